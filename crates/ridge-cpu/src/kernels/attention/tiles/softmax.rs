//! From scores to weights, a query in each lane.
//!
//! Exponentials are powers of two, so scores are multiplied by the scale and by log2(e) at once.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, __mmask16, _CMP_NEQ_UQ, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cmpeq_ps_mask, _mm512_cmpgt_epi32_mask, _mm512_cmple_epi32_mask,
    _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_max_ps,
    _mm512_maskz_mov_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_permutexvar_epi16, _mm512_set1_epi16,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps,
};
use std::ops::Range;

use super::span::{Lanes, SPAN, STEPS, Scales};
use crate::amx::{SIDE, Words};
use crate::simd::power;

/// What a tile of queries does with the scores of a span.
pub(super) struct SpanSight {
    /// For each query, how many of the span's keys it sees.
    pub(super) seen: Lanes<i32>,
    /// The first of them.
    pub(super) start: Lanes<i32>,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
}

/// The scores of one of `together` tiles of queries: tiles `nth`, `nth + together` and so on, 16 keys each.
pub(super) struct OfTile<'a> {
    pub(super) tiles: &'a mut [Words],
    pub(super) nth: usize,
    pub(super) together: usize,
}

/// A line of a tile: 16 lanes.
fn line(tile: &Words, i: usize) -> &[u32; SIDE] {
    &tile.as_chunks::<SIDE>().0[i]
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn load(lanes: &[u32; SIDE]) -> __m512 {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_ps(lanes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn load_floats(lanes: &Lanes<f32>) -> __m512 {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn load_integers(lanes: &Lanes<i32>) -> __m512i {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

impl SpanSight {
    /// Does query `lane` see key `key` of the span?
    pub(super) fn sees(&self, lane: usize, key: usize) -> bool {
        (self.start[lane]..self.seen[lane]).contains(&(key as i32))
    }

    /// Tiles of keys that every query sees whole.
    fn whole(&self) -> Range<usize> {
        let start = self.start.iter().max().map_or(0, |start| *start as usize);
        let seen = self.seen.iter().min().map_or(0, |seen| *seen as usize);
        start.div_ceil(SIDE)..seen / SIDE
    }
}

/// Which queries see a key of the span.
struct Sight {
    seen: __m512i,
    start: __m512i,
}

impl Sight {
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn of(&self, key: usize) -> __mmask16 {
        let key = _mm512_set1_epi32(key as i32);
        _mm512_cmpgt_epi32_mask(self.seen, key) & _mm512_cmple_epi32_mask(self.start, key)
    }
}

/// Turns scores into weights, and takes note of the largest score (times log2(e)) and of the sum of weights. Before the
/// weights it gives `rescale` what came before is to be multiplied by, and every 32 keys of them it calls `between`.
/// Of codes it multiplies scores by the scales of their keys, and weights, once they are summed, by those of values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(super) fn online_softmax<const TERMS: usize>(
    span: &SpanSight,
    scales: Option<&Scales>,
    scores: &mut OfTile<'_>,
    sums: (&mut Lanes<f32>, &mut Lanes<f32>),
    weights: &mut [Words],
    rescale: impl FnOnce(&Lanes<f32>),
    between: &mut impl FnMut(),
) {
    match scales {
        None => online_softmax_with::<TERMS, false>(span, &ONES, scores, sums, weights, rescale, between),
        Some(scales) => online_softmax_with::<TERMS, true>(span, scales, scores, sums, weights, rescale, between),
    }
}

/// Scales that change nothing.
const ONES: Scales = [[1.0; SPAN]; 2];

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
fn online_softmax_with<const TERMS: usize, const CODES: bool>(
    span: &SpanSight,
    [of_keys, of_values]: &Scales,
    scores: &mut OfTile<'_>,
    (largest, total): (&mut Lanes<f32>, &mut Lanes<f32>),
    weights: &mut [Words],
    rescale: impl FnOnce(&Lanes<f32>),
    between: &mut impl FnMut(),
) {
    let (nth, together) = (scores.nth, scores.together);
    let (mut scale, mut of_keys) = (span.scale, of_keys);
    // A factor that is not positive would turn the order around.
    if span.softcap.is_some() || scale <= 0.0 {
        let lines = scores.tiles.iter_mut().skip(nth).step_by(together).flat_map(|tile| tile.as_chunks_mut::<SIDE>().0);
        for (line, of_key) in lines.zip(of_keys) {
            for score in line {
                let scaled = f32::from_bits(*score) * of_key * scale;
                *score = span.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh()).to_bits();
            }
        }
        (scale, of_keys) = (1.0, &ONES[0]);
    }
    let score_of = |of_tile: &Words, tile: usize, i: usize| {
        let score = load(line(of_tile, i));
        if CODES { _mm512_mul_ps(score, _mm512_set1_ps(of_keys[tile * SIDE + i])) } else { score }
    };
    let factor = _mm512_set1_ps(scale * std::f32::consts::LOG2_E);
    let sight = Sight { seen: load_integers(&span.seen), start: load_integers(&span.start) };
    let whole = span.whole();
    let (before, none) = (load_floats(largest), _mm512_set1_ps(f32::NEG_INFINITY));
    let mut most = none;
    for (tile, of_tile) in scores.tiles.iter().skip(nth).step_by(together).enumerate() {
        for i in 0..SIDE {
            let score = score_of(of_tile, tile, i);
            // In this order NaN is passed over.
            most = if whole.contains(&tile) {
                _mm512_max_ps(score, most)
            } else {
                _mm512_mask_max_ps(most, sight.of(tile * SIDE + i), score, most)
            };
        }
    }
    let most = _mm512_max_ps(_mm512_mul_ps(most, factor), before);
    // Where no score is more than minus infinity nothing is taken from them: infinity less infinity would be NaN.
    let shift = _mm512_maskz_mov_ps(!_mm512_cmpeq_ps_mask(most, none), most);
    let one = _mm512_set1_ps(1.0);
    let kept = power::<3>(_mm512_sub_ps(before, shift));
    if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(kept, one) != 0 {
        let mut factors = [0.0; SIDE];
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_ps(factors.as_mut_ptr(), kept) };
        rescale(&factors);
    }
    let mut sum = _mm512_mul_ps(load_floats(total), kept);
    for (tile, of_tile) in scores.tiles.iter().skip(nth).step_by(together).enumerate() {
        let of_whole = whole.contains(&tile);
        for i in 0..SIDE / 2 {
            let weigh = |key: usize| power::<TERMS>(_mm512_fmsub_ps(score_of(of_tile, tile, key), factor, shift));
            let seen = |key: usize, weight| {
                if of_whole { weight } else { _mm512_maskz_mov_ps(sight.of(tile * SIDE + key), weight) }
            };
            let mut pair = [weigh(2 * i), weigh(2 * i + 1)];
            if CODES {
                // What is not seen weighs nothing, whatever its scale.
                sum = _mm512_add_ps(_mm512_add_ps(sum, seen(2 * i, pair[0])), seen(2 * i + 1, pair[1]));
                pair = [0, 1].map(|odd| _mm512_mul_ps(pair[odd], _mm512_set1_ps(of_values[tile * SIDE + 2 * i + odd])));
            }
            let pair = [seen(2 * i, pair[0]), seen(2 * i + 1, pair[1])];
            let to = |term: usize| term * STEPS * SIDE + tile * SIDE / 2 + i;
            let with_these = split::<TERMS>(pair, sum, |term, words| {
                let to = &mut weights.as_flattened_mut().as_chunks_mut::<SIDE>().0[to(term)];
                // SAFETY: 64 bytes.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
            });
            if !CODES {
                sum = with_these;
            }
        }
        if tile % 2 == 1 {
            between();
        }
    }
    // SAFETY: 64 bytes each.
    unsafe {
        _mm512_storeu_ps(largest.as_mut_ptr(), most);
        _mm512_storeu_ps(total.as_mut_ptr(), sum);
    }
}

/// Gives the terms of two keys' weights, pair by pair in each word, and `sum` with the weights added: of one term the
/// rounded ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
fn split<const TERMS: usize>([even, odd]: [__m512; 2], sum: __m512, mut to: impl FnMut(usize, __m512i)) -> __m512 {
    if TERMS == 1 {
        // Words of even keys, then those of odd ones, brought side by side.
        let halves = words(_mm512_cvtne2ps_pbh(odd, even));
        let paired = _mm512_permutexvar_epi16(interleaved(), halves);
        to(0, paired);
        return _mm512_dpbf16_ps(sum, pairs(paired), pairs(_mm512_set1_epi16(0x3f80)));
    }
    let (mut rest, high) = ([even, odd], _mm512_set1_epi32(0xffff_0000_u32 as i32));
    for term in 0..TERMS {
        let [of_even, of_odd] = rest.map(|x| _mm512_castps_si512(x));
        to(term, _mm512_or_si512(_mm512_srli_epi32::<16>(of_even), _mm512_and_si512(of_odd, high)));
        // What is left, which is exact. (Of NaN it is NaN.)
        rest = rest.map(|x| _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), high))));
    }
    _mm512_add_ps(_mm512_add_ps(sum, even), odd)
}

/// Where the halves of words come from that two vectors of 16 halves are interleaved to.
#[inline]
#[target_feature(enable = "avx512f")]
fn interleaved() -> __m512i {
    const ORDER: [u16; 2 * SIDE] = {
        let mut order = [0; 2 * SIDE];
        let mut i = 0;
        while i < 2 * SIDE {
            order[i] = (i / 2 + i % 2 * SIDE) as u16;
            i += 1;
        }
        order
    };
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn words(pairs: __m512bh) -> __m512i {
    // SAFETY: of the same size, and any bits are integers.
    unsafe { std::mem::transmute(pairs) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(words: __m512i) -> __m512bh {
    // SAFETY: of the same size, and any bits are pairs of bf16.
    unsafe { std::mem::transmute(words) }
}
