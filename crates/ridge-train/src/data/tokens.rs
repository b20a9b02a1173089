//! Token ids in memory or in mapped files.
//!
//! A shard is a file of ids of 16 or 32 bits, little-endian, one behind the other, as nanoGPT's `train.bin` is; files with the
//! header of llm.c are read too. A folder of shards has a [`ShardIndex`] beside them.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ridge_files::MappedFile;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError, io_error};

/// The file that says what the shards of a folder are.
pub const SHARD_INDEX: &str = "tokens.json";
const FORMAT: &str = "ridge-tokens-1";

/// What the shards of a folder are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardIndex {
    /// `ridge-tokens-1`.
    pub format: String,
    /// Bytes of an id: 2 or 4.
    pub token_bytes: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The token behind each document.
    pub end_of_text: Option<u32>,
    /// Documents of all shards.
    pub documents: u64,
    /// Names of the shards and their tokens, in order.
    pub shards: Vec<(String, u64)>,
}

impl ShardIndex {
    /// One without shards yet.
    pub fn new(vocabulary: usize, end_of_text: Option<u32>) -> Self {
        let token_bytes = if vocabulary <= 1 << 16 { 2 } else { 4 };
        Self { format: FORMAT.to_owned(), token_bytes, vocabulary, end_of_text, documents: 0, shards: Vec::new() }
    }

    /// That of a folder, if it has one.
    ///
    /// # Errors
    /// When it cannot be read or is of another format.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(SHARD_INDEX);
        if !path.is_file() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).map_err(|cause| io_error(&path, "read the index", &cause))?;
        let index: Self = serde_json::from_str(&text).map_err(|error| {
            TrainError::path(&path, format!("it is not an index of token shards: {error}"), "make the shards again")
        })?;
        if index.format != FORMAT || !matches!(index.token_bytes, 2 | 4) {
            let problem = format!("it has the format {}, and {FORMAT} is read", index.format);
            return Err(TrainError::path(&path, problem, "make the shards again with ridge data"));
        }
        Ok(Some(index))
    }
}

/// Ids one behind the other.
#[derive(Clone)]
pub struct Tokens {
    parts: Vec<TokenPart>,
}

#[derive(Clone)]
struct TokenPart {
    bytes: Arc<dyn AsRef<[u8]> + Send + Sync>,
    /// Bytes of an id.
    width: usize,
    /// The bytes that are ids.
    range: Range<usize>,
    /// Tokens in front of it.
    begins: usize,
}

impl TokenPart {
    fn len(&self) -> usize {
        self.range.len() / self.width
    }
}

impl Tokens {
    /// These ids, stored in as few bytes as `vocabulary` ids take.
    pub fn new(ids: &[u32], vocabulary: usize) -> Self {
        let width = if vocabulary <= 1 << 16 { 2 } else { 4 };
        let bytes = encoded(ids, width);
        let range = 0..bytes.len();
        Self { parts: vec![TokenPart { bytes: Arc::new(bytes), width, range, begins: 0 }] }
    }

    /// A token file, mapped.
    ///
    /// # Errors
    /// When it cannot be read, or its length is no multiple of an id's.
    pub fn open(path: &Path, width: usize) -> Result<Self> {
        let bytes = MappedFile::open(path).map_err(|cause| io_error(path, "open the tokens", &cause))?;
        let (range, width) = body(&bytes, width);
        if range.is_empty() || !range.len().is_multiple_of(width) {
            let problem = format!("its {} bytes are no ids of {width} bytes", bytes.len());
            return Err(TrainError::path(path, problem, "make the shard again"));
        }
        Ok(Self { parts: vec![TokenPart { bytes: Arc::new(bytes), width, range, begins: 0 }] })
    }

    /// The shards of a folder, in order.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and when a shard has other tokens than the index says.
    pub fn of_folder(folder: &Path, index: &ShardIndex) -> Result<Self> {
        let mut all = Self { parts: Vec::new() };
        for (name, tokens) in &index.shards {
            let path: PathBuf = folder.join(name);
            let shard = Self::open(&path, index.token_bytes)?;
            if shard.len() as u64 != *tokens {
                let problem = format!("it has {} tokens, and the index says {tokens}", shard.len());
                return Err(TrainError::path(&path, problem, "make the shards again"));
            }
            all = all.then(shard);
        }
        Ok(all)
    }

    /// These, then `others`.
    #[must_use]
    pub fn then(mut self, others: Self) -> Self {
        let begins = self.len();
        self.parts.extend(others.parts.into_iter().map(|part| TokenPart { begins: begins + part.begins, ..part }));
        self
    }

    /// The first `at` tokens, and the others.
    #[must_use]
    pub fn split(&self, at: usize) -> (Self, Self) {
        let (mut front, mut back) = (Self { parts: Vec::new() }, Self { parts: Vec::new() });
        for part in &self.parts {
            let cut = at.saturating_sub(part.begins).min(part.len());
            let middle = part.range.start + cut * part.width;
            let of = |range| Self { parts: vec![TokenPart { range, begins: 0, ..part.clone() }] };
            if cut > 0 {
                front = front.then(of(part.range.start..middle));
            }
            if cut < part.len() {
                back = back.then(of(middle..part.range.end));
            }
        }
        (front, back)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.parts.last().map_or(0, |part| part.begins + part.len())
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ids from `begin` on that fill `out`.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn read(&self, begin: usize, out: &mut [u32]) {
        let mut done = 0;
        let mut at = self.parts.partition_point(|part| part.begins + part.len() <= begin);
        while done < out.len() {
            let part = &self.parts[at];
            let first = begin + done - part.begins;
            let count = (part.len() - first).min(out.len() - done);
            let bytes = &(*part.bytes).as_ref()[part.range.start + first * part.width..][..count * part.width];
            let to = &mut out[done..done + count];
            match part.width {
                2 => bytes.as_chunks::<2>().0.iter().zip(to).for_each(|(b, id)| *id = u16::from_le_bytes(*b).into()),
                _ => bytes.as_chunks::<4>().0.iter().zip(to).for_each(|(b, id)| *id = u32::from_le_bytes(*b)),
            }
            done += count;
            at += 1;
        }
    }

    /// The largest id; of very many tokens that of evenly spaced parts, so that not all of a large file is read.
    pub fn largest(&self) -> u32 {
        const PART: usize = 1 << 16;
        const PARTS: usize = 1 << 10;
        let mut buffer = vec![0; PART];
        let parts = self.len().div_ceil(PART);
        let mut most = 0;
        for i in 0..parts.min(PARTS) {
            let begin = if parts > PARTS { i * (parts / PARTS) * PART } else { i * PART };
            let count = PART.min(self.len() - begin);
            self.read(begin, &mut buffer[..count]);
            most = buffer[..count].iter().fold(most, |most, id| most.max(*id));
        }
        most
    }
}

/// Ids as `width` bytes each, little-endian.
pub fn encoded(ids: &[u32], width: usize) -> Vec<u8> {
    match width {
        2 => ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect(),
        _ => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
    }
}

/// The bytes of a file that are ids, and the bytes of an id: behind the header of llm.c (256 words, of which the first is a
/// magic number and the third the number of tokens) if there is one.
fn body(bytes: &[u8], width: usize) -> (Range<usize>, usize) {
    const HEADER: usize = 256 * 4;
    let word = |at: usize| bytes.get(at * 4..at * 4 + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let width = match (word(0), word(1)) {
        (20_240_520, 1) => 2,
        (20_240_801, 7) => 4,
        _ => return (0..bytes.len(), width),
    };
    let end = HEADER.saturating_add((word(2) as usize).saturating_mul(width));
    (HEADER.min(bytes.len())..end.min(bytes.len()), width)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(tokens: &Tokens) -> Vec<u32> {
        let mut ids = vec![0; tokens.len()];
        tokens.read(0, &mut ids);
        ids
    }

    #[test]
    fn reads_go_across_shards_of_any_width() {
        let ids: Vec<u32> = (0..100).collect();
        let tokens =
            Tokens::new(&ids[..30], 100).then(Tokens::new(&ids[30..31], 1 << 20)).then(Tokens::new(&ids[31..], 100));
        assert_eq!(all(&tokens), ids);
        let mut some = [0; 5];
        tokens.read(28, &mut some);
        assert_eq!(some, [28, 29, 30, 31, 32]);
        assert_eq!(tokens.largest(), 99);
    }

    #[test]
    fn files_of_nanogpt_and_llm_c_are_read() {
        let dir = tempfile::tempdir().expect("is made");
        let path = dir.path().join("train.bin");
        let ids = [5, 60_000, 7];
        std::fs::write(&path, encoded(&ids, 2)).expect("writes");
        assert_eq!(all(&Tokens::open(&path, 2).expect("opens")), ids);
        for (magic, version, width) in [(20_240_520_u32, 1_u32, 2), (20_240_801, 7, 4)] {
            let mut bytes = vec![0; 1024];
            bytes[..4].copy_from_slice(&magic.to_le_bytes());
            bytes[4..8].copy_from_slice(&version.to_le_bytes());
            bytes[8..12].copy_from_slice(&3_u32.to_le_bytes());
            bytes.extend(encoded(&ids, width));
            std::fs::write(&path, bytes).expect("writes");
            assert_eq!(all(&Tokens::open(&path, 2).expect("opens")), ids);
        }
        std::fs::write(&path, [1, 2, 3]).expect("writes");
        let error = Tokens::open(&path, 2).err().expect("is odd").to_string();
        assert!(error.contains("its 3 bytes are no ids of 2 bytes; make the shard again"), "{error}");
    }
}
