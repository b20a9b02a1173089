//! The weights of a GGUF file as a checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ridge_graph::{DType, FormatRef};

use super::rearrange::{Change, How, Rearranged};
use super::tensors::{Checkpoint, Shard, StoredTensor};
use crate::error::{FilesError, Result};
use crate::gguf::Gguf;

/// A weight in a GGUF file, for [`Checkpoint::from_gguf`].
#[derive(Clone, Debug)]
pub struct Gathered {
    /// The weight's name.
    pub name: String,
    /// Element type; f32 if it is stored in a format.
    pub dtype: DType,
    /// The format, if it is not stored plainly.
    pub format: Option<FormatRef>,
    /// The weight's extents, outermost first.
    pub shape: Vec<usize>,
    /// Index of the file that has it.
    pub part: usize,
    /// Where its bytes lie in that file.
    pub range: Range<usize>,
    /// How the weight follows from those bytes.
    pub change: Change,
}

impl Checkpoint {
    /// The checkpoint of `tensors`, which are tensors of `gguf` under the names and in the shapes of a graph's weights.
    ///
    /// # Errors
    ///
    /// [`FilesError::Path`] if two tensors have the same name or one lies outside its file.
    pub fn from_gguf(gguf: &Gguf, tensors: Vec<Gathered>) -> Result<Self> {
        let file = gguf.file();
        let shards =
            gguf.parts.iter().map(|(file, bytes)| Shard { file: file.clone(), bytes: Arc::clone(bytes) }).collect();
        let (name, unused) = (file.to_owned(), Vec::new());
        let mut checkpoint = Self { name, shards, tensors: BTreeMap::new(), arranged: true, unused };
        for tensor in tensors {
            let bytes = gguf.parts.get(tensor.part).map_or(0, |(_, bytes)| bytes.as_slice().len());
            if tensor.range.start > tensor.range.end || tensor.range.end > bytes {
                return Err(FilesError::Path {
                    path: file.into(),
                    problem: format!("{} at {:?} is outside the file", tensor.name, tensor.range),
                    remedy: "convert the model again".to_owned(),
                });
            }
            let rearranged = rearranged(&tensor).map(Arc::new);
            let Gathered { name, dtype, format, shape, part, range, .. } = tensor;
            let entry = StoredTensor { shard: part, dtype, format, shape, range, rearranged, scales: None };
            if checkpoint.tensors.insert(name.clone(), entry).is_some() {
                return Err(FilesError::Path {
                    path: file.into(),
                    problem: format!("two tensors correspond to {name}"),
                    remedy: "convert the model again".to_owned(),
                });
            }
        }
        Ok(checkpoint)
    }
}

/// The rearrangement that makes a weight of `tensor`, unless the file has the weight's own elements.
fn rearranged(tensor: &Gathered) -> Option<Rearranged> {
    let how = match tensor.change {
        Change::Interleaved { heads } => {
            let rows = tensor.shape.first().copied().unwrap_or(1);
            // Heads of other widths are refused where shapes are held against the model's.
            if heads == 0 || !rows.is_multiple_of(heads * 2) || !tensor.range.len().is_multiple_of(rows) {
                return None;
            }
            How::Halves { heads, row: tensor.range.len() / rows }
        }
        Change::Rows(rows) => {
            let all = rows.stride * rows.blocks;
            // What is not whole rows is refused where bytes are held against the shape.
            if all == 0 || rows.end() > all || !tensor.range.len().is_multiple_of(all) {
                return None;
            }
            How::Rows { shape: [all, tensor.range.len() / all], transposed: false, rows, element: 1 }
        }
        Change::MinusOne if tensor.format.is_none() => How::MinusOne(tensor.dtype),
        Change::None | Change::MinusOne => return None,
    };
    Some(Rearranged::new(how))
}
