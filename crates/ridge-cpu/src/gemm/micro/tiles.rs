//! The innermost product on matrix tiles (AMX): 32 rows of A by 48 columns of B, two tiles by three, which load five tiles for
//! six products.
//!
//! A panel of A has blocks of 16 pairs of 32 rows, a tile's rows one after another; one of B has three parts of 16 columns,
//! whose 16 pairs of steps are a tile. A sum has two chains over the pairs, which is the instruction's order.

use crate::amx::tiles::{Tiles, two_by_three};
use crate::amx::{LINE, Words};
use crate::gemm::words::PanelOfB;

/// Rows and columns of a tile, and pairs that it multiplies.
pub(super) const SIDE: usize = crate::amx::SIDE;

pub(super) const ROWS: usize = 2 * SIDE;
pub(super) const COLUMNS: usize = 3 * SIDE;

/// What multiplies tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileMultiplier {
    Amx,
    #[cfg(test)]
    Emulated,
}

/// Sums, tile by tile: three of the first 16 rows, then three of the others.
#[repr(align(64))]
struct Sums([Words; 6]);

impl TileMultiplier {
    /// As `Micro::multiply`.
    ///
    /// # Safety
    /// `a` and `b` are as long as `steps` pairs take, a multiple of 16, `c` has 32 rows of 48 elements, and tiles are configured if
    /// they are used.
    pub(super) unsafe fn multiply(
        self,
        steps: usize,
        a: &[u32],
        b: PanelOfB<'_>,
        c: *mut f32,
        stride: usize,
        add: bool,
    ) {
        assert!(steps.is_multiple_of(SIDE), "a panel for tiles has whole blocks of pairs");
        let mut sums = Sums([[0; SIDE * SIDE]; 6]);
        // SAFETY: the row of 16 elements is in `c` by the caller's promise.
        let row = |tile: usize, row: usize| unsafe {
            c.add((tile / 3 * SIDE + row) * stride + tile % 3 * SIDE).cast::<[u32; SIDE]>()
        };
        if add {
            for (nth, tile) in sums.0.iter_mut().enumerate() {
                for (r, to) in tile.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
                    // SAFETY: as above; any bits of an f32 are a word.
                    *to = unsafe { row(nth, r).read_unaligned() };
                }
            }
        }
        if steps > 0 {
            let low = a.as_ptr().cast::<u8>();
            let block = ROWS * LINE;
            let a = Tiles { low, high: low.wrapping_add(SIDE * LINE), stride: LINE, step: block };
            let b = [0, 1, 2].map(|part| b.words[part * b.apart..].as_ptr().cast::<Words>());
            let to = sums.0.as_mut_ptr();
            // SAFETY: each tile of A is 16 rows of a block, each of B 16 pairs of a part, and there are as many as asked for.
            unsafe {
                match self {
                    Self::Amx => two_by_three(&a, b, steps / SIDE, to, !add),
                    #[cfg(test)]
                    Self::Emulated => emulated::two_by_three(&a, b, steps / SIDE, to, !add),
                }
            }
        }
        for (nth, tile) in sums.0.iter().enumerate() {
            for (r, from) in tile.as_chunks::<SIDE>().0.iter().enumerate() {
                // SAFETY: as above.
                unsafe { row(nth, r).write_unaligned(*from) };
            }
        }
    }
}

/// The same by the meaning of the instructions.
#[cfg(test)]
mod emulated {
    use super::{SIDE, Tiles, Words};

    /// As [`crate::amx::tiles::two_by_three`].
    ///
    /// # Safety
    /// As there, but for the configuration.
    pub(super) unsafe fn two_by_three(w: &Tiles, x: [*const Words; 3], steps: usize, sums: *mut Words, fresh: bool) {
        for (nth, at) in [w.low, w.high].into_iter().enumerate() {
            for (column, x) in x.into_iter().enumerate() {
                // SAFETY: six tiles, by the caller's promise.
                let sums = unsafe { &mut *sums.add(3 * nth + column) };
                if fresh {
                    sums.fill(0);
                }
                for step in 0..steps {
                    // SAFETY: so many tiles by the caller's promise.
                    let b = unsafe { &*x.add(step) };
                    // SAFETY: each of its rows is 64 bytes, by the caller's promise.
                    let row = |row: usize| unsafe { &*at.add(step * w.step + row * w.stride).cast::<[u32; SIDE]>() };
                    for r in 0..SIDE {
                        product(row(r), b, &mut sums[r * SIDE..][..SIDE]);
                    }
                }
            }
        }
    }

    /// `tdpbf16ps` of one row: two chains, of the lower and of the upper halves of words, that are added to the sums.
    fn product(a: &[u32; SIDE], b: &Words, sums: &mut [u32]) {
        let half = |word: u32, upper: bool| f32::from_bits(if upper { word & 0xffff_0000 } else { word << 16 });
        for (column, sum) in sums.iter_mut().enumerate() {
            let mut chains = [0f32; 2];
            for (k, a) in a.iter().enumerate() {
                for (chain, upper) in chains.iter_mut().zip([false, true]) {
                    *chain += half(*a, upper) * half(b[k * SIDE + column], upper);
                }
            }
            *sum = (f32::from_bits(*sum) + (chains[0] + chains[1])).to_bits();
        }
    }
}
