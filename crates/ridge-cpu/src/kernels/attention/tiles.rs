//! Attention on matrix tiles (AMX), for heads of 32 elements and more.
//!
//! All is turned so that a query is a column: the tiles of scores have a key in each row and a query in each lane, so
//! the largest score, the exponentials and their sum are taken lane by lane, and two rows of exponentials together are
//! a row of the tile by which values are multiplied. Values are transposed once for all queries of a piece.
//!
//! Queries, keys, exponentials and values are as many terms of bf16 as the dtype of the queries has ([`amx::Terms`]);
//! with one they are rounded to bf16, and the sum of the exponentials is that of the rounded ones.
//!
//! Codes of a cache of i8 are one term, exactly; the scales of keys multiply scores, and those of values weights.
//!
//! A value that is infinite or NaN goes through no product, where the weight 0 of a query that does not see it would
//! make NaN of it: it is zero there, and is added afterwards for the queries that see it. Of a key it is the last term,
//! which meets the first term of a query only, so that it gives the score that it means.
//!
//! Of a long context each part has a softmax of its own (`parts.rs`).
//!
//! Floor: 16 cycles for each term product of 16 queries, 16 keys and 32 elements, twice; some 6 cycles for 16
//! exponentials.

mod few;
mod parts;
mod rests;
mod softmax;
mod terms;

use std::ops::Range;

use half::{bf16, f16};
use ridge_graph::DType;

use super::{Attention, Rows};
use crate::kernel::{Io, Scratch};
use crate::kernels::amx::{self, SIDE, Words};
use crate::simd;
use parts::{Sums, tile_of_sums};
use rests::{Rests, take_rest, weight};
use softmax::Span;
use terms::{split_rows, transpose_values};

/// Positions of a span: the scores of two tiles of queries stay in L1.
const SPAN: usize = 128;

/// Keys of a tile along which values are summed.
const STEP: usize = 2 * SIDE;

/// Tiles of a span along its keys.
const STEPS: usize = SPAN / STEP;

/// Rows (a query head of a token each) of a piece, at most, if tokens have fewer: keys and values are read and turned
/// once for all of them.
const ROWS: usize = 256;

/// Heads whose keys and values few queries walk through together.
const HEADS: usize = 8;

type Lanes<T> = [T; SIDE];

/// Keys of a span, a bit each.
type Keys = [u64; SPAN / 64];

/// Scales of a span's keys and values.
type Scales = [[f32; SPAN]; 2];

/// Tokens of a piece.
pub(super) fn together(tokens: usize, group: usize) -> usize {
    (ROWS / group.max(1)).clamp(1, tokens.max(1))
}

/// Two tiles of queries, or the last one, and how many of a span's keys they see at most: not 0.
struct Pair {
    tiles: Range<usize>,
    keys: usize,
}

impl Pair {
    /// Tiles along its keys.
    fn steps(&self) -> usize {
        self.keys.div_ceil(STEP)
    }
}

/// What is kept for the rows of a piece.
struct State<'a> {
    /// Queries as they lie in memory, then as tiles of columns: `[tile][term][depth]`.
    q: &'a mut [u32],
    q_tiles: &'a mut [Words],
    /// Terms of a span's keys, or values: `[term][SPAN][width]`.
    span: &'a mut [bf16],
    /// Of a span of codes.
    scales: &'a mut Scales,
    /// See [`Rests`].
    rest: &'a mut [bf16],
    rests: Keys,
    /// Terms of a span's values, transposed: `[term][width / 16][STEPS]`.
    values: &'a mut [Words],
    /// Twice, of two tiles of queries: a tile of 16 keys after another.
    scores: &'a mut [Words],
    /// Twice, of two tiles of queries: `[tile][term][STEPS]`.
    weights: &'a mut [Words],
    /// For each two tiles of queries those of `width` elements.
    out: &'a mut [Words],
    largest: &'a mut [Lanes<f32>],
    total: &'a mut [Lanes<f32>],
    /// What the parts before gave.
    merged: Sums<'a>,
    /// Rows of a tile of queries on their way out.
    line: &'a mut [f32],
}

impl Attention {
    pub(super) fn run_on_tiles(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        match self.dtype {
            DType::BF16 => self.run_of::<bf16, 1>(io, pieces, scratch),
            DType::F16 => self.run_of::<f16, 2>(io, pieces, scratch),
            _ => self.run_of::<f32, 3>(io, pieces, scratch),
        }
    }

    /// Elements of a head, filled up to whole tiles.
    fn width(&self) -> usize {
        self.dim.next_multiple_of(STEP)
    }

    pub(super) fn prepare_on_tiles(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        match self.dtype {
            DType::BF16 => self.prepare_parts::<bf16, 1>(io, pieces, scratch),
            DType::F16 => self.prepare_parts::<f16, 2>(io, pieces, scratch),
            _ => self.prepare_parts::<f32, 3>(io, pieces, scratch),
        }
    }

    /// Kv heads that one walk through the cache is for: few queries take a tile for each head.
    fn heads_together(&self) -> usize {
        if self.is_few(1) { HEADS.min(self.kv_heads) } else { 1 }
    }

    fn state<'a, const TERMS: usize>(&self, scratch: &'a mut Scratch) -> State<'a> {
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
        State {
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
            merged: Sums { out: merged.as_chunks_mut().0, largest: sums(), total: sums() },
            line: amx::floats(line),
        }
    }

    fn run_of<T: amx::Terms, const TERMS: usize>(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        if self.preparation_on_tiles().is_some() {
            return self.finish_parts::<TERMS>(io, pieces, scratch);
        }
        let mut state = self.state::<TERMS>(scratch);
        if self.together == 1 {
            // Head by head of a token, as its keys lie.
            let mut piece = pieces.start;
            while piece < pieces.end {
                let (token, head) = (piece / self.kv_heads, piece % self.kv_heads);
                let heads = head..self.kv_heads.min(head + self.heads_together()).min(head + pieces.end - piece);
                piece += heads.len();
                self.attend_by_parts::<T, TERMS>(io, &heads, &self.rows(io, token..token + 1), &mut state);
            }
            return;
        }
        let per_head = self.tokens.div_ceil(self.together);
        for piece in pieces {
            let (head, block) = (piece / per_head, piece % per_head);
            let end = ((block + 1) * self.together).min(self.tokens);
            let mut token = block * self.together;
            while token < end {
                let rows = self.rows(io, token..end);
                token = rows.tokens.end;
                self.attend_by_parts::<T, TERMS>(io, &(head..head + 1), &rows, &mut state);
            }
        }
    }

    /// The first row of q of token `token` and kv head `head`.
    fn first_row(&self, token: usize, head: usize) -> usize {
        (token * self.heads + head * self.group()) * self.dim
    }

    /// The queries of `rows` and `heads` as tiles.
    fn load_queries<T: amx::Terms, const TERMS: usize>(
        &self,
        io: &Io<'_>,
        heads: &Range<usize>,
        rows: &Rows,
        state: &mut State<'_>,
    ) {
        let of_token = self.group() * self.dim;
        let count = rows.tokens.len() * self.group();
        let of_head = count.div_ceil(SIDE) * TERMS * (self.width() / STEP);
        for (head, tiles) in heads.clone().zip(state.q_tiles.chunks_exact_mut(of_head)) {
            let q = amx::elements::<T>(state.q);
            for (token, to) in rows.tokens.clone().zip(q.chunks_exact_mut(of_token)) {
                to.copy_from_slice(&io.input::<T>(0)[self.first_row(token, head)..][..of_token]);
            }
            amx::Layout::of_whole_tiles(count, self.dim, TERMS).pack_x(&q[..count * self.dim], self.dim, tiles);
        }
    }

    /// Attention for the loaded queries to `keys`, which are of one part.
    fn attend_part<const TERMS: usize>(
        &self,
        io: &Io<'_>,
        heads: &Range<usize>,
        rows: &Rows,
        keys: &Range<usize>,
        state: &mut State<'_>,
    ) {
        let tiles = heads.len() * (rows.tokens.len() * self.group()).div_ceil(SIDE);
        state.out[..tiles * (self.width() / SIDE)].as_flattened_mut().fill(0);
        state.largest[..tiles].fill([f32::NEG_INFINITY; SIDE]);
        state.total[..tiles].fill([0.0; SIDE]);
        if self.is_few(rows.tokens.len()) {
            self.part_of_few::<TERMS>(io, heads, rows, keys, state);
        } else {
            self.part_of_many::<TERMS>(io, heads.start, rows, keys, state);
        }
    }

    fn part_of_many<const TERMS: usize>(
        &self,
        io: &Io<'_>,
        head: usize,
        rows: &Rows,
        keys: &Range<usize>,
        state: &mut State<'_>,
    ) {
        let (group, width) = (self.group(), self.width());
        let count = rows.tokens.len() * group;
        let tiles = count.div_ceil(SIDE);
        let configured = amx::Session::begin();
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
                Pair { tiles, keys: (rows.seen + last / group).saturating_sub(from).min(span.len()) }
            };
            let pairs = (0..tiles).step_by(2).map(pair).filter(|pair| pair.keys > 0);
            self.attend_span::<TERMS>(&configured, rows, from, pairs, state);
        }
    }

    /// Writes what all parts gave.
    fn store(&self, io: &Io<'_>, heads: &Range<usize>, rows: &Rows, state: &mut State<'_>) {
        let (group, width, d_tiles) = (self.group(), self.width(), self.width() / SIDE);
        let count = rows.tokens.len() * group;
        let (few, tiles) = (self.is_few(rows.tokens.len()), count.div_ceil(SIDE));
        for (at, head) in (0..heads.len() * tiles).zip(heads.clone().flat_map(|head| std::iter::repeat_n(head, tiles)))
        {
            let tile = at % tiles;
            let of_tile = SIDE.min(count - tile * SIDE);
            if few {
                few::unpack_lines(&state.merged.out[at * d_tiles..][..d_tiles], of_tile, state.line);
            } else {
                for d in 0..d_tiles {
                    let sums = &state.merged.out[tile_of_sums(at, d, tiles, d_tiles)];
                    amx::unpack_columns(sums, [of_tile, SIDE], width, &mut state.line[d * SIDE..]);
                }
            }
            for (i, line) in state.line.chunks_exact_mut(width).take(of_tile).enumerate() {
                let (row, total) = (tile * SIDE + i, state.merged.total[at][i]);
                if total > 0.0 {
                    simd::scale(&mut line[..self.dim], 1.0 / total);
                }
                let at = self.first_row(rows.tokens.start + row / group, head) + row % group * self.dim;
                // SAFETY: this token's query heads of this kv head are our piece's alone.
                unsafe { simd::store(io, 0, self.dtype, at, &line[..self.dim]) };
            }
        }
    }

    /// Terms of keys and values: a code is one, and its scale goes to scores and weights.
    fn stored_terms<const TERMS: usize>(&self) -> usize {
        if self.cache == DType::I8 { 1 } else { TERMS }
    }

    /// The scales of a span of codes.
    fn load_scales(&self, io: &Io<'_>, head: usize, rows: &Rows, span: &Range<usize>, to: &mut Scales) {
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
    fn fill_span<const TERMS: usize>(
        &self,
        io: &Io<'_>,
        head: usize,
        rows: &Rows,
        side: usize,
        span: &Range<usize>,
        state: &mut State<'_>,
    ) {
        let (width, term, terms) = (self.width(), SPAN * self.width(), self.stored_terms::<TERMS>());
        let to = &mut *state.span;
        super::with_stored!(self.cache, T => {
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

    /// All `pairs` with the span that begins at `from`. While vectors make weights of the scores of one pair, tiles make
    /// the scores of the next and multiply values by the weights of the one before.
    fn attend_span<const TERMS: usize>(
        &self,
        configured: &amx::Session,
        rows: &Rows,
        from: usize,
        mut pairs: impl Iterator<Item = Pair>,
        state: &mut State<'_>,
    ) {
        let (depth, d_tiles) = (self.width() / STEP, self.width() / SIDE);
        let (mut scores, mut next_scores) = state.scores.split_at_mut(2 * SPAN / SIDE);
        let (mut weights, mut weights_before) = state.weights.split_at_mut(2 * TERMS * STEPS);
        let (span, values, q_tiles) = (&*state.span, &*state.values, &*state.q_tiles);
        let (terms, scales) = (self.stored_terms::<TERMS>(), (self.cache == DType::I8).then_some(&*state.scales));
        let score = |pair: &Pair, step: usize, scores: &mut [Words]| {
            let together = pair.tiles.len();
            let scores = &mut scores[step * 2 * together..][..2 * together];
            // The products of terms, the smallest first.
            for order in (0..TERMS).rev() {
                for of_key in 0..terms.min(order + 1) {
                    let data = &span[(of_key * SPAN + step * STEP) * self.width()..];
                    let w = amx::Rows { data, high: SIDE * self.width(), stride: self.width(), step: STEP };
                    let x = &q_tiles[(pair.tiles.start * TERMS + order - of_key) * depth..];
                    let fresh = order == TERMS - 1 && of_key == 0;
                    amx::multiply_rows(configured, w, x, TERMS * depth, depth, scores, fresh);
                }
            }
        };
        let weigh = |pair: &Pair, d: usize, weights: &[Words], out: &mut [Words]| {
            let together = pair.tiles.len();
            let out = &mut out[pair.tiles.start * d_tiles + d * 2 * together..][..2 * together];
            for order in (0..TERMS).rev() {
                for of_value in 0..terms.min(order + 1) {
                    let data = amx::halves(&values[(of_value * d_tiles + 2 * d) * STEPS..]);
                    let w = amx::Rows { data, high: STEPS * SIDE * STEP, stride: STEP, step: SIDE * STEP };
                    let x = &weights[(order - of_value) * STEPS..];
                    amx::multiply_rows(configured, w, x, TERMS * STEPS, pair.steps(), out, false);
                }
            }
        };
        let (mut before, mut here): (Option<Pair>, _) = (None, pairs.next());
        if let Some(pair) = &here {
            (0..pair.steps()).for_each(|step| score(pair, step, scores));
        }
        while let Some(pair) = here {
            let next = pairs.next();
            let (out_before, out) = state.out.split_at_mut(pair.tiles.start * d_tiles);
            let (to_score, to_weigh) =
                (next.as_ref().map_or(0, Pair::steps), before.as_ref().map_or(0, |_| d_tiles / 2));
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
                unsafe { softmax::soften::<TERMS>(&span, scales, &mut scores, sums, weights, rescale, &mut between) };
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

    /// What the queries of tile `tile` see of the span that begins at `from`. Lanes without a query are as the last one.
    fn span(&self, rows: &Rows, from: usize, tile: usize) -> Span {
        let (group, last) = (self.group() as u32, rows.tokens.len() - 1);
        let token = |lane: usize| (((tile * SIDE + lane) as u32 / group) as usize).min(last);
        let within = |position: usize| position.saturating_sub(from).min(SPAN) as i32;
        Span {
            seen: lanes(|lane| within(rows.seen + token(lane))),
            start: lanes(|lane| within(self.start(rows, token(lane)))),
            scale: self.scale,
            softcap: self.softcap,
        }
    }
}

/// Multiplies sums by `factors`, each by its own.
fn scale_each(sums: &mut [u32; SIDE], factors: &Lanes<f32>) {
    for (sum, factor) in sums.iter_mut().zip(factors) {
        *sum = (f32::from_bits(*sum) * factor).to_bits();
    }
}

fn lanes<T>(f: impl FnMut(usize) -> T) -> Lanes<T> {
    std::array::from_fn(f)
}
