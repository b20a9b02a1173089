//! Rows of weights that are stored in blocks, as f32.
//!
//! Floor: each byte read once, each value written once to where the next loop finds it in cache.

use ridge_graph::FormatRef;
use ridge_graph::format::{BlockFormat, SignedBytes};
use ridge_graph::with_block_format;

#[cfg(target_arch = "x86_64")]
use super::int8;
use crate::simd::vectorised;

/// How rows of one weight are read.
#[derive(Clone, Copy)]
pub(super) struct BlockRows {
    /// Bytes of a row.
    bytes: usize,
    read: fn(&[u8], &mut [f32]),
    /// How they are codes.
    #[cfg(target_arch = "x86_64")]
    codes: int8::WeightCodes,
}

/// Can rows stored so be read?
pub(super) fn supports(format: &FormatRef) -> bool {
    BlockRows::new(format, 0).is_some()
}

impl BlockRows {
    /// Rows of `elements` values stored in `format`.
    pub(super) fn new(format: &FormatRef, elements: usize) -> Option<Self> {
        with_block_format!(format.name(), B => {
            Some(Self {
                bytes: elements / B::ELEMENTS * B::BYTES,
                read: read::<B>,
                #[cfg(target_arch = "x86_64")]
                codes: int8::codes(format)?,
            })
        }, _ => None)
    }

    /// Rows of `elements` int8 codes, as whole numbers.
    pub(super) fn of_bytes(elements: usize) -> Self {
        Self {
            bytes: elements,
            read: read::<SignedBytes>,
            #[cfg(target_arch = "x86_64")]
            codes: int8::codes_of_bytes(),
        }
    }

    /// How rows are codes.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn codes(&self) -> int8::WeightCodes {
        self.codes
    }

    /// As many rows as `out` holds, from row `first` on, of the weight whose blocks are `data`.
    pub(super) fn read(&self, data: &[u8], first: usize, rows: usize, out: &mut [f32]) {
        (self.read)(&data[first * self.bytes..][..rows * self.bytes], out);
    }
}

vectorised! {
    fn read<B: BlockFormat>(blocks: &[u8], out: &mut [f32]) {
        for (block, out) in blocks.chunks_exact(B::BYTES).zip(out.chunks_exact_mut(B::ELEMENTS)) {
            B::read(block, out);
        }
    }
}
