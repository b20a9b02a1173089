//! Published weights: safetensors files, mapped into memory, with their headers checked before a byte is used.
//!
//! `header.rs` reads one file's header; `shards.rs` finds which files make up a checkpoint; this file puts them
//! together and holds them against what a model expects; `parts.rs` takes published tensors apart.

mod header;
mod parts;
mod published;
mod shards;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ridge_graph::{DType, FormatRef};
use ridge_runtime::mem::MappedFile;

use crate::error::{ModelError, Result, TensorMismatch};

pub(crate) use parts::{Change, deinterleaved};
pub use parts::{Part, Rows};
pub(crate) use published::Published;

/// The named tensors of a model, in one safetensors file or several.
///
/// Opening reads the headers only: the weights are mapped, and the operating system fetches a page when it is first
/// touched. See [`MappedFile`] for what must not happen to the files meanwhile.
#[derive(Debug)]
pub struct Checkpoint {
    /// Path or name, for errors.
    name: String,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
    /// Are names and shapes those of the graph's weights already?
    arranged: bool,
}

/// One tensor of a [`Checkpoint`], borrowed from it.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// The name in the checkpoint, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: &'a str,
    /// The type of each element; f32 if they are stored in a format.
    pub dtype: DType,
    /// The format that they are stored in, if they are: `data` is its one component then.
    pub format: Option<&'a FormatRef>,
    /// Extents, outermost first; empty for a scalar.
    pub shape: &'a [usize],
    /// The elements, little-endian, in row-major order without gaps: the product of `shape` times
    /// [`DType::size_bytes`] bytes. **Not aligned**: the format only aligns its header, and a writer may not even do
    /// that, so read elements with `from_le_bytes` or copy them to where alignment is needed.
    pub data: &'a [u8],
}

#[derive(Debug)]
struct Shard {
    file: String,
    bytes: Arc<Bytes>,
}

/// The bytes of a file.
pub(crate) enum Bytes {
    Mapped(MappedFile),
    Held(Cow<'static, [u8]>),
}

/// Their number: they are a model's weights.
impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.get().len())
    }
}

impl Bytes {
    pub(crate) fn get(&self) -> &[u8] {
        match self {
            Self::Mapped(file) => file,
            Self::Held(bytes) => bytes,
        }
    }
}

/// A tensor for [`Checkpoint::gathered`].
pub(crate) struct Gathered {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) format: Option<FormatRef>,
    pub(crate) shape: Vec<usize>,
    /// Which of the files has it, and where its bytes lie in that.
    pub(crate) part: usize,
    pub(crate) range: Range<usize>,
    pub(crate) change: Change,
}

#[derive(Debug)]
struct Entry {
    shard: usize,
    dtype: DType,
    format: Option<FormatRef>,
    shape: Vec<usize>,
    /// Where the data lies in the shard's bytes.
    range: Range<usize>,
    /// How its elements follow from that data, if they are not the data itself.
    moved: Option<parts::Moved>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `dir`: `model.safetensors`, else the shards that
    /// `model.safetensors.index.json` lists, else the only `*.safetensors` file there is.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if the folder holds none of these or a listed shard is missing, [`ModelError::Io`] if a
    /// file cannot be read, [`ModelError::Json`] if the index is not JSON, and [`ModelError::Safetensors`] if a file
    /// breaks the format, holds a dtype that [`DType`] lacks, or disagrees with the index or with another shard.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let found = shards::find(dir)?;
        let mut checkpoint = Self::empty(dir.display().to_string());
        for path in &found.paths {
            let bytes = MappedFile::open(path).map_err(|cause| ModelError::Io {
                path: path.clone(),
                action: "open the weights",
                cause,
            })?;
            checkpoint.add(path.display().to_string(), Bytes::Mapped(bytes))?;
        }
        if let Some(index) = found.index {
            checkpoint.check_index(&index)?;
        }
        Ok(checkpoint)
    }

    /// Reads a checkpoint that is one safetensors file already in memory. `name` stands for it in errors.
    ///
    /// # Errors
    ///
    /// [`ModelError::Safetensors`], as for [`Checkpoint::open`].
    pub fn from_bytes(name: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self> {
        let mut checkpoint = Self::empty(name.to_owned());
        checkpoint.add(name.to_owned(), Bytes::Held(bytes.into()))?;
        Ok(checkpoint)
    }

    fn empty(name: String) -> Self {
        Self { name, shards: Vec::new(), tensors: BTreeMap::new(), arranged: false }
    }

    fn add(&mut self, file: String, bytes: Bytes) -> Result<()> {
        let shard = self.shards.len();
        for tensor in header::read(&file, bytes.get())? {
            if let Some(other) = self.tensors.get(&tensor.name) {
                return Err(ModelError::Safetensors {
                    problem: format!("the tensor {} is also in {}", tensor.name, self.shards[other.shard].file),
                    file,
                    remedy: "remove the file that does not belong to the checkpoint".to_owned(),
                });
            }
            let entry = Entry {
                shard,
                dtype: tensor.dtype,
                format: None,
                shape: tensor.shape,
                range: tensor.range,
                moved: None,
            };
            self.tensors.insert(tensor.name, entry);
        }
        self.shards.push(Shard { file, bytes: Arc::new(bytes) });
        Ok(())
    }

    /// Tensors of `files`, each a name and its bytes, under the names and in the shapes that the graph's weights have.
    ///
    /// # Errors
    ///
    /// [`ModelError::Files`] if two of them have one name.
    pub(crate) fn gathered(file: &str, files: &[(String, Arc<Bytes>)], tensors: Vec<Gathered>) -> Result<Self> {
        let shards = files.iter().map(|(file, bytes)| Shard { file: file.clone(), bytes: Arc::clone(bytes) }).collect();
        let mut checkpoint = Self { name: file.to_owned(), shards, tensors: BTreeMap::new(), arranged: true };
        for tensor in tensors {
            let moved = parts::Moved::changed(&tensor);
            let Gathered { name, dtype, format, shape, part, range, .. } = tensor;
            let entry = Entry { shard: part, dtype, format, shape, range, moved };
            if checkpoint.tensors.insert(name.clone(), entry).is_some() {
                return Err(ModelError::Files {
                    path: file.into(),
                    problem: format!("it has two tensors that are {name}"),
                    remedy: "convert the model anew".to_owned(),
                });
            }
        }
        Ok(checkpoint)
    }

    /// Holds the tensors found in the shards against those that the index lists.
    fn check_index(&self, index: &shards::Index) -> Result<()> {
        let wrong = |problem: String| ModelError::Safetensors {
            file: index.file.clone(),
            problem,
            remedy: "download the index and its shards again, from the same revision".to_owned(),
        };
        for (name, &shard) in &index.shard_of {
            if self.tensors.get(name).is_none_or(|e| e.shard != shard) {
                let file = &self.shards[shard].file;
                return Err(wrong(format!("weight_map says that {name} is in {file}, and it is not")));
            }
        }
        match self.tensors.iter().find(|(name, _)| !index.shard_of.contains_key(*name)) {
            None => Ok(()),
            Some((name, entry)) => {
                Err(wrong(format!("weight_map lacks {name}, which is in {}", self.shards[entry.shard].file)))
            }
        }
    }

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

    /// Is there a tensor called `name`?
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Safetensors`] if there is none.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        match self.tensors.get_key_value(name) {
            Some((name, entry)) => Ok(self.view(name, entry)),
            None => Err(ModelError::Safetensors {
                file: self.name.clone(),
                problem: format!("there is no tensor {name}"),
                remedy: "check that config.json belongs to this checkpoint".to_owned(),
            }),
        }
    }

    /// The dtype of the tensor called `name`, if there is one; looks at no element.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        self.tensors.get(name).map(|entry| entry.dtype)
    }

    /// The format that the tensor called `name` is stored in, if it is.
    pub fn format(&self, name: &str) -> Option<&FormatRef> {
        self.tensors.get(name)?.format.as_ref()
    }

    /// Can the tensor called `name` be computed with as it is?
    ///
    /// # Errors
    ///
    /// [`ModelError::Safetensors`] if its elements are no floating-point numbers.
    pub(crate) fn check_float(&self, name: &str) -> Result<()> {
        match self.tensors.get(name) {
            Some(entry) if !entry.dtype.is_float() => Err(ModelError::Safetensors {
                file: self.shards[entry.shard].file.clone(),
                problem: format!("the tensor {name} is stored as {}, and must be floating-point numbers", entry.dtype),
                remedy: "choose a checkpoint in f32, bf16 or f16: codes of another program's quantisation are not read"
                    .to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a Entry) -> TensorView<'a> {
        let data = &self.shards[entry.shard].bytes.get()[entry.range.clone()];
        let data = entry.moved.as_ref().map_or(data, |moved| moved.bytes(data));
        TensorView { name, dtype: entry.dtype, format: entry.format.as_ref(), shape: &entry.shape, data }
    }

    /// Holds the checkpoint against the tensors that a model expects, given as names and shapes.
    ///
    /// A tensor that is not expected is an error too, since it is a part of a model that Ridge would leave out, unless
    /// one of the patterns in `ignorable` matches its name. In a pattern `*` stands for any characters, also none:
    /// `*.rotary_emb.inv_freq`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Tensors`] with all missing, unexpected and misshapen tensors at once.
    pub fn check<N: AsRef<str>, S: AsRef<[usize]>>(
        &self,
        expected: impl IntoIterator<Item = (N, S)>,
        ignorable: &[&str],
    ) -> Result<()> {
        let mut mismatch = TensorMismatch { checkpoint: self.name.clone(), ..TensorMismatch::default() };
        let mut unexpected: BTreeMap<&str, &Entry> = self.tensors.iter().map(|(n, e)| (n.as_str(), e)).collect();
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
            .filter(|(name, _)| !ignorable.iter().any(|pattern| glob(pattern, name)))
            .map(|(name, entry)| (name.to_owned(), entry.shape.clone()))
            .collect();
        if mismatch.is_empty() { Ok(()) } else { Err(ModelError::Tensors(Box::new(mismatch))) }
    }
}

/// Does `text` match `pattern`, in which `*` stands for any characters?
fn glob(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(mut rest) = text.strip_prefix(head) else {
        return false;
    };
    let mut parts = tail.split('*');
    let last = parts.next_back().unwrap_or_default();
    for part in parts {
        // The earliest place leaves the most for the parts behind it.
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::glob;

    #[test]
    fn star_stands_for_any_characters() {
        for (pattern, text, matches) in [
            ("a.b", "a.b", true),
            ("a.b", "a.bc", false),
            ("*.inv_freq", "layers.0.inv_freq", true),
            ("*.inv_freq", "inv_freq", false),
            ("*.inv_freq", "x.inv_freq.weight", false),
            ("layers.*.q.*", "layers.0.q.bias", true),
            ("layers.*.q.*", "layers.0.k.bias", false),
            ("*ab*ab", "ab", false),
            ("*ab*ab", "abab", true),
            ("*", "", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(glob(pattern, text), matches, "{pattern} against {text}");
        }
    }
}
