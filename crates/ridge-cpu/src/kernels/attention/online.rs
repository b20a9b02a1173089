//! A softmax over scores that come part by part (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

use crate::kernels::linear::source::Lanes;
use crate::simd;

/// What a row has summed so far.
pub(super) struct RowSums<'a> {
    /// Its largest score.
    pub(super) largest: &'a mut f32,
    /// Its exponentials, relative to that.
    pub(super) total: &'a mut f32,
    /// Its weighed values, relative to that.
    pub(super) out: &'a mut [Lanes],
}

/// Turns the next `scores` of a row into weights, adds them to its total, and scales what came before, unless they are the
/// `first`.
pub(super) fn absorb(scores: &mut [f32], first: bool, row: &mut RowSums<'_>) {
    let (before, here) = (*row.largest, simd::max(scores));
    let largest = if here > before { here } else { before };
    // Of minus infinity alone nothing is taken: infinity less infinity would be NaN.
    let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
    if !first {
        let kept = (before - shift).exp();
        *row.total *= kept;
        simd::scale(row.out.as_flattened_mut(), kept);
    }
    *row.largest = largest;
    *row.total += simd::exp_sum(scores, shift);
}
