//! Sums over K of products of bf16 by bf16, two to a lane (`vdpbf16ps` of AVX512_BF16), for a tile of rows of x and columns
//! of the output. Element `k` goes to lane `k / 2 % LANES`, in the order of `k`, however many rows there are: many rows share
//! weights that lie side by side in a packed block, and keep sums in memory between the blocks where few have them in registers all along. Where K ends
//! within a vector, the rest of it is zeros.
//!
//! Floor: `M N K / 32` instructions, one a cycle on Zen 4, beside half as many loads; or every weight read once.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_setzero_ps, _mm512_storeu_ps, _mm512_storeu_si512,
};
use std::ops::Range;

use half::bf16;

use super::source::Lanes;
use super::tile::{Tile, packs};
use crate::simd::{self, LANES, sum_each};

/// Elements of a vector.
const ELEMENTS: usize = 2 * LANES;

/// Columns whose vectors lie side by side in a packed block, and rows that share them.
const GROUP: usize = 4;

/// Vectors of K that a packed block of a group covers: 16 KiB, which stay in L1 while the rows of x go by from L2.
const DEPTH: usize = 64;

/// Rows of x by a group of columns whose sums are in registers.
const ROWS: usize = 4;

/// Vectors of a group of columns at one place of K.
pub(super) type Quad = [[u16; ELEMENTS]; GROUP];

/// [`Quad`]s that a packed block takes for `rows` rows of x of `inner` elements.
pub(super) fn packed_room(rows: usize, inner: usize) -> usize {
    if packs(rows) { inner.div_ceil(ELEMENTS).min(DEPTH) } else { 0 }
}

/// Room as [`Quad`]s, as many as fill it.
pub(super) fn quads(room: &mut [f32]) -> &mut [Quad] {
    // SAFETY: any bits are words of 16 bits, which need no more alignment than those of 32.
    let (_, words, _) = unsafe { room.align_to_mut::<u16>() };
    words.as_chunks_mut::<ELEMENTS>().0.as_chunks_mut::<GROUP>().0
}

/// Can this process multiply so?
pub(super) fn available() -> bool {
    simd::isa() == simd::Isa::Avx512Bf16
}

/// The products of a tile into `out`, `tile.stride` elements a row: `x` has rows of K elements, one after another, and so
/// has `w`, whose rows are the columns of the output. `sums` has a vector for each row and each column of whole groups.
///
/// # Panics
/// Where the machine has no such instructions, or a slice is too short.
pub(super) fn run(tile: &Tile, w: &[bf16], x: &[bf16], sums: &mut [Lanes], packed: &mut [Quad], out: &mut [f32]) {
    assert!(available(), "products in pairs need AVX512_BF16");
    let width = tile.columns.len().next_multiple_of(GROUP);
    let sums = &mut sums[..tile.rows * width];
    // SAFETY: the instruction set has AVX-512 and AVX512_BF16 by the assertion above.
    unsafe {
        if packs(tile.rows) {
            many_rows(tile, w, x, sums, packed, width);
        } else {
            few_rows(tile, w, x, sums, width);
        }
    }
    let columns = tile.columns.len();
    for (sums, out) in sums.chunks_exact(width).zip(out.chunks_mut(tile.stride)) {
        sum_each(&sums[..columns], &mut out[..columns]);
    }
}

/// Vector `at` of a row: zeros where the row has ended.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn vector(row: &[bf16], at: usize) -> __m512i {
    let rest = &row[at * ELEMENTS..];
    if rest.len() >= ELEMENTS {
        // SAFETY: so many elements are there.
        return unsafe { _mm512_loadu_si512(rest.as_ptr().cast()) };
    }
    // SAFETY: only the elements that are there are read.
    unsafe { _mm512_maskz_loadu_epi16((1 << rest.len()) - 1, rest.as_ptr().cast()) }
}

/// `sum` and the products of the pairs of `x` and `w`.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add_pairs(sum: __m512, x: __m512i, w: __m512i) -> __m512 {
    // SAFETY: both are 512 bits, of any content.
    let [x, w] = unsafe { std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([x, w]) };
    _mm512_dpbf16_ps(sum, x, w)
}

/// Row `at` of a matrix, or its last one.
fn row(matrix: &[bf16], at: usize, last: usize, inner: usize) -> &[bf16] {
    &matrix[at.min(last) * inner..][..inner]
}

/// Weights from where they lie, for up to [`GROUP`] rows of x at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn few_rows(tile: &Tile, w: &[bf16], x: &[bf16], sums: &mut [Lanes], width: usize) {
    for group in 0..width / GROUP {
        let mut first = 0;
        while first < tile.rows {
            let columns = tile.columns.start + group * GROUP;
            let weights: [&[bf16]; GROUP] =
                std::array::from_fn(|c| row(w, columns + c, tile.columns.end - 1, tile.inner));
            first += match tile.rows - first {
                1 => few_block::<1>(tile, weights, x, sums, (first, group, width)),
                2 | 3 => few_block::<2>(tile, weights, x, sums, (first, group, width)),
                _ => few_block::<4>(tile, weights, x, sums, (first, group, width)),
            };
        }
    }
}

/// `R` rows of x from the first on by a group of columns. Gives how many.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn few_block<const R: usize>(
    tile: &Tile,
    weights: [&[bf16]; GROUP],
    x: &[bf16],
    sums: &mut [Lanes],
    (first, group, width): (usize, usize, usize),
) -> usize {
    let x: [&[bf16]; R] = std::array::from_fn(|r| row(x, first + r, tile.rows - 1, tile.inner));
    let mut acc = [[_mm512_setzero_ps(); GROUP]; R];
    let next = GROUP * tile.inner;
    for at in 0..tile.inner.div_ceil(ELEMENTS) {
        for c in 0..GROUP {
            if first == 0 {
                // The same vector of the next group: rows that fill pages are not fetched ahead by the machine itself.
                simd::fetch_far(weights[c].as_ptr().wrapping_add(next + at * ELEMENTS).cast(), 1);
            }
            let weights = vector(weights[c], at);
            for r in 0..R {
                acc[r][c] = add_pairs(acc[r][c], vector(x[r], at), weights);
            }
        }
    }
    for r in 0..R {
        for c in 0..GROUP {
            let to: &mut Lanes = &mut sums[(first + r) * width + group * GROUP + c];
            // SAFETY: it has as many elements.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), acc[r][c]) };
        }
    }
    R
}

/// A block of a group's weights is laid side by side once, then all rows of x multiply it.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn many_rows(tile: &Tile, w: &[bf16], x: &[bf16], sums: &mut [Lanes], packed: &mut [Quad], width: usize) {
    let vectors = tile.inner.div_ceil(ELEMENTS);
    for from in (0..vectors).step_by(DEPTH) {
        let depth = from..(from + DEPTH).min(vectors);
        let block = &mut packed[..depth.len()];
        for group in 0..width / GROUP {
            pack(tile, w, &depth, group, block);
            let mut first = 0;
            while first < tile.rows {
                let place = (first, group, width);
                first += match tile.rows - first {
                    1 => many_block::<1>(tile, x, block, &depth, sums, place),
                    2 | 3 => many_block::<2>(tile, x, block, &depth, sums, place),
                    _ => many_block::<ROWS>(tile, x, block, &depth, sums, place),
                };
            }
        }
    }
}

/// The vectors `depth` of the columns of a group, side by side; columns that are missing from the last group are the last one
/// again.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack(tile: &Tile, w: &[bf16], depth: &Range<usize>, group: usize, block: &mut [Quad]) {
    for c in 0..GROUP {
        let from = row(w, tile.columns.start + group * GROUP + c, tile.columns.end - 1, tile.inner);
        for (at, quad) in depth.clone().zip(block.iter_mut()) {
            // SAFETY: it has as many elements.
            unsafe { _mm512_storeu_si512(quad[c].as_mut_ptr().cast(), vector(from, at)) };
        }
    }
}

/// Adds to the sums of `R` rows of x from the first on and of a group of columns. Gives how many.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn many_block<const R: usize>(
    tile: &Tile,
    x: &[bf16],
    block: &[Quad],
    depth: &Range<usize>,
    sums: &mut [Lanes],
    (first, group, width): (usize, usize, usize),
) -> usize {
    let x: [&[bf16]; R] =
        std::array::from_fn(|r| &row(x, first + r, tile.rows - 1, tile.inner)[depth.start * ELEMENTS..]);
    let place = |r: usize, c: usize| (first + r) * width + group * GROUP + c;
    let mut acc = [[_mm512_setzero_ps(); GROUP]; R];
    if depth.start > 0 {
        for r in 0..R {
            for c in 0..GROUP {
                // SAFETY: it has as many elements.
                acc[r][c] = unsafe { _mm512_loadu_ps(sums[place(r, c)].as_ptr()) };
            }
        }
    }
    // All vectors but the last are whole, and that one where K ends with it.
    let whole = if depth.end * ELEMENTS <= tile.inner { block.len() } else { block.len() - 1 };
    let mut add = |quad: &Quad, x: [__m512i; R]| {
        // SAFETY: each has as many elements.
        let weights: [__m512i; GROUP] = std::array::from_fn(|c| unsafe { _mm512_loadu_si512(quad[c].as_ptr().cast()) });
        for r in 0..R {
            for c in 0..GROUP {
                acc[r][c] = add_pairs(acc[r][c], x[r], weights[c]);
            }
        }
    };
    for (at, quad) in block[..whole].iter().enumerate() {
        // SAFETY: so many elements are there of each row.
        add(quad, std::array::from_fn(|r| unsafe { _mm512_loadu_si512(x[r].as_ptr().add(at * ELEMENTS).cast()) }));
    }
    if let Some(quad) = block.get(whole) {
        add(quad, std::array::from_fn(|r| vector(x[r], whole)));
    }
    for r in 0..R {
        for c in 0..GROUP {
            // SAFETY: it has as many elements.
            unsafe { _mm512_storeu_ps(sums[place(r, c)].as_mut_ptr(), acc[r][c]) };
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

    fn products(rows: Range<usize>, columns: usize, inner: usize, w: &[bf16], x: &[bf16]) -> Vec<f32> {
        let tile = Tile { inner, rows: rows.len(), columns: 0..columns, stride: columns };
        let mut sums = vec![[0.0; LANES]; rows.len() * columns.next_multiple_of(GROUP)];
        let mut packed = vec![[[0; ELEMENTS]; GROUP]; packed_room(rows.len(), inner)];
        let mut out = vec![f32::NAN; rows.len() * columns];
        run(&tile, w, &x[rows.start * inner..rows.end * inner], &mut sums, &mut packed, &mut out);
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
            (17, 16, 1024),
            (30, 5, 2085),
            (29, 9, 4096),
        ] {
            let (w, x) = (numbers(columns * inner, 1), numbers(rows * inner, 2));
            let all = products(0..rows, columns, inner, &w, &x);
            for row in 0..rows {
                let alone = products(row..row + 1, columns, inner, &w, &x);
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
