//! Products of codes: x is rounded to codes by all threads, unless it is codes, then blocks of the weights pass by.

use std::ops::Range;

use super::kernel::{After, LinearKernel};
use crate::bytes::cast;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::interleave::Interleaving;
use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::kernels::int8;
use crate::scratch::Scratch;
use crate::simd;

impl LinearKernel {
    fn codes(&self, rows: usize) -> int8::CodeLayout {
        int8::CodeLayout::new(self.rows, self.inner).of_rows(rows)
    }

    /// Writes the codes of one row of x: those that x is, or else of its values, by way of `line`.
    fn put_codes(&self, io: &KernelIo<'_>, layout: int8::CodeLayout, row: usize, line: &mut [f32], to: &mut [u8]) {
        let Some(scales) = self.scales_of_x else {
            simd::load(io, self.x, self.dtype, row * self.inner, line);
            return layout.put(line, to);
        };
        let groups = layout.groups();
        let codes = &io.input::<i8>(self.x)[row * self.inner..][..self.inner];
        layout.put_codes(codes, &io.input_at::<f32>(self.x, scales)[row * groups..][..groups], to);
    }

    /// Rounds every row once: the chunks of a single row's product would else each round it again.
    pub(super) fn preparation_of_codes(&self) -> Preparation {
        let layout = self.codes(self.rows);
        Preparation { bytes: layout.bytes(), pieces: layout.rows, nanos_per_piece: self.inner as f64 }
    }

    pub(super) fn prepare_codes(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let layout = self.codes(self.rows);
        let [line] = scratch.slices::<f32, 1>([self.inner]);
        for row in pieces {
            let bytes = row * layout.row_bytes()..(row + 1) * layout.row_bytes();
            // SAFETY: this row is this piece's alone.
            let to = unsafe { io.room::<u8>().part(bytes) };
            self.put_codes(io, layout, row, line, to);
        }
    }

    /// `of_weights` are how the rows of each weight are codes.
    pub(super) fn run_by_codes(
        &self,
        of_weights: &[int8::WeightCodes],
        io: &KernelIo<'_>,
        pieces: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let all = self.codes(self.rows);
        let most = self.codes(self.row_block.min(self.rows));
        let width = self.columns_together(pieces.len());
        let outputs = most.rows * width;
        let gated = if self.after == After::Swiglu { outputs } else { 0 };
        let floats = |n: usize| n * size_of::<f32>();
        let [room, products, gated, of_bias] =
            scratch.slices::<u8, 4>([int8::room(&most), floats(outputs), floats(gated), floats(width)]);
        let [products, gated, of_bias] = [products, gated, of_bias].map(cast::<f32>);
        let codes: &[u8] = io.prepared();
        let mut pieces = pieces;
        while !pieces.is_empty() {
            let block = pieces.start / self.tiles;
            let rows = block * self.row_block..((block + 1) * self.row_block).min(self.rows);
            let x = int8::ActivationCodes::new(self.codes(rows.len()), &codes[rows.start * all.row_bytes()..]);
            let (which, columns, together) = self.run_of_pieces(&pieces);
            pieces.start += together;
            let mut multiply = |which: usize, out: &mut [f32]| {
                let data = io.input(self.x + 1 + which);
                let weight = int8::CodeWeight {
                    data,
                    codes: of_weights[which],
                    inner: self.inner,
                    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
                    interleaved: self.packed.then(|| Interleaving::new(self.inner, of_weights[which].block)),
                };
                int8::multiply(&weight, columns.clone(), &x, room, out);
                if weight.codes.unit != 1.0 {
                    simd::scale(&mut out[..rows.len() * columns.len()], weight.codes.unit);
                }
            };
            multiply(which, products);
            if self.after == After::Swiglu {
                multiply(1, gated);
            }
            self.finish(io, which, rows, columns, [products, gated, of_bias]);
        }
    }
}
