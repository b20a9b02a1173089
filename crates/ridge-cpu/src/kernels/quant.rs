//! Rows of weights that are stored in blocks, as f32.
//!
//! Floor: each byte read once, each value written once to where the next loop finds it in cache.

#[cfg(target_arch = "x86_64")]
mod blocks;

use ridge_graph::FormatRef;
use ridge_graph::format::BlockFormat;
use ridge_graph::with_block_format;

#[cfg(target_arch = "x86_64")]
use super::int8::unpack::OfRows;
#[cfg(target_arch = "x86_64")]
use crate::amx;
use crate::simd::vectorised;
#[cfg(target_arch = "x86_64")]
pub(super) use blocks::Taken;
#[cfg(target_arch = "x86_64")]
use blocks::ToTiles;

/// How rows of one weight are read.
#[derive(Clone, Copy)]
pub(super) struct BlockRows {
    /// Bytes of a row.
    bytes: usize,
    /// Values and bytes of a block.
    #[cfg(target_arch = "x86_64")]
    block: [usize; 2],
    read: fn(&[u8], &mut [f32]),
    #[cfg(target_arch = "x86_64")]
    to_tiles: ToTiles,
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
                #[cfg(target_arch = "x86_64")]
                block: [B::ELEMENTS, B::BYTES],
                read: read::<B>,
                #[cfg(target_arch = "x86_64")]
                to_tiles: blocks::to_tiles::<B>,
            })
        }, _ => None)
    }

    /// Bytes of a row.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where element `element` of row `row`, the first of a block, begins.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn offset(&self, row: usize, element: usize) -> usize {
        let [elements, bytes] = self.block;
        row * self.bytes + element / elements * bytes
    }

    /// Blocks of `elements` elements.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn blocks(&self, elements: usize) -> usize {
        elements / self.block[0]
    }

    /// Brings blocks of at most 16 rows, and at most 256 elements of each, to tiles of bf16.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn unpack(&self, blocks: &OfRows<'_>, taken: &mut Taken, to: &mut [amx::Words]) {
        (self.to_tiles)(blocks, taken, to);
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
