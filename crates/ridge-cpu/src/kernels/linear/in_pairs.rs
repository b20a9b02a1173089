//! Products of x of bf16 by plain weights of bf16, in pairs: x is read as it lies.

use std::ops::Range;

use half::bf16;

use super::kernel::{After, LinearKernel};
use super::pairs;
use super::tile::Tile;
use crate::bytes::cast;
use crate::interleave::Line;
use crate::io::KernelIo;
use crate::scratch::Scratch;

impl LinearKernel {
    pub(super) fn run_in_pairs(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let block = self.row_block.min(self.rows);
        let width = self.columns_together(pieces.len());
        let floats = |n: usize| n * size_of::<f32>();
        let room = pairs::room(self.packed);
        #[cfg(target_arch = "x86_64")]
        let room = if self.weights.iter().any(|w| w.float_codes) { pairs::ROOM_OF_CODES } else { room };
        let [lines, products, gated, line] = scratch.slices::<u8, 4>([
            room * size_of::<Line>(),
            floats(block * width),
            if self.after == After::Swiglu { floats(block * width) } else { 0 },
            floats(width),
        ]);
        let lines = cast::<u32>(lines).as_chunks_mut().0;
        let [products, gated, line] = [products, gated, line].map(cast::<f32>);
        let mut pieces = pieces;
        while !pieces.is_empty() {
            let first = pieces.start / self.tiles * self.row_block;
            let rows = first..(first + self.row_block).min(self.rows);
            let x = &io.input::<bf16>(self.x)[rows.start * self.inner..rows.end * self.inner];
            let (which, columns, together) = self.run_of_pieces(&pieces);
            pieces.start += together;
            let tile = Tile { inner: self.inner, rows: rows.len(), columns: columns.clone(), stride: columns.len() };
            let mut of = |which: usize, out: &mut [f32]| {
                let input = self.x + 1 + which;
                #[cfg(target_arch = "x86_64")]
                if self.weights[which].float_codes {
                    let weight = pairs::PairedWeight::Codes(self.float_codes(io, which));
                    return pairs::run(&tile, weight, x, lines, &mut out[..tile.rows * tile.stride]);
                }
                let weight = if self.packed {
                    pairs::PairedWeight::Interleaved(io.input::<u32>(input).as_chunks().0)
                } else {
                    pairs::PairedWeight::Rows(&io.input::<bf16>(input)[..self.weights[which].columns * self.inner])
                };
                pairs::run(&tile, weight, x, lines, &mut out[..tile.rows * tile.stride]);
            };
            of(which, products);
            if self.after == After::Swiglu {
                of(1, gated);
            }
            self.finish(io, which, rows, columns, [products, gated, line]);
        }
    }
}
