//! Weights that are multiplied in pairs, and how rows of them are brought side by side.

use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::super::float_codes::FloatCodes;
use crate::interleave::{self, Line};

/// Columns whose rows of the weight are interleaved.
pub(super) const LANES: usize = interleave::ROWS;

/// Elements of K whose products are added up before they are added to the total. AVX-512 has two sums of pairs; its weights of a
/// tile are 64 KiB, which stay in second-level cache, and with 256 elements totals are read and written so often that products of
/// many rows take 6 % longer (Zen 4). NEON has one sum of four elements, whose error 1024 would let grow too far.
pub(super) const DEPTH: usize = if cfg!(target_arch = "aarch64") { 256 } else { 1024 };

/// A weight `[N, K]`.
#[derive(Clone, Copy)]
pub(in crate::kernels::linear) enum PairedWeight<'a> {
    Rows(&'a [bf16]),
    Interleaved(&'a [Line]),
    /// Of codes that become pairs.
    #[cfg(target_arch = "x86_64")]
    Codes(FloatCodes<'a>),
}

/// Elements `depth` of up to 16 rows of the weight as lines; rows that are not there are zeros.
pub(super) fn interleave_rows(w: &[bf16], inner: usize, rows: Range<usize>, depth: &Range<usize>, to: &mut [Line]) {
    let to = &mut to[..depth.len().div_ceil(2)];
    if rows.len() < LANES {
        to.fill([0; LANES]);
    }
    for (lane, row) in rows.take(LANES).enumerate() {
        let row = &w[row * inner..][depth.clone()];
        let (pairs, rest) = row.as_chunks::<2>();
        let mut to = to.iter_mut();
        for ([first, second], line) in pairs.iter().zip(&mut to) {
            line[lane] = pair(*first, *second);
        }
        if let (Some(last), Some(line)) = (rest.first(), to.next()) {
            line[lane] = pair(*last, bf16::ZERO);
        }
    }
}

/// Two elements as a word, the first in its lower half.
pub(super) fn pair(first: bf16, second: bf16) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
}
