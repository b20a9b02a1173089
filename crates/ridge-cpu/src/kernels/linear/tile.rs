//! Sums over K for a tile of rows of x and columns of the output. One row multiplies weights that are widened in
//! registers; several share weights that are widened once.
#![allow(clippy::inline_always)] // must compile with the instruction set of the tile

use std::ops::Range;

use super::source::{Lanes, Source};
use crate::simd::{LANES, fma, sum_each, vectorised};

/// Columns of a tile for one row.
pub(in crate::kernels) const DIRECT_COLUMNS: usize = 32;

/// Columns of a tile for several rows.
pub(in crate::kernels) const PACKED_COLUMNS: usize = 16;

/// Columns whose vectors lie side by side in a packed block.
const GROUP: usize = 4;

/// Vectors of K that a packed block covers: 16 columns of it stay in L1.
const DEPTH: usize = 32;

/// Vectors that a packed block takes for rows of `vectors`.
pub(in crate::kernels) fn packed_room(vectors: usize) -> usize {
    PACKED_COLUMNS * vectors.min(DEPTH)
}

/// What to compute.
pub(in crate::kernels) struct Tile {
    /// K.
    pub(in crate::kernels) inner: usize,
    /// Rows of x, from its first on.
    pub(in crate::kernels) rows: usize,
    /// Rows of the weight.
    pub(in crate::kernels) columns: Range<usize>,
    /// Elements between the beginnings of rows of the result.
    pub(in crate::kernels) stride: usize,
    /// By packing weights, or for one row. The result is the same.
    pub(in crate::kernels) packed: bool,
}

impl Tile {
    /// Sums of a row: whole groups.
    fn width(&self) -> usize {
        self.columns.len().next_multiple_of(GROUP)
    }
}

/// Memory to work in.
pub(in crate::kernels) struct Room<'a> {
    /// For each row and column of the tile.
    pub(in crate::kernels) sums: &'a mut [Lanes],
    /// [`packed_room`], if packed.
    pub(in crate::kernels) weights: &'a mut [Lanes],
}

/// Fills a row of `inner` elements up to whole vectors, the end of the row as [`Source::rest`] lays it out.
pub(in crate::kernels) fn fill(row: &mut [f32], inner: usize) {
    let rest = inner % LANES;
    if rest == 0 {
        return;
    }
    let stride = row.len();
    if inner > LANES {
        row.copy_within(inner - rest..inner, stride - rest);
        row[stride - LANES..stride - rest].fill(0.0);
    } else {
        row[inner..].fill(0.0);
    }
}

/// The tile's products into `out`, `stride` elements a row. `x` has as many vectors a row as K fills or begins.
pub(in crate::kernels) fn run<W: Source>(tile: &Tile, w: W, x: &[Lanes], room: &mut Room<'_>, out: &mut [f32]) {
    if tile.packed {
        packed(tile, w, x, room, out);
    } else {
        direct(tile, w, x, room, out);
    }
}

#[inline(always)]
fn multiply_add<const FMA: bool>(sum: &mut Lanes, x: &Lanes, w: &Lanes) {
    for i in 0..LANES {
        sum[i] = fma::<FMA>(x[i], w[i], sum[i]);
    }
}

vectorised! {
    /// One row of x, weights widened in registers.
    fn direct<W: Source>(tile: &Tile, w: W, x: &[Lanes], room: &mut Room<'_>, out: &mut [f32]) {
        let (stride, whole) = (tile.inner.div_ceil(LANES), tile.inner / LANES);
        let x = &x[..stride];
        let sums = &mut room.sums[..tile.width()];
        for (group, sums) in sums.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
            // Columns that are missing are the last one again.
            let column = |c: usize| (tile.columns.start + group * GROUP + c).min(tile.columns.end - 1);
            let rows = [w.row(column(0), whole), w.row(column(1), whole), w.row(column(2), whole), w.row(column(3), whole)];
            let mut acc = [[0f32; LANES]; GROUP];
            for (at, x) in x[..whole].iter().enumerate() {
                for (sum, row) in acc.iter_mut().zip(rows) {
                    multiply_add::<FMA>(sum, x, &W::lanes(row, at));
                }
            }
            if whole < stride {
                for (c, sum) in acc.iter_mut().enumerate() {
                    multiply_add::<FMA>(sum, &x[whole], &w.rest(column(c)));
                }
            }
            *sums = acc;
        }
        let n = tile.columns.len();
        sum_each(&sums[..n], &mut out[..n]);
    }
}

/// Widens a block of weights once, then multiplies all rows of x by it. Columns that are missing from the last group
/// are zeros.
fn packed<W: Source>(tile: &Tile, w: W, x: &[Lanes], room: &mut Room<'_>, out: &mut [f32]) {
    let (stride, width) = (tile.inner.div_ceil(LANES), tile.width());
    let sums = &mut room.sums[..tile.rows * width];
    sums.fill([0.0; LANES]);
    for from in (0..stride).step_by(DEPTH) {
        let depth = DEPTH.min(stride - from);
        let (blocks, _) = room.weights[..width * depth].as_chunks_mut::<GROUP>();
        pack(w, tile.columns.clone(), from..from + depth, tile.inner, blocks);
        multiply(tile, x, from..from + depth, blocks, sums);
    }
    add_up(tile, sums, out);
}

vectorised! {
    /// Vectors `depth` of rows `rows` of `w`, in groups of rows whose vectors lie side by side.
    fn pack<W: Source>(w: W, rows: Range<usize>, depth: Range<usize>, inner: usize, blocks: &mut [[Lanes; GROUP]]) {
        let whole = (inner / LANES).min(depth.end);
        for (group, block) in blocks.chunks_exact_mut(depth.len()).enumerate() {
            for c in 0..GROUP {
                let row = rows.start + group * GROUP + c;
                if row >= rows.end {
                    block.iter_mut().for_each(|vectors| vectors[c] = [0.0; LANES]);
                    continue;
                }
                let lanes = w.row(row, whole);
                for at in depth.start..whole {
                    block[at - depth.start][c] = W::lanes(lanes, at);
                }
                if whole < depth.end {
                    block[whole - depth.start][c] = w.rest(row);
                }
            }
        }
    }
}

vectorised! {
    /// Adds to `sums` the products of vectors `depth` of all rows of x with packed weights.
    fn multiply(tile: &Tile, x: &[Lanes], depth: Range<usize>, blocks: &[[Lanes; GROUP]], sums: &mut [Lanes]) {
        for (group, block) in blocks.chunks_exact(depth.len()).enumerate() {
            let sums = &mut sums[group * GROUP..];
            // Registers hold 16 sums and their operands, or 4.
            if WIDE {
                multiply_rows::<4, GROUP, FMA>(tile, x, depth.start, block, 0, sums);
            } else {
                multiply_rows::<2, 2, FMA>(tile, x, depth.start, block, 0, sums);
                multiply_rows::<2, 2, FMA>(tile, x, depth.start, block, 2, sums);
            }
        }
    }
}

vectorised! {
    /// The sums of each row's lanes.
    fn add_up(tile: &Tile, sums: &[Lanes], out: &mut [f32]) {
        let columns = tile.columns.len();
        for (sums, out) in sums.chunks_exact(tile.width()).zip(out.chunks_mut(tile.stride)) {
            sum_each(&sums[..columns], &mut out[..columns]);
        }
    }
}

/// All rows of x with columns `skip..skip + C` of a group.
#[inline(always)]
fn multiply_rows<const R: usize, const C: usize, const FMA: bool>(
    tile: &Tile,
    x: &[Lanes],
    from: usize,
    block: &[[Lanes; GROUP]],
    skip: usize,
    sums: &mut [Lanes],
) {
    let mut row = 0;
    while row + R <= tile.rows {
        multiply_block::<R, C, FMA>(tile, x, row, from, block, skip, sums);
        row += R;
    }
    while row + 2 <= tile.rows {
        multiply_block::<2, C, FMA>(tile, x, row, from, block, skip, sums);
        row += 2;
    }
    if row < tile.rows {
        multiply_block::<1, C, FMA>(tile, x, row, from, block, skip, sums);
    }
}

#[inline(always)]
fn multiply_block<const R: usize, const C: usize, const FMA: bool>(
    tile: &Tile,
    x: &[Lanes],
    row: usize,
    from: usize,
    block: &[[Lanes; GROUP]],
    skip: usize,
    sums: &mut [Lanes],
) {
    let (stride, width) = (tile.inner.div_ceil(LANES), tile.width());
    let x: [&[Lanes]; R] = std::array::from_fn(|r| &x[(row + r) * stride + from..][..block.len()]);
    let mut acc = [[[0f32; LANES]; C]; R];
    for r in 0..R {
        acc[r].copy_from_slice(&sums[(row + r) * width + skip..][..C]);
    }
    for at in 0..block.len() {
        for r in 0..R {
            for c in 0..C {
                multiply_add::<FMA>(&mut acc[r][c], &x[r][at], &block[at][skip + c]);
            }
        }
    }
    for r in 0..R {
        sums[(row + r) * width + skip..][..C].copy_from_slice(&acc[r]);
    }
}
