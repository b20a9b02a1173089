//! Published tensors that hold several of a graph's weights, or one of them transposed.
//!
//! Rows that lie together stay where they are: such a part is a range of the mapped file. What must be moved is
//! copied when its elements are first asked for, so that looking at a model moves nothing.

use std::ops::Range;
use std::sync::OnceLock;

use ridge_graph::DType;

use super::{Checkpoint, Entry, Gathered, glob};
use crate::error::{ModelError, Result};

/// A weight of a graph as a part of a published tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the published tensor, in which `*` stands for any characters, such as a layer's number.
    pub of: String,
    /// Name of the weight, with `*` for what that of the tensor stood for.
    pub name: String,
    /// Is the tensor the weight's transpose, `[in, out]`? A vector is not turned.
    pub transposed: bool,
    /// The rows of the tensor, after transposition, that are the weight's; all if `None`.
    pub rows: Option<Rows>,
}

/// Blocks of rows at equal distances, the first of which begins at `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Where the first block begins.
    pub first: usize,
    /// Rows of each block.
    pub len: usize,
    /// Rows from the beginning of a block to the next one's.
    pub stride: usize,
    /// How many blocks there are.
    pub blocks: usize,
}

impl Rows {
    /// Rows that lie together.
    pub const fn range(first: usize, len: usize) -> Self {
        Self { first, len, stride: len, blocks: 1 }
    }

    fn end(&self) -> usize {
        self.first + self.stride * self.blocks.saturating_sub(1) + self.len
    }

    fn count(&self) -> usize {
        self.len * self.blocks
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        let Self { first, len, stride, blocks } = *self;
        (0..blocks).flat_map(move |block| (0..len).map(move |row| first + block * stride + row))
    }
}

/// The way back of [`interleaved`].
pub(crate) fn deinterleaved(rows: usize, i: usize) -> usize {
    i % 2 * (rows / 2) + i / 2
}

/// Elements that are not where the file has them, or not what it has.
#[derive(Debug)]
pub(super) struct Moved {
    how: How,
    bytes: OnceLock<Vec<u8>>,
}

#[derive(Debug)]
enum How {
    /// Rows of a matrix of `shape` that is perhaps transposed.
    Rows { shape: [usize; 2], transposed: bool, rows: Rows, element: usize },
    /// As [`Change::Interleaved`], of rows of so many bytes.
    Halves { heads: usize, row: usize },
    /// As [`Change::MinusOne`].
    MinusOne(DType),
}

/// How a weight follows from what a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It is that.
    None,
    /// Within each head, the rows of the first half lie between those of the second.
    Interleaved {
        /// How many heads there are.
        heads: usize,
    },
    /// One is added to each number.
    MinusOne,
}

/// Which row of a head of `rows` rows, halves interleaved, is the `i`-th.
fn interleaved(rows: usize, i: usize) -> usize {
    let half = rows / 2;
    if i < half { 2 * i } else { 2 * (i - half) + 1 }
}

impl Moved {
    /// The elements, moved from those of the published tensor.
    pub(super) fn bytes(&self, published: &[u8]) -> &[u8] {
        self.bytes.get_or_init(|| match &self.how {
            How::Rows { shape, transposed: false, rows, element } => {
                let row = shape[1] * element;
                rows.iter().flat_map(|r| &published[r * row..][..row]).copied().collect()
            }
            How::Rows { shape, transposed: true, rows, element } => {
                transpose(published, *shape, &rows.iter().collect::<Vec<_>>(), *element)
            }
            How::Halves { heads, row } => {
                let (all, of_head) = (published.len() / row, published.len() / row / heads);
                let from = |i: usize| (i / of_head * of_head + interleaved(of_head, i % of_head)) * row;
                (0..all).flat_map(|i| &published[from(i)..][..*row]).copied().collect()
            }
            How::MinusOne(dtype) => dtype.encode(dtype.decode(published).into_iter().map(|v| v - 1.0)),
        })
    }

    /// What `tensor` needs, if it is not what the file has.
    pub(super) fn changed(tensor: &Gathered) -> Option<Self> {
        let how = match tensor.change {
            Change::Interleaved { heads } => {
                let rows = tensor.shape.first().copied().unwrap_or(1);
                // Heads of other widths are refused where shapes are held against the model's.
                if heads == 0 || !rows.is_multiple_of(heads * 2) || !tensor.range.len().is_multiple_of(rows) {
                    return None;
                }
                How::Halves { heads, row: tensor.range.len() / rows }
            }
            Change::MinusOne if tensor.format.is_none() => How::MinusOne(tensor.dtype),
            Change::None | Change::MinusOne => return None,
        };
        Some(Self { how, bytes: OnceLock::new() })
    }
}

/// Columns `columns` of a matrix as rows, in blocks that fit a cache.
pub(super) fn transpose(from: &[u8], [rows, width]: [usize; 2], columns: &[usize], element: usize) -> Vec<u8> {
    const BLOCK: usize = 64;
    let mut to = vec![0; columns.len() * rows * element];
    for row_block in (0..rows).step_by(BLOCK) {
        let block = row_block..(row_block + BLOCK).min(rows);
        for (i, column) in columns.iter().enumerate() {
            for row in block.clone() {
                let (a, b) = ((row * width + column) * element, (i * rows + row) * element);
                to[b..b + element].copy_from_slice(&from[a..a + element]);
            }
        }
    }
    to
}

impl Checkpoint {
    /// The checkpoint with each tensor that `parts` name replaced by its parts; as it is if it came from a file whose
    /// tensors have been taken apart.
    ///
    /// # Errors
    ///
    /// [`ModelError::Safetensors`] if a tensor has fewer rows than its parts need, or is transposed and no matrix, or
    /// if none has a name that a part asks for.
    pub fn divided(mut self, parts: &[Part]) -> Result<Self> {
        if self.arranged {
            return Ok(self);
        }
        let mut whole = Vec::new();
        for part in parts {
            let before = whole.len();
            for (name, entry) in &self.tensors {
                if let Some(star) = matched(&part.of, name) {
                    let entry = entry.part(part).map_err(|problem| self.wrong(format!("{name} {problem}")))?;
                    whole.push((name.clone(), part.name.replace('*', star), entry));
                }
            }
            if whole.len() == before {
                return Err(self.wrong(format!("there is no tensor {}", part.of)));
            }
        }
        for (published, _, _) in &whole {
            self.tensors.remove(published);
        }
        for (_, name, entry) in whole {
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(self.wrong(format!("{name} is there as a tensor and as a part of another")));
            }
        }
        Ok(self)
    }

    /// The checkpoint with `prefix` before each name, if it holds `tensor` only without: a model that was saved
    /// without its head has names of its own.
    #[must_use]
    pub fn prefixed(mut self, prefix: &str, tensor: &str) -> Self {
        let bare = !self.arranged && tensor.strip_prefix(prefix).is_some_and(|bare| self.contains(bare));
        if bare && !self.contains(tensor) {
            self.tensors = self.tensors.into_iter().map(|(name, entry)| (format!("{prefix}{name}"), entry)).collect();
        }
        self
    }

    /// The checkpoint without the tensors whose names match one of `patterns`, in which `*` stands for any characters.
    #[must_use]
    pub fn without(mut self, patterns: &[&str]) -> Self {
        self.tensors.retain(|name, _| !patterns.iter().any(|pattern| glob(pattern, name)));
        self
    }

    fn wrong(&self, problem: String) -> ModelError {
        ModelError::Safetensors {
            file: self.name.clone(),
            problem,
            remedy: "check that config.json belongs to this checkpoint".to_owned(),
        }
    }
}

/// What `*` stands for when `name` matches `pattern`.
pub(super) fn matched<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    match pattern.split_once('*') {
        Some((head, tail)) => name.strip_prefix(head)?.strip_suffix(tail),
        None => (pattern == name).then_some(""),
    }
}

impl Entry {
    fn part(&self, part: &Part) -> Result<Self, String> {
        let shape = || format!("has the shape {:?}", self.shape);
        let transposed = part.transposed && self.shape.len() > 1;
        let rows = match self.shape[..] {
            [rows, columns] => {
                if transposed {
                    columns
                } else {
                    rows
                }
            }
            [rows] => rows,
            _ => return Err(format!("{}, and should be a matrix or a vector", shape())),
        };
        let wanted = part.rows.unwrap_or(Rows::range(0, rows));
        if wanted.end() > rows {
            return Err(format!("{}, and should have {} rows or more", shape(), wanted.end()));
        }
        let mut extents = self.shape.clone();
        if transposed {
            extents.swap(0, 1);
        }
        extents[0] = wanted.count();
        let element = self.dtype.size_bytes();
        let (mut range, mut moved) = (self.range.clone(), None);
        if transposed || wanted.blocks > 1 {
            let published = [self.shape[0], self.shape.get(1).copied().unwrap_or(1)];
            let how = How::Rows { shape: published, transposed, rows: wanted, element };
            moved = Some(Moved { how, bytes: OnceLock::new() });
        } else {
            let row = self.shape.get(1).copied().unwrap_or(1) * element;
            range = Range { start: range.start + wanted.first * row, end: range.start + wanted.end() * row };
        }
        Ok(Self { shard: self.shard, dtype: self.dtype, format: None, shape: extents, range, moved })
    }
}
