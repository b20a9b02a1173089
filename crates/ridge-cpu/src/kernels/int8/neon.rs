//! Products of codes by vector instructions of NEON, for `columns.rs`: by those that every processor has (8-bit integers to
//! 16-bit ones), by `sdot` (four to a lane), and by `smmla` (8 of two rows by 8 of two others).
//!
//! Codes of weights are signed bytes, and sums of what shares a scale are exact integers, which become floats and are added up
//! in one order. So the three give the same bits.
//!
//! Floor: for 4 elements of 8 rows by a row of x two `sdot`, or one `smmla`; four multiplications and two additions without them.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::aarch64::{
    int8x16_t, int32x4_t, vcvtq_f32_s32, vdupq_n_f32, vdupq_n_s32, vdupq_n_s8, vdupq_n_s16, vfmaq_f32,
    vfmsq_n_f32, vget_low_s8, vld1q_f32, vld1q_s8, vld1q_u32, vmlal_high_s8, vmlal_s8, 
    vpadalq_s16, vpaddq_s32, vreinterpretq_s8_s32, vreinterpretq_s8_s64, vreinterpretq_s64_s8, vst1q_u32,
    vuzp1q_s32, vuzp2q_s32, vzip1q_s64, vzip1q_u32, vzip2q_s64, vzip2q_u32,
};
use std::ops::Range;

use super::columns::{self, ABREAST, Multiply, OfX};
use super::eight::{EIGHT, Floats};
use super::interleaved::{Interleaved, InterleavedCodes};
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

/// Codes that share a scale, of 8 rows of the weight and of `N` rows of x.
struct Operands<'a, const N: usize> {
    weights: &'a [[u8; 4 * EIGHT]],
    x: [&'a [[i8; 4]]; N],
}

impl<'a, const N: usize> Operands<'a, N> {
    #[inline]
    fn new<B: Interleaved>(weights: &'a InterleavedCodes, x: [&'a [[i8; 4]]; N], group: usize) -> Self {
        let words = group * (B::GROUP / 4)..(group + 1) * (B::GROUP / 4);
        Self { weights: &weights.codes[words.clone()], x: x.map(|x| &x[words.clone()]) }
    }

    /// Vector `half` of word `word`: four codes of four rows, or as [`Matrices`] arranges them.
    #[inline]
    #[target_feature(enable = "neon")]
    fn codes(&self, word: usize, half: usize) -> int8x16_t {
        // SAFETY: 16 bytes of the word's 32.
        unsafe { vld1q_s8(self.weights[word].as_ptr().add(16 * half).cast()) }
    }

    /// The codes of a row of x of four words from `word` on.
    #[inline]
    #[target_feature(enable = "neon")]
    fn x(&self, row: usize, word: usize) -> int8x16_t {
        let of_row = &self.x[row][word..word + WORDS];
        // SAFETY: 16 bytes.
        unsafe { vld1q_s8(of_row.as_ptr().cast()) }
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
                    let integers = $integers::<B, N>(&Operands::new::<B>(weights, x, group));
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
    fn arrange(weights: &mut InterleavedCodes, words: usize) {
        for pair in weights.codes[..words].as_chunks_mut::<2>().0 {
            let pair: *mut u32 = pair.as_mut_ptr().cast();
            // SAFETY: two words of eight rows are four vectors; every processor of AArch64 has NEON.
            unsafe {
                for vectors in [pair, pair.add(4)].map(|at| (vld1q_u32(at), vld1q_u32(at.add(EIGHT)))).into_iter().enumerate() {
                    let (half, (first, second)) = vectors;
                    vst1q_u32(pair.add(half * EIGHT), vzip1q_u32(first, second));
                    vst1q_u32(pair.add(half * EIGHT + 4), vzip2q_u32(first, second));
                }
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

#[inline]
#[target_feature(enable = "neon")]
fn in_pairs<B: Interleaved, const N: usize>(operands: &Operands<'_, N>) -> [[int32x4_t; HALVES]; N] {
    // Lanes are of half a word: those of four rows are two vectors.
    let mut sums = [[[vdupq_n_s32(0); 2]; HALVES]; N];
    for first in (0..B::GROUP / 4).step_by(const { words_of_16_bits::<B>() }) {
        let mut sixteen = [[[vdupq_n_s16(0); 2]; HALVES]; N];
        for word in first..first + const { words_of_16_bits::<B>() } {
            let codes = [operands.codes(word, 0), operands.codes(word, 1)];
            for nth in 0..N {
                let x = vreinterpretq_s8_s32(vdupq_n_s32(i32::from_ne_bytes(operands.x[nth][word].map(i8::cast_unsigned))));
                for half in 0..HALVES {
                    let [low, high] = &mut sixteen[nth][half];
                    *low = vmlal_s8(*low, vget_low_s8(codes[half]), vget_low_s8(x));
                    *high = vmlal_high_s8(*high, codes[half], x);
                }
            }
        }
        for nth in 0..N {
            for half in 0..HALVES {
                for part in 0..2 {
                    sums[nth][half][part] = vpadalq_s16(sums[nth][half][part], sixteen[nth][half][part]);
                }
            }
        }
    }
    let mut integers = [[vdupq_n_s32(0); HALVES]; N];
    for nth in 0..N {
        for half in 0..HALVES {
            integers[nth][half] = vpaddq_s32(sums[nth][half][0], sums[nth][half][1]);
        }
    }
    integers
}

/// As [`in_pairs`].
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn in_fours<B: Interleaved, const N: usize>(operands: &Operands<'_, N>) -> [[int32x4_t; HALVES]; N] {
    let mut integers = [[vdupq_n_s32(0); HALVES]; N];
    for word in (0..B::GROUP / 4).step_by(WORDS) {
        let mut x = [operands.x(0, word); N];
        for nth in 1..N {
            x[nth] = operands.x(nth, word);
        }
        for half in 0..HALVES {
            let codes = [0, 1, 2, 3].map(|next| operands.codes(word + next, half));
            for nth in 0..N {
                let sum = &mut integers[nth][half];
                *sum = sdot_lane::<0>(*sum, codes[0], x[nth]);
                *sum = sdot_lane::<1>(*sum, codes[1], x[nth]);
                *sum = sdot_lane::<2>(*sum, codes[2], x[nth]);
                *sum = sdot_lane::<3>(*sum, codes[3], x[nth]);
            }
        }
    }
    integers
}

/// As [`in_pairs`], of weights that are arranged. A row of x that is left alone is multiplied twice.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn in_matrices<B: Interleaved, const N: usize>(operands: &Operands<'_, N>) -> [[int32x4_t; HALVES]; N] {
    const PAIRS: usize = ABREAST / 2;
    // Of a pair of rows of x and one of the weight: both with the first, both with the second of the weight's.
    let mut sums = [[vdupq_n_s32(0); EIGHT / 2]; PAIRS];
    for word in (0..B::GROUP / 4).step_by(WORDS) {
        let mut x = [[vdupq_n_s8(0); 2]; PAIRS];
        for pair in 0..N.div_ceil(2) {
            let (first, second) = (operands.x(2 * pair, word), operands.x((2 * pair + 1).min(N - 1), word));
            let (first, second) = (vreinterpretq_s64_s8(first), vreinterpretq_s64_s8(second));
            x[pair] = [vzip1q_s64(first, second), vzip2q_s64(first, second)].map(|x| vreinterpretq_s8_s64(x));
        }
        for next in 0..2 {
            for rows in 0..EIGHT / 2 {
                let codes = operands.codes(word + 2 * next + rows / 2, rows % 2);
                for pair in 0..N.div_ceil(2) {
                    sums[pair][rows] = smmla(sums[pair][rows], codes, x[pair][next]);
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
