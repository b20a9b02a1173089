//! Groups of elements that share a scale, and the units of scales.

use ridge_graph::format::{BlockFormat, Mxfp4};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use ridge_graph::format::{Iq4Nl, Iq4Xs, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, SignedBytes};

/// Elements of K whose codes of x share a scale, which is a multiple of every block of weights.
pub(crate) const GROUP: usize = 256;

/// Elements whose codes of x are added up for minima.
pub(crate) const SUMMED: usize = 16;

/// Rows of x, and of the weight, of a matrix tile.
pub(crate) const SIDE: usize = 16;

/// Rows of a weight that are the lanes of vectors where they are taken apart.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) const EIGHT: usize = 8;

/// Rows of the weight that are multiplied together.
pub(crate) const COLUMNS: usize = 2 * SIDE;

/// Scales of MXFP4 are powers of two up to 2^127. Sums of codes times such a scale would overflow where sums of values
/// do not, so its scales are taken in this unit. Nothing is rounded: codes are whole numbers, and the least scale is
/// 2^-128.
const LARGE: f32 = 65_536.0;

/// The unit of a format's scales.
pub(crate) fn unit<B: BlockFormat>() -> f32 {
    if B::NAME == Mxfp4::NAME { LARGE } else { 1.0 }
}

/// As [`BlockFormat::codes`], with scales in their unit.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
pub(crate) fn apart<B: BlockFormat>(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
    B::codes(block, codes, scales, minima);
    if unit::<B>() != 1.0 {
        scales[..B::ELEMENTS / B::GROUP].iter_mut().for_each(|scale| *scale /= unit::<B>());
    }
}

/// A block format whose codes are taken apart as bytes that are not negative.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) trait Above: BlockFormat {
    /// How much the bytes are above the codes.
    const ABOVE: u8;
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! above {
    ($($format:ident: $above:literal,)*) => {
        $(impl Above for $format {
            const ABOVE: u8 = $above;
        })*
    };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
above! {
    Q8_0: 128, Q4_0: 8, Q4_1: 0, Q5_0: 16, Q5_1: 0, Iq4Nl: 128, Iq4Xs: 128, Mxfp4: 12, Q2K: 0, Q3K: 4, Q4K: 0, Q5K: 0, Q6K: 32,
    SignedBytes: 128,
}
