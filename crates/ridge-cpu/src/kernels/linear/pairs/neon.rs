//! `bfmmla` of NEON: a vector holds four elements of K of two rows, of the weight or of x, and a sum is of two by two rows. A row of x
//! that is left alone takes the place of both, so it is added up in the same order.
//!
//! Floor: `M N K / 16` instructions; or every weight read once.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::aarch64::{
    float32x4_t, uint32x4_t, vaddq_f32, vcombine_u64, vdup_n_u64, vdupq_n_f32, vdupq_n_u32, vld1q_f32, vld1q_u32,
    vreinterpretq_u32_u64, vst1q_f32, vst1q_u32, vuzp1q_f32, vuzp2q_f32, vzip1q_u32, vzip2q_u32,
};
use std::ops::Range;

use half::bf16;

use super::super::tile::Tile;
use super::weight::{DEPTH, LANES, PairedWeight, interleave_rows};
use crate::interleave::{Interleaving, Line};
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
            PairedWeight::Interleaved(all) => {
                let weights = &all[columns.start / LANES * of_group + from / 2..][..lines];
                if tile.rows > 1 {
                    let next = weights.as_ptr().wrapping_add(lines);
                    simd::fetch_far(next.cast(), lines * size_of::<Line>());
                }
                weights
            }
            PairedWeight::Rows(all) => {
                interleave_rows(all, tile.inner, columns.clone(), &depth, room);
                &room[..lines]
            }
        };
        let at = (columns.start - tile.columns.start, columns.len());
        let weights = InLines(weights);
        if tile.rows == 1 {
            block::<1>(tile, weights, x, 0, &depth, at, out);
            continue;
        }
        let arranged = &mut arranged[..lines.next_multiple_of(2)];
        for (step, to) in arranged.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            weights.arrange(step, to);
        }
        let weights = Arranged(arranged.as_chunks::<2>().0);
        let mut row = 0;
        while row < tile.rows {
            row += match tile.rows - row {
                1 | 2 => block::<1>(tile, weights, x, row, &depth, at, out),
                3 | 4 => block::<2>(tile, weights, x, row, &depth, at, out),
                _ => block::<ROWS>(tile, weights, x, row, &depth, at, out),
            };
        }
    }
}

/// Where the weights of steps of four elements of K come from.
trait Steps: Copy {
    /// Rows `4 * quarter` and the next, and the two after those, of step `step`.
    ///
    /// # Safety
    /// There is the step, and if `whole` all of its elements are.
    unsafe fn pairs(self, step: usize, quarter: usize, whole: bool) -> [uint32x4_t; 2];
}

/// Interleaved rows: step `n` is lines `2 n` and the next.
#[derive(Clone, Copy)]
struct InLines<'a>(&'a [Line]);

impl InLines<'_> {
    /// Brings step `step` into the order in which it is multiplied.
    #[inline]
    #[target_feature(enable = "neon")]
    fn arrange(self, step: usize, to: &mut [Line; 2]) {
        for quarter in 0..LANES / 4 {
            // SAFETY: the step has a line at least, and there is room for two.
            unsafe {
                let [low, high] = self.pairs(step, quarter, 2 * step + 1 < self.0.len());
                let to = to.as_mut_ptr().cast::<u32>().add(8 * quarter);
                vst1q_u32(to, low);
                vst1q_u32(to.add(4), high);
            }
        }
    }
}

impl Steps for InLines<'_> {
    #[inline]
    unsafe fn pairs(self, step: usize, quarter: usize, whole: bool) -> [uint32x4_t; 2] {
        // SAFETY: four words each, by the caller's promise; every processor of AArch64 has NEON.
        unsafe {
            let line = self.0.as_ptr().add(2 * step).cast::<u32>();
            let first = vld1q_u32(line.add(4 * quarter));
            let second = if whole || 2 * step + 1 < self.0.len() {
                vld1q_u32(line.add(LANES + 4 * quarter))
            } else {
                vdupq_n_u32(0)
            };
            [vzip1q_u32(first, second), vzip2q_u32(first, second)]
        }
    }
}

/// As [`InLines::arrange`] leaves them.
#[derive(Clone, Copy)]
struct Arranged<'a>(&'a [[Line; 2]]);

impl Steps for Arranged<'_> {
    #[inline]
    unsafe fn pairs(self, step: usize, quarter: usize, _whole: bool) -> [uint32x4_t; 2] {
        // SAFETY: eight words, by the caller's promise; every processor of AArch64 has NEON.
        unsafe {
            let words = self.0.as_ptr().add(step).cast::<u32>().add(8 * quarter);
            [vld1q_u32(words), vld1q_u32(words.add(4))]
        }
    }
}

/// Four elements of two rows of x.
#[inline]
#[target_feature(enable = "neon")]
fn both(first: u64, second: u64) -> uint32x4_t {
    vreinterpretq_u32_u64(vcombine_u64(vdup_n_u64(first), vdup_n_u64(second)))
}

/// Adds the products of elements `depth` of up to `2 R` rows of x from row `first` on, and of `width` columns from column `at` of the
/// tile on, to the totals. Gives how many rows.
#[inline]
#[target_feature(enable = "neon,bf16")]
fn block<const R: usize>(
    tile: &Tile,
    weights: impl Steps,
    x: &[bf16],
    first: usize,
    depth: &Range<usize>,
    (at, width): (usize, usize),
    out: &mut [f32],
) -> usize {
    let count = (2 * R).min(tile.rows - first);
    let mut rows: [[&[bf16]; 2]; R] = [[&[]; 2]; R];
    for r in 0..R {
        for of_pair in 0..2 {
            let row = first + (2 * r + of_pair).min(count - 1);
            rows[r][of_pair] = &x[row * tile.inner..][depth.clone()];
        }
    }
    let steps = depth.len() / 4;
    let mut sums = [[vdupq_n_f32(0.0); PAIRS]; R];
    for step in 0..steps {
        let mut of_x = [vdupq_n_u32(0); R];
        for r in 0..R {
            // SAFETY: four elements of 16 bits of each row.
            let four = |row: &[bf16]| unsafe { row.as_ptr().add(4 * step).cast::<u64>().read_unaligned() };
            of_x[r] = both(four(rows[r][0]), four(rows[r][1]));
        }
        // SAFETY: the weights have as many steps.
        unsafe { add_step(&mut sums, weights, step, true, of_x) };
    }
    if !depth.len().is_multiple_of(4) {
        let mut of_x = [vdupq_n_u32(0); R];
        for r in 0..R {
            let rest =
                |row: &[bf16]| row[4 * steps..].iter().rev().fold(0, |word, x| word << 16 | u64::from(x.to_bits()));
            of_x[r] = both(rest(rows[r][0]), rest(rows[r][1]));
        }
        // SAFETY: the weights have a step more.
        unsafe { add_step(&mut sums, weights, steps, false, of_x) };
    }
    for nth in 0..count {
        let to = &mut out[(first + nth) * tile.stride + at..][..width];
        for (quarter, to) in to.chunks_mut(4).enumerate() {
            let (low, high) = (sums[nth / 2][2 * quarter], sums[nth / 2][2 * quarter + 1]);
            let sum = if nth % 2 == 1 { vuzp2q_f32(low, high) } else { vuzp1q_f32(low, high) };
            // SAFETY: four floats.
            unsafe {
                if to.len() == 4 {
                    vst1q_f32(to.as_mut_ptr(), vaddq_f32(vld1q_f32(to.as_ptr()), sum));
                } else {
                    let mut lanes = [0f32; 4];
                    vst1q_f32(lanes.as_mut_ptr(), sum);
                    to.iter_mut().zip(lanes).for_each(|(to, sum)| *to += sum);
                }
            }
        }
    }
    count
}

/// Adds the products of four elements of K.
///
/// # Safety
/// As for [`Steps::pairs`], and there are the instructions.
#[inline]
#[target_feature(enable = "neon,bf16")]
unsafe fn add_step<const R: usize>(
    sums: &mut [[float32x4_t; PAIRS]; R],
    weights: impl Steps,
    step: usize,
    whole: bool,
    of_x: [uint32x4_t; R],
) {
    for quarter in 0..LANES / 4 {
        // SAFETY: by the caller's promise.
        let [low, high] = unsafe { weights.pairs(step, quarter, whole) };
        for r in 0..R {
            sums[r][2 * quarter] = bfmmla(sums[r][2 * quarter], low, of_x[r]);
            sums[r][2 * quarter + 1] = bfmmla(sums[r][2 * quarter + 1], high, of_x[r]);
        }
    }
}
