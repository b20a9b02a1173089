//! Where the bytes of a file come from: a mapped file or a server, compressed or not.

use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Buf as _, Bytes};
use flate2::read::MultiGzDecoder;
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use ridge_files::MappedFile;
use ridge_hub::{HubError, HubSettings, RangedFile};

use crate::address::is_remote;
use crate::error::{Result, TrainError, io_error};

/// How a file is compressed as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    None,
    /// Zstandard (RFC 8878).
    Zstd,
    /// gzip (RFC 1952).
    Gzip,
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
                let failed = |error| {
                    let problem = match error {
                        HubError::OfflineFile { .. } => {
                            let remedy = "unset it, or download the file and give its path";
                            return TrainError::path(path, "it is on a server, and HF_HUB_OFFLINE is set", remedy);
                        }
                        HubError::Request { problem, .. } | HubError::Answer { problem, .. } => problem,
                        error => error.to_string(),
                    };
                    TrainError::path(path, problem, "check the address, or download the file and give its path")
                };
                Stored::Remote(Arc::new(opened.map_err(failed)?))
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

    /// What reads parts of it. A file that is compressed as a whole is decompressed into memory for that.
    ///
    /// # Errors
    /// When it cannot be decompressed.
    pub(super) fn parts(&self) -> io::Result<SourceParts> {
        let stored = match self.compression {
            Compression::None => self.stored.clone(),
            Compression::Zstd | Compression::Gzip => Stored::Here(self.whole()?),
        };
        let window = Window { start: 0, bytes: Bytes::new(), end: u64::MAX };
        Ok(SourceParts { stored, window: Arc::new(Mutex::new(window)) })
    }
}

/// Reads parts of a file. Of one on a server it requests the bytes that are read and, up to [`PART`] at a time, those behind
/// them; the last it received are kept, so that what is read in order is requested once.
#[derive(Clone)]
pub(super) struct SourceParts {
    stored: Stored,
    window: Arc<Mutex<Window>>,
}

/// What was last received of a file on a server.
struct Window {
    start: u64,
    bytes: Bytes,
    /// Nothing from here on is requested before it is read.
    end: u64,
}

impl Window {
    /// Those bytes of it that are at `start`, and behind.
    fn behind(&self, start: u64) -> Bytes {
        let at = start.checked_sub(self.start).and_then(|at| usize::try_from(at).ok());
        at.filter(|at| *at < self.bytes.len()).map_or_else(Bytes::new, |at| self.bytes.slice(at..))
    }
}

/// Bytes that are requested at once of what is read in order.
const PART: u64 = 1 << 20;

impl SourceParts {
    /// Next is read what is before `end`.
    pub(super) fn expect_until(&self, end: u64) {
        self.window().end = end;
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At least `length` bytes at `start`.
    fn received(&self, file: &RangedFile, start: u64, length: usize) -> Result<Bytes, HubError> {
        let mut window = self.window();
        let kept = window.behind(start);
        if kept.len() >= length {
            return Ok(kept);
        }
        let (at, lacking) = (start.saturating_add(kept.len() as u64), length - kept.len());
        let ahead = window.end.min(file.size()).saturating_sub(at).min(PART);
        let more = file.read(at, lacking.max(usize::try_from(ahead).unwrap_or(0)))?;
        let bytes = if kept.is_empty() { more.into() } else { Bytes::from([&kept[..], &more].concat()) };
        (window.start, window.bytes) = (start, bytes.clone());
        Ok(bytes)
    }
}

impl Length for SourceParts {
    fn len(&self) -> u64 {
        match &self.stored {
            Stored::Here(bytes) => bytes.len() as u64,
            Stored::Remote(file) => file.size(),
        }
    }
}

/// Reads from a position on. Nothing is requested before it is read.
pub(super) struct PartReader {
    parts: SourceParts,
    at: u64,
    received: Bytes,
}

impl Read for PartReader {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.received.is_empty() && self.at < self.parts.len() && !to.is_empty() {
            self.received = match &self.parts.stored {
                Stored::Here(bytes) => bytes.slice(usize::try_from(self.at).map_err(io::Error::other)?..),
                Stored::Remote(file) => self.parts.received(file, self.at, 1).map_err(io::Error::other)?,
            };
        }
        let length = self.received.len().min(to.len());
        self.received.copy_to_slice(&mut to[..length]);
        self.at += length as u64;
        Ok(length)
    }
}

impl ChunkReader for SourceParts {
    type T = PartReader;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        Ok(PartReader { parts: self.clone(), at: start, received: Bytes::new() })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let end = start.checked_add(length as u64).filter(|end| *end <= self.len());
        let end = end.ok_or_else(|| ParquetError::EOF(format!("{length} bytes at {start}")))?;
        match &self.stored {
            // Both are within what is in memory.
            Stored::Here(bytes) => Ok(bytes.slice(start as usize..end as usize)),
            Stored::Remote(file) => {
                let received = self.received(file, start, length);
                Ok(received.map_err(|error| ParquetError::External(Box::new(error)))?.slice(..length))
            }
        }
    }
}
