//! Repacking published codes into blocks of a format, whose scales and codes lie side by side: see `mxfp4.rs` and `int4.rs` for what is
//! published.

use std::ops::Range;
use std::sync::Arc;

use ridge_graph::DType;
use ridge_graph::format::{BlockFormat as _, Mxfp4, Q4_0, Q4_1};

use super::parts::Rows;
use crate::bytes::FileBytes;

/// Elements of a block, of each format here.
const ELEMENTS: usize = 32;
/// Bytes of the codes of a block.
pub(super) const CODE_BYTES: usize = ELEMENTS / 2;

/// A tensor as a file has it.
#[derive(Clone, Debug)]
pub(super) struct FileTensor {
    pub(super) file: Arc<FileBytes>,
    pub(super) range: Range<usize>,
}

impl FileTensor {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.file.as_slice()[self.range.clone()]
    }
}

/// A weight whose codes are published apart from what scales them: what there is beside the codes.
#[derive(Debug)]
pub(super) enum Repacked {
    /// MXFP4: the exponents, and how many blocks a row has.
    Mxfp4 {
        exponents: FileTensor,
        blocks: usize,
    },
    Int4(PublishedInt4),
}

impl Repacked {
    /// The blocks of these rows, made on all cores from the codes of all rows.
    pub(super) fn bytes(&self, codes: &[u8], rows: &Rows) -> Vec<u8> {
        match self {
            Self::Mxfp4 { exponents, blocks } => {
                let exponents = exponents.bytes();
                on_all_cores(rows, blocks * Mxfp4::BYTES, |rows, to| {
                    for (to, row) in to.chunks_exact_mut(blocks * Mxfp4::BYTES).zip(rows) {
                        let codes = &codes[row * blocks * CODE_BYTES..][..blocks * CODE_BYTES];
                        let exponents = &exponents[row * blocks..][..*blocks];
                        let to = to.as_chunks_mut::<{ Mxfp4::BYTES }>().0.iter_mut();
                        for ((to, codes), exponent) in to.zip(codes.as_chunks().0).zip(exponents) {
                            to[0] = *exponent;
                            to[1..].copy_from_slice(&halves(codes));
                        }
                    }
                })
            }
            Self::Int4(int4) => int4.bytes(codes, rows),
        }
    }
}

/// The bytes that `make` fills for the rows, `row` for each, in pieces on all cores. It takes up to [`TILE`] rows at a time.
fn on_all_cores(rows: &Rows, row: usize, make: impl Fn(&[usize], &mut [u8]) + Sync) -> Vec<u8> {
    let mut to = vec![0; rows.count() * row];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.count().div_ceil(threads).next_multiple_of(TILE);
    std::thread::scope(|scope| {
        for (nth, to) in to.chunks_mut((share * row).max(1)).enumerate() {
            let make = &make;
            scope.spawn(move || {
                for (tile, to) in to.chunks_mut(TILE * row).enumerate() {
                    let first = nth * share + tile * TILE;
                    let of_tile: Vec<usize> = (first..first + to.len() / row).map(|i| rows.at(i)).collect();
                    make(&of_tile, to);
                }
            });
        }
    });
    to
}

/// Rows that are made at a time: of codes that lie by columns, what one line of a cache has of them.
const TILE: usize = 128;
/// Columns of these, whose codes fit a core's cache.
const COLUMNS: usize = 256;

/// 32 codes, of which neighbours share a byte, so that element i shares one with element i + 16.
fn halves(codes: &[u8; CODE_BYTES]) -> [u8; CODE_BYTES] {
    const HALF: usize = CODE_BYTES / 2;
    let mut to = [0; CODE_BYTES];
    for i in 0..HALF {
        let (first, second) = (codes[i], codes[HALF + i]);
        to[2 * i] = first & 15 | second << 4;
        to[2 * i + 1] = first >> 4 | second & 0xf0;
    }
    to
}

/// How words of codes of 4 bits, their scales and zero points lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int4Layout {
    /// As compressed-tensors packs them (`pack-quantized`).
    Compressed,
    /// As GPTQ's libraries do.
    Gptq,
    /// As AWQ's do (`gemm`).
    Awq,
}

/// Which nibble of a word has each of eight neighbouring rows in AWQ.
const AWQ_NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// What lies beside the codes of a matrix of integers of 4 bits.
#[derive(Debug)]
pub(super) struct PublishedInt4 {
    pub(super) layout: Int4Layout,
    /// Rows, and elements of each.
    pub(super) out: usize,
    pub(super) inner: usize,
    /// Groups of a row.
    pub(super) groups: usize,
    pub(super) scales: (DType, FileTensor),
    /// Zero points, and what is added to each of their words.
    pub(super) zeros: Option<(FileTensor, u32)>,
}

impl PublishedInt4 {
    fn bytes(&self, codes: &[u8], rows: &Rows) -> Vec<u8> {
        let (dtype, scales) = (self.scales.0, self.scales.1.bytes());
        let zeros = self.zeros.as_ref().map(|(points, more)| (points.bytes(), *more));
        let head = if zeros.is_some() { Q4_1::BYTES } else { Q4_0::BYTES } - CODE_BYTES;
        let (block, group) = (head + CODE_BYTES, self.inner / self.groups);
        // The scale and the minimum of a row's group.
        let head_of = |row: usize, of: usize| {
            let at = self.scale_at(row, of) * dtype.size_bytes();
            let scale = dtype.decode(&scales[at..at + dtype.size_bytes()])[0];
            let minimum = zeros.map(|(words, more)| -self.zero_point(words, more, row, of) * scale);
            DType::F16.encode([scale].into_iter().chain(minimum))
        };
        on_all_cores(rows, self.inner / ELEMENTS * block, |rows, to| {
            let heads: Vec<u8> =
                rows.iter().flat_map(|row| (0..self.groups).flat_map(|of| head_of(*row, of))).collect();
            let mut tile = vec![0; rows.len() * COLUMNS / 2];
            for first in (0..self.inner).step_by(COLUMNS) {
                let columns = first..(first + COLUMNS).min(self.inner);
                self.read(codes, rows, columns.clone(), &mut tile);
                for i in 0..rows.len() {
                    for column in columns.clone().step_by(ELEMENTS) {
                        let to = &mut to[(i * self.inner + column) / ELEMENTS * block..][..block];
                        to[..head].copy_from_slice(&heads[(i * self.groups + column / group) * head..][..head]);
                        let from = (i * COLUMNS + column - first) / 2;
                        if let Some(codes) = tile[from..].first_chunk() {
                            to[head..].copy_from_slice(&halves(codes));
                        }
                    }
                }
            }
        })
    }

    /// Where the scale of a row's group lies.
    fn scale_at(&self, row: usize, group: usize) -> usize {
        if self.layout == Int4Layout::Compressed { row * self.groups + group } else { group * self.out + row }
    }

    /// The zero point of a row's group.
    fn zero_point(&self, words: &[u8], more: u32, row: usize, group: usize) -> f64 {
        let word = match self.layout {
            Int4Layout::Compressed => row / 8 * self.groups + group,
            _ => group * (self.out / 8) + row / 8,
        };
        let nibble = if self.layout == Int4Layout::Awq { AWQ_NIBBLE[row % 8] } else { row % 8 };
        f64::from(word_at(words, word).wrapping_add(more) >> (4 * nibble) & 15)
    }

    /// The codes of `columns` of each row, of which neighbours share a byte; rows are [`COLUMNS`] codes apart in `tile`.
    fn read(&self, codes: &[u8], rows: &[usize], columns: Range<usize>, tile: &mut [u8]) {
        let lines = tile.chunks_exact_mut(COLUMNS / 2);
        match self.layout {
            Int4Layout::Compressed => {
                for (line, row) in lines.zip(rows) {
                    let from = &codes[(row * self.inner + columns.start) / 2..][..columns.len() / 2];
                    line[..from.len()].copy_from_slice(from);
                }
            }
            Int4Layout::Gptq => {
                for (nth, word) in (columns.start / 8..columns.end / 8).enumerate() {
                    for (i, row) in rows.iter().enumerate() {
                        let from = word_at(codes, word * self.out + row).to_le_bytes();
                        tile[i * COLUMNS / 2 + nth * 4..][..4].copy_from_slice(&from);
                    }
                }
            }
            Int4Layout::Awq => {
                for (nth, column) in columns.enumerate() {
                    for (i, row) in rows.iter().enumerate() {
                        let word = word_at(codes, column * (self.out / 8) + row / 8);
                        let code = (word >> (4 * AWQ_NIBBLE[row % 8]) & 15) as u8;
                        let to = &mut tile[(i * COLUMNS + nth) / 2];
                        *to = if nth % 2 == 0 { code } else { *to | code << 4 };
                    }
                }
            }
        }
    }
}

/// The `at`-th word.
fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes.as_chunks().0[at])
}
