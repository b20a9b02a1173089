//! An open GGUF file: its metadata, its tensors and their bytes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::read::{self, GgufTensor};
use super::value::{GgufArray, GgufType, GgufValue};
use crate::bytes::FileBytes;
use crate::error::{FilesError, Result};
use crate::mapped::MappedFile;

/// A GGUF file of version 2 or 3. Opening reads metadata and the list of tensors; the weights are mapped.
#[derive(Debug)]
pub struct Gguf {
    /// Path or name, for errors.
    pub(super) file: String,
    /// Each file's name and bytes; the first has the metadata.
    pub(crate) parts: Vec<(String, Arc<FileBytes>)>,
    metadata: BTreeMap<String, GgufValue>,
    pub(super) tensors: Vec<GgufTensor>,
}

impl Gguf {
    /// Maps the one file at `path`, which may be a part of a model.
    pub(super) fn open_alone(path: &Path) -> Result<Self> {
        let mapped = MappedFile::open(path).map_err(|cause| FilesError::Io {
            path: path.to_owned(),
            action: "map the model",
            cause,
        })?;
        Self::read(path.display().to_string(), FileBytes::Mapped(mapped))
    }

    pub(super) fn read(file: String, bytes: FileBytes) -> Result<Self> {
        let (metadata, tensors) = read::read(&file, bytes.as_slice())?;
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
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.metadata
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The bytes of a tensor of this file.
    pub fn data(&self, tensor: &GgufTensor) -> &[u8] {
        &self.parts[tensor.part].1.as_slice()[tensor.range.clone()]
    }

    /// The elements of an array of this file's metadata, decoded one by one.
    pub fn elements(&self, array: &GgufArray) -> impl Iterator<Item = GgufValue> {
        read::elements(self.header(), array)
    }

    /// The bytes of the elements of an array of this file's metadata, little-endian.
    pub fn array_bytes(&self, array: &GgufArray) -> &[u8] {
        &self.header()[array.range.clone()]
    }

    /// The bytes of the file that has the metadata.
    fn header(&self) -> &[u8] {
        self.parts[0].1.as_slice()
    }

    /// The value of `key`, if it is there.
    pub fn value(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    /// The whole number under `key`, if it is there.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is something else.
    pub fn int(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a whole number of 0 or more", GgufValue::as_u64)
    }

    /// The number under `key`, if it is there.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is something else.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", GgufValue::as_f64)
    }

    /// The text under `key`, if it is there.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a text", GgufValue::as_str)
    }

    /// The boolean under `key`, if it is there.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |value| match value {
            GgufValue::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// The array under `key`, if it is there.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is something else.
    pub fn array(&self, key: &str) -> Result<Option<&GgufArray>> {
        self.typed(key, "an array", |value| match value {
            GgufValue::Array(array) => Some(array),
            _ => None,
        })
    }

    /// The texts of the array under `key`, if it is there.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is something else.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        if array.kind != GgufType::String {
            return Err(self.wrong(key, "is not an array of texts"));
        }
        let text = |value| match value {
            GgufValue::String(text) => text,
            _ => String::new(),
        };
        Ok(Some(self.elements(array).map(text).collect()))
    }

    /// The numbers of the array under `key`, if it is there.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is something else.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(array) = self.array(key)? else { return Ok(None) };
        let numbers = self.elements(array).map(|value| value.as_f64()).collect::<Option<Vec<f64>>>();
        numbers.map(Some).ok_or_else(|| self.wrong(key, "is not an array of numbers"))
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.wrong(key, &format!("= {value} is not {expected}"))),
            },
        }
    }

    /// `value`, which was read under `key`.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is `None`: the key is missing.
    pub fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.wrong(key, "is missing"))
    }

    /// The error that `key` has a `problem`.
    pub fn wrong(&self, key: &str, problem: &str) -> FilesError {
        self.fail(format!("{key} {problem}"), "download the file again, or convert the model again")
    }

    /// The error that this file has a `problem`, with what to do about it.
    pub fn fail(&self, problem: String, remedy: &str) -> FilesError {
        FilesError::Gguf { file: self.file.clone(), problem, remedy: remedy.to_owned() }
    }
}
