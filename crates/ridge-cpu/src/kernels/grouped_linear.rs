//! Products of groups of rows, each with a weight of its own, perhaps two of one input whose first gates the second.
//!
//! Floor: the weight of every group that has rows read once a step (decode), or `2 M N K` operations (prompts). A product
//! is that of a linear with plain x (`linear/tile.rs`), with the same bits however many rows a group has. Pieces are tiles of
//! columns of all groups, so that threads have equal shares whichever groups have rows.

use std::ops::Range;

use ridge_graph::format::{BLOCK, CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::GroupedLinear as GroupedLinearOp;
use ridge_graph::{DType, FormatRef, Function, Op};

use super::linear::scales::{WeightScales, with_codes};
use super::linear::source::Plain;
use super::linear::tile::{self, Room, Tile};
use super::quant;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, OperandType, Preparation};
use crate::scratch::Scratch;
use crate::simd::{self, Element, LANES};

pub(super) fn entries() -> [KernelEntry; 3] {
    [
        KernelEntry::new("grouped_linear", "grouped_linear(x, w, offsets)", supports, |s| make(s, false)),
        KernelEntry::new("grouped_linear_rows", "grouped_linear(x, w, offsets, rows)", supports, |s| make(s, false)),
        KernelEntry::new(
            "grouped_linear_swiglu",
            "swiglu(grouped_linear(x, g, offsets, rows), grouped_linear(x, u, offsets, rows))",
            supports,
            |s| make(s, true),
        ),
    ]
}

/// Weights that are plain, in blocks, or codes with scales.
fn supports(body: &Function) -> bool {
    let weights = body.nodes.iter().filter_map(|node| match &node.op {
        Op::Composite(op) if op.downcast::<GroupedLinearOp>().is_some() => Some(body.ty(node.inputs[1])),
        _ => None,
    });
    let reads = |format: &FormatRef| quant::supports(format) || format.downcast::<ScaledFormat>().is_some();
    weights.into_iter().all(|w| w.format.as_ref().is_none_or(reads))
}

/// Columns of a piece.
const TILE: usize = 32;
/// Rows of a group that a tile of its weight is used for at a time: their part of one block of K stays in L2.
const ROW_BLOCK: usize = 64;
/// Columns that are widened at once: they stay in cache until they are multiplied.
const WIDENED: usize = 4;

/// How a weight is stored.
enum WeightStorage {
    Plain(DType),
    Blocks(quant::BlockRows),
    /// Codes with scales of rows, the weight or blocks, which are multiplied as they are.
    Codes(WeightScales),
    Scaled {
        format: ScaledFormat,
        /// Where its scales begin, in bytes.
        scales: usize,
    },
}

impl WeightStorage {
    fn new(w: &OperandType) -> Result<Self, String> {
        let Some(format) = &w.format else { return Ok(Self::Plain(w.dtype)) };
        if let Some(scales) = WeightScales::new(w, false)? {
            return Ok(Self::Codes(scales));
        }
        if let Some(format) = format.downcast::<ScaledFormat>() {
            return Ok(Self::Scaled { format: *format, scales: w.component_offsets()?[1] });
        }
        let blocks = quant::BlockRows::new(format, w.last());
        Ok(Self::Blocks(blocks.ok_or_else(|| format!("weights stored in {}", format.name()))?))
    }
}

struct GroupedLinear {
    /// Rows of the output, and of x.
    rows: usize,
    rows_of_x: usize,
    inner: usize,
    columns: usize,
    groups: usize,
    dtype: DType,
    gathered: bool,
    /// The inputs that are weights; of two the first is the gate of the second.
    weights: Vec<(usize, WeightStorage)>,
    nanos_per_piece: f64,
}

fn make(spec: &KernelSpec<'_>, gated: bool) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<GroupedLinearOp>().ok_or("no grouped_linear in the group")?;
    let (x, w) = (&spec.inputs[0], &spec.inputs[1]);
    let [groups, columns, inner] = w.shape[..] else { return Err("a weight is no stack of matrices".into()) };
    let rows = spec.outputs[0].shape[0];
    // In the order of the pattern's text, x, offsets and rows once more come before the second.
    let mut weights = vec![(1, WeightStorage::new(w)?)];
    if gated {
        weights.push((5, WeightStorage::new(&spec.inputs[5])?));
    }
    let macs = (rows * columns * inner * weights.len()) as f64;
    let bytes = (rows.min(groups) * columns * inner * weights.len() * w.dtype.size_bytes()) as f64;
    let nanos = (macs * 0.015).max(bytes * 0.08);
    let pieces = (groups * columns.div_ceil(TILE)).max(1);
    Ok(Box::new(GroupedLinear {
        rows,
        rows_of_x: x.shape[0],
        inner,
        columns,
        groups,
        dtype: x.dtype,
        gathered: op.gathered,
        weights,
        nanos_per_piece: nanos / pieces as f64 + 2.0,
    }))
}

impl GroupedLinear {
    /// Is x copied? It lies as sums want it if its rows are in order, f32 and whole vectors.
    fn is_copied(&self) -> bool {
        self.gathered || self.dtype != DType::F32 || !self.inner.is_multiple_of(LANES)
    }

    fn stride(&self) -> usize {
        self.inner.next_multiple_of(LANES)
    }

    /// Where group `group` begins, at most the number of rows; that behind the last is where groups end.
    fn offset(&self, io: &KernelIo<'_>, group: usize) -> usize {
        usize::try_from(io.input::<i32>(2)[group]).unwrap_or(0).min(self.rows)
    }

    /// Products of the rows of `x` with columns of group `group`, one row after another.
    fn products(
        &self,
        io: &KernelIo<'_>,
        which: usize,
        group: usize,
        x: &[f32],
        tile: &Tile,
        room: &mut Room<'_>,
        widened: &mut [f32],
        out: &mut [f32],
    ) {
        let (input, storage) = &self.weights[which];
        let x = x.as_chunks::<LANES>().0;
        let out = &mut out[..tile.rows * tile.columns.len()];
        let first_row = group * self.columns;
        if let WeightStorage::Plain(dtype) = storage {
            let columns = first_row + tile.columns.start..first_row + tile.columns.end;
            simd::with_element!(*dtype, T => {
                let data = &io.input::<T>(*input)[..self.groups * self.columns * self.inner];
                tile::run(&Tile { columns, ..*tile }, Plain { data, inner: self.inner }, x, room, out);
            });
            return;
        }
        if let WeightStorage::Codes(scales) = storage {
            let place = [*input, group];
            with_codes!(scales, io, place, self.inner, w => tile::run(tile, w, x, room, out));
            return scales.apply(io, place, &tile.columns, out);
        }
        for first in tile.columns.clone().step_by(WIDENED) {
            let count = WIDENED.min(tile.columns.end - first);
            let widened = &mut widened[..count * self.inner];
            match storage {
                WeightStorage::Blocks(rows) => rows.read(io.input::<u8>(*input), first_row + first, count, widened),
                WeightStorage::Scaled { format, scales } => {
                    for (i, row) in widened.chunks_exact_mut(self.inner.max(1)).enumerate() {
                        self.read_scaled(io, *input, *format, *scales, first_row + first + i, row);
                    }
                }
                WeightStorage::Plain(_) | WeightStorage::Codes(_) => {}
            }
            let part = Tile { columns: 0..count, ..*tile };
            tile::run(
                &part,
                Plain { data: &*widened, inner: self.inner },
                x,
                room,
                &mut out[first - tile.columns.start..],
            );
        }
    }

    /// Row `row`, over all groups, of a weight of codes whose scales begin at byte `scales`.
    fn read_scaled(
        &self,
        io: &KernelIo<'_>,
        input: usize,
        format: ScaledFormat,
        scales: usize,
        row: usize,
        out: &mut [f32],
    ) {
        let at = row * self.inner;
        match format.codes {
            CodeType::Int8 => widen_codes(&io.input::<i8>(input)[at..at + self.inner], out),
            CodeType::F8E4M3 | CodeType::F8E5M2 => simd::load(io, input, format.codes.dtype(), at, out),
        }
        let scales = io.input_at::<f32>(input, scales);
        // The elements that share a scale, and the first of the row's scales.
        let (size, first) = match format.scales {
            ScaleLayout::Tensor => (self.inner, 0),
            ScaleLayout::Row => (self.inner, row),
            ScaleLayout::Group(size) => (size, row * self.inner.div_ceil(size)),
            ScaleLayout::Block => {
                let blocks = row / self.columns * self.columns.div_ceil(BLOCK) + row % self.columns / BLOCK;
                (BLOCK, blocks * self.inner.div_ceil(BLOCK))
            }
        };
        for (unit, scale) in out.chunks_mut(size.max(1)).zip(&scales[first..]) {
            simd::scale(unit, *scale);
        }
    }
}

simd::vectorised! {
    fn widen_codes(codes: &[i8], out: &mut [f32]) {
        for (x, code) in out.iter_mut().zip(codes) {
            *x = f32::from(*code);
        }
    }
}

impl CpuKernel for GroupedLinear {
    fn pieces(&self) -> usize {
        if self.rows * self.columns == 0 {
            return 0;
        }
        // The last clears the rows behind the last group.
        self.groups * self.columns.div_ceil(TILE) + 1
    }

    fn nanos_per_piece(&self) -> f64 {
        self.nanos_per_piece
    }

    fn preparation(&self) -> Option<Preparation> {
        (self.is_copied() && self.rows > 0).then(|| Preparation {
            bytes: self.rows * self.stride() * size_of::<f32>(),
            pieces: self.rows,
            nanos_per_piece: self.inner as f64 * 0.2,
        })
    }

    fn prepare(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        let stride = self.stride();
        let end = self.offset(io, self.groups);
        for row in pieces.start..pieces.end.min(end) {
            // SAFETY: this row is that of this piece.
            let to = unsafe { io.room::<f32>().part(row * stride..(row + 1) * stride) };
            let from = if self.gathered { usize::try_from(io.input::<i32>(3)[row]).ok() } else { Some(row) };
            match from.filter(|from| *from < self.rows_of_x) {
                Some(from) => simd::load(io, 0, self.dtype, from * self.inner, &mut to[..self.inner]),
                None => to[..self.inner].fill(0.0),
            }
            tile::fill(to, self.inner);
        }
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let (vectors, block) = (self.inner.div_ceil(LANES), ROW_BLOCK.min(self.rows));
        let in_place = |storage: &WeightStorage| matches!(storage, WeightStorage::Plain(_) | WeightStorage::Codes(_));
        let in_place = self.weights.iter().all(|(_, storage)| in_place(storage));
        let [sums, packed, widened, products, gated] = scratch.slices::<f32, 5>([
            block * TILE * LANES,
            tile::packed_room(block, vectors) * LANES,
            if in_place { 0 } else { WIDENED * self.inner },
            block * TILE,
            if self.weights.len() > 1 { block * TILE } else { 0 },
        ]);
        let x: &[f32] = if self.is_copied() { io.prepared() } else { io.input(0) };
        for piece in pieces {
            let (tile, group) = (piece / self.groups, piece % self.groups);
            if tile == self.columns.div_ceil(TILE) {
                let behind = self.offset(io, self.groups) * self.columns..self.rows * self.columns;
                // SAFETY: no group has these rows, and this is the only piece that writes them.
                simd::with_element!(self.dtype, T => unsafe { io.output::<T>(0).part(behind).fill(T::narrow(0.0)) });
                continue;
            }
            let all = tile * TILE..((tile + 1) * TILE).min(self.columns);
            let (begin, end) = (self.offset(io, group), self.offset(io, group + 1));
            for first in (begin..end).step_by(ROW_BLOCK) {
                let rows = ROW_BLOCK.min(end - first);
                let x = &x[first * self.stride()..];
                for left in all.clone().step_by(tile::columns(rows)) {
                    let columns = left..(left + tile::columns(rows)).min(all.end);
                    let width = columns.len();
                    let at = first * self.columns + left;
                    let tile = Tile { inner: self.inner, rows, columns, stride: width };
                    let mut room = Room { sums: sums.as_chunks_mut().0, weights: packed.as_chunks_mut().0 };
                    self.products(io, 0, group, x, &tile, &mut room, widened, products);
                    let products = &mut products[..rows * width];
                    if self.weights.len() > 1 {
                        self.products(io, 1, group, x, &tile, &mut room, widened, gated);
                        simd::swiglu(products, &gated[..rows * width]);
                    }
                    // SAFETY: these columns of these rows are this piece's alone.
                    simd::with_element!(self.dtype, T => unsafe {
                        simd::store_rows(products, width, io.output::<T>(0), at, self.columns);
                    });
                }
            }
        }
    }
}
