//! Products of codes by vector instructions of NEON, for `columns.rs`: by those that every processor has (8-bit integers to
//! 16-bit ones), by `sdot` (four to a lane), and by `smmla` (8 of two rows by 8 of two others).
//!
//! Codes of weights are signed bytes, and sums of what shares a scale are exact integers, which become floats and are added up
//! in one order. So the three give the same bits.
//!
//! Floor: for 4 elements of 8 rows by a row of x two `sdot`, or one `smmla`; four multiplications and two additions without them.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::aarch64::{
    int8x8_t, int8x16_t, int32x4_t, vcvtq_f32_s32, vdup_n_s32, vdupq_n_f32, vdupq_n_s8, vdupq_n_s16, vdupq_n_s32,
    vfmaq_f32, vfmsq_n_f32, vld1_s8, vld1q_f32, vld1q_s8, vld1q_u32, vmlal_s8, vpadalq_s16, vpaddq_s32,
    vreinterpret_s8_s32, vreinterpretq_s8_s64, vreinterpretq_s64_s8, vst1q_u32, vuzp1q_s32, vuzp2q_s32, vzip1q_s64,
    vzip1q_u32, vzip2q_s64, vzip2q_u32,
};
use std::ops::Range;

use super::columns::{self, ABREAST, Multiply, OfX};
use super::eight::Floats;
use super::interleaved::{Interleaved, InterleavedCodes};
use super::scale::EIGHT;
use super::weight::CodeWeight;
use super::x::ActivationCodes;
use crate::simd::{self, sdot_lane, smmla};

/// The products of `rows` of the weight with the rows of `x`, one row of x after another.
pub(super) fn multiply<B: Interleaved>(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut [u8],
    out: &mut [f32],
) {
    // SAFETY: the instructions are there.
    unsafe {
        match simd::isa() {
            // A single row would leave half of each matrix unused.
            simd::Isa::NeonI8mm | simd::Isa::NeonBf16 if x.layout.rows > 1 => {
                columns::multiply::<B, Matrices>(weight, rows, x, room, out);
            }
            isa if isa >= simd::Isa::NeonDotprod => columns::multiply::<B, Fours>(weight, rows, x, room, out),
            isa => {
                assert!(isa >= simd::Isa::Neon);
                columns::multiply::<B, Pairs>(weight, rows, x, room, out);
            }
        }
    }
}

/// Vectors of four rows of the weight.
const HALVES: usize = EIGHT / 4;

/// Words of K whose codes are a vector of one row of x.
const WORDS: usize = 4;

/// Codes that share a scale, of 8 rows of the weight and of `N` rows of x. Of pointers, since bounds would be checked at each step.
#[derive(Clone, Copy)]
struct Operands<const N: usize> {
    weights: *const u8,
    x: [*const i8; N],
}

impl<const N: usize> Operands<N> {
    /// Those of group `group`.
    #[inline]
    fn new<B: Interleaved>(weights: &InterleavedCodes, x: [&[[i8; 4]]; N], group: usize) -> Self {
        let words = group * (B::GROUP / 4)..(group + 1) * (B::GROUP / 4);
        let mut of_group = [std::ptr::null(); N];
        for (x, to) in x.iter().zip(&mut of_group) {
            *to = x[words.clone()].as_ptr().cast();
        }
        Self { weights: weights.codes[words].as_ptr().cast(), x: of_group }
    }

    /// Vector `half` of word `word`: four codes of four rows, or as [`Matrices`] arranges them.
    ///
    /// # Safety
    /// The group has the word.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes(&self, word: usize, half: usize) -> int8x16_t {
        // SAFETY: 16 bytes of the word's.
        unsafe { vld1q_s8(self.weights.add(4 * EIGHT * word + 16 * half).cast()) }
    }

    /// The codes of a row of x of [`WORDS`] words from `word` on.
    ///
    /// # Safety
    /// The group has the words.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn x(&self, row: usize, word: usize) -> int8x16_t {
        // SAFETY: by the caller's promise.
        unsafe { vld1q_s8(self.x[row].add(4 * word)) }
    }

    /// Four codes of two rows of the weight: part `part` of [`Operands::codes`].
    ///
    /// # Safety
    /// The group has the word.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn codes_of_two(&self, word: usize, half: usize, part: usize) -> int8x8_t {
        // SAFETY: 8 bytes of the word's.
        unsafe { vld1_s8(self.weights.add(4 * EIGHT * word + 16 * half + 8 * part).cast()) }
    }

    /// The four codes of a row of x of word `word`, twice.
    ///
    /// # Safety
    /// The group has the word.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn word_of_x(&self, row: usize, word: usize) -> int8x8_t {
        // SAFETY: by the caller's promise.
        vreinterpret_s8_s32(vdup_n_s32(unsafe { self.x[row].add(4 * word).cast::<i32>().read_unaligned() }))
    }
}

/// Implements [`Multiply`] by a function that gives sums of products of what shares a scale, two vectors for each row of x.
macro_rules! multiply {
    ($(#[$meta:meta])* $name:ident, $features:literal, $integers:ident $(, $arrange:item)?) => {
        $(#[$meta])*
        pub(super) struct $name;

        impl Multiply for $name {
            $($arrange)?

            #[target_feature(enable = $features)]
            unsafe fn products<B: Interleaved, const N: usize>(
                weights: &InterleavedCodes,
                x: [&[[i8; 4]]; N],
                of_x: &[OfX; ABREAST],
            ) -> [Floats; N] {
                // SAFETY: four floats.
                let floats = |of: &[f32; EIGHT], half: usize| unsafe { vld1q_f32(of.as_ptr().add(4 * half)) };
                let mut sums = [[vdupq_n_f32(0.0); HALVES]; N];
                for group in 0..x[0].len() / (B::GROUP / 4) {
                    // SAFETY: the instructions are there by the caller's promise.
                    let integers = unsafe { $integers::<B, N>(Operands::new::<B>(weights, x, group)) };
                    for half in 0..HALVES {
                        let scale = floats(&weights.scales[group], half);
                        for nth in 0..N {
                            sums[nth][half] = vfmaq_f32(sums[nth][half], vcvtq_f32_s32(integers[nth][half]), scale);
                            if B::MINIMA {
                                let minimum = floats(&weights.minima[group], half);
                                sums[nth][half] = vfmsq_n_f32(sums[nth][half], minimum, of_x[nth][group]);
                            }
                        }
                    }
                }
                sums
            }
        }
    };
}

multiply! {
    /// Products of codes as 16-bit integers, which hold two of codes of all 8 bits, since those of x are not -128.
    Pairs, "neon", in_pairs
}

multiply! {
    /// Products of four codes (`sdot`).
    Fours, "neon,dotprod", in_fours
}

multiply! {
    /// Products of matrices (`smmla`): 8 codes of two rows of the weight by those of two rows of x.
    Matrices, "neon,i8mm", in_matrices,
    /// Words of K two by two, and rows two by two: a vector has 8 codes of two rows.
    unsafe fn arrange<B: Interleaved>(weights: &mut InterleavedCodes, words: usize) {
        for pair in weights.codes[..words].as_chunks_mut::<2>().0 {
            let pair: *mut u32 = pair.as_mut_ptr().cast();
            // SAFETY: two words of eight rows are four vectors; every processor of AArch64 has NEON.
            unsafe {
                let (a, b) = (vld1q_u32(pair), vld1q_u32(pair.add(EIGHT)));
                let (c, d) = (vld1q_u32(pair.add(4)), vld1q_u32(pair.add(EIGHT + 4)));
                vst1q_u32(pair, vzip1q_u32(a, b));
                vst1q_u32(pair.add(4), vzip2q_u32(a, b));
                vst1q_u32(pair.add(EIGHT), vzip1q_u32(c, d));
                vst1q_u32(pair.add(EIGHT + 4), vzip2q_u32(c, d));
            }
        }
    }
}

/// How many products of a code are added up as 16-bit integers: a power of two of them, within what shares a scale.
const fn words_of_16_bits<B: Interleaved>() -> usize {
    let (above, below) = (B::ABOVE as usize, (B::LARGEST - B::ABOVE) as usize);
    let largest = if above > below { above } else { below };
    match i16::MAX as usize / (largest * 127) {
        most if most >= B::GROUP / 4 => B::GROUP / 4,
        most => 1 << most.ilog2(),
    }
}

/// Sums of products of what shares a scale.
///
/// # Safety
/// The instructions are there.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn in_pairs<B: Interleaved, const N: usize>(operands: Operands<N>) -> [[int32x4_t; HALVES]; N] {
    let mut integers = [[vdupq_n_s32(0); HALVES]; N];
    for half in 0..HALVES {
        // Lanes are of half a word: those of four rows are two vectors.
        let mut sums = [[vdupq_n_s32(0); 2]; N];
        for first in (0..B::GROUP / 4).step_by(const { words_of_16_bits::<B>() }) {
            let mut sixteen = [[vdupq_n_s16(0); 2]; N];
            for word in first..first + const { words_of_16_bits::<B>() } {
                // SAFETY: a word of the group.
                unsafe {
                    let codes = [operands.codes_of_two(word, half, 0), operands.codes_of_two(word, half, 1)];
                    for nth in 0..N {
                        let x = operands.word_of_x(nth, word);
                        for part in 0..2 {
                            sixteen[nth][part] = vmlal_s8(sixteen[nth][part], codes[part], x);
                        }
                    }
                }
            }
            for nth in 0..N {
                for part in 0..2 {
                    sums[nth][part] = vpadalq_s16(sums[nth][part], sixteen[nth][part]);
                }
            }
        }
        for nth in 0..N {
            integers[nth][half] = vpaddq_s32(sums[nth][0], sums[nth][1]);
        }
    }
    integers
}

/// As [`in_pairs`].
///
/// # Safety
/// The instructions are there.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn in_fours<B: Interleaved, const N: usize>(operands: Operands<N>) -> [[int32x4_t; HALVES]; N] {
    let mut integers = [[vdupq_n_s32(0); HALVES]; N];
    for word in (0..B::GROUP / 4).step_by(WORDS) {
        // SAFETY: words of the group.
        unsafe {
            let mut x = [vdupq_n_s8(0); N];
            for nth in 0..N {
                x[nth] = operands.x(nth, word);
            }
            for half in 0..HALVES {
                let (a, b) = (operands.codes(word, half), operands.codes(word + 1, half));
                let (c, d) = (operands.codes(word + 2, half), operands.codes(word + 3, half));
                for nth in 0..N {
                    let sum = sdot_lane::<0>(integers[nth][half], a, x[nth]);
                    let sum = sdot_lane::<1>(sum, b, x[nth]);
                    let sum = sdot_lane::<2>(sum, c, x[nth]);
                    integers[nth][half] = sdot_lane::<3>(sum, d, x[nth]);
                }
            }
        }
    }
    integers
}

/// As [`in_pairs`], of weights that are arranged. A row of x that is left alone is multiplied twice.
///
/// # Safety
/// The instructions are there.
#[inline]
#[target_feature(enable = "neon,i8mm")]
unsafe fn in_matrices<B: Interleaved, const N: usize>(operands: Operands<N>) -> [[int32x4_t; HALVES]; N] {
    // Of a pair of rows of x and one of the weight: both with the first, both with the second of the weight's.
    let mut sums = [[vdupq_n_s32(0); EIGHT / 2]; ABREAST / 2];
    for word in (0..B::GROUP / 4).step_by(WORDS) {
        // SAFETY: words of the group.
        unsafe {
            let mut x = [[vdupq_n_s8(0); ABREAST / 2]; 2];
            for pair in 0..N.div_ceil(2) {
                let first = vreinterpretq_s64_s8(operands.x(2 * pair, word));
                let second = vreinterpretq_s64_s8(operands.x((2 * pair + 1).min(N - 1), word));
                x[0][pair] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
                x[1][pair] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
            }
            for next in 0..2 {
                for rows in 0..EIGHT / 2 {
                    let codes = operands.codes(word + 2 * next + rows / 2, rows % 2);
                    for pair in 0..N.div_ceil(2) {
                        sums[pair][rows] = smmla(sums[pair][rows], codes, x[next][pair]);
                    }
                }
            }
        }
    }
    let mut integers = [[vdupq_n_s32(0); HALVES]; N];
    for nth in 0..N {
        for half in 0..HALVES {
            let (low, high) = (sums[nth / 2][2 * half], sums[nth / 2][2 * half + 1]);
            integers[nth][half] = if nth % 2 == 0 { vuzp1q_s32(low, high) } else { vuzp2q_s32(low, high) };
        }
    }
    integers
}
