//! GGUF: one file with a model's configuration, tokenizer and weights.
//!
//! `read.rs` reads a file's bytes, `split.rs` joins the parts of a model, and `write.rs` makes a file; `storage.rs` has the
//! types of tensors, `importance.rs` what weighs errors,
//! `mix.rs` the formats of llama.cpp's presets. `convert.rs`
//! goes from any layout to a file, with `metadata.rs` and `vocabulary.rs`, and from a file to a folder. What a file says is
//! told in the words of Hugging Face, so that everything behind it reads one kind of model: `config.rs` makes a
//! `config.json` of the metadata, `tokenizer.rs` a `tokenizer.json`, and `names.rs` gives the tensors their names.

mod config;
mod convert;
mod folder;
mod importance;
mod metadata;
mod mix;
mod names;
mod pretokenizers;
mod read;
mod split;
mod storage;
mod tokenizer;
mod vocabulary;
mod write;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ridge_runtime::mem::MappedFile;

use crate::checkpoint::{Bytes, Checkpoint};
use crate::error::{ModelError, Result};
use crate::pooling::Pooling;

pub use convert::{Instead, Quantisation, Written, to_gguf};
pub use folder::to_folder;
pub use importance::Importance;
pub use mix::Mix;
pub use read::{Array, Kind, Value};
pub use storage::Storage;
pub use write::Writer;

/// A GGUF file of version 2 or 3. Opening reads metadata and the list of tensors; the weights are mapped.
#[derive(Debug)]
pub struct Gguf {
    /// Path or name, for errors.
    file: String,
    /// Each file's name and bytes; the first has the metadata.
    parts: Vec<(String, Arc<Bytes>)>,
    metadata: BTreeMap<String, Value>,
    tensors: Vec<TensorInfo>,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// How its elements are stored.
    pub storage: Storage,
    /// Extents, outermost first (the file has them the other way round).
    pub shape: Vec<usize>,
    /// Which of a model's files has it.
    pub part: usize,
    /// Where its bytes lie in that file.
    pub range: Range<usize>,
}

impl Gguf {
    /// Maps the file at `path` and reads its header. Of a model in several files, `path` is any, and all are opened.
    ///
    /// # Errors
    ///
    /// [`ModelError::Io`] if a file cannot be mapped, [`ModelError::Gguf`] if a part is missing or another one's, else as
    /// for [`Gguf::from_bytes`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let part = Self::open_alone(path)?;
        match split::count(&part)? {
            1 => Ok(part),
            count => split::join(path, part, count),
        }
    }

    /// One file, whatever it is a part of.
    fn open_alone(path: &Path) -> Result<Self> {
        let mapped = MappedFile::open(path).map_err(|cause| ModelError::Io {
            path: path.to_owned(),
            action: "map the model",
            cause,
        })?;
        Self::read(path.display().to_string(), Bytes::Mapped(mapped))
    }

    /// Reads a file that is in memory, the only one of its model. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// [`ModelError::Gguf`] if the bytes are no GGUF file, break the format, or hold something that Ridge does not know.
    pub fn from_bytes(file: &str, bytes: impl Into<std::borrow::Cow<'static, [u8]>>) -> Result<Self> {
        let gguf = Self::read(file.to_owned(), Bytes::Held(bytes.into()))?;
        match split::count(&gguf)? {
            1 => Ok(gguf),
            count => Err(gguf.fail(format!("it is one of {count} parts"), "open it where the others lie beside it")),
        }
    }

    fn read(file: String, bytes: Bytes) -> Result<Self> {
        let (metadata, tensors) = read::read(&file, bytes.get())?;
        Ok(Self { parts: vec![(file.clone(), Arc::new(bytes))], file, metadata, tensors })
    }

    /// Path or name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Paths or names of all files of the model.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|(file, _)| file.as_str())
    }

    /// The metadata, by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The bytes of a tensor of this file.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        &self.parts[tensor.part].1.get()[tensor.range.clone()]
    }

    /// The elements of an array of this file's metadata.
    pub fn elements(&self, array: &Array) -> Vec<Value> {
        self.walk(array).collect()
    }

    /// The elements of an array, none of which is kept.
    fn walk(&self, array: &Array) -> impl Iterator<Item = Value> {
        read::elements(self.header(), array)
    }

    /// The bytes of the file that has the metadata.
    fn header(&self) -> &[u8] {
        self.parts[0].1.get()
    }

    /// The weights under the names that the family's graph has.
    ///
    /// # Errors
    ///
    /// [`ModelError::Gguf`] if the architecture is not one that Ridge runs, or a tensor has a wrong shape.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        names::checkpoint(self)
    }

    /// The text of a `config.json` that says what the metadata says.
    ///
    /// # Errors
    ///
    /// [`ModelError::Gguf`] if a key is missing, has the wrong type, or asks for something that Ridge does not do.
    pub fn config_json(&self) -> Result<String> {
        config::json(self)
    }

    /// The texts of a `tokenizer.json` and a `tokenizer_config.json` that say what the metadata says, chat template
    /// included.
    ///
    /// # Errors
    ///
    /// [`ModelError::Gguf`] if there is no tokenizer, or one of a kind that Ridge does not know.
    pub fn tokenizer_json(&self) -> Result<(String, String)> {
        tokenizer::json(self)
    }

    /// How the vectors of a text's tokens become one, if the metadata says.
    ///
    /// # Errors
    ///
    /// [`ModelError::Gguf`] if it says a way that Ridge does not do.
    pub fn pooling(&self) -> Result<Option<Pooling>> {
        let Some(architecture) = self.text("general.architecture")? else { return Ok(None) };
        let key = format!("{architecture}.pooling_type");
        match self.int(&key)? {
            None | Some(0) => Ok(None),
            Some(number) => match config::POOLINGS.iter().find(|(n, _)| u64::from(*n) == number) {
                Some((_, pooling)) => Ok(Some(*pooling)),
                None => {
                    let problem = format!("{key} = {number} is a way of pooling that Ridge does not do");
                    Err(self.fail(problem, "choose a model that pools by mean, cls or last token, or say --pooling"))
                }
            },
        }
    }

    /// The value of `key`, if it is there.
    fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// The whole number under `key`, if it is there.
    fn int(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a whole number of 0 or more", Value::as_u64)
    }

    /// The number under `key`, if it is there.
    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// The text under `key`, if it is there.
    fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a text", Value::as_str)
    }

    /// The truth under `key`, if it is there.
    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// The array under `key`, if it is there.
    fn array(&self, key: &str) -> Result<Option<&Array>> {
        self.typed(key, "an array", |value| match value {
            Value::Array(array) => Some(array),
            _ => None,
        })
    }

    /// The texts under `key`, if it is there.
    fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        if array.kind != Kind::String {
            return Err(self.wrong(key, "is not an array of texts"));
        }
        let text = |value| match value {
            Value::String(text) => text,
            _ => String::new(),
        };
        Ok(Some(self.walk(array).map(text).collect()))
    }

    /// The numbers under `key`, if it is there.
    fn floats(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        let numbers = self.walk(array).map(|value| value.as_f64()).collect::<Option<Vec<f64>>>();
        numbers.map(Some).ok_or_else(|| self.wrong(key, "is not an array of numbers"))
    }

    fn typed<'a, T>(&'a self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.wrong(key, &format!("= {value} is not {expected}"))),
            },
        }
    }

    /// `value`, or that `key` is missing.
    fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.wrong(key, "is missing"))
    }

    fn wrong(&self, key: &str, problem: &str) -> ModelError {
        self.fail(format!("{key} {problem}"), "download the file again, or convert the model anew")
    }

    fn fail(&self, problem: String, remedy: &str) -> ModelError {
        ModelError::Gguf { file: self.file.clone(), problem, remedy: remedy.to_owned() }
    }
}
