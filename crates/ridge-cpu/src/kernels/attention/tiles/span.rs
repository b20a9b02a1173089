//! Spans of positions whose scores are computed together, as tiles.

use crate::amx::SIDE;

/// Positions of a span: the scores of two tiles of queries stay in L1.
pub(super) const SPAN: usize = 128;

/// Keys of a tile along which values are summed.
pub(super) const STEP: usize = 2 * SIDE;

/// Tiles of a span along its keys.
pub(super) const STEPS: usize = SPAN / STEP;

pub(super) type Lanes<T> = [T; SIDE];

/// Keys of a span, a bit each.
pub(super) type Keys = [u64; SPAN / 64];

/// Scales of a span's keys and values.
pub(super) type Scales = [[f32; SPAN]; 2];

/// Multiplies sums by `factors`, each by its own.
pub(super) fn scale_each(sums: &mut [u32; SIDE], factors: &Lanes<f32>) {
    for (sum, factor) in sums.iter_mut().zip(factors) {
        *sum = (f32::from_bits(*sum) * factor).to_bits();
    }
}

pub(super) fn lanes<T>(f: impl FnMut(usize) -> T) -> Lanes<T> {
    std::array::from_fn(f)
}
