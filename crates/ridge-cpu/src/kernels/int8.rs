//! Products of codes: rows of x, rounded to 8-bit codes where they are prepared, by weights that are stored in blocks of
//! codes.
//!
//! The sum over a group of weights that share a scale is an exact integer, whatever instructions make it. Such sums
//! become floats, are multiplied by the weights' scale and added up in order over 256 elements of K, the codes of x that
//! share a scale; those sums by the scale of x are added up in order over K. Minima times the sum of x's codes are taken
//! away with the first. So on one instruction set a result has the same bits for one row of x and for many.
//!
//! Floor: every block read once (decode), or the rate of the instructions that multiply codes (prompts).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod columns;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod eight;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod interleaved;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod rows;
mod scale;
mod weight;
mod x;

use std::ops::Range;

use ridge_graph::FormatRef;
use ridge_graph::format::{BlockFormat, SignedBytes};
use ridge_graph::with_block_format;

use crate::simd;
use scale::apart;
use scale::unit;
pub(super) use scale::{COLUMNS, GROUP, SUMMED};
pub(super) use weight::{CodeWeight, WeightCodes};
pub(super) use x::{ActivationCodes, CodeLayout, CodeMultiplier, by, encode, rows_together};

/// One row of x waits for memory, which the longest vectors read fastest; more share codes that were taken apart once. Bits
/// are the same.
#[cfg(target_arch = "x86_64")]
fn past<B: avx512::Wide>(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut [u8],
    out: &mut [f32],
) {
    match simd::isa() {
        simd::Isa::Avx512Vnni | simd::Isa::Avx512Bf16 | simd::Isa::Amx => {
            avx512::multiply::<B>(weight, rows, x, room, out);
        }
        _ => avx2::multiply::<B>(weight, rows, x, room, out),
    }
}

#[cfg(target_arch = "aarch64")]
use neon::multiply as past;

macro_rules! codes_in_blocks {
    ($block:ident) => {
        WeightCodes {
            block: [$block::ELEMENTS, $block::BYTES],
            group: $block::GROUP,
            minima: $block::MINIMA,
            unit: unit::<$block>(),
            read: read::<$block>,
            #[cfg(target_arch = "x86_64")]
            to_panel: avx512::to_panel::<$block>,
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            stream: past::<$block>,
        }
    };
}

/// How the blocks of `format` are codes, if they are.
pub(super) fn codes(format: &FormatRef) -> Option<WeightCodes> {
    with_block_format!(format.name(), B => Some(codes_in_blocks!(B)), _ => None)
}

/// As [`codes`], of rows of int8 codes whose scale is elsewhere.
pub(super) fn codes_of_bytes() -> WeightCodes {
    codes_in_blocks!(SignedBytes)
}

simd::vectorised! {
    fn read<B: BlockFormat>(blocks: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
        let groups = B::ELEMENTS / B::GROUP;
        let parts = codes.chunks_exact_mut(B::ELEMENTS).zip(scales.chunks_exact_mut(groups));
        for ((block, (codes, scales)), minima) in blocks.chunks_exact(B::BYTES).zip(parts).zip(minima.chunks_exact_mut(groups)) {
            apart::<B>(block, codes, scales, minima);
        }
    }
}

/// Bytes that [`multiply`] works in.
pub(super) fn room(x: &CodeLayout) -> usize {
    match x.by {
        #[cfg(target_arch = "x86_64")]
        CodeMultiplier::Stream => columns::room().max(avx512::room(x)),
        #[cfg(target_arch = "aarch64")]
        CodeMultiplier::Stream => columns::room(),
        CodeMultiplier::Lanes => 0,
    }
}

/// The products of `rows` of the weight, at most [`COLUMNS`] where x has several rows, with the rows of `x`, one row of x after
/// another.
pub(super) fn multiply(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut [u8],
    out: &mut [f32],
) {
    match x.layout.by {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        CodeMultiplier::Stream => (weight.codes.stream)(weight, rows, x, room, out),
        CodeMultiplier::Lanes => {
            let _ = room;
            lanes::multiply(weight, rows, x, out);
        }
    }
}
