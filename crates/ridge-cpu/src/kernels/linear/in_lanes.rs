//! Products in lanes of f32: weights are widened in registers, into packed blocks, or from blocks of their format.

use std::ops::Range;

use super::kernel::{After, LinearKernel, LinearWeight};
#[cfg(target_arch = "x86_64")]
use super::one_row;
use super::scales::with_codes;
use super::source::{Plain, Source, Streamed};
use super::tile::{self, Room, Tile};
use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::scratch::Scratch;
use crate::simd::{self, LANES, vectorised};

/// Columns in blocks that are widened at once: they stay in cache until they are multiplied.
const WIDENED: usize = 4;

/// Bytes of a weight from which on it is taken to come from memory.
const STREAMED: usize = 1 << 20;

vectorised! {
    /// Rows `rows` of a weight as f32, one after another.
    fn widen<W: Source>(w: W, rows: Range<usize>, inner: usize, to: &mut [f32]) {
        let (whole, rest) = (inner / LANES, inner % LANES);
        for (row, to) in rows.zip(to.chunks_exact_mut(inner.max(1))) {
            let lanes = w.row(row, whole);
            let (vectors, end) = to.as_chunks_mut::<LANES>();
            for (at, to) in vectors.iter_mut().enumerate() {
                *to = simd::lanes_of(W::lanes(lanes, at));
            }
            if rest > 0 {
                // As `Source::rest` lays it out.
                let from = if inner > LANES { LANES - rest } else { 0 };
                end.copy_from_slice(&w.rest(row)[from..from + rest]);
            }
        }
    }
}

impl LinearKernel {
    /// The copy of x, where it must be copied.
    pub(super) fn preparation_in_lanes(&self) -> Option<Preparation> {
        // A single row is copied where it is used.
        (self.is_copied() && self.rows > 1).then(|| Preparation {
            bytes: self.rows * self.stride() * size_of::<f32>(),
            pieces: self.rows,
            nanos_per_piece: self.inner as f64 * 0.2,
        })
    }

    pub(super) fn prepare_in_lanes(&self, io: &KernelIo<'_>, pieces: Range<usize>) {
        let stride = self.stride();
        // SAFETY: these rows are those of these pieces.
        let to = unsafe { io.room::<f32>().part(pieces.start * stride..pieces.end * stride) };
        self.copy_x(io, pieces, to);
    }

    pub(super) fn run_in_lanes(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let n = self.inner.div_ceil(LANES);
        let block = self.row_block.min(self.rows);
        let quantised = self.weights.iter().any(|w| w.stored.is_some() && w.scales.is_none() || self.widens(w));
        let [copy, sums, weights, widened, products, gated, line] = scratch.slices::<f32, 7>([
            if self.is_copied() && self.rows == 1 { self.stride() } else { 0 },
            block * self.tile * LANES,
            tile::packed_room(block, n) * LANES,
            if quantised { WIDENED * self.inner } else { 0 },
            block * self.tile,
            if self.after == After::Swiglu { block * self.tile } else { 0 },
            self.tile,
        ]);
        if !copy.is_empty() {
            self.copy_x(io, 0..1, copy);
        }
        let x: &[f32] = match (self.is_copied(), self.rows) {
            (true, 1) => copy,
            (true, _) => io.prepared(),
            (false, _) => io.input(self.x),
        };
        for piece in pieces {
            let (row_block, tile) = (piece / self.tiles, piece % self.tiles);
            let first = row_block * self.row_block;
            let rows = first..(first + self.row_block).min(self.rows);
            let x = &x[first * self.stride()..];
            let (which, columns) = self.place(tile);
            let tile = Tile { inner: self.inner, rows: rows.len(), columns: columns.clone(), stride: columns.len() };
            let mut room = Room { sums: sums.as_chunks_mut().0, weights: weights.as_chunks_mut().0 };
            self.products(io, which, x, &tile, &mut room, widened, products);
            if self.after == After::Swiglu {
                self.products(io, 1, x, &tile, &mut room, widened, gated);
            }
            self.finish(io, which, rows, columns, [products, gated, line]);
        }
    }

    /// Are the rows of a weight of codes widened once for several rows of x? Registers of AVX-512 hold the sums of four, for which
    /// codes are widened in registers in less time.
    fn widens(&self, weight: &LinearWeight) -> bool {
        #[cfg(target_arch = "x86_64")]
        let few = simd::isa() < simd::Isa::Avx512;
        #[cfg(not(target_arch = "x86_64"))]
        let few = true;
        weight.scales.is_some() && few && self.rows > 1
    }

    /// A tile of products with weight `which`, one row after another.
    fn products(
        &self,
        io: &KernelIo<'_>,
        which: usize,
        x: &[f32],
        tile: &Tile,
        room: &mut Room<'_>,
        widened: &mut [f32],
        out: &mut [f32],
    ) {
        let weight = &self.weights[which];
        let input = self.x + 1 + which;
        let x = x.as_chunks::<LANES>().0;
        let out = &mut out[..tile.rows * tile.columns.len()];
        #[cfg(target_arch = "x86_64")]
        if self.by_one_row {
            let data = &io.input::<f32>(input)[..weight.columns * self.inner];
            return one_row::run(data, self.inner, tile.columns.clone(), x, out);
        }
        if let Some(scales) = &weight.scales {
            with_codes!(scales, io, [input, 0], self.inner, w => {
                if widened.is_empty() || tile.rows == 1 || tile::packs(tile.rows) {
                    return tile::run(tile, w, x, room, out);
                }
                for first in tile.columns.clone().step_by(WIDENED) {
                    let columns = first..tile.columns.end.min(first + WIDENED);
                    let part = Tile { columns: 0..columns.len(), ..*tile };
                    widen(w, columns, self.inner, widened);
                    let out = &mut out[first - tile.columns.start..];
                    tile::run(&part, Plain { data: &*widened, inner: self.inner }, x, room, out);
                }
            });
        } else if let Some(rows) = &weight.stored {
            let data = io.input::<u8>(input);
            for first in tile.columns.clone().step_by(WIDENED) {
                let count = WIDENED.min(tile.columns.end - first);
                rows.read(data, first, count, widened);
                let part = Tile { columns: 0..count, ..*tile };
                let out = &mut out[first - tile.columns.start..];
                tile::run(&part, Plain { data: &*widened, inner: self.inner }, x, room, out);
            }
        } else {
            simd::with_element!(weight.dtype, T => {
                let plain = Plain { data: io.input::<T>(input), inner: self.inner };
                if !tile::packs(tile.rows) && weight.columns * self.inner * size_of::<T>() >= STREAMED {
                    tile::run(tile, Streamed(plain), x, room, out);
                } else {
                    tile::run(tile, plain, x, room, out);
                }
            });
        }
    }

    #[cfg(target_arch = "x86_64")]
    /// [`crate::kernel::CpuKernel::run`] of a row of f32 without biases, from the products to the output without a detour.
    pub(super) fn run_one_row(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let copied = if self.is_copied() { self.stride() } else { 0 };
        let [copy, gated] = scratch.slices::<f32, 2>([copied, self.tile]);
        if copied > 0 {
            self.copy_x(io, 0..1, copy);
        }
        let x = if copied > 0 { &*copy } else { io.input(self.x) };
        let x = x.as_chunks::<LANES>().0;
        for piece in pieces {
            let (which, columns) = self.place(piece);
            let weight =
                |which: usize| &io.input::<f32>(self.x + 1 + which)[..self.weights[which].columns * self.inner];
            // SAFETY: these columns are this piece's alone.
            let out = unsafe { io.output::<f32>(which).part(columns.clone()) };
            one_row::run(weight(which), self.inner, columns.clone(), x, out);
            match self.after {
                After::Nothing => {}
                After::Add => simd::add(out, &io.input(0)[columns]),
                After::Swiglu => {
                    let gated = &mut gated[..columns.len()];
                    one_row::run(weight(1), self.inner, columns, x, gated);
                    simd::swiglu(out, gated);
                }
            }
        }
    }
}
