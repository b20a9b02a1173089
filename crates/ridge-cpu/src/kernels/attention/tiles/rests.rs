//! Values that are infinite or NaN, which go through no product.

use half::bf16;

use super::span::{Keys, STEP, STEPS};
use super::state::TilePair;
use crate::amx::{SIDE, Words};
use crate::kernels::attention::kernel::{AttentionKernel, TokenRows};

/// A span's values that are not finite.
pub(super) struct Rests<'a> {
    /// Those that have some.
    pub(super) keys: &'a Keys,
    /// `[SPAN][width]`, zeros elsewhere in the rows of these keys.
    pub(super) values: &'a [bf16],
}

impl AttentionKernel {
    /// Adds the values that are not finite for the queries of `pair` that see them.
    pub(super) fn add_rests<const TERMS: usize>(
        &self,
        rows: &TokenRows,
        from: usize,
        pair: &TilePair,
        rests: &Rests<'_>,
        weights: &[Words],
        out: &mut [Words],
    ) {
        if *rests.keys == Keys::default() {
            return;
        }
        let (width, together) = (self.width(), pair.tiles.len());
        let out = &mut out[pair.tiles.start * (width / SIDE)..][..together * (width / SIDE)];
        for (nth, tile) in pair.tiles.clone().enumerate() {
            let span = self.span(rows, from, tile);
            let keys = (0..pair.keys).filter(|key| rests.keys[key / 64] >> (key % 64) & 1 == 1);
            for (key, lane) in keys.flat_map(|key| (0..SIDE).map(move |lane| (key, lane))) {
                if !span.sees(lane, key) {
                    continue;
                }
                let weight = weight::<TERMS>(&weights[nth * TERMS * STEPS..], key, lane);
                for (d, value) in rests.values[key * width..][..width].iter().enumerate() {
                    if *value != bf16::ZERO {
                        let sum = &mut out[d / SIDE * together + nth][d % SIDE * SIDE + lane];
                        *sum = (f32::from_bits(*sum) + weight * value.to_f32()).to_bits();
                    }
                }
            }
        }
    }
}

/// The weight of key `key` of a span for the query of lane `lane`: its terms lie in `weights` as `[TERMS][STEPS]`.
pub(super) fn weight<const TERMS: usize>(weights: &[Words], key: usize, lane: usize) -> f32 {
    let term = |term: usize| {
        let pair = weights[term * STEPS + key / STEP][key % STEP / 2 * SIDE + lane];
        f32::from_bits(if key.is_multiple_of(2) { pair << 16 } else { pair & 0xffff_0000 })
    };
    (0..TERMS).rev().map(term).sum()
}

/// Moves values that are not finite from the `keys` rows of `span` to `rest`, and tells in which rows there are some.
pub(super) fn take_rest<const TERMS: usize>(span: &mut [bf16], width: usize, keys: usize, rest: &mut [bf16]) -> Keys {
    let mut found = Keys::default();
    // Their last term is what they are, and the others are zeros.
    let last = span.len() / TERMS * (TERMS - 1);
    let span = &mut span[last..][..keys * width];
    // SAFETY: there is AMX, and every machine that has it has AVX-512.
    if unsafe { are_finite(span) } {
        return found;
    }
    for (key, (row, rest)) in span.chunks_exact_mut(width).zip(rest.chunks_exact_mut(width)).enumerate() {
        if row.iter().all(|x| x.is_finite()) {
            continue;
        }
        found[key / 64] |= 1 << (key % 64);
        for (x, rest) in row.iter_mut().zip(rest) {
            *rest = if x.is_finite() { bf16::ZERO } else { std::mem::replace(x, bf16::ZERO) };
        }
    }
    found
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn are_finite(row: &[bf16]) -> bool {
    const INFINITE: u16 = 0x7f80;
    row.iter().fold(0, |found, x| found | u16::from(x.to_bits() & INFINITE == INFINITE)) == 0
}
