//! Contexts in parts of [`PART`] positions, counted from position 0. Each part has a softmax of its own, and what comes of
//! them is merged in order, wherever a part is computed: so threads can share the context of one token, and no bit depends
//! on whether they did (Dao et al. 2023, "Flash-Decoding for long-context inference").
//!
//! Of single tokens the parts are the kernel's preparation. Its pieces are as many as there would be work if all tokens saw
//! all of the table; each stands for as many of the real units (a kv head of a part of a token) as there are to a piece, so
//! that the ranges of pieces that threads take are equal work whatever the tokens see.

use std::arch::x86_64::{
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_storeu_ps, _mm512_sub_ps,
};
use std::ops::Range;

use super::few;
use super::span::{Lanes, SPAN, STEP};
use super::state::TileState;
use crate::amx::{self, SIDE, Words};
use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::kernels::attention::kernel::{AttentionKernel, TOKENS, TokenRows};
use crate::scratch::Scratch;
use crate::simd::{self, power};

/// Positions of a part.
const PART: usize = 1024;

impl AttentionKernel {
    /// Parts of the whole table.
    fn table_parts(&self) -> usize {
        (self.table * self.block_size).div_ceil(PART)
    }

    /// The work on the parts, where single tokens may see several of them.
    pub(in super::super) fn preparation_on_tiles(&self) -> Option<Preparation> {
        let single = self.together == 1 && self.tokens <= TOKENS;
        (self.on_tiles && single && self.table_parts() > 1).then(|| {
            let pieces = self.tokens * self.kv_heads * self.table_parts();
            let bytes = pieces * self.group().div_ceil(SIDE) * self.kept_words() * size_of::<u32>();
            // Half the context, for want of knowing.
            let keys = self.window.map_or(PART / 2, |window| window.min(PART / 2));
            let nanos_per_piece = 100.0 + (self.group() * keys) as f64 * self.nanos_per_pair();
            Preparation { bytes, pieces, nanos_per_piece }
        })
    }

    /// What merging the parts of a piece takes.
    pub(in super::super) fn nanos_to_merge(&self) -> f64 {
        100.0 + (self.table_parts() * self.group() * self.dim) as f64 * 0.1
    }

    /// The parts that `rows` see some of, or one.
    fn parts(&self, rows: &TokenRows) -> Range<usize> {
        let first = self.start(rows, 0) / PART;
        first..rows.most().div_ceil(PART).max(first + 1)
    }

    /// What `rows` see of a part, and what is left of its first span.
    fn seen_of(&self, rows: &TokenRows, part: usize) -> Range<usize> {
        (part * PART).max(self.start(rows, 0) / SPAN * SPAN)..rows.most().min((part + 1) * PART)
    }

    /// The queries of `rows` and `heads` as tiles.
    fn load_queries<T: amx::Terms, const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        heads: &Range<usize>,
        rows: &TokenRows,
        state: &mut TileState<'_>,
    ) {
        let of_token = self.group() * self.dim;
        let count = rows.tokens.len() * self.group();
        let of_head = count.div_ceil(SIDE) * TERMS * (self.width() / STEP);
        for (head, tiles) in heads.clone().zip(state.q_tiles.chunks_exact_mut(of_head)) {
            let q = amx::elements::<T>(state.q);
            for (token, to) in rows.tokens.clone().zip(q.chunks_exact_mut(of_token)) {
                to.copy_from_slice(&io.input::<T>(0)[self.first_row(token, head)..][..of_token]);
            }
            amx::ColumnLayout::of_whole_tiles(count, self.dim, TERMS).pack_x(&q[..count * self.dim], self.dim, tiles);
        }
    }

    /// Attention for the loaded queries to `keys`, which are of one part.
    fn attend_part<const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        heads: &Range<usize>,
        rows: &TokenRows,
        keys: &Range<usize>,
        state: &mut TileState<'_>,
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

    /// Writes what all parts gave.
    fn store(&self, io: &KernelIo<'_>, heads: &Range<usize>, rows: &TokenRows, state: &mut TileState<'_>) {
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

    /// All of attention for `rows` and the query heads of kv heads `heads`: of one, if they are more than a tile.
    pub(super) fn attend_by_parts<T: amx::Terms, const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        heads: &Range<usize>,
        rows: &TokenRows,
        state: &mut TileState<'_>,
    ) {
        self.load_queries::<T, TERMS>(io, heads, rows, state);
        for (nth, part) in self.parts(rows).enumerate() {
            self.attend_part::<TERMS>(io, heads, rows, &self.seen_of(rows, part), state);
            self.merge(nth, heads, rows, state);
        }
        self.store(io, heads, rows, state);
    }

    /// Merges what part `nth` of those that `rows` see gave with what those before it gave.
    fn merge(&self, nth: usize, heads: &Range<usize>, rows: &TokenRows, state: &mut TileState<'_>) {
        if nth == 0 {
            return state.keep();
        }
        let (count, d_tiles) = (rows.tokens.len() * self.group(), self.width() / SIDE);
        let (few, tiles) = (self.is_few(rows.tokens.len()), count.div_ceil(SIDE));
        for at in 0..heads.len() * tiles {
            // SAFETY: there is AMX, and every machine that has it has AVX-512.
            let factors = unsafe { factors(&mut state.merged.largest[at], &state.largest[at]) };
            let totals = state.merged.total[at].iter_mut().zip(&state.total[at]);
            totals.enumerate().for_each(|(i, (sum, part))| *sum = *sum * factors[0][i] + part * factors[1][i]);
            for d in 0..d_tiles {
                let place = if few { at * d_tiles + d } else { tile_of_sums(at, d, tiles, d_tiles) };
                // Queries are lines, or else lanes.
                let lines = if few { count } else { SIDE };
                // SAFETY: as above.
                unsafe { merge_tile(&mut state.merged.out[place], &state.out[place], &factors, lines, few) };
            }
        }
    }

    /// Words that are kept of a part for a tile of queries of a token: lines of sums with their largest scores and totals.
    fn kept_words(&self) -> usize {
        self.width() * self.group().min(SIDE) + 2 * SIDE
    }

    /// Where in the room part `nth` of those that a token sees is kept: a chunk of [`Self::kept_words`] for each tile.
    fn kept_at(&self, token: usize, head: usize, nth: usize) -> Range<usize> {
        let of_head = self.group().div_ceil(SIDE) * self.kept_words();
        let at = ((token * self.kv_heads + head) * self.table_parts() + nth) * of_head;
        at..at + of_head
    }

    /// Computes the parts of single tokens that `pieces` of the preparation stand for.
    pub(super) fn prepare_parts<T: amx::Terms, const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        pieces: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let Some(Preparation { pieces: all, .. }) = self.preparation_on_tiles() else { return };
        let units = |token: usize| self.parts(&self.rows(io, token..token + 1)).len() * self.kv_heads;
        let total: usize = (0..self.tokens).map(units).sum();
        let mut state = self.state::<TERMS>(scratch);
        let (mut unit, end) = (pieces.start * total / all, pieces.end * total / all);
        let (mut token, mut before) = (0, 0);
        while unit < end {
            let rows = self.rows(io, token..token + 1);
            let parts = self.parts(&rows);
            let end_of_token = before + parts.len() * self.kv_heads;
            while unit < end.min(end_of_token) {
                // Head by head of a part, as its keys lie.
                let (nth, head) = ((unit - before) / self.kv_heads, (unit - before) % self.kv_heads);
                let heads = head..self.kv_heads.min(head + self.heads_together()).min(head + end - unit);
                unit += heads.len();
                self.load_queries::<T, TERMS>(io, &heads, &rows, &mut state);
                self.attend_part::<TERMS>(io, &heads, &rows, &self.seen_of(&rows, parts.start + nth), &mut state);
                self.keep_part(io, token, &heads, nth, &state);
            }
            (token, before) = (token + 1, end_of_token);
        }
    }

    fn keep_part(&self, io: &KernelIo<'_>, token: usize, heads: &Range<usize>, nth: usize, state: &TileState<'_>) {
        let (tiles, d_tiles, lines) = (self.group().div_ceil(SIDE), self.width() / SIDE, self.group().min(SIDE));
        for (i, head) in heads.clone().enumerate() {
            // SAFETY: this part of this head is of our pieces alone.
            let kept = unsafe { io.room::<u32>().part(self.kept_at(token, head, nth)) };
            for (at, kept) in (i * tiles..).zip(kept.chunks_exact_mut(self.kept_words())) {
                let (sums, out) = kept.split_at_mut(2 * SIDE);
                sums[..SIDE].copy_from_slice(&state.largest[at].map(f32::to_bits));
                sums[SIDE..].copy_from_slice(&state.total[at].map(f32::to_bits));
                for (to, from) in out.chunks_exact_mut(lines * SIDE).zip(&state.out[at * d_tiles..]) {
                    to.copy_from_slice(&from[..lines * SIDE]);
                }
            }
        }
    }

    /// Merges the parts of `pieces`, which are heads of single tokens.
    pub(super) fn finish_parts<const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        pieces: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let (d_tiles, lines) = (self.width() / SIDE, self.group().min(SIDE));
        let mut state = self.state::<TERMS>(scratch);
        for piece in pieces {
            let (token, head) = (piece / self.kv_heads, piece % self.kv_heads);
            let (rows, heads) = (self.rows(io, token..token + 1), head..head + 1);
            for nth in 0..self.parts(&rows).len() {
                let kept = &io.prepared::<u32>()[self.kept_at(token, head, nth)];
                for (at, kept) in kept.chunks_exact(self.kept_words()).enumerate() {
                    let (sums, out) = kept.split_at(2 * SIDE);
                    state.largest[at] = std::array::from_fn(|i| f32::from_bits(sums[i]));
                    state.total[at] = std::array::from_fn(|i| f32::from_bits(sums[SIDE + i]));
                    for (from, to) in out.chunks_exact(lines * SIDE).zip(&mut state.out[at * d_tiles..]) {
                        to[..lines * SIDE].copy_from_slice(from);
                    }
                }
                self.merge(nth, &heads, &rows, &mut state);
            }
            self.store(io, &heads, &rows, &mut state);
        }
    }
}

/// The place of sums `d` of tile `tile` of many queries: those of two tiles, or of the last one, lie side by side.
fn tile_of_sums(tile: usize, d: usize, tiles: usize, d_tiles: usize) -> usize {
    let pair = tile / 2 * 2;
    pair * d_tiles + d * (tiles - pair).min(2) + tile % 2
}

/// Adds a tile of sums to another, both multiplied by their factors: those of each of `lines` lines, or of each lane.
#[target_feature(enable = "avx512f,avx512dq")]
fn merge_tile(sums: &mut Words, part: &Words, factors: &[Lanes<f32>; 2], lines: usize, of_lines: bool) {
    // SAFETY: 64 bytes.
    let load = |from: &Lanes<f32>| unsafe { _mm512_loadu_ps(from.as_ptr()) };
    let of_lanes = factors.each_ref().map(load);
    for (line, (sums, part)) in sums.as_chunks_mut::<SIDE>().0.iter_mut().zip(part.as_chunks::<SIDE>().0).enumerate() {
        if line == lines {
            break;
        }
        let of_line = [_mm512_set1_ps(factors[0][line]), _mm512_set1_ps(factors[1][line])];
        let [kept, added] = if of_lines { of_line } else { of_lanes };
        // SAFETY: 64 bytes each.
        unsafe {
            let (before, here) = (_mm512_loadu_ps(sums.as_ptr().cast()), _mm512_loadu_ps(part.as_ptr().cast()));
            let sum = _mm512_fmadd_ps(here, added, _mm512_mul_ps(before, kept));
            _mm512_storeu_ps(sums.as_mut_ptr().cast(), sum);
        }
    }
}

/// What the sums of two parts are multiplied by when they are merged; `largest` becomes that of both.
#[target_feature(enable = "avx512f,avx512dq")]
fn factors(largest: &mut Lanes<f32>, of_part: &Lanes<f32>) -> [Lanes<f32>; 2] {
    let before = *largest;
    for (largest, of_part) in largest.iter_mut().zip(of_part) {
        *largest = largest.max(*of_part);
    }
    // As within a part: of minus infinity nothing is taken.
    let shift = largest.map(|x| if x == f32::NEG_INFINITY { 0.0 } else { x });
    [&before, of_part].map(|x| {
        let mut factors = [0.0; SIDE];
        // SAFETY: 64 bytes each.
        unsafe {
            let below = _mm512_sub_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(shift.as_ptr()));
            _mm512_storeu_ps(factors.as_mut_ptr(), power::<3>(below));
        }
        factors
    })
}
