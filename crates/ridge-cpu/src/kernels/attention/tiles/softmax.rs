//! From scores to weights, a query in each lane.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _CMP_GT_OQ, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT,
    _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_andnot_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cmpeq_ps_mask, _mm512_cmpgt_epi32_mask, _mm512_cmple_epi32_mask, _mm512_fmadd_ps,
    _mm512_fmsub_ps, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_blend_ps,
    _mm512_mask_mov_epi32, _mm512_mask_mov_ps, _mm512_maskz_mov_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_or_si512,
    _mm512_roundscale_ps, _mm512_scalef_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};

use super::{Lanes, STEPS};
use crate::kernels::amx::{SIDE, Words};

/// What a tile of queries does with the scores of a span.
pub(super) struct Span {
    /// For each query, how many of the span's keys it sees.
    pub(super) seen: Lanes<i32>,
    /// The first of them.
    pub(super) start: Lanes<i32>,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
}

/// The scores of one of `together` tiles of queries: tiles `nth`, `nth + together` and so on, 16 keys each.
pub(super) struct OfTile<'a> {
    pub(super) tiles: &'a mut [Words],
    pub(super) nth: usize,
    pub(super) together: usize,
}

/// A line of a tile: 16 lanes.
fn line(tile: &Words, i: usize) -> &[u32; SIDE] {
    &tile.as_chunks::<SIDE>().0[i]
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn load(lanes: &[u32; SIDE]) -> __m512 {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_ps(lanes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn load_floats(lanes: &Lanes<f32>) -> __m512 {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn load_integers(lanes: &Lanes<i32>) -> __m512i {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

/// Turns scores into weights, takes note of the largest score and the sum of weights, and scales what came before:
/// the tiles of `out` that are of this tile of queries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) fn soften<const TERMS: usize>(
    span: &Span,
    scores: &mut OfTile<'_>,
    (largest, total): (&mut Lanes<f32>, &mut Lanes<f32>),
    weights: &mut [Words],
    out: &mut [Words],
) {
    let (nth, together) = (scores.nth, scores.together);
    let mut scale = _mm512_set1_ps(span.scale);
    if let Some(cap) = span.softcap {
        for score in scores.tiles.iter_mut().skip(nth).step_by(together).flatten() {
            *score = (cap * (f32::from_bits(*score) * span.scale / cap).tanh()).to_bits();
        }
        scale = _mm512_set1_ps(1.0);
    }
    let (seen, start) = (load_integers(&span.seen), load_integers(&span.start));
    let sees = |key: usize| -> __mmask16 {
        let key = _mm512_set1_epi32(key as i32);
        _mm512_cmpgt_epi32_mask(seen, key) & _mm512_cmple_epi32_mask(start, key)
    };
    let (before, none) = (load_floats(largest), _mm512_set1_ps(f32::NEG_INFINITY));
    let mut most = before;
    for (tile, of_tile) in scores.tiles.iter().skip(nth).step_by(together).enumerate() {
        for i in 0..SIDE {
            let score = _mm512_mul_ps(load(line(of_tile, i)), scale);
            let more = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(score, most) & sees(tile * SIDE + i);
            most = _mm512_mask_mov_ps(most, more, score);
        }
    }
    // Where nothing came before and nothing has come, 1 rather than what infinity less infinity is.
    let nothing = _mm512_cmpeq_ps_mask(most, none);
    let kept = _mm512_mask_blend_ps(nothing, exp::<3>(_mm512_sub_ps(before, most)), _mm512_set1_ps(1.0));
    for of_tile in out.iter_mut().skip(nth).step_by(together) {
        for line in of_tile.as_chunks_mut::<SIDE>().0 {
            let scaled = _mm512_mul_ps(load(line), kept);
            // SAFETY: 64 bytes.
            unsafe { _mm512_storeu_ps(line.as_mut_ptr().cast(), scaled) };
        }
    }
    let mut sum = _mm512_mul_ps(load_floats(total), kept);
    for (tile, of_tile) in scores.tiles.iter().skip(nth).step_by(together).enumerate() {
        for i in 0..SIDE / 2 {
            let weigh = |odd: usize| {
                let weight = exp::<TERMS>(_mm512_fmsub_ps(load(line(of_tile, 2 * i + odd)), scale, most));
                let weight = if TERMS == 1 { _mm512_castsi512_ps(rounded(weight)) } else { weight };
                _mm512_maskz_mov_ps(sees(tile * SIDE + 2 * i + odd), weight)
            };
            let (even, odd) = (weigh(0), weigh(1));
            sum = _mm512_add_ps(_mm512_add_ps(sum, even), odd);
            let (mut even, mut odd) = (even, odd);
            for term in 0..TERMS {
                let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                let (of_even, of_odd) = (_mm512_castps_si512(even), _mm512_castps_si512(odd));
                let words = _mm512_or_si512(_mm512_srli_epi32::<16>(of_even), _mm512_and_si512(of_odd, high));
                let to = &mut weights[term * STEPS + tile / 2].as_chunks_mut::<SIDE>().0[tile % 2 * SIDE / 2 + i];
                // SAFETY: 64 bytes.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
                // What is left, which is exact. (Of NaN it is NaN.)
                even = _mm512_sub_ps(even, _mm512_castsi512_ps(_mm512_and_si512(of_even, high)));
                odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(of_odd, high)));
            }
        }
    }
    // SAFETY: 64 bytes each.
    unsafe {
        _mm512_storeu_ps(largest.as_mut_ptr(), most);
        _mm512_storeu_ps(total.as_mut_ptr(), sum);
    }
}

/// Bits of the nearest bf16, ties to even, in the upper half of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn rounded(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    let up = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), up);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_mov_epi32(up, nan, _mm512_slli_epi32::<16>(_mm512_set1_epi32(0x7fc0)))
}

/// `e^x` of what is not positive: as [`crate::simd::exp`] for three terms of bf16, and well within the rounding of
/// fewer.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp<const TERMS: usize>(x: __m512) -> __m512 {
    // In this order NaN stays.
    let x = _mm512_max_ps(_mm512_set1_ps(-104.0), x);
    let n = _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E));
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(n);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.121_944_4e-4), r);
    // The series to r^7, or to r^4 (below 2^-14 of the sum).
    let powers: &[f32] = match TERMS {
        1 => &[1.0 / 6.0, 0.5, 1.0, 1.0],
        _ => &[1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0],
    };
    let mut p = _mm512_set1_ps(if TERMS == 1 { 1.0 / 24.0 } else { 1.0 / 5040.0 });
    for c in powers {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
    }
    _mm512_scalef_ps(p, n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_as_accurate_as_their_terms() {
        if crate::simd::isa() != crate::simd::Isa::Amx {
            return;
        }
        let mut worst = [0f64; 2];
        for i in 0..=10_000 {
            let x = -(i as f32) * 0.0087;
            let mut got = [[0f32; SIDE]; 2];
            // SAFETY: there is AMX, and every machine that has it has AVX-512.
            unsafe {
                _mm512_storeu_ps(got[0].as_mut_ptr(), exp::<1>(_mm512_set1_ps(x)));
                _mm512_storeu_ps(got[1].as_mut_ptr(), exp::<3>(_mm512_set1_ps(x)));
            }
            for (worst, got) in worst.iter_mut().zip(got) {
                let exact = f64::from(x).exp();
                *worst = worst.max((f64::from(got[3]) - exact).abs() / exact);
            }
        }
        assert!(worst[0] < 2f64.powi(-14) && worst[1] < 2f64.powi(-22), "{worst:?}");
    }
}
