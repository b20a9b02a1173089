//! Sums over K of products of bf16 by bf16, two to a lane (`vdpbf16ps` of AVX512_BF16), for a tile of rows of x and columns
//! of the output: 16 rows of the weight are the lanes of a vector, so that no sum crosses them, and a pair of x goes to all.
//!
//! Over 1024 elements of K pairs are added up in turn in two sums, which are added together and then to the total, so a row
//! has the same bits alone and among many. Weights are interleaved, or brought into that order a block at a time.
//!
//! Floor: `M N K / 32` instructions, one a cycle on Zen 4; or every weight read once.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::ops::Range;

use half::bf16;

use super::tile::Tile;
use crate::interleave::{self, Interleaving, Line};
use crate::simd;

/// Columns of a tile: two vectors of lanes.
pub(super) const COLUMNS: usize = 2 * LANES;

/// Columns that are the lanes of a vector.
const LANES: usize = interleave::ROWS;

/// Elements of K whose products are added up before they are added to the total: the weights of a tile are then 64 KiB, which
/// stay in second-level cache. With 256 elements, which stay in that of the first level, totals are read and written so often that
/// products of many rows take 6 % longer.
const DEPTH: usize = 1024;

/// Rows of x by two vectors of columns whose sums are in registers.
const ROWS: usize = 6;

/// A weight `[N, K]`.
#[derive(Clone, Copy)]
pub(super) enum PairedWeight<'a> {
    Rows(&'a [bf16]),
    Interleaved(&'a [Line]),
}

/// Lines of weights that [`run`] works in where rows are not interleaved.
pub(super) const ROOM: usize = COLUMNS / LANES * DEPTH / 2;

/// Can this process multiply so?
pub(super) fn available() -> bool {
    simd::isa() == simd::Isa::Avx512Bf16
}

/// The products of a tile, whose columns begin with a multiple of 16, into `out`, `tile.stride` elements a row: `x` has rows
/// of K elements, one after another.
///
/// # Panics
/// Where the machine has no such instructions, or a slice is too short.
pub(super) fn run(tile: &Tile, w: PairedWeight<'_>, x: &[bf16], room: &mut [Line], out: &mut [f32]) {
    assert!(available(), "products in pairs need AVX512_BF16");
    assert!(tile.columns.start.is_multiple_of(LANES) && x.len() >= tile.rows * tile.inner);
    for row in out.chunks_mut(tile.stride).take(tile.rows) {
        row[..tile.columns.len()].fill(0.0);
    }
    // A single row waits for memory, which is read in one stream.
    let together = if tile.rows == 1 { LANES } else { COLUMNS };
    for first in tile.columns.clone().step_by(together) {
        let columns = first..(first + together).min(tile.columns.end);
        // SAFETY: the instruction set has AVX-512 and AVX512_BF16 by the assertion above.
        unsafe {
            if columns.len() > LANES {
                multiply::<2>(tile, &columns, w, x, room, out);
            } else {
                multiply::<1>(tile, &columns, w, x, room, out);
            }
        }
    }
}

/// The products of at most `16 C` columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn multiply<const C: usize>(
    tile: &Tile,
    columns: &Range<usize>,
    w: PairedWeight<'_>,
    x: &[bf16],
    room: &mut [Line],
    out: &mut [f32],
) {
    let of_group = Interleaving::new(tile.inner, [1, 2]).group_lines();
    for from in (0..tile.inner).step_by(DEPTH) {
        let depth = from..(from + DEPTH).min(tile.inner);
        let lines = depth.len().div_ceil(2);
        let mut weights: [&[Line]; C] = [&[]; C];
        match w {
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
            let at = (columns.start - tile.columns.start, columns.len());
            row += match tile.rows - row {
                1 => block::<1, C>(tile, weights, x, row, &depth, at, out),
                2 | 3 => block::<2, C>(tile, weights, x, row, &depth, at, out),
                4 | 5 => block::<4, C>(tile, weights, x, row, &depth, at, out),
                _ => block::<ROWS, C>(tile, weights, x, row, &depth, at, out),
            };
        }
    }
}

/// Elements `depth` of up to 16 rows of the weight as lines; rows that are not there are zeros.
fn interleave_rows(w: &[bf16], inner: usize, rows: Range<usize>, depth: &Range<usize>, to: &mut [Line]) {
    let to = &mut to[..depth.len().div_ceil(2)];
    if rows.len() < LANES {
        to.fill([0; LANES]);
    }
    for (lane, row) in rows.take(LANES).enumerate() {
        let row = &w[row * inner..][depth.clone()];
        let (pairs, rest) = row.as_chunks::<2>();
        let mut to = to.iter_mut();
        for ([first, second], line) in pairs.iter().zip(&mut to) {
            line[lane] = pair(*first, *second);
        }
        if let (Some(last), Some(line)) = (rest.first(), to.next()) {
            line[lane] = pair(*last, bf16::ZERO);
        }
    }
}

/// Two elements as a word, the first in its lower half.
fn pair(first: bf16, second: bf16) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
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
            let to = &mut to[c * LANES..];
            let sum = _mm512_add_ps(even[r][c], odd[r][c]);
            // SAFETY: as many floats as are read and written.
            unsafe {
                if to.len() >= LANES {
                    _mm512_storeu_ps(to.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(to.as_ptr()), sum));
                } else {
                    let mask = (1u16 << to.len()) - 1;
                    let total = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to.as_ptr()), sum);
                    _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, total);
                }
            }
        }
    }
    R
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of bf16 between -1 and 1.
    fn numbers(count: usize, seed: usize) -> Vec<bf16> {
        (0..count).map(|i| bf16::from_f32(((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0)).collect()
    }

    fn products(rows: Range<usize>, columns: usize, inner: usize, w: PairedWeight<'_>, x: &[bf16]) -> Vec<f32> {
        let tile = Tile { inner, rows: rows.len(), columns: 0..columns, stride: columns };
        let mut out = vec![f32::NAN; rows.len() * columns];
        run(&tile, w, &x[rows.start * inner..rows.end * inner], &mut [[0; LANES]; ROOM], &mut out);
        out
    }

    #[test]
    fn rows_have_the_same_bits_alone_and_among_many_and_are_near_to_exact() {
        if !available() {
            ridge_testing::skip!("this machine has no AVX512_BF16, or RIDGE_CPU_ISA leaves it out");
        }
        for (rows, columns, inner) in [
            (1, 1, 1),
            (9, 1, 31),
            (10, 3, 32),
            (11, 4, 33),
            (13, 16, 100),
            (20, 13, 519),
            (17, 32, 1024),
            (14, 40, 1023),
            (30, 5, 2085),
            (29, 9, 4096),
        ] {
            let (w, x) = (numbers(columns * inner, 1), numbers(rows * inner, 2));
            let all = products(0..rows, columns, inner, PairedWeight::Rows(&w), &x);
            let of = Interleaving::new(inner, [1, 2]);
            let mut lines = vec![[0; LANES]; of.bytes(columns) / size_of::<Line>()];
            of.pack(&w.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>(), 0, &mut lines);
            let interleaved = PairedWeight::Interleaved(&lines);
            assert_eq!(products(0..rows, columns, inner, interleaved, &x), all, "{columns} of {inner}, interleaved");
            for row in 0..rows {
                let alone = products(row..row + 1, columns, inner, interleaved, &x);
                assert_eq!(alone, all[row * columns..(row + 1) * columns], "{rows} x {columns} of {inner}, row {row}");
                for (column, got) in alone.iter().enumerate() {
                    let terms = x[row * inner..(row + 1) * inner].iter().zip(&w[column * inner..(column + 1) * inner]);
                    let terms = terms.map(|(x, w)| f64::from(x.to_f32()) * f64::from(w.to_f32()));
                    let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                    assert!((f64::from(*got) - exact).abs() <= 1e-6 * size + 1e-9, "{got} and not {exact}");
                }
            }
        }
    }
}
