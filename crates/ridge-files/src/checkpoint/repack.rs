//! Repacking published MXFP4 codes and exponents into blocks of the format `mxfp4`; see `mxfp4.rs` for both layouts.

use std::ops::Range;
use std::sync::Arc;

use ridge_graph::format::{BlockFormat as _, Mxfp4};

use super::parts::Rows;
use crate::bytes::FileBytes;

/// Bytes of a published block's codes.
pub(super) const CODE_BYTES: usize = Mxfp4::ELEMENTS / 2;

/// Rows of a weight whose codes and exponents are published apart.
#[derive(Debug)]
pub(super) struct PublishedMxfp4 {
    /// The file that has the exponents.
    pub(super) file: Arc<FileBytes>,
    /// Where these lie in it.
    pub(super) exponents: Range<usize>,
    /// Blocks of a row.
    pub(super) blocks: usize,
    /// Which rows these are.
    pub(super) rows: Rows,
}

impl PublishedMxfp4 {
    /// As this, of these rows of the weight alone.
    pub(super) fn of_rows(&self, rows: Rows) -> Self {
        Self { file: Arc::clone(&self.file), exponents: self.exponents.clone(), blocks: self.blocks, rows }
    }

    /// The blocks, made on all cores from the codes of all rows.
    pub(super) fn bytes(&self, codes: &[u8]) -> Vec<u8> {
        let exponents = &self.file.as_slice()[self.exponents.clone()];
        let row = self.blocks * Mxfp4::BYTES;
        let mut to = vec![0; self.rows.count() * row];
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = self.rows.count().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (nth, to) in to.chunks_mut(share * row).enumerate() {
                scope.spawn(move || {
                    let rows = (nth * share..).map(|i| self.rows.at(i));
                    for (to, from) in to.chunks_exact_mut(row).zip(rows) {
                        let codes = &codes[from * self.blocks * CODE_BYTES..][..self.blocks * CODE_BYTES];
                        repack(codes, &exponents[from * self.blocks..][..self.blocks], to);
                    }
                });
            }
        });
        to
    }
}

/// The blocks of one row.
fn repack(codes: &[u8], exponents: &[u8], to: &mut [u8]) {
    const HALF: usize = CODE_BYTES / 2;
    let blocks = to.as_chunks_mut::<{ Mxfp4::BYTES }>().0.iter_mut();
    for ((to, codes), exponent) in blocks.zip(codes.as_chunks::<CODE_BYTES>().0).zip(exponents) {
        to[0] = *exponent;
        for i in 0..HALF {
            let (first, second) = (codes[i], codes[HALF + i]);
            to[1 + 2 * i] = first & 15 | second << 4;
            to[2 + 2 * i] = first >> 4 | second & 0xf0;
        }
    }
}
