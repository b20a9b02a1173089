//! `vdpbf16ps` of AVX512_BF16: pairs are added up in turn in two sums, which are added together at the end of each block of K.
//!
//! Floor: `M N K / 32` instructions, one a cycle on Zen 4; or every weight read once.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_epi32, _mm512_set1_epi64, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::ops::Range;

use half::bf16;
use ridge_graph::format::BLOCK;

use super::super::float_codes::{Decoder, FOUR, FloatCodes, in_turn_of_floats};
use super::super::tile::Tile;
use super::weight::{DEPTH, LANES, PairedWeight, interleave_rows, pair};
use crate::interleave::{Interleaving, Line};
use crate::simd;

/// Rows of x by two vectors of columns whose sums are in registers.
const ROWS: usize = 6;

/// As [`DEPTH`], of weights of codes: pairs of 32 columns stay in first-level cache, which for 8 rows of x takes 13 % less time than
/// those of 1024 elements in the second level.
const DEPTH_OF_CODES: usize = 256;

/// The products of at most `16 C` columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn multiply<const C: usize>(
    tile: &Tile,
    columns: &Range<usize>,
    w: PairedWeight<'_>,
    x: &[bf16],
    room: &mut [Line],
    out: &mut [f32],
) {
    let of_group = Interleaving::new(tile.inner, [1, 2]).group_lines();
    let at = (columns.start - tile.columns.start, columns.len());
    let step = match w {
        // Sums of codes that share a scale are multiplied by it.
        PairedWeight::Codes(FloatCodes { scales: Some(_), .. }) => BLOCK,
        PairedWeight::Codes(_) => DEPTH_OF_CODES,
        _ => DEPTH,
    };
    for from in (0..tile.inner).step_by(step) {
        let depth = from..(from + step).min(tile.inner);
        let lines = depth.len().div_ceil(2);
        let mut weights: [&[Line]; C] = [&[]; C];
        let mut scale = 1.0;
        match w {
            PairedWeight::Codes(codes) => {
                scale = codes.scales.map_or(1.0, |scales| scales.of_row(columns.start)[from / BLOCK]);
                // SAFETY: codes become pairs only where there are the instructions.
                let one = unsafe { of_codes::<C>(tile, columns, codes, x, &depth, scale, room, out) };
                if one {
                    continue;
                }
                for c in 0..C {
                    weights[c] = &room[c * (DEPTH / 2)..][..lines];
                }
            }
            PairedWeight::Interleaved(all) => {
                for c in 0..C {
                    let group = columns.start / LANES + c;
                    weights[c] = &all[group * of_group + from / 2..][..lines];
                    if tile.rows > 1 {
                        let next = weights[c].as_ptr().wrapping_add(lines);
                        simd::fetch_far(next.cast(), lines * size_of::<Line>());
                    }
                }
            }
            PairedWeight::Rows(all) => {
                for (c, room) in room.chunks_exact_mut(DEPTH / 2).enumerate().take(C) {
                    interleave_rows(all, tile.inner, columns.start + c * LANES..columns.end, &depth, room);
                }
                for c in 0..C {
                    weights[c] = &room[c * (DEPTH / 2)..][..lines];
                }
            }
        }
        let mut row = 0;
        while row < tile.rows {
            row += match tile.rows - row {
                1 => block::<1, C>(tile, weights, x, row, &depth, at, scale, out),
                2 | 3 => block::<2, C>(tile, weights, x, row, &depth, at, scale, out),
                4 | 5 => block::<4, C>(tile, weights, x, row, &depth, at, scale, out),
                _ => block::<ROWS, C>(tile, weights, x, row, &depth, at, scale, out),
            };
        }
    }
}

/// Elements `depth` of columns of codes: multiplied by a single row of x as they are read, which it says then, or else as pairs in
/// the beginning of `room`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vbmi")]
fn of_codes<const C: usize>(
    tile: &Tile,
    columns: &Range<usize>,
    codes: FloatCodes<'_>,
    x: &[bf16],
    depth: &Range<usize>,
    scale: f32,
    room: &mut [Line],
    out: &mut [f32],
) -> bool {
    let decoder = Decoder::new();
    let (pairs, of_codes) = room.split_at_mut(C * (DEPTH / 2));
    for (c, pairs) in pairs.chunks_exact_mut(DEPTH / 2).enumerate() {
        let first = columns.start + c * LANES;
        let rows = first..columns.end.min(first + LANES);
        let lines = codes.lines(&rows, depth, of_codes);
        if tile.rows > 1 {
            let next = lines.as_ptr().wrapping_add(lines.len());
            simd::fetch_far(next.cast(), size_of_val(lines));
            decoder.pairs(lines, pairs);
            continue;
        }
        // As `block` adds them: the first pairs of fours, and the second ones.
        let [mut first_rows, mut last_rows] = [_mm512_setzero_ps(); 2];
        for (line, x) in lines.iter().zip(x[depth.clone()].as_chunks::<FOUR>().0) {
            // SAFETY: a line is 64 bytes, and four elements of x are 8.
            let (line, x) = unsafe {
                let x = _mm512_set1_epi64(x.as_ptr().cast::<i64>().read_unaligned());
                (_mm512_loadu_si512(line.as_ptr().cast()), x)
            };
            let [first, last] = decoder.fours(line);
            first_rows = add_pairs(first_rows, x, first);
            last_rows = add_pairs(last_rows, x, last);
        }
        let [even, odd] = in_turn_of_floats([first_rows, last_rows]);
        let to = &mut out[rows.start - tile.columns.start..rows.end - tile.columns.start];
        add_to(to, _mm512_add_ps(even, odd), scale);
    }
    tile.rows == 1
}

/// `sum` and the products of the pairs of `x` and `w`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add_pairs(sum: __m512, x: __m512i, w: __m512i) -> __m512 {
    // SAFETY: both are 512 bits, of any content.
    let [x, w] = unsafe { std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([x, w]) };
    _mm512_dpbf16_ps(sum, x, w)
}

/// Adds the products of elements `depth` of `R` rows of x from row `first` on, and of `width` columns from column `at` of the
/// tile on, to the totals. Gives how many rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn block<const R: usize, const C: usize>(
    tile: &Tile,
    weights: [&[Line]; C],
    x: &[bf16],
    first: usize,
    depth: &Range<usize>,
    (at, width): (usize, usize),
    scale: f32,
    out: &mut [f32],
) -> usize {
    let mut rows: [&[bf16]; R] = [&[]; R];
    for r in 0..R {
        rows[r] = &x[(first + r) * tile.inner..][depth.clone()];
    }
    let pairs = depth.len() / 2;
    let mut even = [[_mm512_setzero_ps(); C]; R];
    let mut odd = even;
    // SAFETY: there are so many lines, and so many pairs of each row.
    let line = |c: usize, nth: usize| unsafe { _mm512_loadu_si512(weights[c].as_ptr().add(nth).cast()) };
    let of_x = |r: usize, nth: usize| unsafe {
        // SAFETY: as above.
        _mm512_set1_epi32(rows[r].as_ptr().add(2 * nth).cast::<i32>().read_unaligned())
    };
    for nth in 0..pairs / 2 {
        for (sums, nth) in [(&mut even, 2 * nth), (&mut odd, 2 * nth + 1)] {
            let mut of_weights = [line(0, nth); C];
            for c in 1..C {
                of_weights[c] = line(c, nth);
            }
            for r in 0..R {
                let of_x = of_x(r, nth);
                for c in 0..C {
                    sums[r][c] = add_pairs(sums[r][c], of_x, of_weights[c]);
                }
            }
        }
    }
    if pairs % 2 == 1 {
        for r in 0..R {
            for c in 0..C {
                even[r][c] = add_pairs(even[r][c], of_x(r, pairs - 1), line(c, pairs - 1));
            }
        }
    }
    if depth.len() % 2 == 1 {
        for r in 0..R {
            let last = _mm512_set1_epi32(pair(rows[r][depth.len() - 1], bf16::ZERO).cast_signed());
            for c in 0..C {
                odd[r][c] = add_pairs(odd[r][c], last, line(c, pairs));
            }
        }
    }
    for r in 0..R {
        let to = &mut out[(first + r) * tile.stride + at..][..width];
        for c in 0..C {
            add_to(&mut to[c * LANES..], _mm512_add_ps(even[r][c], odd[r][c]), scale);
        }
    }
    R
}

/// Adds `sum` times `scale` to the first 16 of `to`, or as many as there are.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_to(to: &mut [f32], sum: __m512, scale: f32) {
    let scale = _mm512_set1_ps(scale);
    // SAFETY: as many floats as are read and written.
    unsafe {
        if to.len() >= LANES {
            _mm512_storeu_ps(to.as_mut_ptr(), _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(to.as_ptr())));
        } else {
            let mask = (1u16 << to.len()) - 1;
            let total = _mm512_fmadd_ps(sum, scale, _mm512_maskz_loadu_ps(mask, to.as_ptr()));
            _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, total);
        }
    }
}
