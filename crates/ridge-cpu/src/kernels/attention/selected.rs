//! Attention to selected positions of a paged cache.
//!
//! Floor: the selected rows of each token read once, and `4 dim` operations a (query, row) pair of each head.
//!
//! A piece is a token and some of the query heads that share keys, so that one token keeps several threads busy; rows are
//! then read again from the cache of the processor. They are gathered as f32, [`ROWS`] at a time in the order of the
//! selection, and a softmax goes over these parts. A token's bits depend on its own selection alone.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::SelectedAttention;

use super::kernel::{SPAN, with_stored};
use super::online::{RowSums, absorb};
use super::values::{self, KeyRun, weigh};
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelSpec};
use crate::kernels::linear::source::{Lanes, Plain};
use crate::kernels::linear::tile::{self, Room, Tile};
use crate::scratch::Scratch;
use crate::simd::{self, LANES};

/// Query heads of a piece.
const HEADS: usize = 16;

/// Rows that are gathered at a time: they stay in L2. Scores have strides of [`SPAN`].
const ROWS: usize = 128;
const _: () = assert!(ROWS <= SPAN);

struct SelectedKernel {
    scale: f32,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    sides: usize,
    dim: usize,
    dtype: DType,
    blocks: usize,
    block_size: usize,
    cache: DType,
    /// Are there scales of its rows?
    scaled: bool,
    sequences: usize,
    /// Columns of the block table.
    table: usize,
    /// Columns of the selection.
    selected: usize,
}

/// The query heads of a piece: `count` from `first` on, of one kv head.
struct PieceHeads {
    token: usize,
    kv_head: usize,
    first: usize,
    count: usize,
}

/// Working memory of a piece, with a row for each of its heads.
struct PieceState<'a> {
    q: &'a mut [Lanes],
    /// Weighed values, in chains: see [`values`].
    out: &'a mut [Lanes],
    /// Scores, then their exponentials: [`SPAN`] a row.
    scores: &'a mut [f32],
    largest: &'a mut [f32],
    total: &'a mut [f32],
    sums: &'a mut [Lanes],
    weights: &'a mut [Lanes],
}

pub(super) fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<SelectedAttention>().ok_or("no selected attention in the group")?;
    let [q, kv, table, _, selected, ..] = &spec.inputs[..] else {
        return Err("selected attention takes five inputs".into());
    };
    Ok(Box::new(SelectedKernel {
        scale: op.scale as f32,
        tokens: q.shape[0],
        heads: q.shape[1],
        kv_heads: kv.shape[2],
        sides: kv.shape[1],
        dim: q.shape[2],
        dtype: q.dtype,
        blocks: kv.shape[0],
        block_size: kv.shape[3],
        cache: kv.dtype,
        scaled: spec.inputs.len() > 5,
        sequences: table.shape[0],
        table: table.shape[1],
        selected: selected.shape[1],
    }))
}

impl CpuKernel for SelectedKernel {
    fn pieces(&self) -> usize {
        if self.heads * self.dim == 0 { 0 } else { self.tokens * self.kv_heads * self.pieces_of_group() }
    }

    fn nanos_per_piece(&self) -> f64 {
        let heads = self.group().min(HEADS) as f64;
        100.0 + self.selected as f64 * (heads * (1.0 + self.dim as f64 * 0.05) + self.dim as f64 * 0.1)
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let (rows, vectors) = (self.group().min(HEADS), self.dim.div_ceil(LANES));
        let [q, out, scores, largest, total, sums, weights, gathered] = scratch.slices::<f32, 8>([
            rows * vectors * LANES,
            rows * self.chained() * LANES,
            rows * SPAN,
            rows,
            rows,
            rows * tile::columns(rows) * LANES,
            tile::packed_room(rows, vectors) * LANES,
            ROWS * self.dim,
        ]);
        let mut state = PieceState {
            q: q.as_chunks_mut().0,
            out: out.as_chunks_mut().0,
            scores,
            largest,
            total,
            sums: sums.as_chunks_mut().0,
            weights: weights.as_chunks_mut().0,
        };
        for piece in pieces {
            let (row, part) = (piece / self.pieces_of_group(), piece % self.pieces_of_group());
            let (token, kv_head) = (row / self.kv_heads, row % self.kv_heads);
            let count = HEADS.min(self.group() - part * HEADS);
            let heads = PieceHeads { token, kv_head, first: kv_head * self.group() + part * HEADS, count };
            self.attend(io, &heads, &mut state, gathered);
        }
    }
}

impl SelectedKernel {
    fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    fn pieces_of_group(&self) -> usize {
        self.group().div_ceil(HEADS)
    }

    /// Vectors of all chains of a head.
    fn chained(&self) -> usize {
        let vectors = self.dim.div_ceil(LANES);
        vectors * values::chains(vectors)
    }

    fn attend(&self, io: &KernelIo<'_>, heads: &PieceHeads, state: &mut PieceState<'_>, gathered: &mut [f32]) {
        let (count, vectors, chained) = (heads.count, self.dim.div_ceil(LANES), self.chained());
        let at = |nth: usize| (heads.token * self.heads + heads.first + nth) * self.dim;
        for (nth, q) in state.q[..count * vectors].chunks_exact_mut(vectors).enumerate() {
            let q = q.as_flattened_mut();
            simd::load(io, 0, self.dtype, at(nth), &mut q[..self.dim]);
            simd::scale(&mut q[..self.dim], self.scale);
            tile::fill(q, self.dim);
        }
        state.out[..count * chained].fill([0.0; LANES]);
        state.largest[..count].fill(f32::NEG_INFINITY);
        state.total[..count].fill(0.0);
        let mut rows = self.rows(io, heads.token);
        let (mut part, mut first) = ([None; ROWS], true);
        loop {
            let mut n = 0;
            for (to, row) in part.iter_mut().zip(rows.by_ref()) {
                *to = row;
                n += 1;
            }
            if n == 0 {
                break;
            }
            self.gather(io, heads.kv_head, 0, &part[..n], gathered);
            self.scores(count, n, state, gathered);
            for nth in 0..count {
                let mut sums = RowSums {
                    largest: &mut state.largest[nth],
                    total: &mut state.total[nth],
                    out: &mut state.out[nth * chained..][..chained],
                };
                absorb(&mut state.scores[nth * SPAN..][..n], first, &mut sums);
            }
            if self.sides > 1 {
                self.gather(io, heads.kv_head, 1, &part[..n], gathered);
            }
            let run = KeyRun { values: &gathered[..n * self.dim], dim: self.dim, first: 0, keys: n };
            weigh(&run, &state.scores[..count * SPAN], count, &mut state.out[..count * chained]);
            first = false;
        }
        for nth in 0..count {
            let out = &mut state.out[nth * chained..][..chained];
            values::add_chains(out, vectors);
            let values = &mut out.as_flattened_mut()[..self.dim];
            if state.total[nth] > 0.0 {
                simd::scale(values, 1.0 / state.total[nth]);
            }
            // SAFETY: these heads of this token are our piece's alone.
            unsafe { simd::store(io, 0, self.dtype, at(nth), values) };
        }
    }

    /// Block and offset of each position that `token` selects; there is no block where the table has none.
    fn rows<'a>(&self, io: &KernelIo<'a>, token: usize) -> impl Iterator<Item = Option<(usize, usize)>> + use<'a> {
        let sequence = usize::try_from(io.input::<i32>(3)[token]).ok().filter(|nth| *nth < self.sequences);
        let table = sequence.map_or(&[][..], |nth| &io.input::<i32>(2)[nth * self.table..][..self.table]);
        let (block_size, blocks) = (self.block_size, self.blocks);
        io.input::<i32>(4)[token * self.selected..][..self.selected].iter().filter_map(move |position| {
            let position = usize::try_from(*position).ok()?;
            let block = usize::try_from(*table.get(position / block_size)?).ok().filter(|block| *block < blocks);
            Some(block.map(|block| (block, position % block_size)))
        })
    }

    /// Keys (side 0) or values (side 1) of `rows`, one after another.
    fn gather(
        &self,
        io: &KernelIo<'_>,
        head: usize,
        side: usize,
        rows: &[Option<(usize, usize)>],
        gathered: &mut [f32],
    ) {
        for (row, to) in rows.iter().zip(gathered.chunks_exact_mut(self.dim)) {
            let Some((block, offset)) = row else {
                to.fill(0.0);
                continue;
            };
            let row = ((block * self.sides + side) * self.kv_heads + head) * self.block_size + offset;
            with_stored!(self.cache, T => simd::widen(&io.input::<T>(1)[row * self.dim..][..self.dim], to));
            if self.scaled {
                simd::scale(to, io.input::<f32>(5)[row]);
            }
        }
    }

    /// Scores of `count` heads for the `n` keys that were gathered.
    fn scores(&self, count: usize, n: usize, state: &mut PieceState<'_>, gathered: &[f32]) {
        let source = Plain { data: gathered, inner: self.dim };
        let columns = tile::columns(count);
        for from in (0..n).step_by(columns) {
            let tile = Tile { inner: self.dim, rows: count, columns: from..n.min(from + columns), stride: SPAN };
            let mut room = Room { sums: state.sums, weights: state.weights };
            tile::run(&tile, source, state.q, &mut room, &mut state.scores[from..count * SPAN]);
        }
    }
}
