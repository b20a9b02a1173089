//! Sums over K for a tile of rows of x and columns of the output. A few rows multiply weights that are widened in
//! registers; many share weights that are widened once. The result is the same.
#![allow(clippy::inline_always)] // must compile with the instruction set of the tile
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::ops::Range;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod parts;

use super::source::{Lanes, Source};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::simd;
use crate::simd::{LANES, Vector, fma, lanes_of, multiply_add, sum_each, vector_of, vectorised};

/// Columns of a tile for a few rows.
const DIRECT_COLUMNS: usize = 32;

/// Columns of a tile for many rows.
const PACKED_COLUMNS: usize = 16;

/// Columns whose vectors lie side by side in a packed block.
const GROUP: usize = 4;

/// Vectors of K that a packed block covers: it stays in L1.
const DEPTH: usize = 32;

/// Rows of x from which on weights are packed. Fewer leave time while weights come from memory to widen them again.
const PACKED_ROWS: usize = 9;

/// Is the product of `rows` rows of x computed by packing?
pub(in crate::kernels) fn packs(rows: usize) -> bool {
    rows >= PACKED_ROWS
}

/// Vectors that a packed block takes for rows of `vectors`.
pub(in crate::kernels) fn packed_room(rows: usize, vectors: usize) -> usize {
    if packs(rows) { PACKED_COLUMNS * vectors.min(DEPTH) } else { 0 }
}

/// Columns of a tile for `rows` rows of x.
pub(in crate::kernels) fn columns(rows: usize) -> usize {
    if packs(rows) { PACKED_COLUMNS } else { DIRECT_COLUMNS }
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
    if packs(tile.rows) {
        packed(tile, w, x, room, out);
    } else {
        direct(tile, w, x, room, out);
    }
}

vectorised! {
    /// Weights widened in registers, again for every few rows of x.
    fn direct<W: Source>(tile: &Tile, w: W, x: &[Lanes], room: &mut Room<'_>, out: &mut [f32]) {
        let sums = &mut room.sums[..tile.rows * tile.width()];
        for group in 0..tile.width() / GROUP {
            let mut row = 0;
            while row < tile.rows {
                // Registers hold the sums of four rows, or of one.
                row += if WIDE && tile.rows - row > 1 {
                    direct_block::<W, 4, FMA>(tile, w, x, row, group, sums)
                } else {
                    direct_block::<W, 1, FMA>(tile, w, x, row, group, sums)
                };
            }
        }
        sum_tile(tile, sums, out);
    }
}

/// `R` rows of x, or as many as there are, and the columns of a group. What is missing is the last one again.
#[inline(always)]
fn direct_block<W: Source, const R: usize, const FMA: bool>(
    tile: &Tile,
    w: W,
    x: &[Lanes],
    row: usize,
    group: usize,
    sums: &mut [Lanes],
) -> usize {
    let (stride, whole, width) = (tile.inner.div_ceil(LANES), tile.inner / LANES, tile.width());
    let column = |c: usize| (tile.columns.start + group * GROUP + c).min(tile.columns.end - 1);
    let weights = [w.row(column(0), whole), w.row(column(1), whole), w.row(column(2), whole), w.row(column(3), whole)];
    let x: [&[Lanes]; R] = std::array::from_fn(|r| &x[(row + r).min(tile.rows - 1) * stride..][..stride]);
    let mut acc: [[Vector; GROUP]; R] = [[vector_of(&[0.0; LANES]); GROUP]; R];
    let next = tile.columns.start + (group + 1) * GROUP;
    for at in 0..whole {
        // Weights come from memory for the first row of x: in four streams, each too short to be fetched ahead by the processor.
        if row == 0 {
            for c in 0..GROUP {
                w.fetch(next + c, at);
            }
        }
        for (c, weights) in weights.iter().enumerate() {
            let lanes = W::lanes(*weights, at);
            for r in 0..R {
                multiply_add::<FMA>(&mut acc[r][c], &x[r][at], &lanes);
            }
        }
    }
    if whole < stride {
        for c in 0..GROUP {
            let lanes = vector_of(&w.rest(column(c)));
            for r in 0..R {
                multiply_add::<FMA>(&mut acc[r][c], &x[r][whole], &lanes);
            }
        }
    }
    for (r, acc) in acc.iter().enumerate().take(tile.rows - row) {
        for (to, acc) in sums[(row + r) * width + group * GROUP..][..GROUP].iter_mut().zip(acc) {
            *to = lanes_of(*acc);
        }
    }
    R
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
                    block[at - depth.start][c] = lanes_of(W::lanes(lanes, at));
                }
                if whole < depth.end {
                    block[whole - depth.start][c] = w.rest(row);
                }
            }
        }
    }
}

/// Adds to `sums` the products of vectors `depth` of all rows of x with packed weights.
fn multiply(tile: &Tile, x: &[Lanes], depth: Range<usize>, blocks: &[[Lanes; GROUP]], sums: &mut [Lanes]) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if in_parts() {
        let x = parts::RowsOfX { data: x, stride: tile.inner.div_ceil(LANES), rows: tile.rows, from: depth.start };
        for (group, block) in blocks.chunks_exact(depth.len()).enumerate() {
            // SAFETY: there are the instructions.
            unsafe { parts::multiply(&x, block, &mut sums[group * GROUP..], tile.width()) };
        }
        return;
    }
    multiply_lanes(tile, x, depth, blocks, sums);
}

/// Are sums kept as vectors that are a part of [`LANES`]?
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn in_parts() -> bool {
    #[cfg(target_arch = "x86_64")]
    return matches!(simd::isa(), simd::Isa::Avx2 | simd::Isa::AvxVnni);
    #[cfg(target_arch = "aarch64")]
    return simd::isa() >= simd::Isa::Neon;
}

vectorised! {
    fn multiply_lanes(tile: &Tile, x: &[Lanes], depth: Range<usize>, blocks: &[[Lanes; GROUP]], sums: &mut [Lanes]) {
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
    fn add_up(tile: &Tile, sums: &[Lanes], out: &mut [f32]) {
        sum_tile(tile, sums, out);
    }
}

/// The sums of each row's lanes.
#[inline(always)]
fn sum_tile(tile: &Tile, sums: &[Lanes], out: &mut [f32]) {
    let columns = tile.columns.len();
    for (sums, out) in sums.chunks_exact(tile.width()).zip(out.chunks_mut(tile.stride)) {
        sum_each(&sums[..columns], &mut out[..columns]);
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
                for i in 0..LANES {
                    acc[r][c][i] = fma::<FMA>(x[r][at][i], block[at][skip + c][i], acc[r][c][i]);
                }
            }
        }
    }
    for r in 0..R {
        sums[(row + r) * width + skip..][..C].copy_from_slice(&acc[r]);
    }
}
