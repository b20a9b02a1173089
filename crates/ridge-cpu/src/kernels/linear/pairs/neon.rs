//! `bfmmla` of NEON: a vector holds four elements of K of two rows, of the weight or of x, and a sum is of two by two rows. A row of x
//! that is left alone takes the place of both, so it is added up in the same order.
//!
//! Floor: `M N K / 16` instructions; or every weight read once.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::aarch64::{
    float32x4_t, uint32x4_t, vaddq_f32, vdupq_n_f32, vdupq_n_u32, vld1q_f32, vld1q_u32,
    vreinterpretq_u32_u64, vcombine_u64, vdup_n_u64, vst1q_f32, vst1q_u32,
    vuzp1q_f32, vuzp2q_f32, vzip1q_u32, vzip2q_u32,
};
use std::ops::Range;

use half::bf16;

use super::super::tile::Tile;
use super::{DEPTH, LANES, PairedWeight, interleave_rows};
use crate::interleave::{AHEAD, Interleaving, Line};
use crate::simd::{self, bfmmla};

/// Pairs of rows of the weight that are interleaved.
const PAIRS: usize = LANES / 2;

/// Pairs of rows of x whose sums are in registers: 24 vectors.
const ROWS: usize = 3;

/// The products of at most 16 columns.
///
/// # Safety
/// The processor has products of bf16.
#[target_feature(enable = "neon,bf16")]
pub(super) unsafe fn multiply(
    tile: &Tile,
    columns: &Range<usize>,
    w: PairedWeight<'_>,
    x: &[bf16],
    room: &mut [Line],
    out: &mut [f32],
) {
    let of_group = Interleaving::new(tile.inner, [1, 2]).group_lines();
    let (room, arranged) = room.split_at_mut(DEPTH / 2);
    for from in (0..tile.inner).step_by(DEPTH) {
        let depth = from..(from + DEPTH).min(tile.inner);
        let lines = depth.len().div_ceil(2);
        let weights: &[Line] = match w {
            PairedWeight::Interleaved(all) => &all[columns.start / LANES * of_group + from / 2..][..lines],
            PairedWeight::Rows(all) => {
                interleave_rows(all, tile.inner, columns.clone(), &depth, room);
                &room[..lines]
            }
        };
        let at = (columns.start - tile.columns.start, columns.len());
        if tile.rows == 1 {
            let of_step = |step: usize| {
                simd::fetch_far(weights.as_ptr().wrapping_add(2 * step + AHEAD).cast(), 2 * size_of::<Line>());
                TwoLines { lines: weights, step }
            };
            block::<1, _>(tile, of_step, x, 0, &depth, at, out);
            continue;
        }
        let arranged = &mut arranged[..lines.next_multiple_of(2)];
        for (step, to) in arranged.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            TwoLines { lines: weights, step }.arrange(to);
        }
        let arranged = arranged.as_chunks::<2>().0;
        let mut row = 0;
        while row < tile.rows {
            let of_step = |step: usize| &arranged[step];
            row += match tile.rows - row {
                1 | 2 => block::<1, _>(tile, of_step, x, row, &depth, at, out),
                3 | 4 => block::<2, _>(tile, of_step, x, row, &depth, at, out),
                _ => block::<ROWS, _>(tile, of_step, x, row, &depth, at, out),
            };
        }
    }
}

/// Four elements of K of the 16 rows of the weight.
trait FourElements {
    /// Rows `4 * quarter` and the next, and the two after those.
    fn pairs(&self, quarter: usize) -> [uint32x4_t; 2];
}

/// Those of lines `2 * step` and the next, if there is one.
struct TwoLines<'a> {
    lines: &'a [Line],
    step: usize,
}

impl TwoLines<'_> {
    /// Brings them into the order in which they are multiplied.
    #[inline]
    #[target_feature(enable = "neon")]
    fn arrange(&self, to: &mut [Line; 2]) {
        let to = to.as_flattened_mut().as_chunks_mut::<4>().0;
        for quarter in 0..LANES / 4 {
            for (to, pair) in to[2 * quarter..].iter_mut().zip(self.pairs(quarter)) {
                // SAFETY: four words.
                unsafe { vst1q_u32(to.as_mut_ptr(), pair) };
            }
        }
    }
}

impl FourElements for TwoLines<'_> {
    #[inline]
    fn pairs(&self, quarter: usize) -> [uint32x4_t; 2] {
        let first = self.lines[2 * self.step][4 * quarter..].as_ptr();
        // SAFETY: four words each; every processor of AArch64 has NEON.
        unsafe {
            let first = vld1q_u32(first);
            let second = match self.lines.get(2 * self.step + 1) {
                Some(line) => vld1q_u32(line[4 * quarter..].as_ptr()),
                None => vdupq_n_u32(0),
            };
            [vzip1q_u32(first, second), vzip2q_u32(first, second)]
        }
    }
}

impl FourElements for &[Line; 2] {
    #[inline]
    fn pairs(&self, quarter: usize) -> [uint32x4_t; 2] {
        let words = self.as_flattened()[8 * quarter..][..8].as_ptr();
        // SAFETY: eight words; every processor of AArch64 has NEON.
        unsafe { [vld1q_u32(words), vld1q_u32(words.add(4))] }
    }
}

/// Elements `depth` of rows of x, two by two.
struct RowsOfX<'a, const R: usize>([[&'a [bf16]; 2]; R]);

impl<const R: usize> RowsOfX<'_, R> {
    /// Elements `4 * step` and the next three of pair `pair` of rows, which are there.
    #[inline]
    #[target_feature(enable = "neon")]
    fn whole(&self, pair: usize, step: usize) -> uint32x4_t {
        let [first, second] = self.0[pair].map(|row| row[4 * step..][..4].as_ptr().cast::<u64>());
        // SAFETY: four elements of 16 bits.
        let both = unsafe { [first.read_unaligned(), second.read_unaligned()] };
        vreinterpretq_u32_u64(vcombine_u64(vdup_n_u64(both[0]), vdup_n_u64(both[1])))
    }

    /// As [`RowsOfX::whole`], of elements of which some are not there: those are zeros.
    #[inline]
    #[target_feature(enable = "neon")]
    fn rest(&self, pair: usize, step: usize) -> uint32x4_t {
        let [first, second] = self.0[pair].map(|row| {
            row[4 * step..].iter().rev().fold(0u64, |word, x| word << 16 | u64::from(x.to_bits()))
        });
        vreinterpretq_u32_u64(vcombine_u64(vdup_n_u64(first), vdup_n_u64(second)))
    }
}

/// Adds the products of elements `depth` of up to `2 R` rows of x from row `first` on, and of `width` columns from column `at` of the
/// tile on, to the totals. Gives how many rows.
#[inline]
#[target_feature(enable = "neon,bf16")]
fn block<const R: usize, W: FourElements>(
    tile: &Tile,
    weights: impl Fn(usize) -> W,
    x: &[bf16],
    first: usize,
    depth: &Range<usize>,
    (at, width): (usize, usize),
    out: &mut [f32],
) -> usize {
    let count = (2 * R).min(tile.rows - first);
    let row = |nth: usize| &x[(first + nth.min(count - 1)) * tile.inner..][depth.clone()];
    let mut rows = RowsOfX([[row(0), row(1)]; R]);
    for r in 1..R {
        rows.0[r] = [row(2 * r), row(2 * r + 1)];
    }
    let mut sums = [[vdupq_n_f32(0.0); PAIRS]; R];
    for step in 0..depth.len() / 4 {
        let mut of_x = [rows.whole(0, step); R];
        for r in 1..R {
            of_x[r] = rows.whole(r, step);
        }
        add_step(&mut sums, &weights(step), of_x);
    }
    if !depth.len().is_multiple_of(4) {
        let step = depth.len() / 4;
        let mut of_x = [rows.rest(0, step); R];
        for r in 1..R {
            of_x[r] = rows.rest(r, step);
        }
        add_step(&mut sums, &weights(step), of_x);
    }
    for nth in 0..count {
        let to = &mut out[(first + nth) * tile.stride + at..][..width];
        let (of_rows, is_second) = (&sums[nth / 2], nth % 2 == 1);
        for (quarter, to) in to.chunks_mut(4).enumerate() {
            let (low, high) = (of_rows[2 * quarter], of_rows[2 * quarter + 1]);
            let sum = if is_second { vuzp2q_f32(low, high) } else { vuzp1q_f32(low, high) };
            let mut lanes = [0f32; 4];
            lanes[..to.len()].copy_from_slice(to);
            // SAFETY: four floats.
            unsafe { vst1q_f32(lanes.as_mut_ptr(), vaddq_f32(vld1q_f32(lanes.as_ptr()), sum)) };
            to.copy_from_slice(&lanes[..to.len()]);
        }
    }
    count
}

/// Adds the products of four elements of K.
#[inline]
#[target_feature(enable = "neon,bf16")]
fn add_step<const R: usize>(
    sums: &mut [[float32x4_t; PAIRS]; R],
    weights: &impl FourElements,
    of_x: [uint32x4_t; R],
) {
    for quarter in 0..LANES / 4 {
        let [low, high] = weights.pairs(quarter);
        for r in 0..R {
            sums[r][2 * quarter] = bfmmla(sums[r][2 * quarter], low, of_x[r]);
            sums[r][2 * quarter + 1] = bfmmla(sums[r][2 * quarter + 1], high, of_x[r]);
        }
    }
}
