//! Products with parameters: one, or several of one input, with biases, then a residual added or the gate of an MLP
//! applied.
//!
//! Floor: every weight read once a step (decode), or `2 M N K` operations (prompts). But on tiles, weights are used where
//! they lie, in rows of K. An output is a sum over K in [`LANES`] partial sums and a fixed tree, element `k` going to lane
//! `k % LANES` in the order of `k`, however many rows of x there are: `tile.rs` computes the same sums for a few
//! rows (weights widened in registers) and for many (weights widened once into a packed block). What does not fill the
//! lanes comes last, at the end of a vector whose beginning is masked, so that it is read without a loop.
//! Weights in blocks are widened into cache, a few columns at a time. Weights of bf16 are multiplied on matrix tiles
//! where the machine has them (`on_panels.rs` if they are repacked for it, else `on_tiles.rs`), and one row by weights of
//! f32 has a loop of its own (`one_row.rs`).

mod by_codes;
#[cfg(target_arch = "x86_64")]
mod on_panels;
#[cfg(target_arch = "x86_64")]
mod on_tiles;
#[cfg(target_arch = "x86_64")]
mod one_row;
pub(super) mod source;
pub(super) mod tile;

use std::ops::Range;

use ridge_graph::ops::{Activations, Linear as LinearOp, LinearGroup};
use ridge_graph::{DType, Function, Node, Op};

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::{Entry, int8, quant};
use crate::kernel::{Io, Kernel, Operand, Preparation, Scratch, Spec};
use crate::simd::{self, LANES};
use source::Plain;
use tile::{Room, Tile};

pub(super) const ENTRIES: &[Entry] = &[
    Entry { name: "linear", pattern: "linear(x, w)", supports, make: |s| make(s, After::Nothing) },
    Entry { name: "linear_bias", pattern: "linear(x, w, b)", supports, make: |s| make(s, After::Nothing) },
    Entry { name: "linear_group", pattern: "linear_group(x, ...)", supports, make: |s| make(s, After::Nothing) },
    Entry { name: "linear_add", pattern: "add(r, linear(x, w))", supports: adds, make: |s| make(s, After::Add) },
    Entry {
        name: "linear_bias_add",
        pattern: "add(r, linear(x, w, b))",
        supports: adds,
        make: |s| make(s, After::Add),
    },
    Entry {
        name: "linear_swiglu",
        pattern: "swiglu(g@linear_group(x, ...).0, g.1)",
        supports: gates,
        make: |s| make(s, After::Swiglu),
    },
];

/// What is done to the product before it is rounded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    Nothing,
    /// Input 0 is added.
    Add,
    /// The first weight's product is the gate of the second's.
    Swiglu,
}

/// Plain weights, or such in blocks; codes of x are multiplied by codes of all weights.
fn supports(body: &Function) -> bool {
    let (rounds, count) = body.nodes.iter().find_map(taken).unwrap_or((Activations::Exact, 0));
    let stored = body.args.iter().filter(|a| a.ty.format.is_some()).count();
    let fits = rounds == Activations::Exact || stored == count;
    fits && body.args.iter().all(|a| a.ty.format.as_ref().is_none_or(quant::supports))
}

/// How a linear takes x, and how many weights it has.
fn taken(node: &Node) -> Option<(Activations, usize)> {
    let Op::Composite(op) = &node.op else { return None };
    let one = op.downcast::<LinearOp>().map(|l| (l.activations, 1));
    one.or_else(|| op.downcast::<LinearGroup>().map(|g| (g.activations, g.count)))
}

/// Nothing is broadcast.
fn adds(body: &Function) -> bool {
    let sum = body.ty(body.outputs[0].var);
    let product = body.nodes.iter().find(|n| matches!(n.op, Op::Composite(_)));
    supports(body) && body.args[0].ty == *sum && product.is_some_and(|n| n.outputs[0] == *sum)
}

fn gates(body: &Function) -> bool {
    supports(body) && group(body).is_some_and(|g| g.count == 2)
}

fn group(body: &Function) -> Option<&LinearGroup> {
    body.nodes.iter().find_map(|n| match &n.op {
        Op::Composite(op) => op.downcast(),
        _ => None,
    })
}

/// Rows of x that a packed block is used for, at most: their part of one block of K stays in L2.
const ROW_BLOCK: usize = 64;

/// Columns in blocks that are widened at once: they stay in cache until they are multiplied.
const WIDENED: usize = 4;

/// Bytes of an output from which on it is written past the caches: about a core's L2. Its lines, a row apart, would else
/// be read first and push out x, which costs a prompt's widest products a tenth.
#[cfg(target_arch = "x86_64")]
const STREAMED: usize = 2 << 20;

struct Weight {
    columns: usize,
    dtype: DType,
    /// How its rows are read, if it is stored in blocks and they are not multiplied as codes.
    stored: Option<quant::Rows>,
    /// Input and dtype of the bias.
    bias: Option<(usize, DType)>,
    /// Tiles of the weights before.
    tiles_before: usize,
}

struct Linear {
    rows: usize,
    inner: usize,
    /// Dtype of x, of the residual and of the outputs.
    dtype: DType,
    /// The input that is x; weights follow.
    x: usize,
    weights: Vec<Weight>,
    after: After,
    /// Tiles of columns, over all weights that have outputs of their own.
    tiles: usize,
    /// Columns of a tile and rows of a block.
    tile: usize,
    row_block: usize,
    nanos_per_piece: f64,
    /// How the rows of each weight are codes, if codes of x multiply them.
    by_codes: Option<Vec<int8::Codes>>,
    /// Are the products those of matrix tiles?
    #[cfg(target_arch = "x86_64")]
    on_tiles: bool,
    /// Are they so with weights in panels?
    #[cfg(target_arch = "x86_64")]
    on_panels: bool,
    /// Would its weights be taken in panels?
    takes_panels: bool,
    /// Is it one row by weights of f32?
    #[cfg(target_arch = "x86_64")]
    by_one_row: bool,
}

/// Products on matrix tiles take weights of bf16, as long as a tile, and those in blocks if x is of bf16: in any other
/// dtype their values would have to be more than one term.
#[cfg(target_arch = "x86_64")]
fn on_tiles(x: &Operand, weights: &[Operand]) -> bool {
    let fits = |w: &Operand| if w.format.is_some() { x.dtype == DType::BF16 } else { w.dtype == DType::BF16 };
    weights.iter().all(fits) && amx::takes(x.dtype, x.last()) && simd::isa() == simd::Isa::Amx
}

/// How the rows of `weights` are codes.
fn codes(weights: &[Operand]) -> Result<Vec<int8::Codes>, String> {
    let of_weight = |w: &Operand| w.format.as_ref().and_then(int8::Codes::new).ok_or("a weight is not stored in codes");
    Ok(weights.iter().map(of_weight).collect::<Result<_, _>>()?)
}

fn make(spec: &Spec<'_>, after: After) -> Result<Box<dyn Kernel>, String> {
    let (count, biases) = match (spec.composite::<LinearOp>(), spec.composite::<LinearGroup>()) {
        (Some(one), _) => (1, one.bias),
        (_, Some(group)) => (group.count, group.biases),
        _ => return Err("no linear in the group".into()),
    };
    let first = usize::from(after == After::Add);
    let x = &spec.inputs[first];
    let rows = x.rows();
    let by_codes = match spec.body.nodes.iter().find_map(taken) {
        Some((Activations::Int8, _)) => Some(codes(&spec.inputs[first + 1..][..count])?),
        _ => None,
    };
    #[cfg(target_arch = "x86_64")]
    let on_tiles = by_codes.is_none() && on_tiles(x, &spec.inputs[first + 1..][..count]);
    #[cfg(target_arch = "x86_64")]
    let takes_panels = on_tiles && spec.inputs[first + 1..][..count].iter().all(|w| w.format.is_none());
    #[cfg(not(target_arch = "x86_64"))]
    let takes_panels = false;
    #[cfg(target_arch = "x86_64")]
    let on_panels = takes_panels && spec.inputs[first + 1..][..count].iter().all(|w| w.panels);
    let (tile, row_block) = (tile::columns(rows.min(ROW_BLOCK)), ROW_BLOCK);
    #[cfg(target_arch = "x86_64")]
    let plain = |w: &Operand| w.dtype == DType::F32 && w.format.is_none() && one_row::takes(w.shape[0], x.last());
    #[cfg(target_arch = "x86_64")]
    let by_one_row = rows == 1 && spec.inputs[first + 1..][..count].iter().all(plain);
    #[cfg(target_arch = "x86_64")]
    let tile = if by_one_row { one_row::COLUMNS } else { tile };
    #[cfg(target_arch = "x86_64")]
    let (tile, row_block) =
        if on_tiles { (amx::COLUMNS, amx::rows_together(x.dtype, rows)) } else { (tile, row_block) };
    let (tile, row_block) =
        if by_codes.is_some() { (int8::COLUMNS, int8::rows_together(rows, x.last())) } else { (tile, row_block) };
    let mut tiles = 0;
    let mut weights = Vec::with_capacity(count);
    for (i, w) in spec.inputs[first + 1..][..count].iter().enumerate() {
        let bias = first + 1 + count + i;
        weights.push(Weight {
            columns: w.shape[0],
            dtype: w.dtype,
            stored: w.format.as_ref().filter(|_| by_codes.is_none()).and_then(|f| quant::Rows::new(f, x.last())),
            bias: biases.then(|| (bias, spec.inputs[bias].dtype)),
            tiles_before: tiles,
        });
        tiles += w.shape[0].div_ceil(tile);
    }
    if after == After::Swiglu {
        tiles = weights[0].columns.div_ceil(tile);
    }
    let columns: usize = weights.iter().map(|w| w.columns).sum();
    let macs = (rows.min(row_block) * columns * x.last()) as f64;
    // Small weights are in cache.
    let bytes = match (&by_codes, weights.first()) {
        (Some(codes), _) => weights.iter().zip(codes).map(|(w, codes)| w.columns * codes.bytes(x.last())).sum(),
        (None, first) => columns * x.last() * first.map_or(0, |w| w.dtype.size_bytes()),
    } as f64;
    let nanos_per_byte = if bytes < 1e6 { 0.02 } else { 0.08 };
    let nanos_per_mac = 0.015;
    #[cfg(target_arch = "x86_64")]
    let nanos_per_mac = if on_tiles { 0.001 * amx::terms(x.dtype) as f64 } else { nanos_per_mac };
    let nanos_per_mac = match (by_codes.is_some(), int8::by(rows)) {
        (false, _) => nanos_per_mac,
        #[cfg(target_arch = "x86_64")]
        (true, int8::By::Tiles | int8::By::Stream) => 0.0015,
        (true, int8::By::Lanes) => 0.01,
    };
    let nanos = (macs * nanos_per_mac).max(bytes * nanos_per_byte) + columns as f64;
    Ok(Box::new(Linear {
        rows,
        inner: x.last(),
        dtype: x.dtype,
        x: first,
        weights,
        after,
        tiles,
        tile,
        row_block,
        nanos_per_piece: nanos / tiles.max(1) as f64,
        #[cfg(target_arch = "x86_64")]
        on_tiles,
        #[cfg(target_arch = "x86_64")]
        on_panels,
        takes_panels,
        by_codes,
        #[cfg(target_arch = "x86_64")]
        by_one_row,
    }))
}

impl Kernel for Linear {
    fn pieces(&self) -> usize {
        self.tiles * self.rows.div_ceil(self.row_block)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.nanos_per_piece
    }

    fn takes_panels(&self) -> Range<usize> {
        if self.takes_panels { self.x + 1..self.x + 1 + self.weights.len() } else { 0..0 }
    }

    fn preparation(&self) -> Option<Preparation> {
        if self.by_codes.is_some() {
            return self.preparation_of_codes();
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return if self.on_panels { self.preparation_on_panels() } else { self.preparation_on_tiles() };
        }
        // A single row is copied where it is used.
        (self.is_copied() && self.rows > 1).then(|| Preparation {
            bytes: self.rows * self.stride() * size_of::<f32>(),
            pieces: self.rows,
            nanos_per_piece: self.inner as f64 * 0.2,
        })
    }

    fn prepare(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        if self.by_codes.is_some() {
            return self.prepare_codes(io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return if self.on_panels { self.prepare_on_panels(io, pieces) } else { self.prepare_on_tiles(io, pieces) };
        }
        let stride = self.stride();
        // SAFETY: these rows are those of these pieces.
        let to = unsafe { io.room::<f32>().part(pieces.start * stride..pieces.end * stride) };
        self.copy_x(io, pieces, to);
    }

    fn run(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        if let Some(of_weights) = &self.by_codes {
            return self.run_by_codes(of_weights, io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            if self.on_panels {
                return self.run_on_panels(io, pieces, scratch);
            }
            return self.run_on_tiles(io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if self.by_one_row && self.dtype == DType::F32 && self.weights.iter().all(|w| w.bias.is_none()) {
            return self.run_one_row(io, pieces, scratch);
        }
        let n = self.inner.div_ceil(LANES);
        let block = self.row_block.min(self.rows);
        let quantised = self.weights.iter().any(|w| w.stored.is_some());
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
}

impl Linear {
    /// Must x be copied? It lies as sums want it if it is f32 and fills the lanes.
    fn is_copied(&self) -> bool {
        self.dtype != DType::F32 || !self.inner.is_multiple_of(LANES)
    }

    /// Elements of a row of x as sums want it.
    fn stride(&self) -> usize {
        self.inner.next_multiple_of(LANES)
    }

    /// The weight and its columns that tile `tile` is of.
    fn place(&self, tile: usize) -> (usize, Range<usize>) {
        let which = match self.after {
            After::Swiglu => 0,
            After::Nothing | After::Add => {
                self.weights.iter().rposition(|w| w.tiles_before <= tile && w.columns > 0).unwrap_or(0)
            }
        };
        let begin = (tile - self.weights[which].tiles_before) * self.tile;
        (which, begin..(begin + self.tile).min(self.weights[which].columns))
    }

    /// From the products of a tile to the output.
    fn finish(
        &self,
        io: &Io<'_>,
        which: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        [products, gated, line]: [&mut [f32]; 3],
    ) {
        let width = columns.len();
        self.add_bias(io, which, &columns, &mut products[..rows.len() * width], line);
        if self.after == After::Swiglu {
            self.add_bias(io, 1, &columns, &mut gated[..rows.len() * width], line);
        }
        let of_weight = self.weights[which].columns;
        let products = &mut products[..rows.len() * width];
        let at = rows.start * of_weight + columns.start;
        match self.after {
            After::Nothing => {}
            After::Add => simd::with_element!(self.dtype, T => {
                simd::add_rows(products, width, &io.input::<T>(0)[at..], of_weight);
            }),
            After::Swiglu => simd::swiglu(products, &gated[..rows.len() * width]),
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles && self.rows * of_weight * self.dtype.size_bytes() >= STREAMED {
            // SAFETY: these columns of these rows are this piece's alone, and where there are tiles there is AVX-512.
            simd::with_element!(self.dtype, T => unsafe {
                simd::stream_rows(products, width, io.output::<T>(which), at, of_weight);
            });
            return;
        }
        // SAFETY: these columns of these rows are this piece's alone.
        simd::with_element!(self.dtype, T => unsafe {
            simd::store_rows(products, width, io.output::<T>(which), at, of_weight);
        });
    }

    /// Rows of x as f32, laid out as sums want them.
    fn copy_x(&self, io: &Io<'_>, rows: Range<usize>, to: &mut [f32]) {
        for (row, to) in rows.zip(to.chunks_exact_mut(self.stride().max(1))) {
            simd::load(io, self.x, self.dtype, row * self.inner, &mut to[..self.inner]);
            tile::fill(to, self.inner);
        }
    }

    /// A tile of products with weight `which`, one row after another.
    fn products(
        &self,
        io: &Io<'_>,
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
        if let Some(rows) = &weight.stored {
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
                let data = io.input::<T>(input);
                tile::run(tile, Plain { data, inner: self.inner }, x, room, out);
            });
        }
    }

    fn add_bias(&self, io: &Io<'_>, which: usize, columns: &Range<usize>, products: &mut [f32], line: &mut [f32]) {
        let Some((input, dtype)) = self.weights[which].bias else { return };
        let bias = simd::view(io, input, dtype, columns.start, &mut line[..columns.len()]);
        for row in products.chunks_exact_mut(columns.len()) {
            simd::add(row, bias);
        }
    }
}
