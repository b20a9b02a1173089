//! The named tensors of a checkpoint.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ridge_graph::{DType, FormatRef};

use super::pattern::matches;
use super::rearrange::Rearranged;
use crate::bytes::FileBytes;
use crate::error::{FilesError, Result, TensorMismatch};

/// The named tensors of a model, in one safetensors file or several.
///
/// Opening reads the headers only: the weights are mapped, and the operating system fetches a page when it is first
/// touched. See [`MappedFile`](crate::MappedFile) for what must not happen to the files meanwhile.
#[derive(Debug)]
pub struct Checkpoint {
    /// Path or name, for errors.
    pub(super) name: String,
    pub(super) shards: Vec<Shard>,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
    /// Whether names and shapes are those of the graph's weights already.
    pub(super) arranged: bool,
    /// Names of tensors that the model does not use.
    pub(super) unused: Vec<String>,
}

/// One tensor of a [`Checkpoint`], borrowed from it.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// The name in the checkpoint, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: &'a str,
    /// The type of each element; f32 if they are stored in a format.
    pub dtype: DType,
    /// The format that they are stored in, if they are: `data` is its first component then.
    pub format: Option<&'a FormatRef>,
    /// Extents, outermost first; empty for a scalar.
    pub shape: &'a [usize],
    /// The elements, little-endian, in row-major order without gaps: the product of `shape` times
    /// [`DType::size_bytes`] bytes. **Not aligned**: the format only aligns its header, and a writer may not even do
    /// that, so read elements with `from_le_bytes` or copy them to where alignment is needed.
    pub data: &'a [u8],
    /// The second component of the format, if it has one: the scales of codes, f32.
    pub scales: Option<&'a [u8]>,
}

/// The bytes of one tensor of a [`Checkpoint`], as [`TensorView::data`]. They keep the file mapped for as long as they
/// are in use. A rearranged tensor is computed when its bytes are first read, and kept; [`TensorBytes::made`] keeps nothing.
pub struct TensorBytes {
    file: Arc<FileBytes>,
    range: Range<usize>,
    rearranged: Option<Arc<Rearranged>>,
}

impl TensorBytes {
    /// The bytes of a tensor that is rearranged, for the caller alone; nothing of one that the file has as it is.
    pub fn made(&self) -> Option<Vec<u8>> {
        let data = &self.file.as_slice()[self.range.clone()];
        self.rearranged.as_ref().map(|rearranged| rearranged.made(data))
    }
}

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        elements(&self.file, &self.range, self.rearranged.as_deref())
    }
}

/// Shows where they are, not the bytes.
impl fmt::Debug for TensorBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorBytes").field("range", &self.range).finish_non_exhaustive()
    }
}

/// One file of a checkpoint.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) file: String,
    pub(super) bytes: Arc<FileBytes>,
}

/// Where a tensor is stored, and how.
#[derive(Debug)]
pub(super) struct StoredTensor {
    pub(super) shard: usize,
    pub(super) dtype: DType,
    pub(super) format: Option<FormatRef>,
    pub(super) shape: Vec<usize>,
    /// Where the data lies in the shard's bytes; within them.
    pub(super) range: Range<usize>,
    /// How its elements follow from that data, if they are not the data itself.
    pub(super) rearranged: Option<Arc<Rearranged>>,
    /// The scales of its codes: the second component of its format.
    pub(super) scales: Option<Box<StoredTensor>>,
}

/// The elements of a tensor whose data lies at `range` of `file`.
fn elements<'a>(file: &'a FileBytes, range: &Range<usize>, rearranged: Option<&'a Rearranged>) -> &'a [u8] {
    let data = &file.as_slice()[range.clone()];
    rearranged.map_or(data, |rearranged| rearranged.viewed(data))
}

impl Checkpoint {
    /// The folder or name that this was opened from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Is there no tensor at all?
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The names of all tensors, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The names of tensors that were left out because the model does not use them, in order.
    pub fn unused(&self) -> &[String] {
        &self.unused
    }

    /// Is there a tensor called `name`?
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let (name, tensor) = self.stored(name)?;
        Ok(self.view(name, tensor))
    }

    /// The bytes of the tensor called `name`, without reading them.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`] if there is none.
    pub fn bytes(&self, name: &str) -> Result<TensorBytes> {
        let (_, tensor) = self.stored(name)?;
        Ok(self.bytes_of(tensor))
    }

    /// The bytes of each component of the tensor called `name`, without reading them: one, or codes and their scales.
    ///
    /// # Errors
    ///
    /// As for [`Checkpoint::bytes`].
    pub fn components(&self, name: &str) -> Result<Vec<TensorBytes>> {
        let (_, tensor) = self.stored(name)?;
        Ok([Some(tensor), tensor.scales.as_deref()].into_iter().flatten().map(|part| self.bytes_of(part)).collect())
    }

    fn bytes_of(&self, tensor: &StoredTensor) -> TensorBytes {
        TensorBytes {
            file: Arc::clone(&self.shards[tensor.shard].bytes),
            range: tensor.range.clone(),
            rearranged: tensor.rearranged.clone(),
        }
    }

    fn stored(&self, name: &str) -> Result<(&String, &StoredTensor)> {
        self.tensors.get_key_value(name).ok_or_else(|| FilesError::Safetensors {
            file: self.name.clone(),
            problem: format!("there is no tensor {name}"),
            remedy: "check that config.json belongs to this checkpoint".to_owned(),
        })
    }

    /// The dtype of the tensor called `name`, if there is one; looks at no element.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.tensors.get(name).map(|entry| entry.dtype)
    }

    /// The extents of the tensor called `name`, if there is one.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.tensors.get(name)?.shape)
    }

    /// The format that the tensor called `name` is stored in, if it is.
    pub fn format(&self, name: &str) -> Option<&FormatRef> {
        self.tensors.get(name)?.format.as_ref()
    }

    /// Requires that the tensor called `name`, if there is one, holds floating-point numbers.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`] if it holds others.
    pub fn check_float(&self, name: &str) -> Result<()> {
        match self.tensors.get(name) {
            Some(entry) if !entry.dtype.is_float() => Err(FilesError::Safetensors {
                file: self.shards[entry.shard].file.clone(),
                problem: format!("the tensor {name} is stored as {}, but must be floating-point", entry.dtype),
                remedy:
                    "use a checkpoint in f32, bf16 or f16: quantisation formats of other programs are not supported"
                        .to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    fn elements_of<'a>(&'a self, entry: &'a StoredTensor) -> &'a [u8] {
        elements(&self.shards[entry.shard].bytes, &entry.range, entry.rearranged.as_deref())
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a StoredTensor) -> TensorView<'a> {
        let data = self.elements_of(entry);
        let scales = entry.scales.as_deref().map(|scales| self.elements_of(scales));
        TensorView { name, dtype: entry.dtype, format: entry.format.as_ref(), shape: &entry.shape, data, scales }
    }

    /// Compares the checkpoint with the tensors that a model expects, given as names and shapes.
    ///
    /// A tensor that is not expected is an error too, since it is a part of a model that Ridge would leave out, unless
    /// one of the patterns in `ignorable` matches its name. In a pattern `*` stands for any characters, also none:
    /// `*.rotary_emb.inv_freq`.
    ///
    /// # Errors
    ///
    /// [`FilesError::Tensors`] with all missing, unexpected and misshapen tensors at once.
    pub fn check<N: AsRef<str>, S: AsRef<[usize]>>(
        &self,
        expected: impl IntoIterator<Item = (N, S)>,
        ignorable: &[&str],
    ) -> Result<()> {
        let mut mismatch = TensorMismatch { checkpoint: self.name.clone(), ..TensorMismatch::default() };
        let mut unexpected: BTreeMap<&str, &StoredTensor> = self.tensors.iter().map(|(n, e)| (n.as_str(), e)).collect();
        for (name, shape) in expected {
            let (name, shape) = (name.as_ref(), shape.as_ref());
            unexpected.remove(name);
            match self.tensors.get(name) {
                None => mismatch.missing.push((name.to_owned(), shape.to_vec())),
                Some(entry) if entry.shape != shape => {
                    mismatch.misshapen.push((name.to_owned(), shape.to_vec(), entry.shape.clone()));
                }
                Some(_) => {}
            }
        }
        mismatch.extra = unexpected
            .into_iter()
            .filter(|(name, _)| !ignorable.iter().any(|pattern| matches(pattern, name)))
            .map(|(name, entry)| (name.to_owned(), entry.shape.clone()))
            .collect();
        if mismatch.is_empty() { Ok(()) } else { Err(FilesError::Tensors(Box::new(mismatch))) }
    }
}
