//! Rows of weights that are stored in blocks, as f32.
//!
//! Floor: each byte read once, each value written once to where the next loop finds it in cache.

use ridge_graph::FormatRef;
use ridge_graph::format::BlockFormat;
use ridge_graph::with_block_format;

#[cfg(target_arch = "x86_64")]
use super::amx::blocks::{self, ToTiles};
use crate::simd::vectorised;

/// How rows of one weight are read.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Bytes of a row.
    bytes: usize,
    /// Values and bytes of a block.
    block: [usize; 2],
    read: fn(&[u8], &mut [f32]),
    #[cfg(target_arch = "x86_64")]
    to_tiles: Option<ToTiles>,
}

/// Can rows stored so be read?
pub(super) fn supports(format: &FormatRef) -> bool {
    Rows::new(format, 0).is_some()
}

impl Rows {
    /// Rows of `elements` values stored in `format`.
    pub(super) fn new(format: &FormatRef, elements: usize) -> Option<Self> {
        with_block_format!(format.name(), B => {
            Some(Self {
                bytes: elements / B::ELEMENTS * B::BYTES,
                block: [B::ELEMENTS, B::BYTES],
                read: read::<B>,
                #[cfg(target_arch = "x86_64")]
                to_tiles: blocks::to_tiles(B::NAME),
            })
        }, _ => None)
    }

    /// Bytes of a row.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Blocks of `len` values of row `row` from element `from` on, both whole blocks.
    pub(super) fn part<'a>(&self, data: &'a [u8], row: usize, from: usize, len: usize) -> &'a [u8] {
        let [elements, bytes] = self.block;
        &data[row * self.bytes + from / elements * bytes..][..len / elements * bytes]
    }

    /// The values of blocks.
    pub(super) fn read_part(&self, blocks: &[u8], out: &mut [f32]) {
        (self.read)(blocks, out);
    }

    /// How blocks are brought to matrix tiles, where there is a way of its own.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn to_tiles(self) -> Option<ToTiles> {
        self.to_tiles
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
