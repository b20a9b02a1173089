//! Products of codes with 8 rows of the weight as the lanes of vectors, so no sum crosses lanes: what was taken apart serves all
//! rows of x while it is in first-level cache. The instructions that multiply are [`Multiply`]'s (`avx2.rs`, `neon.rs`).
//!
//! Floor: every block read once (decode); for 4 elements of 8 rows the instructions that multiply and add them (prompts).
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::ops::Range;

use super::eight::{Floats, add_product, put_floats};
use super::interleaved::{Interleaved, InterleavedCodes, InterleavedPlace};
use super::rows::{BlockPointers, EightRows, InterleavedRows};
use super::scale::{COLUMNS, EIGHT, GROUP, SIDE, SUMMED};
use super::weight::CodeWeight;
use super::x::{ActivationCodes, FEW};
use crate::bytes::cast;
use crate::interleave::Line;
use crate::simd;

/// Rows of x that share a load of the weight's codes.
pub(super) const ABREAST: usize = 4;

/// Sums of x's codes over what shares a scale.
pub(super) type OfX = [f32; GROUP / SUMMED];

/// Memory to work in.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct ColumnRoom {
    unpacked: [InterleavedCodes; COLUMNS / EIGHT],
    of_x: [OfX; ABREAST],
}

// SAFETY: arrays of numbers, whose sizes are multiples of the alignment.
unsafe impl crate::bytes::Pod for ColumnRoom {}

/// Bytes that [`multiply`] works in.
pub(super) fn room() -> usize {
    size_of::<ColumnRoom>()
}

/// Instructions that multiply codes.
pub(super) trait Multiply {
    /// Turns codes into what [`Multiply::products`] takes, after the first `words` of each row were taken apart.
    ///
    /// # Safety
    /// The instructions are there.
    unsafe fn arrange<B: Interleaved>(_weights: &mut InterleavedCodes, _words: usize) {}

    /// What the products of 8 rows of the weight with `N` of x stand for but for the scales of x.
    ///
    /// # Safety
    /// The instructions are there.
    unsafe fn products<B: Interleaved, const N: usize>(
        weights: &InterleavedCodes,
        x: [&[[i8; 4]]; N],
        of_x: &[OfX; ABREAST],
    ) -> [Floats; N];
}

/// Checks what kernels rely on.
///
/// # Panics
/// Where the rows are not inside of the weight, or it is not of this format or not as wide as x.
pub(super) fn check<B: Interleaved>(weight: &CodeWeight<'_>, rows: &Range<usize>, x: &ActivationCodes<'_>) {
    assert!(match weight.interleaved {
        Some(interleaving) => {
            rows.start.is_multiple_of(SIDE) && interleaving.bytes(rows.end) <= weight.data.len()
        }
        None => rows.end * weight.stride() <= weight.data.len(),
    });
    assert!(x.layout.inner == weight.inner && weight.inner.is_multiple_of(B::ELEMENTS));
    assert!(weight.codes.block == [B::ELEMENTS, B::BYTES]);
}

/// The products of `rows` of the weight with the rows of `x`, one row of x after another.
///
/// # Safety
/// There are the instructions of `M`.
pub(super) unsafe fn multiply<B: Interleaved, M: Multiply>(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut [u8],
    out: &mut [f32],
) {
    let room = &mut cast::<ColumnRoom>(room)[0];
    check::<B>(weight, &rows, x);
    let width = rows.len();
    let out = &mut out[..x.layout.rows * width];
    out.fill(0.0);
    // Few rows of x wait for memory, which is read as few rows of the weight at a time as possible.
    let few = if weight.interleaved.is_some() { SIDE } else { EIGHT };
    let together = if x.layout.rows > FEW { COLUMNS } else { few };
    for first in rows.clone().step_by(together) {
        let these = first..(first + together).min(rows.end);
        // SAFETY: by the caller's promise, and rows are inside of the weight.
        unsafe { columns::<B, M>(weight, &these, x, room, &mut out[first - rows.start..], width) };
    }
}

/// Adds the products of at most [`COLUMNS`] rows of the weight to `out`, of which every `width`th is of the same one.
///
/// # Safety
/// There are the instructions of `M`, and rows are inside of the weight.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn columns<B: Interleaved, M: Multiply>(
    weight: &CodeWeight<'_>,
    rows: &Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut ColumnRoom,
    out: &mut [f32],
    width: usize,
) {
    let stride = weight.stride();
    let groups = x.layout.groups();
    for group in 0..groups {
        if weight.interleaved.is_none() {
            // A share of the next rows, which lie behind these.
            let end = weight.data.as_ptr().wrapping_add(rows.end * stride);
            simd::fetch_share(end, rows.len() * stride, group, groups);
        }
        let elements = weight.elements(group);
        let from = weight.codes.bytes(elements.start);
        for (first, to) in rows.clone().step_by(EIGHT).zip(&mut room.unpacked) {
            // SAFETY: blocks are inside of their rows, which are inside of the weight.
            unsafe {
                if let Some((lines, unit)) = weight.lines(first) {
                    let lines = &lines[group * unit..];
                    simd::fetch_far(lines.as_ptr().wrapping_add(unit).cast(), unit * size_of::<Line>());
                    unpack::<B>(InterleavedRows::<B>::new(lines, first % SIDE), elements.len(), to);
                } else {
                    let of_rows = BlockPointers::new(weight.data, first..rows.end, stride, from);
                    unpack::<B>(of_rows, elements.len(), to);
                }
            }
            // SAFETY: by the caller's promise.
            unsafe { M::arrange::<B>(to, elements.len() / 4) };
        }
        let part = Part { group, elements, rows, width };
        let mut row = 0;
        while row < x.layout.rows {
            // SAFETY: what is multiplied was unpacked just now.
            unsafe {
                if row + ABREAST <= x.layout.rows {
                    abreast::<B, M, ABREAST>(&part, x, row, room, out);
                    row += ABREAST;
                } else {
                    abreast::<B, M, 1>(&part, x, row, room, out);
                    row += 1;
                }
            }
        }
    }
}

/// Takes apart `elements` elements of eight rows.
///
/// # Safety
/// There are the instructions, and the rows have so many elements.
#[inline]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn unpack<B: Interleaved>(rows: impl EightRows, elements: usize, to: &mut InterleavedCodes) {
    for block in 0..elements / B::ELEMENTS {
        // SAFETY: by the caller's promise.
        unsafe { B::unpack(rows.after(block * B::BYTES), &mut InterleavedPlace::of_block(to, block)) };
    }
}

/// Floats that a vector is stored to.
#[repr(C, align(32))]
struct Lanes([f32; EIGHT]);

/// A group of K of some rows of the weight.
struct Part<'a> {
    group: usize,
    elements: Range<usize>,
    rows: &'a Range<usize>,
    /// Floats from what is of one row of x to what is of the next.
    width: usize,
}

/// Adds the products of a part that is unpacked with `N` rows of x from row `first` on.
///
/// # Safety
/// There are the instructions of `M`.
#[inline(never)]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn abreast<B: Interleaved, M: Multiply, const N: usize>(
    part: &Part<'_>,
    x: &ActivationCodes<'_>,
    first: usize,
    room: &mut ColumnRoom,
    out: &mut [f32],
) {
    // No closures within functions of arrays: those have not the instructions, so the closures would be called.
    let (mut codes, mut scales): ([&[[i8; 4]]; N], _) = ([&[]; N], [0f32; N]);
    for nth in 0..N {
        let row = first + nth;
        codes[nth] = x.codes(row)[part.elements.clone()].as_chunks().0;
        scales[nth] = x.scales(row)[part.group];
        let sums = &x.sums(row)[part.elements.start / SUMMED..part.elements.end / SUMMED];
        for (of_x, sums) in room.of_x[nth].iter_mut().zip(sums.chunks_exact(B::GROUP / SUMMED)) {
            *of_x = sums.iter().sum();
        }
    }
    for (tile, unpacked) in room.unpacked.iter().enumerate().take(part.rows.len().div_ceil(EIGHT)) {
        // SAFETY: by the caller's promise.
        let sums = unsafe { M::products::<B, N>(unpacked, codes, &room.of_x) };
        for nth in 0..N {
            let to = &mut out[(first + nth) * part.width..][tile * EIGHT..];
            let of_row = part.rows.len() - tile * EIGHT;
            match to.first_chunk_mut::<EIGHT>() {
                Some(to) if of_row >= EIGHT => add_product(sums[nth], scales[nth], to),
                _ => {
                    let mut lanes = Lanes([0.0; EIGHT]);
                    // SAFETY: 8 floats.
                    unsafe { put_floats(lanes.0.as_mut_ptr(), sums[nth]) };
                    for (to, sum) in to.iter_mut().zip(&lanes.0[..of_row]) {
                        *to = sum.mul_add(scales[nth], *to);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
