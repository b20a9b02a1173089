//! Queries that fill more than a tile: values are transposed once for all of them, and tiles work for one pair of tiles
//! of queries while vectors work for another.

use std::ops::Range;

use ridge_graph::DType;

use super::rests::{Rests, take_rest};
use super::softmax;
use super::span::{Keys, Lanes, SPAN, STEP, STEPS, scale_each};
use super::state::{TilePair, TileState};
use super::terms::transpose_values;
use crate::amx::{self, SIDE, Words};
use crate::io::KernelIo;
use crate::kernels::attention::kernel::{AttentionKernel, TokenRows};

impl AttentionKernel {
    pub(super) fn part_of_many<const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        head: usize,
        rows: &TokenRows,
        keys: &Range<usize>,
        state: &mut TileState<'_>,
    ) {
        let (group, width) = (self.group(), self.width());
        let count = rows.tokens.len() * group;
        let tiles = count.div_ceil(SIDE);
        let configured = amx::TileSession::begin();
        for from in keys.clone().step_by(SPAN) {
            let span = from..keys.end.min(from + SPAN);
            self.fill_span::<TERMS>(io, head, rows, 1, &span, state);
            let (terms, steps) = (self.stored_terms::<TERMS>(), span.len().div_ceil(STEP));
            state.rests = Keys::default();
            if self.cache != DType::I8 {
                state.rests = take_rest::<TERMS>(state.span, width, span.len(), state.rest);
            }
            // SAFETY: there is AMX, and every machine that has it has AVX-512.
            unsafe { transpose_values(state.span, width, terms, steps, state.values) };
            self.fill_span::<TERMS>(io, head, rows, 0, &span, state);
            self.load_scales(io, head, rows, &span, state.scales);
            let pair = |first: usize| {
                let tiles = first..tiles.min(first + 2);
                // Keys after the last that the pair's rows see are left out.
                let last = (tiles.end * SIDE).min(count) - 1;
                TilePair { tiles, keys: (rows.seen + last / group).saturating_sub(from).min(span.len()) }
            };
            let pairs = (0..tiles).step_by(2).map(pair).filter(|pair| pair.keys > 0);
            self.attend_span::<TERMS>(&configured, rows, from, pairs, state);
        }
    }

    /// All `pairs` with the span that begins at `from`. While vectors make weights of the scores of one pair, tiles make
    /// the scores of the next and multiply values by the weights of the one before.
    fn attend_span<const TERMS: usize>(
        &self,
        configured: &amx::TileSession,
        rows: &TokenRows,
        from: usize,
        mut pairs: impl Iterator<Item = TilePair>,
        state: &mut TileState<'_>,
    ) {
        let (depth, d_tiles) = (self.width() / STEP, self.width() / SIDE);
        let (mut scores, mut next_scores) = state.scores.split_at_mut(2 * SPAN / SIDE);
        let (mut weights, mut weights_before) = state.weights.split_at_mut(2 * TERMS * STEPS);
        let (span, values, q_tiles) = (&*state.span, &*state.values, &*state.q_tiles);
        let (terms, scales) = (self.stored_terms::<TERMS>(), (self.cache == DType::I8).then_some(&*state.scales));
        let score = |pair: &TilePair, step: usize, scores: &mut [Words]| {
            let together = pair.tiles.len();
            let scores = &mut scores[step * 2 * together..][..2 * together];
            // The products of terms, the smallest first.
            for order in (0..TERMS).rev() {
                for of_key in 0..terms.min(order + 1) {
                    let data = &span[(of_key * SPAN + step * STEP) * self.width()..];
                    let w = amx::TileRows { data, high: SIDE * self.width(), stride: self.width(), step: STEP };
                    let x = &q_tiles[(pair.tiles.start * TERMS + order - of_key) * depth..];
                    let fresh = order == TERMS - 1 && of_key == 0;
                    amx::multiply_rows(configured, w, x, TERMS * depth, depth, scores, fresh);
                }
            }
        };
        let weigh = |pair: &TilePair, d: usize, weights: &[Words], out: &mut [Words]| {
            let together = pair.tiles.len();
            let out = &mut out[pair.tiles.start * d_tiles + d * 2 * together..][..2 * together];
            for order in (0..TERMS).rev() {
                for of_value in 0..terms.min(order + 1) {
                    let data = amx::halves(&values[(of_value * d_tiles + 2 * d) * STEPS..]);
                    let w = amx::TileRows { data, high: STEPS * SIDE * STEP, stride: STEP, step: SIDE * STEP };
                    let x = &weights[(order - of_value) * STEPS..];
                    amx::multiply_rows(configured, w, x, TERMS * STEPS, pair.steps(), out, false);
                }
            }
        };
        let (mut before, mut here): (Option<TilePair>, _) = (None, pairs.next());
        if let Some(pair) = &here {
            (0..pair.steps()).for_each(|step| score(pair, step, scores));
        }
        while let Some(pair) = here {
            let next = pairs.next();
            let (out_before, out) = state.out.split_at_mut(pair.tiles.start * d_tiles);
            let (to_score, to_weigh) =
                (next.as_ref().map_or(0, TilePair::steps), before.as_ref().map_or(0, |_| d_tiles / 2));
            let mut done = 0;
            let mut between = || {
                match (&next, &before) {
                    (Some(next), _) if done < to_score => score(next, done, next_scores),
                    (_, Some(before)) if done < to_score + to_weigh => {
                        weigh(before, done - to_score, weights_before, out_before);
                    }
                    _ => {}
                }
                done += 1;
            };
            let together = pair.tiles.len();
            for (nth, tile) in pair.tiles.clone().enumerate() {
                let mut scores = softmax::OfTile { tiles: &mut scores[..pair.steps() * 2 * together], nth, together };
                let weights = &mut weights[nth * TERMS * STEPS..][..TERMS * STEPS];
                let sums = (&mut state.largest[tile], &mut state.total[tile]);
                let (span, out) = (self.span(rows, from, tile), &mut out[..together * d_tiles]);
                let rescale = |factors: &Lanes<f32>| {
                    for line in out.iter_mut().skip(nth).step_by(together).flat_map(|tile| tile.as_chunks_mut().0) {
                        scale_each(line, factors);
                    }
                };
                // SAFETY: there is AMX, and every machine that has it has AVX-512.
                unsafe {
                    softmax::online_softmax::<TERMS>(&span, scales, &mut scores, sums, weights, rescale, &mut between);
                };
            }
            (pair.steps() * together..to_score + to_weigh).for_each(|_| between());
            if let Some(before) = &before {
                let rests = Rests { keys: &state.rests, values: state.rest };
                self.add_rests::<TERMS>(rows, from, before, &rests, weights_before, out_before);
            }
            (before, here) = (Some(pair), next);
            std::mem::swap(&mut scores, &mut next_scores);
            std::mem::swap(&mut weights, &mut weights_before);
        }
        if let Some(before) = &before {
            (0..d_tiles / 2).for_each(|d| weigh(before, d, weights_before, state.out));
            let rests = Rests { keys: &state.rests, values: state.rest };
            self.add_rests::<TERMS>(rows, from, before, &rests, weights_before, state.out);
        }
    }
}
