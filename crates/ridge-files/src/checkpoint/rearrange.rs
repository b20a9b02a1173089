//! Rearranging the elements of a published tensor into those of a weight.
//!
//! A weight is rearranged when its elements are read, so that opening a model copies nothing. A view of them is kept for as
//! long as the checkpoint is; who takes them has them alone.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use ridge_graph::DType;

use super::parts::Rows;
use super::repack::Repacked;
use crate::bytes::FileBytes;

/// Which row of a head of `rows` rows is at `i` once the halves of the head are interleaved: the inverse of how
/// [`Change::Interleaved`] reads them.
pub fn deinterleaved(rows: usize, i: usize) -> usize {
    i % 2 * (rows / 2) + i / 2
}

/// Elements of a weight that differ in place or value from those of the file.
#[derive(Debug)]
pub(super) struct Rearranged {
    how: How,
    /// Those that a view shows.
    viewed: OnceLock<Vec<u8>>,
}

#[derive(Debug)]
pub(super) enum How {
    /// Rows of a matrix of `shape` that is perhaps transposed.
    Rows { shape: [usize; 2], transposed: bool, rows: Rows, element: usize },
    /// Columns of matrices of `shape`, which lie one after another: those of the first are counted first.
    Columns { shape: [usize; 2], rows: Rows, element: usize },
    /// As [`Change::Interleaved`], of rows of so many bytes.
    Halves { heads: usize, row: usize },
    /// As [`Change::MinusOne`].
    MinusOne(DType),
    /// Several tensors, one after another, wherever they lie.
    Joined(Vec<Joined>),
    /// Floats of this type as f32, all of them so many times.
    Widened { dtype: DType, times: usize },
    /// Rows of blocks that are made of codes and what lies beside them.
    Blocks { how: Arc<Repacked>, rows: Rows },
}

/// A tensor that is joined with others.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) file: Arc<FileBytes>,
    pub(super) range: Range<usize>,
    pub(super) rearranged: Option<Arc<Rearranged>>,
}

impl Joined {
    fn bytes(&self) -> Cow<'_, [u8]> {
        let data = &self.file.as_slice()[self.range.clone()];
        self.rearranged.as_ref().map_or(Cow::Borrowed(data), |rearranged| Cow::Owned(rearranged.made(data)))
    }
}

/// How the elements of a weight follow from those of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// They are the same.
    None,
    /// Within each head, the file interleaves the rows of the first half with those of the second.
    Interleaved {
        /// How many heads there are.
        heads: usize,
    },
    /// The file adds one to each number.
    MinusOne,
    /// It is these rows of the file's, whose blocks are of one stride to the end.
    Rows(Rows),
}

/// Which row of a head of `rows` rows, halves interleaved, is the `i`-th.
fn interleaved(rows: usize, i: usize) -> usize {
    let half = rows / 2;
    if i < half { 2 * i } else { 2 * (i - half) + 1 }
}

impl Rearranged {
    pub(super) fn new(how: How) -> Self {
        Self { how, viewed: OnceLock::new() }
    }

    /// These rows of what is divided in rows itself; nothing of what is not.
    pub(super) fn of_rows(&self, rows: Rows) -> Option<Self> {
        match &self.how {
            How::Blocks { how, .. } => Some(Self::new(How::Blocks { how: Arc::clone(how), rows })),
            _ => None,
        }
    }

    /// The elements, moved from those of the published tensor, which are kept.
    pub(super) fn viewed(&self, published: &[u8]) -> &[u8] {
        self.viewed.get_or_init(|| self.made(published))
    }

    /// The elements, moved from those of the published tensor.
    pub(super) fn made(&self, published: &[u8]) -> Vec<u8> {
        match &self.how {
            How::Rows { shape, transposed: false, rows, element } => {
                let row = shape[1] * element;
                rows.iter().flat_map(|r| &published[r * row..][..row]).copied().collect()
            }
            How::Rows { shape, transposed: true, rows, element } => {
                transpose(published, *shape, &rows.iter().collect::<Vec<_>>(), *element)
            }
            How::Columns { shape, rows, element } => {
                let (columns, matrix) = (shape[1].max(1), shape[0] * shape[1] * element);
                let mut to = Vec::with_capacity(rows.count() * shape[0] * element);
                let chosen: Vec<usize> = rows.iter().collect();
                for of_matrix in chosen.chunk_by(|a, b| a / columns == b / columns) {
                    let from = &published[of_matrix[0] / columns * matrix..][..matrix];
                    let of_matrix: Vec<usize> = of_matrix.iter().map(|column| column % columns).collect();
                    to.extend(transpose(from, *shape, &of_matrix, *element));
                }
                to
            }
            How::Halves { heads, row } => {
                let (all, of_head) = (published.len() / row, published.len() / row / heads);
                let from = |i: usize| (i / of_head * of_head + interleaved(of_head, i % of_head)) * row;
                (0..all).flat_map(|i| &published[from(i)..][..*row]).copied().collect()
            }
            How::Joined(parts) => {
                let parts: Vec<Cow<'_, [u8]>> = parts.iter().map(Joined::bytes).collect();
                parts.concat()
            }
            How::Widened { dtype, times } => DType::F32.encode(dtype.decode(published)).repeat(*times),
            How::MinusOne(dtype) => dtype.encode(dtype.decode(published).into_iter().map(|v| v - 1.0)),
            How::Blocks { how, rows } => how.bytes(published, rows),
        }
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
