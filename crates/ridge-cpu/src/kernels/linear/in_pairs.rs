//! Products of x of bf16 by plain weights of bf16, in pairs: both are read as they lie.

use std::ops::Range;

use half::bf16;

use super::kernel::{After, LinearKernel};
use super::pairs;
use super::tile::Tile;
use crate::io::KernelIo;
use crate::scratch::Scratch;
use crate::simd::LANES;

impl LinearKernel {
    pub(super) fn run_in_pairs(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let block = self.row_block.min(self.rows);
        let quad = size_of::<pairs::Quad>() / size_of::<f32>();
        let [sums, packed, products, gated, line] = scratch.slices::<f32, 5>([
            block * self.tile * LANES,
            pairs::packed_room(block, self.inner) * quad,
            block * self.tile,
            if self.after == After::Swiglu { block * self.tile } else { 0 },
            self.tile,
        ]);
        let sums = sums.as_chunks_mut().0;
        let packed = pairs::quads(packed);
        for piece in pieces {
            let (row_block, tile) = (piece / self.tiles, piece % self.tiles);
            let first = row_block * self.row_block;
            let rows = first..(first + self.row_block).min(self.rows);
            let x = &io.input::<bf16>(self.x)[rows.start * self.inner..rows.end * self.inner];
            let (which, columns) = self.place(tile);
            let tile = Tile { inner: self.inner, rows: rows.len(), columns: columns.clone(), stride: columns.len() };
            let mut of = |which: usize, out: &mut [f32]| {
                let weight = &io.input::<bf16>(self.x + 1 + which)[..self.weights[which].columns * self.inner];
                pairs::run(&tile, weight, x, sums, packed, &mut out[..tile.rows * tile.stride]);
            };
            of(which, products);
            if self.after == After::Swiglu {
                of(1, gated);
            }
            self.finish(io, which, rows, columns, [products, gated, line]);
        }
    }
}
