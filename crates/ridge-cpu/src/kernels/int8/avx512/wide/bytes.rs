//! Int8 codes whose scales are elsewhere, of 16 rows.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{
    __m512, _mm512_add_epi32, _mm512_cvtepi32_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_si512, _mm512_xor_si512,
};

use ridge_graph::format::{BlockFormat, SignedBytes};

use super::super::rows::SixteenRows;
use super::{GROUP, RowOfX, Wide, WideCodes, add_signed};

impl Wide for SignedBytes {
    const TAKEN_TOGETHER: bool = true;

    /// All 256 elements are one sum: of products of bytes it is exact as an integer, and as a float.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        // Of each 32 elements, at every other place.
        let begin = x.begin.iter().step_by(2).sum::<i32>();
        let zero = _mm512_setzero_si512();
        let mut integers = [_mm512_set1_epi32(begin), zero, zero, zero];
        for four in 0..GROUP / 16 {
            // SAFETY: 256 bytes are 16 times four words.
            let words = unsafe { rows.words(16 * four) };
            for nth in 0..4 {
                integers[nth] = add_signed(integers[nth], words[nth], x.word(4 * four + nth));
            }
        }
        let [a, b, c, d] = integers;
        _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack_sixteen(rows: impl SixteenRows, to: &mut WideCodes) {
        for four in 0..GROUP / 16 {
            // SAFETY: as above.
            let words = unsafe { rows.words(16 * four) };
            for nth in 0..4 {
                to.put(4 * four + nth, _mm512_xor_si512(words[nth], _mm512_set1_epi8(-128)));
            }
        }
        for group in 0..GROUP / Self::GROUP {
            to.put_scale(group, _mm512_set1_ps(1.0));
        }
    }
}
