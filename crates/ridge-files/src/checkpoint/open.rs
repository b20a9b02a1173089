//! Opening a checkpoint: safetensors files in a folder, or one in memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::header;
use super::shards::{self, ShardIndex};
use super::tensors::{Checkpoint, Shard, StoredTensor};
use crate::bytes::FileBytes;
use crate::error::{FilesError, Result};
use crate::mapped::MappedFile;

impl Checkpoint {
    /// Opens the checkpoint in the folder `dir`: `model.safetensors`, else the shards that
    /// `model.safetensors.index.json` lists, else the only `*.safetensors` file there is.
    ///
    /// # Errors
    ///
    /// [`FilesError::Path`] if the folder holds none of these or a listed shard is missing, [`FilesError::Io`] if a
    /// file cannot be read, [`FilesError::Json`] if the index is not JSON, and [`FilesError::Safetensors`] if a file
    /// breaks the format, holds a dtype that [`DType`](ridge_graph::DType) lacks, or disagrees with the index or with another shard.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let found = shards::find(dir)?;
        let mut checkpoint = Self::empty(dir.display().to_string());
        for path in &found.paths {
            let bytes = MappedFile::open(path).map_err(|cause| FilesError::Io {
                path: path.clone(),
                action: "open the weights",
                cause,
            })?;
            checkpoint.add(path.display().to_string(), FileBytes::Mapped(bytes))?;
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
    /// [`FilesError::Safetensors`], as for [`Checkpoint::open`].
    pub fn from_bytes(name: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self> {
        let mut checkpoint = Self::empty(name.to_owned());
        checkpoint.add(name.to_owned(), FileBytes::InMemory(bytes.into()))?;
        Ok(checkpoint)
    }

    fn empty(name: String) -> Self {
        Self { name, shards: Vec::new(), tensors: BTreeMap::new(), arranged: false, unused: Vec::new() }
    }

    fn add(&mut self, file: String, bytes: FileBytes) -> Result<()> {
        let shard = self.shards.len();
        for tensor in header::read(&file, bytes.as_slice())? {
            if let Some(other) = self.tensors.get(&tensor.name) {
                return Err(FilesError::Safetensors {
                    problem: format!("the tensor {} is also in {}", tensor.name, self.shards[other.shard].file),
                    file,
                    remedy: "remove the file that does not belong to the checkpoint".to_owned(),
                });
            }
            let entry = StoredTensor {
                shard,
                dtype: tensor.dtype,
                format: None,
                shape: tensor.shape,
                range: tensor.range,
                rearranged: None,
                scales: None,
            };
            self.tensors.insert(tensor.name, entry);
        }
        self.shards.push(Shard { file, bytes: Arc::new(bytes) });
        Ok(())
    }

    /// Holds the tensors found in the shards against those that the index lists.
    fn check_index(&self, index: &ShardIndex) -> Result<()> {
        let wrong = |problem: String| FilesError::Safetensors {
            file: index.file.clone(),
            problem,
            remedy: "download the index and its shards again, from the same revision".to_owned(),
        };
        for (name, &shard) in &index.shard_of {
            if self.tensors.get(name).is_none_or(|e| e.shard != shard) {
                let file = &self.shards[shard].file;
                return Err(wrong(format!("weight_map lists {name} in {file}, but it is not there")));
            }
        }
        match self.tensors.iter().find(|(name, _)| !index.shard_of.contains_key(*name)) {
            None => Ok(()),
            Some((name, entry)) => {
                Err(wrong(format!("weight_map lacks {name}, which is in {}", self.shards[entry.shard].file)))
            }
        }
    }
}
