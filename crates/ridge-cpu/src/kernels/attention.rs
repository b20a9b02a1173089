//! Causal attention over a paged cache.
//!
//! Floor: at decoding, the keys and values of each sequence read once (a group of query heads shares them); at prompts,
//! `4 dim` operations a (query, key) pair of each head.
//!
//! A softmax goes over spans of [`SPAN`] positions, counted from position 0: scores of a span, its largest, its
//! exponentials and their sum, then values weighed by them, with what came before scaled to the new largest (Milakov and
//! Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention", algorithm 1). Within
//! a span keys come in order. So a token's bits depend on its own position, never on the tokens beside it. With a window
//! the spans before it are passed over, and keys before it in its first span weigh nothing.
//!
//! Of a cache of codes, scores are multiplied by the scales of keys, and weights by those of values; tiles take codes times
//! scales.

mod narrow;
#[cfg(target_arch = "x86_64")]
mod packed;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod values;

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::PagedAttention;

use super::Entry;
use super::linear::source::{Lanes, Plain};
use super::linear::tile::{self, Room, Tile};
use crate::kernel::{Io, Kernel, Scratch, Spec};
use crate::simd::{self, Element, LANES};
use values::{Run, weigh};

pub(super) const ENTRIES: &[Entry] = &[
    Entry { name: "attention", pattern: "attention(q, kv, block_table, seq_ids, positions)", supports: |_| true, make },
    Entry {
        name: "attention_codes",
        pattern: "attention(q, kv, block_table, seq_ids, positions, scales)",
        supports: |_| true,
        make,
    },
];

/// Runs `$body` with `$t` as the element type of a cache of `$dtype`.
macro_rules! with_stored {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            ridge_graph::DType::I8 => {
                type $t = i8;
                $body
            }
            float => $crate::simd::with_element!(float, $t => $body),
        }
    };
}
#[cfg(target_arch = "x86_64")]
use with_stored;

/// Positions of a span.
const SPAN: usize = 512;

/// Tokens of one sequence that share the reading of keys and values.
const TOKENS: usize = 8;

struct Attention {
    scale: f32,
    window: Option<usize>,
    softcap: Option<f32>,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    dtype: DType,
    blocks: usize,
    block_size: usize,
    cache: DType,
    sequences: usize,
    /// Columns of the block table.
    table: usize,
    /// Tokens of a piece.
    together: usize,
    /// Is it computed on matrix tiles?
    #[cfg(target_arch = "x86_64")]
    on_tiles: bool,
}

fn make(spec: &Spec<'_>) -> Result<Box<dyn Kernel>, String> {
    let op = spec.composite::<PagedAttention>().ok_or("no attention in the group")?;
    let [q, kv, table, ..] = &spec.inputs[..] else { return Err("attention takes five inputs".into()) };
    // Single tokens leave more pieces to a few tokens, which rarely are of one sequence.
    let together = if q.shape[0] > TOKENS { TOKENS } else { 1 };
    #[cfg(target_arch = "x86_64")]
    let on_tiles = simd::isa() == simd::Isa::Amx && super::amx::takes(q.dtype, q.shape[2]);
    #[cfg(target_arch = "x86_64")]
    let together = match q.shape[1].checked_div(kv.shape[2]) {
        Some(group) if on_tiles && together > 1 => tiles::together(q.shape[0], group),
        _ => together,
    };
    Ok(Box::new(Attention {
        scale: op.scale as f32,
        window: op.window,
        softcap: op.softcap.map(|cap| cap as f32),
        tokens: q.shape[0],
        heads: q.shape[1],
        kv_heads: kv.shape[2],
        dim: q.shape[2],
        dtype: q.dtype,
        blocks: kv.shape[0],
        block_size: kv.shape[3],
        cache: kv.dtype,
        sequences: table.shape[0],
        table: table.shape[1],
        together,
        #[cfg(target_arch = "x86_64")]
        on_tiles,
    }))
}

/// Tokens of one sequence at successive positions.
struct Rows {
    tokens: Range<usize>,
    sequence: usize,
    /// Where the keys end that the first of them sees; those of each end one later than those of the one before.
    seen: usize,
    /// Position of the first of them.
    position: usize,
}

impl Rows {
    /// Where the keys end that the last of them sees.
    fn most(&self) -> usize {
        if self.seen == 0 { 0 } else { self.seen + self.tokens.len() - 1 }
    }
}

/// What is kept for the rows of a piece, one for each token and query head of the group, in this order.
struct State<'a> {
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
}

impl Kernel for Attention {
    fn pieces(&self) -> usize {
        if self.heads * self.dim == 0 { 0 } else { self.kv_heads * self.tokens.div_ceil(self.together) }
    }

    fn nanos_per_piece(&self) -> f64 {
        #[cfg(target_arch = "x86_64")]
        if self.preparation_on_tiles().is_some() {
            return self.nanos_to_merge();
        }
        // Half the context, for want of knowing.
        let keys = (self.table * self.block_size).div_ceil(2);
        let pairs = self.together * self.group() * self.window.map_or(keys, |window| keys.min(window));
        100.0 + pairs as f64 * self.nanos_per_pair()
    }

    #[cfg(target_arch = "x86_64")]
    fn preparation(&self) -> Option<crate::kernel::Preparation> {
        self.preparation_on_tiles()
    }

    #[cfg(target_arch = "x86_64")]
    fn prepare(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        self.prepare_on_tiles(io, pieces, scratch);
    }

    fn run(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return self.run_on_tiles(io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if packed::takes(self.dim) && self.cache != DType::I8 {
            return self.run_packed(io, pieces, scratch);
        }
        let (rows, vectors) = (self.together * self.group(), self.dim.div_ceil(LANES));
        let columns = self.columns();
        let [q, out, scores, largest, total, sums, weights] = scratch.slices::<f32, 7>([
            rows * vectors * LANES,
            rows * values::chains(vectors) * vectors * LANES,
            rows * SPAN,
            rows,
            rows,
            rows * columns * LANES,
            tile::packed_room(rows, vectors) * LANES,
        ]);
        let mut state = State {
            q: q.as_chunks_mut().0,
            out: out.as_chunks_mut().0,
            scores,
            largest,
            total,
            sums: sums.as_chunks_mut().0,
            weights: weights.as_chunks_mut().0,
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
}

impl Attention {
    /// What a query and a key take.
    fn nanos_per_pair(&self) -> f64 {
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return 1.0 + self.dim as f64 * 0.01;
        }
        1.0 + self.dim as f64 * 0.05
    }

    fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
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

    /// The first of `tokens`, with those after it that follow it in its sequence.
    fn rows(&self, io: &Io<'_>, tokens: Range<usize>) -> Rows {
        let (ids, positions) = (io.input::<i32>(3), io.input::<i32>(4));
        let first = tokens.start;
        let follows = |t: usize| {
            ids[t] == ids[first] && i64::from(positions[t]) == i64::from(positions[first]) + (t - first) as i64
        };
        let end = (first + 1..tokens.end).find(|t| !follows(*t)).unwrap_or(tokens.end);
        let keys = self.table * self.block_size;
        match (usize::try_from(ids[first]), usize::try_from(positions[first])) {
            // Beyond the table there are no keys, so what is there sees as much as the next, not one more.
            (Ok(sequence), Ok(position)) if sequence < self.sequences && position + (end - first) <= keys => {
                Rows { tokens: first..end, sequence, seen: position + 1, position }
            }
            (Ok(sequence), Ok(position)) if sequence < self.sequences => {
                Rows { tokens: first..first + 1, sequence, seen: keys.min(position + 1), position }
            }
            _ => Rows { tokens: first..first + 1, sequence: 0, seen: 0, position: 0 },
        }
    }

    /// All of attention for `rows` and the query heads of kv head `head`.
    fn attend(&self, io: &Io<'_>, head: usize, rows: &Rows, state: &mut State<'_>) {
        let (group, vectors, chained) = (self.group(), self.dim.div_ceil(LANES), self.chained());
        let count = rows.tokens.len() * group;
        for (i, q) in state.q[..count * vectors].chunks_exact_mut(vectors).enumerate() {
            let q = q.as_flattened_mut();
            let at = ((rows.tokens.start + i / group) * self.heads + head * group + i % group) * self.dim;
            simd::load(io, 0, self.dtype, at, &mut q[..self.dim]);
            simd::scale(&mut q[..self.dim], self.scale);
            tile::fill(q, self.dim);
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
                self.runs(io, rows.sequence, &span, |keys, at| self.scores(cache, head, count, keys, at, state));
                self.scale_scores(io, (head, 0), rows, &span, state.scores);
                self.soften(rows, from, state);
                self.scale_scores(io, (head, 1), rows, &span, state.scores);
                self.runs(io, rows.sequence, &span, |keys, at| {
                    self.values(cache, head, rows, from + keys.start, keys, at, state);
                });
            });
        }
        for i in 0..count {
            let out = &mut state.out[i * chained..][..chained];
            values::add_chains(out, vectors);
            let values = &mut out.as_flattened_mut()[..self.dim];
            if state.total[i] > 0.0 {
                simd::scale(values, 1.0 / state.total[i]);
            }
            let at = ((rows.tokens.start + i / group) * self.heads + head * group + i % group) * self.dim;
            // SAFETY: this token's query heads of this kv head are our piece's alone.
            unsafe { simd::store(io, 0, self.dtype, at, values) };
        }
    }

    /// Calls `f` for each run of `span`'s positions that lie together: their indices in the span, and the block and
    /// offset of the first. There is no block where the table has none.
    fn runs(
        &self,
        io: &Io<'_>,
        sequence: usize,
        span: &Range<usize>,
        mut f: impl FnMut(Range<usize>, Option<(usize, usize)>),
    ) {
        let table = &io.input::<i32>(2)[sequence * self.table..][..self.table];
        let (mut nth, mut offset) = (span.start / self.block_size, span.start % self.block_size);
        let mut position = span.start;
        while position < span.end {
            let end = (position + self.block_size - offset).min(span.end);
            let block = usize::try_from(table[nth]).ok().filter(|b| *b < self.blocks);
            f(position - span.start..end - span.start, block.map(|b| (b, offset)));
            (position, nth, offset) = (end, nth + 1, 0);
        }
    }

    /// Elements of the cache from key (side 0) or value (side 1) `offset` of `block` on.
    fn slab<'a, T>(&self, cache: &'a [T], head: usize, side: usize, (block, offset): (usize, usize)) -> &'a [T] {
        &cache[(((block * 2 + side) * self.kv_heads + head) * self.block_size + offset) * self.dim..]
    }

    /// Scores of `count` rows for keys `keys` of the span. A key that is nowhere is zero.
    fn scores<T: Element>(
        &self,
        cache: &[T],
        head: usize,
        count: usize,
        keys: Range<usize>,
        at: Option<(usize, usize)>,
        state: &mut State<'_>,
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

    /// The scales of keys (side 0) or values (side 1) from `offset` of `block` on, where the cache is of codes.
    fn scales<'a>(&self, io: &Io<'a>, head: usize, side: usize, (block, offset): (usize, usize)) -> Option<&'a [f32]> {
        let at = ((block * 2 + side) * self.kv_heads + head) * self.block_size + offset;
        (self.cache == DType::I8).then(|| &io.input::<f32>(5)[at..])
    }

    /// Multiplies the scores or weights of each row by the scales of the span's keys (side 0) or values (side 1).
    fn scale_scores(
        &self,
        io: &Io<'_>,
        (head, side): (usize, usize),
        rows: &Rows,
        span: &Range<usize>,
        scores: &mut [f32],
    ) {
        if self.cache != DType::I8 {
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

    /// The first position that token `nth` of `rows` sees.
    fn start(&self, rows: &Rows, nth: usize) -> usize {
        self.window.map_or(0, |window| (rows.position + nth + 1).saturating_sub(window))
    }

    /// Turns the scores of the span that begins at `from` into weights, and scales what came before.
    fn soften(&self, rows: &Rows, from: usize, state: &mut State<'_>) {
        let (group, chained) = (self.group(), self.chained());
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
            let (before, here) = (state.largest[i], simd::max(scores));
            let largest = if here > before { here } else { before };
            // Of minus infinity alone nothing is taken: infinity less infinity would be NaN.
            let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
            if from > 0 {
                let kept = (before - shift).exp();
                state.total[i] *= kept;
                simd::scale(state.out[i * chained..][..chained].as_flattened_mut(), kept);
            }
            state.largest[i] = largest;
            state.total[i] += simd::exp_sum(scores, shift);
        }
    }

    /// Adds values of `keys` of the span by their weights; `first` is the position of the first.
    fn values<T: Element>(
        &self,
        cache: &[T],
        head: usize,
        rows: &Rows,
        first: usize,
        keys: Range<usize>,
        at: Option<(usize, usize)>,
        state: &mut State<'_>,
    ) {
        let Some(at) = at else { return };
        let (group, chained) = (self.group(), self.chained());
        let slab = self.slab(cache, head, 1, at);
        let run = |from: usize, end: usize| Run {
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
