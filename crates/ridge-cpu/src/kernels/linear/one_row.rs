//! One row of x by a weight of f32, with AVX-512: the sums of `tile.rs`, for 16 columns in registers. Weights of small
//! models are in L2, where there is no time to keep sums in memory and to look up where rows begin.

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_permutexvar_ps, _mm512_setr_epi32, _mm512_setzero_ps, _mm512_shuffle_f32x4,
    _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};
use std::ops::Range;

use super::source::Lanes;
use crate::simd::{self, Isa, LANES};

/// Columns of a piece.
pub(super) const COLUMNS: usize = 256;

/// Is the product of a row with this many columns of `inner` elements computed here?
pub(super) fn takes(columns: usize, inner: usize) -> bool {
    simd::isa() >= Isa::Avx512 && columns >= LANES && inner >= LANES
}

/// Products of `x`, laid out as [`super::tile::fill`] leaves it, with rows `columns` of the weight `[N, inner]`.
pub(super) fn run(weight: &[f32], inner: usize, columns: Range<usize>, x: &[Lanes], out: &mut [f32]) {
    assert!(takes(weight.len() / inner, inner) && columns.end * inner <= weight.len());
    assert!(x.len() >= inner.div_ceil(LANES) && out.len() >= columns.len());
    let mut first = columns.start;
    while first < columns.end {
        // The last 16 rows are taken together, whether all of them are asked for or not.
        let from = first.min(weight.len() / inner - LANES);
        let wanted = first - from..LANES.min(columns.end - from);
        let rows = &weight[from * inner..][..LANES * inner];
        // SAFETY: `takes` has found AVX-512.
        unsafe { sixteen(rows, inner, x, wanted.clone(), &mut out[first - columns.start..][..wanted.len()]) };
        first += wanted.len();
    }
}

/// Columns `wanted` of the products with 16 rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn sixteen(rows: &[f32], inner: usize, x: &[Lanes], wanted: Range<usize>, out: &mut [f32]) {
    let (whole, rest) = (inner / LANES, inner % LANES);
    let mut sums = [_mm512_setzero_ps(); LANES];
    let fours: [&[f32]; 4] = std::array::from_fn(|i| &rows[4 * i * inner..][..4 * inner]);
    assert!(x.len() >= whole + usize::from(rest > 0));
    for at in 0..whole {
        // SAFETY: x has this vector, and each row of four begins `inner` elements after the one before it.
        unsafe {
            let x = _mm512_loadu_ps(x.as_ptr().add(at).cast());
            for (i, four) in fours.iter().enumerate() {
                let w = four.as_ptr().add(at * LANES);
                for r in 0..4 {
                    sums[4 * i + r] = _mm512_fmadd_ps(x, _mm512_loadu_ps(w.add(r * inner)), sums[4 * i + r]);
                }
            }
        }
    }
    if rest > 0 {
        // At the end of the last vector of each row, what is before it left out.
        let mask = u16::MAX << (LANES - rest);
        // SAFETY: rows have a vector at least, which ends where they end.
        unsafe {
            let x = _mm512_loadu_ps(x.as_ptr().add(whole).cast());
            for (r, sum) in sums.iter_mut().enumerate() {
                let w = rows.as_ptr().add((r + 1) * inner - LANES);
                *sum = _mm512_fmadd_ps(x, _mm512_maskz_loadu_ps(mask, w), *sum);
            }
        }
    }
    let sums = add_lanes(&sums);
    let mask = ((1u32 << wanted.len()) - 1) << wanted.start;
    debug_assert_eq!(out.len(), wanted.len());
    // SAFETY: only the lanes that are wanted are written, the first of them to the beginning of `out`.
    unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr().wrapping_sub(wanted.start), mask as u16, sums) };
}

/// [`simd::sum_lanes`] of 16 vectors at once: halves are added, then quarters and so on, each time of two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn add_lanes(v: &[__m512; LANES]) -> __m512 {
    // Lanes 0..8 are of `a` and the others of `b`: lane i of the halves plus lane i + 8.
    let halves =
        |a: __m512, b: __m512| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    // In each half quarters 0 and 1 are added, which leaves four lanes of each of four vectors.
    let quarters =
        |a: __m512, b: __m512| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    let pairs = |a: __m512, b: __m512| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    };
    // After `pairs` lanes 0 and 1 of each quarter are of one vector, 2 and 3 of another.
    let ones = |a: __m512, b: __m512| {
        let (low, high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)))
    };
    let h: [__m512; 8] = std::array::from_fn(|i| halves(v[2 * i], v[2 * i + 1]));
    let q: [__m512; 4] = std::array::from_fn(|i| quarters(h[2 * i], h[2 * i + 1]));
    let p: [__m512; 2] = std::array::from_fn(|i| pairs(q[2 * i], q[2 * i + 1]));
    let sums = ones(p[0], p[1]);
    // Each quarter has a vector of the first four, one of the third four, of the second and of the last.
    _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15), sums)
}
