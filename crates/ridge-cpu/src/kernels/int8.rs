//! Products of codes: rows of x, rounded to 8-bit codes where they are prepared, by weights that are stored in blocks of
//! codes.
//!
//! The sum over a group of weights that share a scale is an exact integer, whatever instructions make it. Such sums
//! become floats, are multiplied by the weights' scale and added up in order over 256 elements of K, the codes of x that
//! share a scale; those sums by the scale of x are added up in order over K. Minima times the sum of x's codes are taken
//! away with the first. So on one instruction set a result has the same bits for one row of x and for many.
//!
//! Floor: every block read once (decode), or the rate of the instructions that multiply codes (prompts).

#[cfg(target_arch = "x86_64")]
mod avx2;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod stream;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
pub(super) mod unpack;
mod x;

use std::ops::Range;

use ridge_graph::FormatRef;
use ridge_graph::format::{BlockFormat, Mxfp4};
use ridge_graph::with_block_format;

use crate::simd;
pub(super) use x::{Layout, X};

/// Elements of K whose codes of x share a scale, which is a multiple of every block of weights.
pub(super) const GROUP: usize = ridge_graph::ops::Activations::GROUP;

/// Elements whose codes of x are added up for minima.
const SUMMED: usize = 16;

/// Rows of x, and of the weight, of a matrix tile.
pub(super) const SIDE: usize = 16;

/// Rows of the weight that are multiplied together.
pub(super) const COLUMNS: usize = 2 * SIDE;

/// Bytes of codes of x that are multiplied together: they stay in L2.
const RESIDENT: usize = 1 << 20;

/// Rows of x up to which a weight is streamed past them where there are matrix tiles: more take less time on those.
#[cfg(target_arch = "x86_64")]
const FEW: usize = 8;

/// What multiplies codes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// Matrix tiles.
    #[cfg(target_arch = "x86_64")]
    Tiles,
    /// Vectors of bytes, as blocks pass by.
    #[cfg(target_arch = "x86_64")]
    Stream,
    /// Loops that compilers turn into vectors.
    Lanes,
}

/// What multiplies the codes of `rows` rows of x.
pub(super) fn by(rows: usize) -> By {
    #[cfg(target_arch = "x86_64")]
    {
        let isa = simd::isa();
        if isa == simd::Isa::Amx && rows > FEW {
            return By::Tiles;
        }
        if isa >= simd::Isa::Avx2 {
            return By::Stream;
        }
    }
    let _ = rows;
    By::Lanes
}

/// Of `rows` rows of x of `inner` elements, those that are multiplied together: whole strips, all blocks alike.
pub(super) fn rows_together(rows: usize, inner: usize) -> usize {
    let most = (RESIDENT / inner.max(1)).clamp(SIDE, 512) / SIDE * SIDE;
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(SIDE).max(SIDE)
}

/// Products of some rows of a weight, in a format, with those of x.
#[cfg(target_arch = "x86_64")]
type Stream = fn(&Weight<'_>, Range<usize>, &X<'_>, &mut [u8], &mut [f32]);

/// One row of x waits for memory, which the longest vectors read fastest; more share codes that were taken apart once. Bits
/// are the same.
#[cfg(target_arch = "x86_64")]
fn past<B: avx2::Interleaved>(weight: &Weight<'_>, rows: Range<usize>, x: &X<'_>, room: &mut [u8], out: &mut [f32]) {
    if simd::isa() >= simd::Isa::Avx512Vnni && x.layout.rows == 1 {
        stream::stream::<B>(weight, rows, x, room, out);
    } else {
        avx2::multiply::<B>(weight, rows, x, room, out);
    }
}

/// How the blocks of a format are codes.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    /// Elements and bytes of a block.
    block: [usize; 2],
    /// Elements that share a scale.
    group: usize,
    pub(super) minima: bool,
    /// What products are multiplied by at last: see [`LARGE`].
    pub(super) unit: f32,
    read: Read,
    #[cfg(target_arch = "x86_64")]
    unpack: unpack::Unpack,
    #[cfg(target_arch = "x86_64")]
    stream: Stream,
}

impl Codes {
    pub(super) fn new(format: &FormatRef) -> Option<Self> {
        with_block_format!(format.name(), B => {
            Some(Self {
                block: [B::ELEMENTS, B::BYTES],
                group: B::GROUP,
                minima: B::MINIMA,
                unit: unit::<B>(),
                read: read::<B>,
                #[cfg(target_arch = "x86_64")]
                unpack: unpack::unpack::<B>,
                #[cfg(target_arch = "x86_64")]
                stream: past::<B>,
            })
        }, _ => None)
    }

    /// Bytes of `elements` values.
    pub(super) fn bytes(&self, elements: usize) -> usize {
        elements / self.block[0] * self.block[1]
    }
}

/// Scales of MXFP4 are powers of two up to 2^127. Sums of codes times such a scale would overflow where sums of values
/// do not, so its scales are taken in this unit. Nothing is rounded: codes are whole numbers, and the least scale is
/// 2^-128.
const LARGE: f32 = 65_536.0;

/// The unit of a format's scales.
pub(super) fn unit<B: BlockFormat>() -> f32 {
    if B::NAME == Mxfp4::NAME { LARGE } else { 1.0 }
}

/// As [`BlockFormat::codes`], with scales in their unit.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
fn apart<B: BlockFormat>(block: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
    B::codes(block, codes, scales, minima);
    if unit::<B>() != 1.0 {
        scales[..B::ELEMENTS / B::GROUP].iter_mut().for_each(|scale| *scale /= unit::<B>());
    }
}

/// Takes whole blocks apart: codes, and a scale and a minimum for each group.
type Read = fn(&[u8], &mut [i8], &mut [f32], &mut [f32]);

simd::vectorised! {
    fn read<B: BlockFormat>(blocks: &[u8], codes: &mut [i8], scales: &mut [f32], minima: &mut [f32]) {
        let groups = B::ELEMENTS / B::GROUP;
        let parts = codes.chunks_exact_mut(B::ELEMENTS).zip(scales.chunks_exact_mut(groups));
        for ((block, (codes, scales)), minima) in blocks.chunks_exact(B::BYTES).zip(parts).zip(minima.chunks_exact_mut(groups)) {
            apart::<B>(block, codes, scales, minima);
        }
    }
}

/// A weight `[N, K]`, row-major.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) data: &'a [u8],
    pub(super) codes: Codes,
    pub(super) inner: usize,
}

impl Weight<'_> {
    /// Bytes of a row.
    fn stride(&self) -> usize {
        self.codes.bytes(self.inner)
    }

    /// Elements of group `group` of K.
    fn elements(&self, group: usize) -> Range<usize> {
        group * GROUP..((group + 1) * GROUP).min(self.inner)
    }
}

/// Bytes that [`multiply`] works in.
pub(super) fn room(x: &Layout) -> usize {
    match x.by {
        #[cfg(target_arch = "x86_64")]
        By::Tiles => tiles::room(x),
        #[cfg(target_arch = "x86_64")]
        By::Stream => stream::room().max(avx2::room()),
        By::Lanes => 0,
    }
}

/// The products of `rows` of the weight, at most [`COLUMNS`], with the rows of `x`, one row of x after another.
pub(super) fn multiply(weight: &Weight<'_>, rows: Range<usize>, x: &X<'_>, room: &mut [u8], out: &mut [f32]) {
    match x.layout.by {
        #[cfg(target_arch = "x86_64")]
        By::Tiles => tiles::multiply(weight, rows, x, room, out),
        #[cfg(target_arch = "x86_64")]
        By::Stream => (weight.codes.stream)(weight, rows, x, room, out),
        By::Lanes => {
            let _ = room;
            lanes::multiply(weight, rows, x, out);
        }
    }
}
