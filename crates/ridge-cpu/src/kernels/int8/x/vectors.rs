//! Codes of 256 elements by AVX-512: what the loop in `x.rs` computes, to the same bits.

use std::arch::x86_64::{
    __m512, __m512i, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEG_INF, _mm_storeu_si128, _mm512_abs_ps, _mm512_add_epi32,
    _mm512_add_ps, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi8, _mm512_cvtepi32_ps,
    _mm512_cvtps_epi32, _mm512_div_ps, _mm512_dpbusd_epi32, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_max_ps,
    _mm512_min_ps, _mm512_mul_ps, _mm512_permutexvar_epi32, _mm512_reduce_max_ps, _mm512_roundscale_ps,
    _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_storeu_ps, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use super::super::scale::{GROUP, SUMMED};

/// Comparison: less, false for NaN.
const LESS: i32 = 0x11;

/// Elements `16 * nth..16 * (nth + 1)`.
#[inline]
#[target_feature(enable = "avx512f")]
fn part(x: &[f32; GROUP], nth: usize) -> __m512 {
    // SAFETY: 16 floats.
    unsafe { _mm512_loadu_ps(x.as_chunks::<SUMMED>().0[nth].as_ptr()) }
}

/// As `encode`, of a whole group. Codes and sums are left as they are if not all elements are finite.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn encode(x: &[f32; GROUP], codes: &mut [i8; GROUP], sums: &mut [f32; GROUP / SUMMED]) -> f32 {
    let infinite = _mm512_castsi512_ps(_mm512_set1_epi32(f32::INFINITY.to_bits().cast_signed()));
    let mut largest = _mm512_setzero_ps();
    let mut finite = u16::MAX;
    for nth in 0..GROUP / SUMMED {
        let magnitude = _mm512_abs_ps(part(x, nth));
        finite &= _mm512_cmp_ps_mask::<LESS>(magnitude, infinite);
        largest = _mm512_max_ps(largest, magnitude);
    }
    if finite != u16::MAX {
        return f32::NAN;
    }
    let largest = _mm512_reduce_max_ps(largest);
    let divisor = _mm512_set1_ps(if largest == 0.0 { 1.0 } else { largest });
    let (by, back, half) = (_mm512_set1_ps(127.0 / 128.0), _mm512_set1_ps(128.0), _mm512_set1_ps(0.5));
    let (low, high) = (_mm512_set1_ps(-127.0), _mm512_set1_ps(127.0));
    for (nth, codes) in codes.as_chunks_mut::<SUMMED>().0.iter_mut().enumerate() {
        let scaled = _mm512_mul_ps(_mm512_div_ps(_mm512_mul_ps(part(x, nth), by), divisor), back);
        let nearest =
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(_mm512_add_ps(scaled, half));
        let nearest = _mm512_max_ps(_mm512_min_ps(nearest, high), low);
        // SAFETY: 16 bytes.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(nearest))) };
    }
    // Sums of four codes, then of the four lanes of each quarter: word `4 q + j` is of quarter `q` of vector `j`.
    let mut fours = [_mm512_setzero_si512(); 4];
    for (fours, codes) in fours.iter_mut().zip(codes.as_chunks::<64>().0) {
        // SAFETY: 64 bytes.
        let codes = unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) };
        *fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
    }
    let [a, b, c, d] = fours;
    let (ab, cd) = (pairs(a, b), pairs(c, d));
    let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let all = _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(in_order, all));
    // SAFETY: 16 floats.
    unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), all) };
    largest / 127.0
}

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
}
