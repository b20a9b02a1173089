//! Products of codes by vector instructions of AVX2 that multiply bytes and add pairs, for `columns.rs`.
//!
//! Codes of weights are taken as bytes that are not negative, above what they are; what that adds to each sum is taken
//! away from it as a float, exactly: sums are below 2^24. Pairs of products are added up as 16-bit integers as long as
//! they fit. Codes of all 8 bits would not fit at all, so their magnitudes are multiplied, and x is inverted where they are negative:
//! `|w| (-x - 1)` is `w x` less `|w|`, and sums begin with what is so missing. (Zen 4 multiplies bytes and gives them signs in the same
//! two of its four pipes, and inverts them in all.) Floats are added up as `lanes.rs` adds them, to the same bits.
//!
//! Floor: for 4 elements of 8 rows a multiplication and an addition.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{
    __m256, __m256i, _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256, _mm256_cmpgt_epi8,
    _mm256_cvtepi32_ps, _mm256_dpbusd_avx_epi32, _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_load_ps, _mm256_load_si256,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_setzero_si256, _mm256_store_si256, _mm256_xor_si256,
};
use std::ops::Range;

mod one_row;
mod pairs;

use pairs::{above, pairs};

use super::columns::{self, ABREAST, Multiply, OfX};
use super::interleaved::{Interleaved, InterleavedCodes};
use super::scale::EIGHT;
use super::weight::CodeWeight;
use super::x::ActivationCodes;
use crate::simd;

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
            simd::Isa::Avx2 | simd::Isa::AvxVnni | simd::Isa::Avx512 if x.layout.rows == 1 => {
                columns::check::<B>(weight, &rows, x);
                one_row::multiply::<B>(weight, rows, x, out);
            }
            simd::Isa::AvxVnni => columns::multiply::<B, Fours>(weight, rows, x, room, out),
            isa => {
                assert!(isa >= simd::Isa::Avx2);
                columns::multiply::<B, Pairs>(weight, rows, x, room, out);
            }
        }
    }
}

/// What is multiplied: codes that share a scale, of 8 rows of the weight and of `N` rows of x.
struct Operands<const N: usize> {
    weights: *const [u8; 4 * EIGHT],
    /// What sums begin with.
    begin: *const [i32; EIGHT],
    x: [*const i32; N],
}

impl<const N: usize> Operands<N> {
    /// Of group `group`.
    ///
    /// # Safety
    /// The weights and every row of x have so many groups, which they keep while this lives.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn new<B: Interleaved>(weights: &InterleavedCodes, x: [*const i32; N], group: usize) -> Self {
        let first = group * const { B::GROUP / 4 };
        // SAFETY: by the caller's promise.
        unsafe {
            let mut of_group = x;
            for row in &mut of_group {
                *row = row.add(first);
            }
            let begin = weights.begin.as_ptr().add(group);
            Self { weights: weights.codes.as_ptr().add(first), begin, x: of_group }
        }
    }

    /// Four codes of each row of the weight.
    ///
    /// # Safety
    /// The word is one of the group: so it is for [`Operands::x`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(&self, word: usize) -> __m256i {
        // SAFETY: a vector, aligned as what it lies in.
        unsafe { _mm256_load_si256(self.weights.add(word).cast()) }
    }

    /// Four codes of a row of x, eight times.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn x(&self, row: usize, word: usize) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe { _mm256_set1_epi32(self.x[row].add(word).read_unaligned()) }
    }
}

/// Implements [`Multiply`] by a function that sums the products of some words, and how much those are too large for each
/// unit of what is multiplied.
macro_rules! multiply {
    ($(#[$meta:meta])* $name:ident, $features:literal, $integers:ident, $above:expr $(, $arrange:item)?) => {
        $(#[$meta])*
        pub(super) struct $name;

        impl Multiply for $name {
            $($arrange)?

            #[target_feature(enable = $features)]
            unsafe fn products<B: Interleaved, const N: usize>(
                weights: &InterleavedCodes,
                x: [&[[i8; 4]]; N],
                of_x: &[OfX; ABREAST],
            ) -> [__m256; N] {
                let words = const { B::GROUP / 4 };
                assert!(x.iter().all(|row| row.len() >= x[0].len()) && x[0].len() <= weights.codes.len());
                // Of a number that the compiler can bound it unrolls the loop whole, and spills its registers. So there are no
                // bounds to check in it either.
                let groups = std::hint::black_box(x[0].len() / words);
                let x = x.map(|row| row.as_ptr().cast::<i32>());
                // SAFETY: vectors within the weights, aligned as those are.
                let floats = |floats: *const [f32; EIGHT]| unsafe { _mm256_load_ps(floats.cast()) };
                let mut sums = [_mm256_setzero_ps(); N];
                for group in 0..groups {
                    // SAFETY: the weights and rows of x have as many groups.
                    let integers = unsafe { $integers::<B, N>(&Operands::new::<B>(weights, x, group)) };
                    // SAFETY: as above.
                    let scales = floats(unsafe { weights.scales.get_unchecked(group) });
                    for nth in 0..N {
                        // SAFETY: as above.
                        let of_x = _mm256_set1_ps(unsafe { *of_x.get_unchecked(nth).get_unchecked(group) });
                        let mut integers = _mm256_cvtepi32_ps(integers[nth]);
                        if $above != 0 {
                            integers = _mm256_fnmadd_ps(_mm256_set1_ps(f32::from($above)), of_x, integers);
                        }
                        sums[nth] = _mm256_fmadd_ps(integers, scales, sums[nth]);
                        if B::MINIMA {
                            // SAFETY: as above.
                            let minima = floats(unsafe { weights.minima.get_unchecked(group) });
                            sums[nth] = _mm256_fnmadd_ps(minima, of_x, sums[nth]);
                        }
                    }
                }
                sums
            }
        }
    };
}

multiply! {
    /// Bytes, pairs of which are added up as 16-bit integers.
    Pairs, "avx2,fma,f16c", in_pairs, const { above::<B>() },
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn arrange<B: Interleaved>(weights: &mut InterleavedCodes, words: usize) {
        if const { pairs::<B>() } == 0 {
            with_signs::<B>(weights, words);
        }
    }
}

/// Codes as they are instead of above that, and as what sums begin with the magnitudes of those that are negative.
#[target_feature(enable = "avx2,fma,f16c")]
fn with_signs<B: Interleaved>(weights: &mut InterleavedCodes, words: usize) {
    let groups = weights.codes[..words].chunks_exact_mut(const { B::GROUP / 4 });
    for (codes, begin) in groups.zip(&mut weights.begin) {
        let mut sixteen = _mm256_setzero_si256();
        for word in codes {
            // SAFETY: a vector, aligned as what it lies in; so it is below.
            let codes = unsafe { _mm256_load_si256(word.as_ptr().cast()) };
            let codes = _mm256_xor_si256(codes, _mm256_set1_epi8(B::ABOVE.cast_signed()));
            let below = _mm256_and_si256(_mm256_abs_epi8(codes), _mm256_cmpgt_epi8(_mm256_setzero_si256(), codes));
            sixteen = _mm256_add_epi16(sixteen, _mm256_maddubs_epi16(below, _mm256_set1_epi8(1)));
            // SAFETY: as above.
            unsafe { _mm256_store_si256(word.as_mut_ptr().cast(), codes) };
        }
        // SAFETY: as above.
        unsafe { _mm256_store_si256(begin.as_mut_ptr().cast(), _mm256_madd_epi16(sixteen, _mm256_set1_epi16(1))) };
    }
}

multiply! {
    /// Bytes, four of which are added up as 32-bit integers, as AVX-VNNI has it.
    Fours, "avx2,fma,f16c,avxvnni", in_fours, B::ABOVE
}

/// Sums of products of what shares a scale.
///
/// # Safety
/// The operands are there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn in_pairs<B: Interleaved, const N: usize>(operands: &Operands<N>) -> [__m256i; N] {
    let (words, ones) = (0..B::GROUP / 4, _mm256_set1_epi16(1));
    let mut integers = [_mm256_setzero_si256(); N];
    if const { pairs::<B>() } == 0 {
        // SAFETY: by the caller's promise; so it is below.
        integers = [unsafe { _mm256_load_si256(operands.begin.cast()) }; N];
        for word in words {
            // SAFETY: as above.
            let codes = unsafe { operands.codes(word) };
            let (magnitudes, negative) = (_mm256_abs_epi8(codes), _mm256_cmpgt_epi8(_mm256_setzero_si256(), codes));
            for nth in 0..N {
                // SAFETY: as above.
                let x = _mm256_xor_si256(unsafe { operands.x(nth, word) }, negative);
                let pairs = _mm256_maddubs_epi16(magnitudes, x);
                integers[nth] = _mm256_add_epi32(integers[nth], _mm256_madd_epi16(pairs, ones));
            }
        }
        return integers;
    }
    for first in words.step_by(const { pairs::<B>() }) {
        let mut sixteen = [_mm256_setzero_si256(); N];
        for word in first..first + const { pairs::<B>() } {
            // SAFETY: as above.
            let codes = unsafe { operands.codes(word) };
            for nth in 0..N {
                // SAFETY: as above.
                let x = unsafe { operands.x(nth, word) };
                sixteen[nth] = _mm256_add_epi16(sixteen[nth], _mm256_maddubs_epi16(codes, x));
            }
        }
        for nth in 0..N {
            integers[nth] = _mm256_add_epi32(integers[nth], _mm256_madd_epi16(sixteen[nth], ones));
        }
    }
    integers
}

/// As [`in_pairs`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn in_fours<B: Interleaved, const N: usize>(operands: &Operands<N>) -> [__m256i; N] {
    let mut integers = [_mm256_setzero_si256(); N];
    for word in 0..B::GROUP / 4 {
        // SAFETY: as above.
        let codes = unsafe { operands.codes(word) };
        for nth in 0..N {
            // SAFETY: as above.
            let x = unsafe { operands.x(nth, word) };
            integers[nth] = _mm256_dpbusd_avx_epi32(integers[nth], codes, x);
        }
    }
    integers
}
