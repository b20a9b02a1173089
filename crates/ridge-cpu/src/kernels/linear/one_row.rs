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
    // SAFETY: `takes` has found AVX-512, and what is read and written is there, as just checked.
    unsafe { run_wide(weight, inner, columns, x, out) }
}

/// # Safety
/// The weight has rows `columns` of `inner` elements, x so many elements and `out` so many columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn run_wide(weight: &[f32], inner: usize, columns: Range<usize>, x: &[Lanes], out: &mut [f32]) {
    let mut first = columns.start;
    while first < columns.end {
        // The last 16 rows are taken together, whether all of them are asked for or not.
        let from = first.min(weight.len() / inner - LANES);
        let wanted = first - from..LANES.min(columns.end - from);
        let rows = weight[from * inner..][..LANES * inner].as_ptr();
        // SAFETY: 16 rows were just found.
        let [low, high] = unsafe { [eight(rows, inner, x), eight(rows.add(LANES / 2 * inner), inner, x)] };
        let mask = ((1u32 << wanted.len()) - 1) << wanted.start;
        let out = out[first - columns.start..][..wanted.len()].as_mut_ptr();
        // SAFETY: only the lanes that are wanted are written, the first of them to the beginning of `out`.
        unsafe { _mm512_mask_storeu_ps(out.wrapping_sub(wanted.start), mask as u16, add_lanes(&low, &high)) };
        first += wanted.len();
    }
}

/// Sums of 8 rows, one after another from `rows` on: so few that each has a register for its address.
///
/// # Safety
/// There are 8 rows, of [`LANES`] elements at least, and x has as many.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn eight(rows: *const f32, inner: usize, x: &[Lanes]) -> [__m512; 8] {
    let (whole, rest) = (inner / LANES, inner % LANES);
    let mut sums = [_mm512_setzero_ps(); 8];
    for at in 0..whole {
        // SAFETY: x has this vector, and so has each row.
        unsafe {
            let x = _mm512_loadu_ps(x.as_ptr().add(at).cast());
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_fmadd_ps(x, _mm512_loadu_ps(rows.add(r * inner + at * LANES)), *sum);
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
                let w = rows.add((r + 1) * inner - LANES);
                *sum = _mm512_fmadd_ps(x, _mm512_maskz_loadu_ps(mask, w), *sum);
            }
        }
    }
    sums
}

/// [`simd::sum_lanes`] of 16 vectors at once: halves are added, then quarters and so on, each time of two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn add_lanes(low: &[__m512; 8], high: &[__m512; 8]) -> __m512 {
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
    let mut h = [_mm512_setzero_ps(); 8];
    for i in 0..4 {
        h[i] = halves(low[2 * i], low[2 * i + 1]);
        h[4 + i] = halves(high[2 * i], high[2 * i + 1]);
    }
    let q = [quarters(h[0], h[1]), quarters(h[2], h[3]), quarters(h[4], h[5]), quarters(h[6], h[7])];
    let sums = ones(pairs(q[0], q[1]), pairs(q[2], q[3]));
    // Each quarter has a vector of the first four, one of the third four, of the second and of the last.
    _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15), sums)
}
