//! Blocks of a product's results: how the work is cut into pieces, and what a piece does.

use std::ops::Range;

use super::micro::{Ahead, MicroSession};
use super::words::PanelOfB;
use super::{BLOCK, Cut, DEPTH, Depth, Gemm, Side};
use crate::io::KernelIo;

/// Lines of the packed operand that share a block of the other, at most, so that their part of the result stays in L2.
const TOGETHER: usize = 768;

/// A block of a result.
pub(crate) struct Block {
    /// Which result.
    pub(crate) result: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

/// Memory of a thread.
pub(crate) struct GemmRoom<'a> {
    /// As many words as the first of [`Gemm::room`].
    pub(crate) packed: &'a mut [u32],
    /// As many elements as the second.
    pub(crate) sums: &'a mut [f32],
}

/// Where the sums of a block are computed.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    pub(crate) at: *mut f32,
    /// Elements from a row to the next.
    pub(crate) stride: usize,
}

impl Sums {
    /// Row `row`, of `width` elements.
    ///
    /// # Safety
    /// It is there, and no other slice of it is alive.
    pub(crate) unsafe fn row<'a>(self, row: usize, width: usize) -> &'a mut [f32] {
        // SAFETY: passed on to the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(row * self.stride), width) }
    }

    /// Sets all of `block` to zero, which a sum of nothing is.
    fn clear(self, block: &Block) {
        for row in 0..block.rows.len() {
            // SAFETY: inside of the block, by the promise of the caller of `run`.
            unsafe { self.row(row, block.columns.len()) }.fill(0.0);
        }
    }
}

/// The sums of a tile of the innermost product at an edge.
const LARGEST_TILE: usize = 32 * 48;

impl Gemm {
    fn block_cut(&self, extent: usize) -> Cut {
        Cut::new(extent, self.width(self.other()), BLOCK)
    }

    /// The extents that blocks are cut from: rows, or the columns of each result.
    fn extents(&self) -> impl Iterator<Item = usize> {
        let rows = (self.other() == Side::A).then(|| self.rows());
        let columns = if rows.is_some() { &[] } else { &self.columns[..] };
        rows.into_iter().chain(columns.iter().copied())
    }

    /// Pieces of all results: those of one block follow each other.
    pub(crate) fn pieces(&self) -> usize {
        self.group.count() * self.extents().map(|extent| self.block_cut(extent).count()).sum::<usize>()
    }

    pub(crate) fn piece_nanos(&self) -> f64 {
        let block = self.extents().map(|extent| self.block_cut(extent).size.min(extent)).max().unwrap_or(0);
        200.0 + (block * self.group.size.min(self.group.extent) * self.words()) as f64 * self.micro.nanos()
    }

    fn together(&self) -> usize {
        (TOGETHER / self.group.size).clamp(1, self.group.count().max(1))
    }

    /// Words and elements of the memory that [`Gemm::run`] works in: a packed block, and the sums of a block if they are not
    /// computed where they stay.
    pub(crate) fn room(&self, in_place: bool) -> [usize; 2] {
        let block = self.extents().map(|extent| self.block_cut(extent).size).max().unwrap_or(0);
        let depth = self.terms.iter().map(|term| self.micro.words_of(term.inner)).max().unwrap_or(0).min(DEPTH);
        let lines = self.together() * self.group.size;
        [block * depth.next_multiple_of(self.micro.together), if in_place { LARGEST_TILE } else { block * lines }]
    }

    /// The block that piece `piece` belongs to: which result, and which lines of the operand that is packed where it is used.
    fn place(&self, piece: usize) -> (usize, Range<usize>) {
        let mut block = piece / self.group.count();
        for (result, extent) in self.extents().enumerate() {
            let cut = self.block_cut(extent);
            if block < cut.count() {
                return (result, cut.range(block..block + 1));
            }
            block -= cut.count();
        }
        unreachable!("piece {piece} of {}", self.pieces())
    }

    /// Computes `pieces` from the packed operand. The sums of a block are at `place(block)`, if there is such a place, and
    /// otherwise in the room, from where `finish(block, sums)` takes them.
    ///
    /// # Safety
    /// Where `place` gives a place, the rows and columns of the block are there and belong to these pieces.
    pub(crate) unsafe fn run(
        &self,
        io: &KernelIo<'_>,
        pieces: Range<usize>,
        room: &mut GemmRoom<'_>,
        place: impl Fn(&Block) -> Option<Sums>,
        mut finish: impl FnMut(&Block, Sums),
    ) {
        let (session, depths) = (self.micro.begin(), &self.depths);
        let mut pieces = pieces;
        while !pieces.is_empty() {
            let (groups, first) = (self.group.count(), pieces.start % self.group.count());
            let count = pieces.len().min(groups - first).min(self.together());
            let (result, block) = self.place(pieces.start);
            let lines = self.group.range(first..first + count);
            pieces.start += count;
            let (rows, columns) = if self.packed == Side::A { (lines, block) } else { (block, lines) };
            let block = Block { result, rows, columns };
            let placed = place(&block);
            let stride = block.columns.len().next_multiple_of(self.micro.columns);
            let sums = placed.unwrap_or(Sums { at: room.sums.as_mut_ptr(), stride });
            for (nth, depth) in depths.iter().enumerate() {
                self.pack_block(io, &block, depth, room.packed);
                // SAFETY: the place is there by the caller's promise, and the room has whole tiles.
                unsafe { self.multiply(&session, io, &block, depth, room, sums, placed.is_some(), nth > 0) };
            }
            if depths.is_empty() {
                sums.clear(&block);
            }
            finish(&block, sums);
        }
    }

    fn pack_block(&self, io: &KernelIo<'_>, block: &Block, depth: &Depth, to: &mut [u32]) {
        let (side, term) = (self.other(), &self.terms[depth.term]);
        let (operand, lines) = match side {
            Side::A => (&term.a, &block.rows),
            Side::B => (&term.b[block.result], &block.columns),
        };
        let width = self.width(side);
        let panels = to.chunks_exact_mut(width * depth.words.len()).take(lines.len().div_ceil(width));
        for (panel, to) in panels.enumerate() {
            self.pack_panel(io, side, operand, lines.start + panel * width, depth.steps.clone(), to);
        }
    }

    /// # Safety
    /// As [`Gemm::run`]; tiles that reach over the edge of the block are in `sums` unless it is `exact`.
    unsafe fn multiply(
        &self,
        session: &MicroSession,
        io: &KernelIo<'_>,
        block: &Block,
        depth: &Depth,
        room: &mut GemmRoom<'_>,
        sums: Sums,
        exact: bool,
        add: bool,
    ) {
        let (packed, words) = (io.prepared::<u32>(), depth.words.len());
        let (outer, inner) = match self.packed {
            Side::A => (&block.rows, &block.columns),
            Side::B => (&block.columns, &block.rows),
        };
        let (outer_width, inner_width) = (self.width(self.packed), self.width(self.other()));
        for i in (0..outer.len()).step_by(outer_width) {
            // In a panel, terms follow each other; in one of B, the parts of a term.
            let lanes = if self.packed == Side::A { outer_width } else { self.micro.lanes };
            let of_panel = &packed[(outer.start + i) * self.words()..];
            let once = &of_panel[depth.before * outer_width + depth.words.start * lanes..];
            // The same part of the next panel comes from memory meanwhile, a share of it with each tile.
            let next = once.as_ptr().wrapping_add(outer_width * self.words()).cast::<u8>();
            let tiles = inner.len().div_ceil(inner_width).max(1);
            let per_step = (outer_width * size_of::<u32>()).div_ceil(tiles);
            for j in (0..inner.len()).step_by(inner_width) {
                let here = &room.packed[j * words..];
                let ahead = Ahead { at: next.wrapping_add(j / inner_width * words * per_step), per_step };
                let (row, column, a, b, apart) = match self.packed {
                    Side::A => (i, j, once, here, words * self.micro.lanes),
                    Side::B => (j, i, here, once, depth.of_term * self.micro.lanes),
                };
                let b = PanelOfB { words: b, apart };
                // SAFETY: the first element of the tile is one of the block.
                let c = unsafe { sums.at.add(row * sums.stride + column) };
                let size = [block.rows.len() - row, block.columns.len() - column];
                let is_whole = size[0] >= self.micro.rows && size[1] >= self.micro.columns;
                // SAFETY: the tile is in the block or in what the sums have beyond it.
                unsafe {
                    if is_whole || !exact {
                        self.micro.multiply(session, words, a, b, c, sums.stride, add, ahead);
                    } else {
                        self.multiply_edge(session, words, a, b, Sums { at: c, ..sums }, size, add, room.sums);
                    }
                }
            }
        }
    }

    /// A tile of which only the first rows and columns, `size`, are at `c`: computed in `tile`.
    ///
    /// # Safety
    /// So many rows and columns are there.
    unsafe fn multiply_edge(
        &self,
        session: &MicroSession,
        words: usize,
        a: &[u32],
        b: PanelOfB<'_>,
        c: Sums,
        size: [usize; 2],
        add: bool,
        tile: &mut [f32],
    ) {
        let stride = self.micro.columns;
        let (rows, width) = (size[0].min(self.micro.rows), size[1].min(stride));
        assert!(tile.len() >= self.micro.rows * stride);
        for row in 0..rows {
            if add {
                // SAFETY: by the caller's promise.
                tile[row * stride..][..width].copy_from_slice(unsafe { c.row(row, width) });
            }
        }
        // SAFETY: the tile is as large as asserted.
        unsafe { self.micro.multiply(session, words, a, b, tile.as_mut_ptr(), stride, add, Ahead::NOTHING) };
        for row in 0..rows {
            // SAFETY: by the caller's promise.
            unsafe { c.row(row, width) }.copy_from_slice(&tile[row * stride..][..width]);
        }
    }
}
