//! Products of many rows of x in panels of lanes ([`LaneProduct`]): x is packed once, weights a tile of columns at a time.
#![allow(clippy::inline_always)] // must compile with the instruction set of the loop

use std::ops::Range;

use super::kernel::{After, LinearKernel};
use super::scales::with_codes;
use super::source::{Plain, Source};
use crate::bytes::bits_of;
use crate::gemm::{LaneProduct, SLOTS, Square, TURN, turn};
use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::scratch::Scratch;
use crate::simd::{self, LANES, Vector, lanes_of, vectorised};

/// Rows of x from which on weights are packed by lanes: it takes as long as to multiply a few rows.
const ROWS: usize = 24;

/// Rows of x that packed weights are used for, at most.
const ROW_BLOCK: usize = 264;

/// Columns in blocks that are widened at once.
const WIDENED: usize = 8;

/// How the product of `rows` rows of x of `inner` elements is computed, if so.
pub(super) fn product(rows: usize, inner: usize) -> Option<LaneProduct> {
    if rows < ROWS || inner == 0 { None } else { LaneProduct::new(inner.div_ceil(LANES)) }
}

/// Pieces that threads share well, and rows of a block below which it is not cut for them.
const PIECES: usize = 64;
const SHORT_BLOCK: usize = 96;

/// Rows of a block where weights have `columns` rows in all: whole panels, and nearly as many in each block.
pub(super) fn row_block(product: LaneProduct, rows: usize, columns: usize) -> usize {
    let shared = PIECES.div_ceil(columns.div_ceil(product.columns()).max(1)).min(rows / SHORT_BLOCK);
    rows.div_ceil(rows.div_ceil(ROW_BLOCK).max(shared)).next_multiple_of(product.rows())
}

impl LinearKernel {
    pub(super) fn preparation_by_lane(&self, product: LaneProduct) -> Preparation {
        let panels = self.rows.div_ceil(product.rows());
        Preparation {
            bytes: panels * product.of_panel() * size_of::<f32>(),
            pieces: panels,
            nanos_per_piece: (self.inner * product.rows()) as f64 * 0.3,
        }
    }

    /// Packs panels `panels` of x.
    pub(super) fn prepare_by_lane(
        &self,
        product: LaneProduct,
        io: &KernelIo<'_>,
        panels: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let [rows] = scratch.slices::<f32, 1>([product.rows() * self.stride()]);
        for panel in panels {
            let first = panel * product.rows();
            let of_x = first..(first + product.rows()).min(self.rows);
            rows[of_x.len() * self.stride()..].fill(0.0);
            self.copy_x(io, of_x, rows);
            // SAFETY: this panel is this piece's alone.
            let to = unsafe { io.room::<f32>().part(panel * product.of_panel()..(panel + 1) * product.of_panel()) };
            let lines = Plain { data: &*rows, inner: self.stride() };
            pack(lines, 0..product.rows(), self.stride(), [product.of_lane(), product.rows()], to);
        }
    }

    pub(super) fn run_by_lane(
        &self,
        product: LaneProduct,
        io: &KernelIo<'_>,
        pieces: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let padded = self.row_block * self.tile;
        let quantised = self.weights.iter().any(|w| w.stored.is_some() && w.scales.is_none());
        let [weights, widened, sums, products, gated, line] = scratch.slices::<f32, 6>([
            LANES * product.apart(),
            if quantised { WIDENED * self.inner } else { 0 },
            SLOTS * padded,
            padded,
            if self.after == After::Swiglu { padded } else { 0 },
            self.tile,
        ]);
        let x: &[f32] = io.prepared();
        for piece in pieces {
            let (row_block, tile) = (piece / self.tiles, piece % self.tiles);
            let first = row_block * self.row_block;
            let rows = first..(first + self.row_block).min(self.rows);
            let panels = first / product.rows()..rows.end.div_ceil(product.rows());
            let x = &x[panels.start * product.of_panel()..panels.end * product.of_panel()];
            let (which, columns) = self.place(tile);
            let mut multiply = |which: usize, out: &mut [f32]| {
                self.pack_weights(product, io, which, columns.clone(), widened, weights);
                product.multiply(x, weights, sums);
                let width = columns.len();
                let sums = sums.chunks_exact(self.tile);
                for (out, sums) in out.chunks_exact_mut(width).zip(sums).take(rows.len()) {
                    out.copy_from_slice(&sums[..width]);
                }
            };
            multiply(which, products);
            if self.after == After::Swiglu {
                multiply(1, gated);
            }
            self.finish(io, which, rows, columns, [products, gated, line]);
        }
    }

    /// Packs columns `columns` of weight `which`.
    fn pack_weights(
        &self,
        product: LaneProduct,
        io: &KernelIo<'_>,
        which: usize,
        columns: Range<usize>,
        widened: &mut [f32],
        to: &mut [f32],
    ) {
        let (weight, input) = (&self.weights[which], self.x + 1 + which);
        let (inner, distances) = (self.inner, [product.apart(), product.columns()]);
        if let Some(scales) = &weight.scales {
            return with_codes!(scales, io, [input, 0], inner, w => pack(w, columns, inner, distances, to));
        }
        let Some(stored) = &weight.stored else {
            return simd::with_element!(weight.dtype, T => {
                pack(Plain { data: io.input::<T>(input), inner }, columns, inner, distances, to);
            });
        };
        let data = io.input::<u8>(input);
        for first in columns.clone().step_by(WIDENED) {
            let count = WIDENED.min(columns.end - first);
            stored.read(data, first, count, widened);
            let to = &mut to[first - columns.start..];
            pack(Plain { data: &*widened, inner }, 0..count, inner, distances, to);
        }
    }
}

vectorised! {
    /// Writes element `LANES * v + lane` of each of `rows` beside each other at `lane * apart + v * width`, of
    /// distances `[apart, width]`.
    pub(in crate::kernels) fn pack<W: Source>(
        w: W,
        rows: Range<usize>,
        inner: usize,
        distances: [usize; 2],
        to: &mut [f32],
    ) {
        let ([apart, width], to) = (distances, bits_of(to));
        let whole = inner / LANES;
        let mut square: Square = [[0; TURN]; TURN];
        for first in (0..rows.len()).step_by(TURN) {
            let count = TURN.min(rows.len() - first);
            let row = |i: usize| rows.start + first + i.min(count - 1);
            let lines: [W::Row; TURN] = std::array::from_fn(|i| w.row(row(i), whole));
            for at in 0..whole {
                if count == TURN {
                    for i in 0..TURN {
                        square[i] = bits(W::lanes(lines[i], at));
                    }
                } else {
                    for (square, line) in square.iter_mut().zip(lines).take(count) {
                        *square = bits(W::lanes(line, at));
                    }
                }
                turn(&square, LANES, count, apart, &mut to[at * width + first..]);
            }
            if !inner.is_multiple_of(LANES) {
                for (i, square) in square.iter_mut().enumerate().take(count) {
                    *square = w.rest(row(i)).map(f32::to_bits);
                }
                turn(&square, LANES, count, apart, &mut to[whole * width + first..]);
            }
        }
    }
}

#[inline(always)]
fn bits(vector: Vector) -> [u32; LANES] {
    lanes_of(vector).map(f32::to_bits)
}
