//! Products of 32 rows of bf16, wherever they lie, with tiles of columns.

use half::bf16;

use super::config::{DEPTH, SIDE, TileSession, Words};
use super::tiles::{Tiles, two_by_one, two_by_two};

/// 32 rows of bf16 that lie together somehow; all numbers are elements.
#[derive(Clone, Copy)]
pub(crate) struct TileRows<'a> {
    pub(crate) data: &'a [bf16],
    /// Where the second 16 rows begin.
    pub(crate) high: usize,
    /// From a row to the next.
    pub(crate) stride: usize,
    /// From a tile to the next along K.
    pub(crate) step: usize,
}

/// Adds the products of `w` with one or two tiles of columns over `steps` tiles of K to `sums`, two for each tile of
/// columns, or sets them. The second tile of columns lies `apart` tiles after the first.
pub(crate) fn multiply_rows(
    _configured: &TileSession,
    w: TileRows<'_>,
    x: &[Words],
    apart: usize,
    steps: usize,
    sums: &mut [Words],
    fresh: bool,
) {
    assert!(steps > 0 && w.data.len() >= w.high + (SIDE - 1) * w.stride + (steps - 1) * w.step + DEPTH);
    let low = w.data.as_ptr();
    let size = size_of::<bf16>();
    let at =
        Tiles { low: low.cast(), high: low.wrapping_add(w.high).cast(), stride: w.stride * size, step: w.step * size };
    let x_at = x.as_ptr();
    // SAFETY: the tiles are configured; the rows are inside of the data, the second 16 after the first, and x and the
    // sums are as many tiles as is checked here.
    unsafe {
        if sums.len() == 4 {
            assert!(x.len() >= apart + steps);
            two_by_two(&at, [x_at, x_at.wrapping_add(apart)], steps, sums.as_mut_ptr(), fresh);
        } else {
            assert!(x.len() >= steps && sums.len() == 2);
            two_by_one(&at, x_at, steps, sums.as_mut_ptr(), fresh);
        }
    }
}
