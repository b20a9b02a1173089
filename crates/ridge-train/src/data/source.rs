//! Where the bytes of a file come from: a mapped file or a server, compressed or not.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use bytes::{Buf as _, Bytes};
use flate2::read::MultiGzDecoder;
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use ridge_files::MappedFile;
use ridge_hub::{HubError, HubSettings, RangedFile};

use crate::error::{Result, TrainError, io_error};

/// How a file is compressed as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not.
    None,
    /// Zstandard (RFC 8878).
    Zstd,
    /// gzip (RFC 1952).
    Gzip,
}

/// Is it the URL of a file?
pub fn is_remote(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with("https://") || text.starts_with("http://"))
}

/// The bytes of a file.
pub struct Source {
    stored: Stored,
    compression: Compression,
}

#[derive(Clone)]
enum Stored {
    Here(Bytes),
    Remote(Arc<RangedFile>),
}

impl Source {
    /// Maps the file, or asks the server of a URL for its size.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn open(path: &Path, compression: Compression) -> Result<Self> {
        let stored = match path.to_str().filter(|_| is_remote(path)) {
            Some(url) => {
                let opened = HubSettings::from_environment().and_then(|settings| RangedFile::open(url, &settings));
                let remedy = "check the address, or download the file and give its path";
                let problem = |error| match error {
                    HubError::Request { problem, .. } | HubError::Answer { problem, .. } => problem,
                    error => error.to_string(),
                };
                Stored::Remote(Arc::new(opened.map_err(|error| TrainError::path(path, problem(error), remedy))?))
            }
            None => {
                let bytes = MappedFile::open(path).map_err(|cause| io_error(path, "open the text", &cause))?;
                Stored::Here(Bytes::from_owner(bytes))
            }
        };
        Ok(Self { stored, compression })
    }

    /// Plain bytes.
    pub fn of(bytes: Bytes) -> Self {
        Self { stored: Stored::Here(bytes), compression: Compression::None }
    }

    /// Bytes as they are stored.
    pub(super) fn size(&self) -> usize {
        match &self.stored {
            Stored::Here(bytes) => bytes.len(),
            Stored::Remote(file) => usize::try_from(file.size()).unwrap_or(usize::MAX),
        }
    }

    /// Reads it from the beginning, decompressed.
    ///
    /// # Errors
    /// When there is no memory for a decoder.
    pub(super) fn reader(&self) -> io::Result<Box<dyn Read + '_>> {
        let stored: Box<dyn Read> = match &self.stored {
            Stored::Here(bytes) => Box::new(&bytes[..]),
            Stored::Remote(file) => Box::new(file.stream(0)),
        };
        Ok(match self.compression {
            Compression::None => stored,
            Compression::Zstd => Box::new(zstd::Decoder::new(stored)?),
            Compression::Gzip => Box::new(MultiGzDecoder::new(io::BufReader::new(stored))),
        })
    }

    /// All of it, decompressed.
    ///
    /// # Errors
    /// When it cannot be read or decompressed.
    pub(super) fn whole(&self) -> io::Result<Bytes> {
        if let (Stored::Here(bytes), Compression::None) = (&self.stored, self.compression) {
            return Ok(bytes.clone());
        }
        let mut whole = Vec::new();
        self.reader()?.read_to_end(&mut whole)?;
        Ok(whole.into())
    }

    /// What reads parts of it, if it is not compressed as a whole.
    pub(super) fn parts(&self) -> SourceParts {
        SourceParts(self.stored.clone())
    }
}

/// Reads parts of a file: of one on a server, those that are asked for alone.
pub(super) struct SourceParts(Stored);

/// A file on a server is read by this many bytes at a time where the end is not known.
const PART: u64 = 1 << 20;

impl Length for SourceParts {
    fn len(&self) -> u64 {
        match &self.0 {
            Stored::Here(bytes) => bytes.len() as u64,
            Stored::Remote(file) => file.size(),
        }
    }
}

impl ChunkReader for SourceParts {
    type T = Box<dyn Read>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let length = self.len().saturating_sub(start);
        let length = if matches!(self.0, Stored::Here(_)) { length } else { length.min(PART) };
        Ok(Box::new(self.get_bytes(start, usize::try_from(length).unwrap_or(usize::MAX))?.reader()))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        match &self.0 {
            Stored::Here(bytes) => {
                let part = usize::try_from(start).ok().and_then(|start| Some((start, start.checked_add(length)?)));
                let part = part.filter(|(_, end)| *end <= bytes.len());
                let (start, end) = part.ok_or_else(|| ParquetError::EOF(format!("{length} bytes at {start}")))?;
                Ok(bytes.slice(start..end))
            }
            Stored::Remote(file) => {
                Ok(file.read(start, length).map_err(|e| ParquetError::External(Box::new(e)))?.into())
            }
        }
    }
}
