//! What is kept for the rows of a piece, and spans of the cache brought into it.

use std::ops::Range;

use half::bf16;
use ridge_graph::DType;

use super::softmax::SpanSight;
use super::span::{Keys, Lanes, SPAN, STEP, STEPS, Scales, lanes};
use super::terms::split_rows;
use crate::amx::{self, SIDE, Words};
use crate::io::KernelIo;
use crate::kernels::attention::kernel::{AttentionKernel, TokenRows, with_stored};
use crate::scratch::Scratch;

/// Heads whose keys and values few queries walk through together.
const HEADS: usize = 8;

/// Two tiles of queries, or the last one, and how many of a span's keys they see at most: not 0.
pub(super) struct TilePair {
    pub(super) tiles: Range<usize>,
    pub(super) keys: usize,
}

impl TilePair {
    /// Tiles along its keys.
    pub(super) fn steps(&self) -> usize {
        self.keys.div_ceil(STEP)
    }
}

/// What is kept for the rows of a piece.
pub(super) struct TileState<'a> {
    /// Queries as they lie in memory, then as tiles of columns: `[tile][term][depth]`.
    pub(super) q: &'a mut [u32],
    pub(super) q_tiles: &'a mut [Words],
    /// Terms of a span's keys, or values: `[term][SPAN][width]`.
    pub(super) span: &'a mut [bf16],
    /// Of a span of codes.
    pub(super) scales: &'a mut Scales,
    /// See [`Rests`].
    pub(super) rest: &'a mut [bf16],
    pub(super) rests: Keys,
    /// Terms of a span's values, transposed: `[term][width / 16][STEPS]`.
    pub(super) values: &'a mut [Words],
    /// Twice, of two tiles of queries: a tile of 16 keys after another.
    pub(super) scores: &'a mut [Words],
    /// Twice, of two tiles of queries: `[tile][term][STEPS]`.
    pub(super) weights: &'a mut [Words],
    /// For each two tiles of queries those of `width` elements.
    pub(super) out: &'a mut [Words],
    pub(super) largest: &'a mut [Lanes<f32>],
    pub(super) total: &'a mut [Lanes<f32>],
    /// What the parts before gave.
    pub(super) merged: PartSums<'a>,
    /// Rows of a tile of queries on their way out.
    pub(super) line: &'a mut [f32],
}

/// Sums of weighed values, largest scores and sums of weights, as the like of [`TileState`].
pub(super) struct PartSums<'a> {
    pub(super) out: &'a mut [Words],
    pub(super) largest: &'a mut [Lanes<f32>],
    pub(super) total: &'a mut [Lanes<f32>],
}

impl TileState<'_> {
    /// What the first part gave becomes what others are merged into.
    pub(super) fn keep(&mut self) {
        std::mem::swap(&mut self.out, &mut self.merged.out);
        std::mem::swap(&mut self.largest, &mut self.merged.largest);
        std::mem::swap(&mut self.total, &mut self.merged.total);
    }
}

impl AttentionKernel {
    /// Elements of a head, filled up to whole tiles.
    pub(super) fn width(&self) -> usize {
        self.dim.next_multiple_of(STEP)
    }

    /// Do the queries of `tokens` tokens fill one tile at most?
    pub(super) fn is_few(&self, tokens: usize) -> bool {
        tokens * self.group() <= SIDE
    }

    /// Kv heads that one walk through the cache is for: few queries take a tile for each head.
    pub(super) fn heads_together(&self) -> usize {
        if self.is_few(1) { HEADS.min(self.kv_heads) } else { 1 }
    }

    pub(super) fn state<'a, const TERMS: usize>(&self, scratch: &'a mut Scratch) -> TileState<'a> {
        let (rows, width) = (self.together * self.group(), self.width());
        let (tiles, tile) = (rows.div_ceil(SIDE).max(self.heads_together()), SIDE * SIDE);
        let pairs = tiles.next_multiple_of(2);
        let [q, q_tiles, span, scales, rest, values, scores, weights, out, merged, sums, line] = scratch
            .slices::<u32, 12>([
                rows * self.dim,
                tiles * TERMS * (width / STEP) * tile,
                TERMS * SPAN * width / 2,
                2 * SPAN,
                SPAN * width / 2,
                TERMS * width / SIDE * STEPS * tile,
                2 * 2 * SPAN / SIDE * tile,
                2 * 2 * TERMS * STEPS * tile,
                pairs * width / SIDE * tile,
                pairs * width / SIDE * tile,
                4 * pairs * SIDE,
                SIDE * width,
            ]);
        let mut sums = amx::floats(sums).as_chunks_mut().0.chunks_exact_mut(pairs);
        let mut sums = || sums.next().expect("as many as were asked for");
        TileState {
            q,
            q_tiles: q_tiles.as_chunks_mut().0,
            span: amx::elements::<bf16>(span),
            scales: amx::floats(scales).as_chunks_mut().0.first_chunk_mut().expect("two times a span"),
            rest: amx::elements::<bf16>(rest),
            rests: Keys::default(),
            values: values.as_chunks_mut().0,
            scores: scores.as_chunks_mut().0,
            weights: weights.as_chunks_mut().0,
            out: out.as_chunks_mut().0,
            largest: sums(),
            total: sums(),
            merged: PartSums { out: merged.as_chunks_mut().0, largest: sums(), total: sums() },
            line: amx::floats(line),
        }
    }

    /// The first row of q of token `token` and kv head `head`.
    pub(super) fn first_row(&self, token: usize, head: usize) -> usize {
        (token * self.heads + head * self.group()) * self.dim
    }

    /// Terms of keys and values: a code is one, and its scale goes to scores and weights.
    pub(super) fn stored_terms<const TERMS: usize>(&self) -> usize {
        if self.cache == DType::I8 { 1 } else { TERMS }
    }

    /// The scales of a span of codes.
    pub(super) fn load_scales(
        &self,
        io: &KernelIo<'_>,
        head: usize,
        rows: &TokenRows,
        span: &Range<usize>,
        to: &mut Scales,
    ) {
        if self.cache != DType::I8 {
            return;
        }
        for (side, to) in to.iter_mut().enumerate() {
            self.runs(io, rows.sequence, span, |keys, at| match at.and_then(|at| self.scales(io, head, side, at)) {
                Some(scales) => to[keys.clone()].copy_from_slice(&scales[..keys.len()]),
                None => to[keys].fill(0.0),
            });
        }
    }

    /// The span's keys (side 0) or values (side 1) as terms; zeros where there are none, up to a whole step.
    pub(super) fn fill_span<const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        head: usize,
        rows: &TokenRows,
        side: usize,
        span: &Range<usize>,
        state: &mut TileState<'_>,
    ) {
        let (width, term, terms) = (self.width(), SPAN * self.width(), self.stored_terms::<TERMS>());
        let to = &mut *state.span;
        with_stored!(self.cache, T => {
            let cache = io.input::<T>(1);
            self.runs(io, rows.sequence, span, |keys, at| match at {
                Some(at) => {
                    let from = &self.slab(cache, head, side, at)[..keys.len() * self.dim];
                    let to = &mut to[keys.start * width..];
                    // SAFETY: there is AMX, and every machine that has it has AVX-512.
                    unsafe {
                        match self.cache {
                            DType::I8 => split_rows::<T, 1>(from, self.dim, width, term, to),
                            _ => split_rows::<T, TERMS>(from, self.dim, width, term, to),
                        }
                    }
                }
                None => (0..terms).for_each(|t| to[t * term..][keys.start * width..keys.end * width].fill(bf16::ZERO)),
            });
        });
        for t in 0..terms {
            to[t * term..][span.len() * width..span.len().next_multiple_of(STEP) * width].fill(bf16::ZERO);
        }
    }

    /// What the queries of tile `tile` see of the span that begins at `from`. Lanes without a query are as the last one.
    pub(super) fn span(&self, rows: &TokenRows, from: usize, tile: usize) -> SpanSight {
        let (group, last) = (self.group() as u32, rows.tokens.len() - 1);
        let token = |lane: usize| (((tile * SIDE + lane) as u32 / group) as usize).min(last);
        let within = |position: usize| position.saturating_sub(from).min(SPAN) as i32;
        SpanSight {
            seen: lanes(|lane| within(rows.seen + token(lane))),
            start: lanes(|lane| within(self.start(rows, token(lane)))),
            scale: self.scale,
            softcap: self.softcap,
        }
    }
}
