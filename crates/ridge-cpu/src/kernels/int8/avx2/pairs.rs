//! What instructions that add pairs of products of bytes as 16-bit integers allow.

use super::super::interleaved::Interleaved;

/// How many products of a byte are added up as 16-bit integers: pairs, a power of two of them, within what shares a scale.
/// None if a pair does not fit.
pub(super) const fn pairs<B: Interleaved>() -> usize {
    match i16::MAX as usize / (2 * B::LARGEST as usize * 127) {
        0 => 0,
        most if most >= B::GROUP / 4 => B::GROUP / 4,
        most => 1 << most.ilog2(),
    }
}

/// How much what is multiplied is above codes.
pub(super) const fn above<B: Interleaved>() -> u8 {
    if pairs::<B>() == 0 { 0 } else { B::ABOVE }
}
