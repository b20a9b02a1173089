//! Sums over K of products of bf16 by bf16, in pairs of neighbours, for a tile of rows of x and columns of the output: 16 rows of
//! the weight are side by side, so that no sum crosses them. The instructions are those of AVX512_BF16 (`pairs/avx512.rs`) or of
//! NEON (`pairs/neon.rs`).
//!
//! Pairs are added up over blocks of K, in an order that each of the two has, and then to the total, so a row has the same bits
//! alone and among many. Weights are interleaved, or brought into that order a block at a time.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod weight;

use half::bf16;

use super::tile::Tile;
use crate::interleave::Line;
use crate::simd;
pub(super) use weight::PairedWeight;
use weight::{DEPTH, LANES};

/// Columns of a tile: two groups of interleaved rows.
pub(super) const COLUMNS: usize = 2 * LANES;

/// Lines of weights that [`run`] works in: where they are interleaved, NEON brings them into another order for many rows of x.
pub(super) fn room(is_interleaved: bool) -> usize {
    if is_interleaved && cfg!(target_arch = "x86_64") { 0 } else { ROOM }
}

const ROOM: usize = COLUMNS / LANES * DEPTH / 2;

/// As [`room`], of weights of codes: they lie there as lines, if they are not interleaved, and as pairs.
#[cfg(target_arch = "x86_64")]
pub(super) const ROOM_OF_CODES: usize = ROOM + COLUMNS / LANES * DEPTH / 4;

/// Can this process multiply so?
pub(super) fn available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return simd::isa() == simd::Isa::Avx512Bf16;
    #[cfg(target_arch = "aarch64")]
    return simd::isa() == simd::Isa::NeonBf16;
}

/// The products of a tile, whose columns begin with a multiple of 16, into `out`, `tile.stride` elements a row: `x` has rows
/// of K elements, one after another.
///
/// # Panics
/// Where the machine has no such instructions, or a slice is too short.
pub(super) fn run(tile: &Tile, w: PairedWeight<'_>, x: &[bf16], room: &mut [Line], out: &mut [f32]) {
    assert!(available(), "products in pairs need AVX512_BF16 or those of NEON");
    assert!(tile.columns.start.is_multiple_of(LANES) && x.len() >= tile.rows * tile.inner);
    for row in out.chunks_mut(tile.stride).take(tile.rows) {
        row[..tile.columns.len()].fill(0.0);
    }
    // A single row waits for memory, which is read in one stream.
    let together = if tile.rows == 1 || cfg!(target_arch = "aarch64") { LANES } else { COLUMNS };
    for first in tile.columns.clone().step_by(together) {
        let columns = first..(first + together).min(tile.columns.end);
        // SAFETY: the instructions are there by the assertion above.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if columns.len() > LANES {
                avx512::multiply::<2>(tile, &columns, w, x, room, out);
            } else {
                avx512::multiply::<1>(tile, &columns, w, x, room, out);
            }
            #[cfg(target_arch = "aarch64")]
            neon::multiply(tile, &columns, w, x, room, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::interleave::Interleaving;

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
            ridge_testing::skip!("this machine has no products of bf16, or RIDGE_CPU_ISA leaves it out");
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
