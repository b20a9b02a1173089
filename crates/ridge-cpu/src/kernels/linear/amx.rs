//! Products on the matrix tiles of x86 (AMX), for weights of bf16.
//!
//! A tile instruction multiplies 16 rows of the weight, as they lie in memory, by 16 columns, over 32 elements of K, and
//! adds into f32. A row of x is a column for each of the terms that it is taken apart into: bf16 numbers that sum to it
//! exactly, of which bf16 needs one, f16 two and f32 three. The terms' products are summed from the smallest on. So a
//! result is a sum in blocks of 32, each of two chains of 16, whatever rows share the tile and however K is cut.
//!
//! Floor: 16 cycles for each term of 16 rows of x, 16 rows of the weight and 32 of K (prompts), or every weight read
//! once (decode, where a step takes no longer for the 16 columns than for one). For many rows of x a block of the weight
//! is copied into tiles that stay in L2; for few it is used where it lies.

mod columns;
mod tiles;

use std::arch::asm;
use std::ops::Range;

use half::bf16;

use crate::simd;
use columns::split;
pub(super) use columns::{Layout, Terms, floats, row_block, takes, terms};
use tiles::{Tiles, two_by_one, two_by_two};

/// Rows and columns of a tile of sums.
pub(super) const SIDE: usize = 16;

/// Elements of K in a tile.
const DEPTH: usize = 32;

/// Rows of the weight that are multiplied together: two tiles.
pub(super) const COLUMNS: usize = 2 * SIDE;

/// Tiles of K that are copied together: 128 KiB of the weight, which stay in L2 beside x.
const COPIED: usize = 64;

/// Tiles of columns up to which a weight is used where it lies.
const FEW: usize = 4;

/// A tile as 32-bit words: sums, or pairs of bf16.
pub(super) type Words = [u32; SIDE * SIDE];

/// A weight `[N, K]` of bf16, row-major.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) data: &'a [bf16],
    pub(super) inner: usize,
}

/// The tiles of this thread, configured while this lives.
pub(super) struct Session(());

#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl Session {
    /// Configures the tiles, where there are some.
    pub(super) fn begin() -> Self {
        assert!(simd::isa() == simd::Isa::Amx, "tiles are used where there are none");
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        config.bytes[..8].fill(64);
        config.rows[..8].fill(SIDE as u8);
        // SAFETY: the machine has tiles and the system lets this process use them; the configuration is 64 bytes that
        // give each of the eight tiles 16 rows of 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Self(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the machine has tiles; nobody uses them from here on.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The sums of rows `rows` (32 at most) of `w` with x into `sums`, two rows of [`Layout::tiles`].
pub(super) fn multiply(
    _configured: &Session,
    layout: &Layout,
    w: Weight<'_>,
    rows: Range<usize>,
    x: &[Words],
    room: &mut [Words],
    sums: &mut [Words],
) {
    assert!(x.len() >= layout.tiles * layout.depth && sums.len() >= 2 * layout.tiles);
    assert!(rows.end * w.inner <= w.data.len() && layout.depth == w.inner.div_ceil(DEPTH));
    let in_place = layout.tiles <= FEW && rows.len() == COLUMNS;
    let mut step = 0;
    if in_place {
        let whole = w.inner / DEPTH;
        let stride = w.inner * size_of::<bf16>();
        let low = w.data[rows.start * w.inner..].as_ptr().cast::<u8>();
        let at = Tiles { low, high: low.wrapping_add(SIDE * stride), stride, step: DEPTH * size_of::<bf16>() };
        add_products(layout, &at, 0..whole, x, sums);
        step = whole;
    }
    while step < layout.depth {
        let steps = step..(step + COPIED).min(layout.depth);
        copy(w, rows.clone(), steps.clone(), room);
        let (low, high) = (room.as_ptr().cast(), room[COPIED..].as_ptr().cast());
        let at = Tiles { low, high, stride: 64, step: size_of::<Words>() };
        add_products(layout, &at, steps.clone(), x, sums);
        step = steps.end;
    }
}

/// Copies tiles `steps` of K of rows `rows` into tiles that lie together, zeros where there is nothing.
fn copy(w: Weight<'_>, rows: Range<usize>, steps: Range<usize>, to: &mut [Words]) {
    for (i, at) in steps.enumerate() {
        let from = at * DEPTH;
        let len = DEPTH.min(w.inner - from);
        for half in 0..2 {
            for (line, row) in
                to[half * COPIED + i].as_chunks_mut::<SIDE>().0.iter_mut().zip(rows.start + half * SIDE..)
            {
                let of_row: &[bf16] = if row < rows.end { &w.data[row * w.inner + from..][..len] } else { &[] };
                match of_row.first_chunk::<DEPTH>() {
                    // SAFETY: both are 64 bytes, of which any are words.
                    Some(of_row) => *line = unsafe { of_row.as_ptr().cast::<[u32; SIDE]>().read_unaligned() },
                    None => split(of_row, 0, line),
                }
            }
        }
    }
}

/// Adds the products over tiles `steps` of K, of which `w` begins with the first; sets where that is the first of
/// all.
fn add_products(layout: &Layout, w: &Tiles, steps: Range<usize>, x: &[Words], sums: &mut [Words]) {
    if steps.is_empty() {
        return;
    }
    let fresh = steps.start == 0;
    let mut tile = 0;
    while tile < layout.tiles {
        let pair = tile + 1 < layout.tiles;
        let x = x[tile * layout.depth + steps.start..].as_ptr();
        let low = sums[tile..].as_mut_ptr();
        let high = sums[layout.tiles + tile..].as_mut_ptr();
        // SAFETY: the tiles are configured; `w` has `steps.len()` tiles of 16 rows at each of its places, x as many
        // from here on for this tile of columns and, if there is one, for the next, and the sums are those of these
        // tiles, as `multiply` has checked.
        unsafe {
            if pair {
                two_by_two(w, x, x.wrapping_add(layout.depth), steps.len(), low, high, fresh);
            } else {
                two_by_one(w, x, steps.len(), low, high, fresh);
            }
        }
        tile += if pair { 2 } else { 1 };
    }
}
