//! Attention in lanes of f32, for heads of any size.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::by_lane::LanePanels;
use super::kernel::{AttentionKernel, SPAN, TokenRows, with_stored};
use super::narrow;
use super::online::{RowSums, absorb};
use super::values::{self, KeyRun, weigh};
use crate::io::KernelIo;
use crate::kernels::linear::source::{Lanes, Plain};
use crate::kernels::linear::tile::{self, Room, Tile};
use crate::scratch::Scratch;
use crate::simd::{self, Element, LANES};

/// What is kept for the rows of a piece, one for each token and query head of the group, in this order.
struct LaneState<'a> {
    /// Vectors, as sums want them.
    q: &'a mut [Lanes],
    /// Vectors of weighed values, in chains: see [`values`].
    out: &'a mut [Lanes],
    /// Scores, then their exponentials: [`SPAN`] a row.
    scores: &'a mut [f32],
    largest: &'a mut [f32],
    total: &'a mut [f32],
    sums: &'a mut [Lanes],
    weights: &'a mut [Lanes],
    #[cfg(target_arch = "x86_64")]
    panels: Option<LanePanels<'a>>,
}

/// What weighed values are multiplied by: one over the sum of weights, which are relative to `largest`, and of the sink's.
fn share(total: f32, largest: f32, sink: Option<f32>) -> f32 {
    let Some(sink) = sink else { return 1.0 / total };
    let most = if sink > largest { sink } else { largest };
    let kept = (largest - most).exp();
    kept / (total * kept + (sink - most).exp())
}

impl AttentionKernel {
    pub(super) fn run_in_lanes(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let (rows, vectors) = (self.together * self.group(), self.dim.div_ceil(LANES));
        let columns = self.columns();
        #[cfg(target_arch = "x86_64")]
        let product = self.lane_product(rows);
        #[cfg(target_arch = "x86_64")]
        let [packed_q, packed_keys, tiles] = LanePanels::sizes(product, rows);
        #[cfg(not(target_arch = "x86_64"))]
        let [packed_q, packed_keys, tiles] = [0; 3];
        let [q, out, scores, largest, total, sums, weights, packed_q, packed_keys, tiles] =
            scratch.slices::<f32, 10>([
                rows * vectors * LANES,
                rows * values::chains(vectors) * vectors * LANES,
                rows * SPAN,
                rows,
                rows,
                rows * columns * LANES,
                tile::packed_room(rows, vectors) * LANES,
                packed_q,
                packed_keys,
                tiles,
            ]);
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (packed_q, packed_keys, tiles);
        let mut state = LaneState {
            q: q.as_chunks_mut().0,
            out: out.as_chunks_mut().0,
            scores,
            largest,
            total,
            sums: sums.as_chunks_mut().0,
            weights: weights.as_chunks_mut().0,
            #[cfg(target_arch = "x86_64")]
            panels: product.map(|product| LanePanels { product, q: packed_q, keys: packed_keys, sums: tiles }),
        };
        let per_head = self.tokens.div_ceil(self.together);
        for piece in pieces {
            let (head, block) = (piece / per_head, piece % per_head);
            let end = ((block + 1) * self.together).min(self.tokens);
            let mut token = block * self.together;
            while token < end {
                let rows = self.rows(io, token..end);
                token = rows.tokens.end;
                self.attend(io, head, &rows, &mut state);
            }
        }
    }

    /// Vectors of all chains of a row.
    fn chained(&self) -> usize {
        let vectors = self.dim.div_ceil(LANES);
        vectors * values::chains(vectors)
    }

    /// Keys whose scores are computed together.
    fn columns(&self) -> usize {
        tile::columns(self.together * self.group())
    }

    /// All of attention for `rows` and the query heads of kv head `head`.
    fn attend(&self, io: &KernelIo<'_>, head: usize, rows: &TokenRows, state: &mut LaneState<'_>) {
        let (group, vectors, chained) = (self.group(), self.dim.div_ceil(LANES), self.chained());
        let count = rows.tokens.len() * group;
        for (i, q) in state.q[..count * vectors].chunks_exact_mut(vectors).enumerate() {
            let q = q.as_flattened_mut();
            let at = ((rows.tokens.start + i / group) * self.heads + head * group + i % group) * self.dim;
            simd::load(io, 0, self.dtype, at, &mut q[..self.dim]);
            simd::scale(&mut q[..self.dim], self.scale);
            tile::fill(q, self.dim);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(panels) = state.panels.as_mut().filter(|_| Self::packs(count)) {
            panels.take(&state.q[..count * vectors], count);
        }
        state.out[..count * chained].fill([0.0; LANES]);
        state.largest[..count].fill(f32::NEG_INFINITY);
        state.total[..count].fill(0.0);
        let most = rows.most();
        let start = self.start(rows, 0) / SPAN * SPAN;
        for from in (start..most).step_by(SPAN) {
            let span = from..most.min(from + SPAN);
            with_stored!(self.cache, T => {
                let cache = io.input::<T>(1);
                self.scores::<T>(io, head, rows, &span, state);
                self.scale_scores(io, (head, 0), rows, &span, state.scores);
                self.online_softmax(io, head, rows, from, state);
                self.scale_scores(io, (head, 1), rows, &span, state.scores);
                self.runs(io, rows.sequence, &span, |keys, at| {
                    self.values(cache, head, rows, from + keys.start, keys, at, state);
                });
            });
        }
        let sinks = self.sinks.map(|input| &io.input::<f32>(input)[head * group..][..group]);
        for i in 0..count {
            let out = &mut state.out[i * chained..][..chained];
            values::add_chains(out, vectors);
            let values = &mut out.as_flattened_mut()[..self.dim];
            if state.total[i] > 0.0 {
                simd::scale(values, share(state.total[i], state.largest[i], sinks.map(|sinks| sinks[i % group])));
            }
            let at = ((rows.tokens.start + i / group) * self.heads + head * group + i % group) * self.dim;
            // SAFETY: this token's query heads of this kv head are our piece's alone.
            unsafe { simd::store(io, 0, self.dtype, at, values) };
        }
    }

    /// Scores of `rows` for the keys of `span`.
    fn scores<T: Element>(
        &self,
        io: &KernelIo<'_>,
        head: usize,
        rows: &TokenRows,
        span: &Range<usize>,
        state: &mut LaneState<'_>,
    ) {
        let count = rows.tokens.len() * self.group();
        #[cfg(target_arch = "x86_64")]
        if let Some(panels) = state.panels.as_mut().filter(|_| Self::packs(count)) {
            return self.scores_by_lane::<T>(io, head, rows, span, panels, state.scores);
        }
        let cache = io.input::<T>(1);
        self.runs(io, rows.sequence, span, |keys, at| self.scores_of_run(cache, head, count, keys, at, state));
    }

    /// Scores of `count` rows for keys `keys` of the span. A key that is nowhere is zero.
    fn scores_of_run<T: Element>(
        &self,
        cache: &[T],
        head: usize,
        count: usize,
        keys: Range<usize>,
        at: Option<(usize, usize)>,
        state: &mut LaneState<'_>,
    ) {
        let Some(at) = at else {
            return state.scores.chunks_exact_mut(SPAN).take(count).for_each(|row| row[keys.clone()].fill(0.0));
        };
        let slab = self.slab(cache, head, 0, at);
        if narrow::is_narrow(self.dim) {
            return narrow::scores(
                slab,
                self.dim,
                keys.len(),
                state.q,
                count,
                &mut state.scores[keys.start..count * SPAN],
            );
        }
        let source = Plain { data: slab, inner: self.dim };
        let columns = self.columns();
        for from in (0..keys.len()).step_by(columns) {
            let columns = from..(from + columns).min(keys.len());
            let out = &mut state.scores[keys.start + from..count * SPAN];
            let tile = Tile { inner: self.dim, rows: count, columns, stride: SPAN };
            tile::run(&tile, source, state.q, &mut Room { sums: state.sums, weights: state.weights }, out);
        }
    }

    /// Multiplies the scores or weights of each row by the scales of the span's keys (side 0) or values (side 1).
    fn scale_scores(
        &self,
        io: &KernelIo<'_>,
        (head, side): (usize, usize),
        rows: &TokenRows,
        span: &Range<usize>,
        scores: &mut [f32],
    ) {
        if !self.scaled {
            return;
        }
        let count = rows.tokens.len() * self.group();
        self.runs(io, rows.sequence, span, |keys, at| {
            let Some(scales) = at.and_then(|at| self.scales(io, head, side, at)) else { return };
            for row in scores.chunks_exact_mut(SPAN).take(count) {
                row[keys.clone()].iter_mut().zip(scales).for_each(|(score, scale)| *score *= scale);
            }
        });
    }

    /// Turns the scores of the span that begins at `from` into weights, and scales what came before.
    fn online_softmax(&self, io: &KernelIo<'_>, head: usize, rows: &TokenRows, from: usize, state: &mut LaneState<'_>) {
        let (group, chained) = (self.group(), self.chained());
        let slopes = self.slopes.map(|input| &io.input::<f32>(input)[head * group..][..group]);
        for i in 0..rows.tokens.len() * group {
            let seen = (rows.seen + i / group).saturating_sub(from).min(SPAN);
            let unseen = self.start(rows, i / group).saturating_sub(from).min(seen);
            let (before_window, scores) = state.scores[i * SPAN..][..seen].split_at_mut(unseen);
            before_window.fill(0.0);
            if scores.is_empty() {
                continue;
            }
            if let Some(cap) = self.softcap {
                scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
            }
            if let Some(slopes) = slopes {
                let (slope, back) = (slopes[i % group], rows.position + i / group - (from + unseen));
                scores.iter_mut().enumerate().for_each(|(j, score)| *score -= slope * (back - j) as f32);
            }
            let mut sums = RowSums {
                largest: &mut state.largest[i],
                total: &mut state.total[i],
                out: &mut state.out[i * chained..][..chained],
            };
            absorb(scores, from == 0, &mut sums);
        }
    }

    /// Adds values of `keys` of the span by their weights; `first` is the position of the first.
    fn values<T: Element>(
        &self,
        cache: &[T],
        head: usize,
        rows: &TokenRows,
        first: usize,
        keys: Range<usize>,
        at: Option<(usize, usize)>,
        state: &mut LaneState<'_>,
    ) {
        let Some(at) = at else { return };
        let (group, chained) = (self.group(), self.chained());
        let slab = self.slab(cache, head, 1, at);
        let run = |from: usize, end: usize| KeyRun {
            values: &slab[from * self.dim..],
            dim: self.dim,
            first: keys.start + from,
            keys: end - from,
        };
        // Keys that all tokens see at once, then for each token those that it sees alone or with some others.
        let sees = |token: usize| {
            let end = (rows.seen + token).saturating_sub(first).min(keys.len());
            self.start(rows, token).saturating_sub(first).min(end)..end
        };
        let last = rows.tokens.len() - 1;
        let (shared, all) = (sees(last).start..sees(0).end, (last + 1) * group);
        let mut add = |token: usize, keys_of: Range<usize>, rows: usize| {
            if !keys_of.is_empty() {
                let scores = &state.scores[token * group * SPAN + keys.start + keys_of.start..all * SPAN];
                let out = &mut state.out[token * group * chained..][..rows * chained];
                weigh(&run(keys_of.start, keys_of.end), scores, rows, out);
            }
        };
        if shared.is_empty() {
            return (0..=last).for_each(|token| add(token, sees(token), group));
        }
        // Earlier ones first.
        (0..last).for_each(|token| add(token, sees(token).start..shared.start, group));
        add(0, shared.clone(), all);
        (1..=last).for_each(|token| add(token, shared.end..sees(token).end, group));
    }
}
