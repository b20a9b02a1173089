//! Queries that fill one tile at most, such as those of a token that share a kv head: nothing that is done with keys and
//! values is shared by many queries, so as little as can be is done with them.
//!
//! Keys are multiplied where they lie. Values are not transposed: sums have a row for each query here, and values become
//! the tile's pairs of keys by one instruction for each cache line of them. Every sum has the bits that it has among many
//! queries, for it is of the same products in the same order. Codes are widened where they lie, each once.
//!
//! Floor: keys and values read once. Several heads go through the cache together, since theirs lie side by side.

use std::arch::x86_64::{
    _mm512_and_si512, _mm512_cmpge_epu16_mask, _mm512_max_epu16, _mm512_set1_epi16, _mm512_setzero_si512,
    _mm512_storeu_si512, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::ops::Range;

use half::bf16;
use ridge_graph::DType;

use super::rests::{take_rest, weight};
use super::softmax;
use super::span::{Keys, Lanes, SPAN, STEP, STEPS, scale_each};
use super::state::TileState;
use super::terms::{rounded_lines, split_rows};
use crate::amx::{self, SIDE, Words};
use crate::io::KernelIo;
use crate::kernels::attention::kernel::{AttentionKernel, TokenRows};
use crate::simd::Element;

/// Tiles of a span along its keys.
const TILES: usize = SPAN / SIDE;

/// Where the keys of head 0 begin that are a span's tiles.
type Places = [usize; TILES];

/// The tile, of two, and its column that have element `d` of 32.
fn column(d: usize) -> (usize, usize) {
    (d % 8 / 4, d / 8 * 4 + d % 4)
}

impl AttentionKernel {
    /// Attention for the queries of `rows` and kv heads `heads` to `keys`, which are of one part.
    pub(super) fn part_of_few<const TERMS: usize>(
        &self,
        io: &KernelIo<'_>,
        heads: &Range<usize>,
        rows: &TokenRows,
        keys: &Range<usize>,
        state: &mut TileState<'_>,
    ) {
        let configured = amx::FewQueries::begin(rows.tokens.len() * self.group());
        for from in keys.clone().step_by(SPAN) {
            let span = from..keys.end.min(from + SPAN);
            let places = self.places::<TERMS>(io, rows.sequence, &span);
            for nth in 0..heads.len() {
                self.few_at_span::<TERMS>(&configured, io, (heads.start + nth, nth), rows, &span, places, state);
            }
        }
    }

    /// Where the span's keys lie as tiles, if they do.
    fn places<const TERMS: usize>(&self, io: &KernelIo<'_>, sequence: usize, span: &Range<usize>) -> Option<Places> {
        let whole = self.dim.is_multiple_of(STEP) && self.block_size.is_multiple_of(SIDE);
        let as_they_are = self.cache == DType::BF16 && TERMS == 1;
        if !whole || !as_they_are && self.cache != DType::I8 {
            return None;
        }
        let (mut places, mut all) = (Places::default(), true);
        self.runs(io, sequence, span, |keys, at| match at {
            Some((block, offset)) => {
                for (tile, keys) in keys.step_by(SIDE).enumerate() {
                    places[keys / SIDE] =
                        (block * self.sides * self.kv_heads * self.block_size + offset + tile * SIDE) * self.dim;
                }
            }
            None => all = false,
        });
        all.then_some(places)
    }

    /// `span` for the queries of head `head`, which is `nth` in `state`.
    #[allow(clippy::too_many_arguments)]
    fn few_at_span<const TERMS: usize>(
        &self,
        configured: &amx::FewQueries,
        io: &KernelIo<'_>,
        (head, nth): (usize, usize),
        rows: &TokenRows,
        span: &Range<usize>,
        places: Option<Places>,
        state: &mut TileState<'_>,
    ) {
        let (width, count) = (self.width(), rows.tokens.len() * self.group());
        let (depth, d_tiles, term) = (width / STEP, width / SIDE, SPAN * width);
        let (steps, terms) = (span.len().div_ceil(STEP), self.stored_terms::<TERMS>());
        let of_head = self.block_size * self.dim;

        let codes = self.cache == DType::I8;
        // Keys and values behind the last that is seen are not looked at, or weigh nothing.
        let last = (span.len() - 1) / SIDE;
        let key_at = |tile: usize| places.map(|places| places[tile.min(last)] + head * of_head);
        if places.is_none() {
            self.fill_span::<TERMS>(io, head, rows, 0, span, state);
        }
        self.load_scales(io, head, rows, span, state.scales);
        let q_tiles = &state.q_tiles[nth * TERMS * depth..][..TERMS * depth];
        for step in 0..steps {
            let scores = &mut state.scores[2 * step..][..2];
            match [key_at(2 * step), key_at(2 * step + 1)] {
                [Some(low), Some(high)] if !codes => {
                    let cache = io.input::<bf16>(1);
                    configured.score([&cache[low..], &cache[high..]], width, q_tiles, scores, true);
                    continue;
                }
                [Some(low), Some(high)] => {
                    for (at, to) in [low, high].into_iter().zip(state.span.chunks_exact_mut(SIDE * width)) {
                        let of_tile = &io.input::<i8>(1)[at..][..SIDE * width];
                        // SAFETY: there is AMX, and every machine that has it has AVX-512.
                        unsafe { split_rows::<i8, 1>(of_tile, width, width, 0, to) };
                    }
                }
                _ => {}
            }
            let from = if places.is_some() { 0 } else { step * STEP * width };
            // The products of terms, the smallest first.
            for order in (0..TERMS).rev() {
                for of_key in 0..terms.min(order + 1) {
                    let (low, high) = state.span[of_key * term + from..][..STEP * width].split_at(SIDE * width);
                    let x = &q_tiles[(order - of_key) * depth..][..depth];
                    configured.score([low, high], width, x, scores, order == TERMS - 1 && of_key == 0);
                }
            }
        }

        let (weights, turned) = state.weights.split_at_mut(TERMS * STEPS);
        let out = &mut state.out[nth * d_tiles..][..d_tiles];
        let sight = self.span(rows, span.start, 0);
        let mut scores = softmax::OfTile { tiles: &mut state.scores[..2 * steps], nth: 0, together: 1 };
        let rescale = |factors: &Lanes<f32>| {
            for tile in &mut *out {
                for (line, factor) in tile.as_chunks_mut().0.iter_mut().zip(factors).take(count) {
                    scale_each(line, &[*factor; SIDE]);
                }
            }
        };
        let scales = codes.then_some(&*state.scales);
        let sums = (&mut state.largest[nth], &mut state.total[nth]);
        // SAFETY: there is AMX, and every machine that has it has AVX-512.
        unsafe {
            softmax::online_softmax::<TERMS>(&sight, scales, &mut scores, sums, weights, rescale, &mut || {});
            for (term, turned) in weights.chunks_exact(STEPS).zip(turned.chunks_exact_mut(STEPS)) {
                term.iter().zip(turned).take(steps).for_each(|(tile, to)| turn(tile, to));
            }
        }

        let values = (self.heads_to_values() + head) * of_head;
        // SAFETY: as above.
        let in_place = places.is_some_and(|places| unsafe {
            if codes {
                let values = &io.input::<i8>(1)[values..];
                pair_up(|tile| &values[places[tile]..], span.len(), width, state.values)
            } else {
                let values = &io.input::<bf16>(1)[values..];
                pair_up(|tile| &values[places[tile]..], span.len(), width, state.values)
            }
        });
        let mut rests = false;
        if !in_place {
            self.fill_span::<TERMS>(io, head, rows, 1, span, state);
            if !codes {
                state.rests = take_rest::<TERMS>(state.span, width, span.len(), state.rest);
                rests = state.rests != Keys::default();
            }
            for (t, to) in state.values.chunks_exact_mut(STEPS * d_tiles).take(terms).enumerate() {
                let span_of = |tile: usize| &state.span[t * term + tile * SIDE * width..];
                // SAFETY: as above.
                unsafe { pair_up(span_of, span.len(), width, to) };
            }
        }
        let turned = &state.weights[TERMS * STEPS..];
        let out = &mut state.out[nth * d_tiles..][..d_tiles];
        for (d, out) in out.chunks_exact_mut(2).enumerate() {
            for order in (0..TERMS).rev() {
                for of_value in 0..terms.min(order + 1) {
                    let weights = &turned[(order - of_value) * STEPS..][..steps];
                    let values = &state.values[of_value * STEPS * d_tiles + d * 2 * STEPS..];
                    configured.weigh(weights, values, out);
                }
            }
        }
        if rests {
            self.add_rests_of_few::<TERMS>(&sight, span.len(), count, nth, state);
        }
    }

    /// Adds the values that are not finite for the queries that see them.
    fn add_rests_of_few<const TERMS: usize>(
        &self,
        sight: &softmax::SpanSight,
        keys: usize,
        count: usize,
        nth: usize,
        state: &mut TileState<'_>,
    ) {
        let (width, weights) = (self.width(), &*state.weights);
        let out = &mut state.out[nth * width / SIDE..][..width / SIDE];
        for key in (0..keys).filter(|key| state.rests[key / 64] >> (key % 64) & 1 == 1) {
            for query in (0..count).filter(|query| sight.sees(*query, key)) {
                let weight = weight::<TERMS>(weights, key, query);
                for (d, value) in state.rest[key * width..][..width].iter().enumerate() {
                    if *value != bf16::ZERO {
                        let (tile, column) = column(d % STEP);
                        let sum = &mut out[d / STEP * 2 + tile][query * SIDE + column];
                        *sum = (f32::from_bits(*sum) + weight * value.to_f32()).to_bits();
                    }
                }
            }
        }
    }
}

/// The first `count` queries' sums as rows.
pub(super) fn unpack_lines(sums: &[Words], count: usize, to: &mut [f32]) {
    for (i, line) in to.chunks_exact_mut(sums.len() * SIDE).take(count).enumerate() {
        for (d, x) in line.iter_mut().enumerate() {
            let (tile, column) = column(d % STEP);
            *x = f32::from_bits(sums[d / STEP * 2 + tile][i * SIDE + column]);
        }
    }
}

/// Columns of a tile as rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn turn(tile: &Words, to: &mut Words) {
    amx::transpose_into(tile.as_chunks().0.first_chunk().expect("a tile has 16 lines"), to);
}

/// Rows of `width` values of a span's first `keys` keys, 16 rows from each of `tiles` on, as tiles of pairs of keys: for
/// each 32 elements two for each 32 keys, in the order of [`column`]. Zeros behind the last key. Are they all finite?
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma,f16c")]
fn pair_up<'a, T: Element>(tiles: impl Fn(usize) -> &'a [T], keys: usize, width: usize, to: &mut [Words]) -> bool {
    if width.is_multiple_of(2 * STEP) {
        pair_up_lines::<T, 2>(tiles, keys, width, to)
    } else {
        pair_up_lines::<T, 1>(tiles, keys, width, to)
    }
}

/// [`pair_up`], with as many cache lines of bf16 at once.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma,f16c")]
fn pair_up_lines<'a, T: Element, const LINES: usize>(
    tiles: impl Fn(usize) -> &'a [T],
    keys: usize,
    width: usize,
    to: &mut [Words],
) -> bool {
    let (magnitude, mut most) = (_mm512_set1_epi16(0x7fff), _mm512_setzero_si512());
    for tile in 0..keys.div_ceil(STEP) * 2 {
        let here = keys.saturating_sub(tile * SIDE).min(SIDE);
        let rows = if here > 0 { &tiles(tile)[..here * width] } else { &[] };
        let lines_of = |key: usize, d: usize| match rows.get(key * width + d * STEP..) {
            Some(rest) if rest.len() >= LINES * STEP => rounded_lines::<T, LINES>(&rest[..LINES * STEP]),
            _ => [_mm512_setzero_si512(); LINES],
        };
        for pair in 0..SIDE / 2 {
            for first in (0..width / STEP).step_by(LINES) {
                let (even, odd) = (lines_of(2 * pair, first), lines_of(2 * pair + 1, first));
                for i in 0..LINES {
                    let (even, odd) = (even[i], odd[i]);
                    let larger = _mm512_max_epu16(_mm512_and_si512(even, magnitude), _mm512_and_si512(odd, magnitude));
                    most = _mm512_max_epu16(most, larger);
                    let at = ((first + i) * STEPS + tile / 2) * 2;
                    let halves = [_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd)];
                    for (to, half) in to[at..at + 2].iter_mut().zip(halves) {
                        let to = &mut to.as_chunks_mut::<SIDE>().0[tile % 2 * SIDE / 2 + pair];
                        // SAFETY: 64 bytes.
                        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), half) };
                    }
                }
            }
        }
    }
    _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7f80)) == 0
}
