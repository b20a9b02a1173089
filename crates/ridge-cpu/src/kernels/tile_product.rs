//! Products on the matrix tiles of x86 (AMX) of weights of bf16 that lie in rows.
//!
//! A tile instruction multiplies 16 rows of the weight, as they lie in memory, by 16 columns, over 32 elements of K, and
//! adds into f32. A row of x is a column for each of the terms that it is taken apart into: bf16 numbers that sum to it
//! exactly, of which bf16 needs one, f16 two and f32 three. The terms' products are summed from the smallest on. So a
//! result is a sum in blocks of 32, each of two chains of 16, whatever rows share the tile and however K is cut.
//!
//! Floor: 16 cycles for each term of 16 rows of x, 16 rows of the weight and 32 of K (prompts), or every weight read
//! once (decode, where a step takes no longer for the 16 columns than for one).
//!
//! What a prompt waits for are loads from L2: two tiles of the weight by three of x ask for five tiles for six products
//! (two by two would for six), and sums leave while they are in L1. K is cut so that a block of x stays in L2 while 32 rows
//! of the weight after another pass by; sums of several such rows wait for the next part of K, whose x is fetched
//! meanwhile ([`Ahead`]).
//!
//! Weights of bf16 that nothing else reads are in panels, whose tiles come as they are, and weights in blocks become panels
//! (`amx/panels.rs`). Others, which are here, are multiplied where they lie for a few rows of x, and copied to tiles for many.

use std::ops::Range;

use half::bf16;

use crate::amx::tiles::{Tiles, from_room, two_by_one, two_by_three, two_by_two};
use crate::amx::{Ahead, BLOCK, COLUMNS, ColumnLayout, DEPTH, FEW, LINE, SHORT, SIDE, TileSession, Words, split};
use crate::simd;

/// A weight `[N, K]`, row-major.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct TileWeight<'a> {
    pub(in crate::kernels) data: &'a [bf16],
    pub(in crate::kernels) inner: usize,
}

/// 32 rows of a weight, or the last ones, and a part of K in tiles.
#[derive(Clone)]
pub(in crate::kernels) struct WeightPart<'a> {
    pub(in crate::kernels) weight: TileWeight<'a>,
    pub(in crate::kernels) rows: Range<usize>,
    pub(in crate::kernels) steps: Range<usize>,
}

impl WeightPart<'_> {
    /// Tiles of K that can be multiplied where they lie.
    fn in_place(&self, layout: &ColumnLayout) -> Range<usize> {
        let whole = self.rows.len() == COLUMNS && layout.tiles <= FEW;
        let end = if whole { self.steps.end.min(self.weight.inner / DEPTH) } else { self.steps.start };
        self.steps.start..end
    }

    /// Where tile `step` of K of its row `row` lies.
    fn at(&self, row: usize, step: usize) -> *const u8 {
        let element = (self.rows.start + row) * self.weight.inner + step * DEPTH;
        self.weight.data.as_ptr().wrapping_add(element).cast()
    }

    /// Bytes from a row to the next.
    fn stride(&self) -> usize {
        self.weight.inner * size_of::<bf16>()
    }

    /// All of it, if it is whole rows.
    pub(in crate::kernels) fn together(&self) -> Option<&[u32]> {
        let whole = self.steps == (0..self.weight.inner.div_ceil(DEPTH));
        let elements = &self.weight.data[self.rows.start * self.weight.inner..self.rows.end * self.weight.inner];
        // SAFETY: any elements are words.
        whole.then(|| unsafe { elements.align_to::<u32>().1 })
    }

    /// Brings share `nth` of `shares` of it to cache, if it is a part of each row.
    fn fetch(&self, nth: usize, shares: usize) {
        if self.together().is_some() {
            return;
        }
        let of_row = self.at(0, self.steps.end).addr().min(self.at(1, 0).addr()) - self.at(0, self.steps.start).addr();
        for row in self.rows.len() * nth / shares..self.rows.len() * (nth + 1) / shares {
            simd::fetch(self.at(row, self.steps.start), of_row);
        }
    }
}

/// Adds the products of `part` with x to `sums`, as many as [`ColumnLayout::sums_room`]; sets them if it is the first of K.
/// Meanwhile brings `ahead` to cache, and `next` if it is parts of its rows. Says for each of [`ColumnLayout::groups`] when its sums are `done`.
pub(in crate::kernels) fn multiply(
    _configured: &TileSession,
    layout: &ColumnLayout,
    part: &WeightPart<'_>,
    next: Option<&WeightPart<'_>>,
    ahead: &mut Ahead,
    x: &[Words],
    room: &mut [Words],
    sums: &mut [Words],
    mut done: impl FnMut(&Range<usize>, &[Words]),
) {
    let inner = part.weight.inner;
    assert!(x.len() >= layout.tiles * layout.depth && sums.len() >= 2 * layout.tiles);
    assert!(
        part.rows.end * inner <= part.weight.data.len()
            && part.rows.len() <= COLUMNS
            && room.len() >= 2 * BLOCK / DEPTH
    );
    assert!(part.steps.end <= layout.depth && layout.depth == inner.div_ceil(DEPTH));
    let in_place = part.in_place(layout);
    let groups = layout.groups().count();
    let next = next.filter(|_| layout.tiles > FEW);
    // For many columns the sums are loaded once for all of K, for few what is copied stays in L1.
    let together = if layout.tiles <= FEW { SHORT } else { BLOCK } / DEPTH;
    let copied = (in_place.end..part.steps.end).step_by(together).map(|from| from..part.steps.end.min(from + together));
    for steps in std::iter::once(in_place.clone()).filter(|steps| !steps.is_empty()).chain(copied) {
        let is_copied = steps.start >= in_place.end;
        let at = if is_copied {
            copy(part, steps.clone(), room);
            let (low, high) = (room.as_ptr().cast(), room[BLOCK / DEPTH..].as_ptr().cast());
            Tiles { low, high, stride: LINE, step: size_of::<Words>() }
        } else {
            let (low, stride) = (part.at(0, steps.start), part.stride());
            Tiles { low, high: low.wrapping_add(SIDE * stride), stride, step: DEPTH * size_of::<bf16>() }
        };
        let (fresh, last) = (steps.start == 0, steps.end == part.steps.end);
        for (nth, group) in layout.groups().enumerate() {
            if let Some(next) = next {
                next.fetch(nth, groups);
            }
            let x = x[group.start * layout.depth + steps.start..].as_ptr();
            let x = [0, 1, 2].map(|tile| x.wrapping_add(tile * layout.depth));
            let sums = &mut sums[2 * group.start..2 * group.end];
            let to = sums.as_mut_ptr();
            // SAFETY: the tiles are configured; there are `steps.len()` tiles of 16 rows of the weight at each of its
            // places, x has as many from here on for each tile of the group, and the sums are those of these tiles.
            unsafe {
                match group.len() {
                    1 => two_by_one(&at, x[0], steps.len(), to, fresh),
                    2 if layout.tiles <= FEW => two_by_two(&at, [x[0], x[1]], steps.len(), to, fresh),
                    3 if layout.tiles <= FEW => two_by_three(&at, x, steps.len(), to, fresh),
                    count => from_room(room, &x[..count], steps.len(), to, fresh, ahead.take(steps.len())),
                }
            }
            if last {
                done(&group, sums);
            }
        }
    }
}

/// Copies tiles `steps` of K of `part` into tiles that lie together, zeros where there is nothing.
fn copy(part: &WeightPart<'_>, steps: Range<usize>, to: &mut [Words]) {
    let TileWeight { data, inner } = part.weight;
    for half in 0..2 {
        for line in 0..SIDE {
            let row = part.rows.start + half * SIDE + line;
            let of_row: &[bf16] = if row < part.rows.end { &data[row * inner..][..inner] } else { &[] };
            for (i, at) in steps.clone().enumerate() {
                let to = &mut to[half * (BLOCK / DEPTH) + i].as_chunks_mut::<SIDE>().0[line];
                let of_row = of_row.get(at * DEPTH..).unwrap_or(&[]);
                match of_row.first_chunk::<DEPTH>() {
                    // SAFETY: both are 64 bytes, of which any are words.
                    Some(of_row) => *to = unsafe { of_row.as_ptr().cast::<[u32; SIDE]>().read_unaligned() },
                    None => split(of_row, to),
                }
            }
        }
    }
}
