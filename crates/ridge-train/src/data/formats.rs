//! Containers of documents, each a parser of bytes that were not written by Ridge: Parquet tables, WebDataset archives and
//! MDS shards.

mod mds;
mod parquet;
mod webdataset;

use std::path::Path;

use bytes::Bytes;

use crate::error::{Result, TrainError};

/// A kind of container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A Parquet table: the field is a column of strings.
    Parquet,
    /// A WebDataset archive (tar): a sample's `.txt` member, or the field of its `.json` member.
    WebDataset,
    /// A shard of MosaicML streaming: the field is a column of encoding `str`.
    Mds,
}

impl Container {
    /// Gives `each` the texts in `bytes` that are not empty; `path` is named in errors.
    ///
    /// # Errors
    /// When the bytes are no such container, it lacks the field, or a text is not UTF-8; and those of `each`.
    pub fn each(self, path: &Path, bytes: &Bytes, field: &str, each: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        let container = Reading { path, field, each };
        match self {
            Self::Parquet => parquet::read(bytes, container),
            Self::WebDataset => webdataset::read(bytes, container),
            Self::Mds => mds::read(bytes, container),
        }
    }
}

/// What a parser works for.
struct Reading<'a> {
    path: &'a Path,
    field: &'a str,
    each: &'a mut dyn FnMut(&str) -> Result<()>,
}

impl Reading<'_> {
    /// The file is damaged or no such container.
    fn broken(&self, problem: impl Into<String>) -> TrainError {
        TrainError::path(self.path, problem, "download or write the file again")
    }

    /// The file is whole, and does not have what is asked for.
    fn lacks(&self, problem: impl Into<String>) -> TrainError {
        TrainError::path(self.path, problem, "name the field that holds the text: --text-field, or data.text_field")
    }

    /// Gives a text if it is not empty; `place` names it in errors.
    fn give(&mut self, text: &[u8], place: impl Fn() -> String) -> Result<()> {
        match std::str::from_utf8(text) {
            Ok("") => Ok(()),
            Ok(text) => (self.each)(text),
            Err(error) => {
                let problem = format!("{} is not UTF-8 at its byte {}", place(), error.valid_up_to());
                Err(TrainError::path(self.path, problem, "leave it out, or save it as UTF-8"))
            }
        }
    }
}

/// `length` bytes at `at`, if they are there.
fn part(bytes: &[u8], at: usize, length: usize) -> Option<&[u8]> {
    bytes.get(at..at.checked_add(length)?)
}
