//! Sizes of matrix tiles, how K is cut into parts for them, and the configuration of a thread's tiles.

use std::arch::asm;
use std::ops::Range;

use crate::simd;

/// Rows and columns of a tile of sums.
pub(crate) const SIDE: usize = 16;

/// Elements of K in a tile.
pub(crate) const DEPTH: usize = 32;

/// Rows of the weight that are multiplied together: two tiles.
pub(crate) const COLUMNS: usize = 2 * SIDE;

/// Elements of K that are multiplied at once, unless K is cut ([`parts`]): of x they take 1 MiB, of a weight 128 KiB.
pub(crate) const BLOCK: usize = 64 * DEPTH;

/// Elements of K that are copied at once for a few tiles of columns, and widened at once: the largest block of a format.
pub(crate) const SHORT: usize = 256;

/// Tiles of columns up to which no weight is copied that could be used where it lies.
pub(crate) const FEW: usize = 4;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// A tile as 32-bit words: sums, or pairs of bf16.
pub(crate) type Words = [u32; SIDE * SIDE];

/// Parts into which K is cut, where it is longer than [`BLOCK`]: half as long, so that those of x that the next part needs
/// are brought to L2 while these are used.
pub(crate) fn parts(inner: usize) -> usize {
    if inner > BLOCK { inner.div_ceil(BLOCK / 2) } else { 1 }
}

/// Steps of part `nth` of K; of the first after the last.
pub(crate) fn part(inner: usize, nth: usize) -> Range<usize> {
    let depth = inner.div_ceil(DEPTH);
    let (steps, nth) = if parts(inner) > 1 { (BLOCK / 2 / DEPTH, nth % parts(inner)) } else { (depth, 0) };
    nth * steps..((nth + 1) * steps).min(depth)
}

/// Tiles of columns for products of three or two of them, whole rows with all of their terms.
pub(crate) fn groups(tiles: usize, terms: usize) -> impl Iterator<Item = Range<usize>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        // Four that are left are two pairs, so that none is alone.
        let count = match tiles - from {
            0 => return None,
            4 => 2,
            left => left.min(if terms == 2 { 2 } else { 3 }),
        };
        from += count;
        Some(from - count..from)
    })
}

/// The tiles of this thread, configured while this lives.
pub(crate) struct TileSession(());

#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileSession {
    /// Configures the tiles, where there are some: 16 rows of 64 bytes each.
    pub(crate) fn begin() -> Self {
        Self::with([[SIDE, LINE]; 8])
    }

    /// Configures the tiles, where there are some, with the rows and the bytes of a row of each.
    pub(crate) fn with(tiles: [[usize; 2]; 8]) -> Self {
        assert!(simd::isa() == simd::Isa::Amx, "tiles are used where there are none");
        assert!(tiles.iter().all(|[rows, bytes]| (1..=SIDE).contains(rows) && (1..=LINE).contains(bytes)));
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        for (i, [rows, bytes]) in tiles.into_iter().enumerate() {
            (config.rows[i], config.bytes[i]) = (rows as u8, bytes as u16);
        }
        // SAFETY: the machine has tiles and the system lets this process use them; the configuration is 64 bytes that
        // give each of the eight tiles rows that it can have.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Self(())
    }
}

impl Drop for TileSession {
    fn drop(&mut self) {
        // SAFETY: the machine has tiles; nobody uses them from here on.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
