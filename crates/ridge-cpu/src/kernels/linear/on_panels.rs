//! Products with weights in panels: x is laid out in tiles of its rows by all threads, then panels of the weight pass by.

use std::ops::Range;

use half::{bf16, f16};
use ridge_graph::DType;

use super::on_tiles::{WAITING, of_x};
use super::{After, Linear};
use crate::kernel::{Io, Preparation, Scratch};
use crate::kernels::amx::{self, panels};

/// Steps of K between which sums wait, where K is longer than [`amx::BLOCK`]: of x they take half a MiB, so that those
/// of the next part are brought to L2 while these are used.
const PART: usize = amx::BLOCK / 2 / amx::DEPTH;

impl Linear {
    fn row_tiles(&self, rows: usize) -> panels::RowTiles {
        panels::RowTiles::new(rows, self.inner, amx::terms(self.dtype))
    }

    /// Rows that fill no tile are laid out where they are used.
    pub(super) fn preparation_on_panels(&self) -> Option<Preparation> {
        let layout = self.row_tiles(self.rows);
        (!layout.compact).then(|| Preparation {
            bytes: layout.room() * size_of::<u32>(),
            pieces: self.rows.div_ceil(amx::SIDE),
            nanos_per_piece: (self.inner * amx::terms(self.dtype)) as f64,
        })
    }

    pub(super) fn prepare_on_panels(&self, io: &Io<'_>, pieces: Range<usize>) {
        of_x!(self.prepare_rows_of(io, pieces));
    }

    fn prepare_rows_of<T: amx::Terms>(&self, io: &Io<'_>, pieces: Range<usize>) {
        let rows = pieces.start * amx::SIDE..(pieces.end * amx::SIDE).min(self.rows);
        let x = &io.input::<T>(self.x)[rows.start * self.inner..rows.end * self.inner];
        let all = self.row_tiles(self.rows);
        let (from, layout) = (all.before(rows.start), all.of_rows(rows.len()));
        // SAFETY: the tiles of these rows are those of these pieces.
        let to = unsafe { io.room::<u32>().part(from..from + layout.room()) };
        layout.pack(x, self.inner, to);
    }

    pub(super) fn run_on_panels(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        of_x!(self.run_on_panels_of(io, pieces, scratch));
    }

    fn run_on_panels_of<T: amx::Terms>(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let all = self.row_tiles(self.rows);
        let compact = all.compact;
        let most = all.of_rows(self.row_block.min(self.rows));
        let of_piece = if self.after == After::Swiglu { 2 } else { 1 };
        let parts = if self.inner > amx::BLOCK { all.depth.div_ceil(PART) } else { 1 };
        let of_part = if parts > 1 { PART } else { all.depth };
        // Where K is cut, sums wait for its next part; else those of a gate do for the weight that it gates.
        let waiting = if parts > 1 { WAITING } else { of_piece };
        let slot = most.tiles * most.sums_of_tile();
        let outputs = 3 * amx::SIDE * amx::COLUMNS;
        let [packed, sums, products, gated, line] = scratch.slices::<u32, 5>([
            if compact { all.room() } else { 0 },
            waiting * slot,
            outputs,
            outputs,
            amx::COLUMNS,
        ]);
        let [sums, products, gated, line] = [sums, products, gated, line].map(amx::floats);
        if compact {
            all.pack(io.input::<T>(self.x), self.inner, packed);
        }
        let tiles = most.configure();
        // Pieces from one on that are multiplied together, all of one block of rows of x.
        let group =
            |first: usize| first..pieces.end.min((first / self.tiles + 1) * self.tiles).min(first + waiting / of_piece);
        // What is multiplied in turn for a group: for each part of K the pieces, for each of them the weights.
        let turn = |group: &Range<usize>, nth: usize| {
            let (part, nth) = (nth / (group.len() * of_piece), nth % (group.len() * of_piece));
            let (which, columns) = self.place((group.start + nth / of_piece) % self.tiles);
            let steps = part * of_part..((part + 1) * of_part).min(all.depth);
            let of_panel = panels::panel_tiles(self.inner);
            let panel = columns.start / amx::COLUMNS * of_panel;
            let of_weight: &[amx::Words] = io.input::<u32>(self.x + 1 + which + nth % of_piece).as_chunks().0;
            let panel = &of_weight[panel..][..of_panel][panels::of_steps(&steps)];
            (panel, steps, which, columns)
        };
        let mut pieces_now = group(pieces.start);
        while !pieces_now.is_empty() {
            let pieces_next = group(pieces_now.end);
            let block = pieces_now.start / self.tiles;
            let rows = block * self.row_block..((block + 1) * self.row_block).min(self.rows);
            let layout = all.of_rows(rows.len());
            let x: &[u32] = if compact { packed } else { &io.prepared::<u32>()[all.before(rows.start)..] };
            let turns = pieces_now.len() * of_piece;
            for nth in 0..turns * parts {
                let (panel, steps, which, columns) = turn(&pieces_now, nth);
                let next = if nth + 1 < turns * parts {
                    turn(&pieces_now, nth + 1).0
                } else if pieces_next.is_empty() {
                    &[]
                } else {
                    turn(&pieces_next, 0).0
                };
                let after =
                    (steps.end % layout.depth..(steps.end % layout.depth + of_part).min(layout.depth), nth % turns);
                let of_x = if parts > 1 { turns } else { 0 };
                let x_after = (of_x > 0).then(|| layout.share(x, after.0, after.1, of_x)).into_iter().flatten();
                let ahead = std::iter::once(next.as_flattened()).chain(x_after);
                let mut ahead = amx::Ahead::new(ahead, layout.groups().count(), steps.len());
                let of_turn = nth % turns * slot;
                let done = steps.end == layout.depth && nth % of_piece == of_piece - 1;
                for group in layout.groups() {
                    let of_group = group.start * layout.sums_of_tile()..group.end * layout.sums_of_tile();
                    let at = of_turn + of_group.start..of_turn + of_group.end;
                    let fresh = steps.start == 0;
                    panels::multiply(
                        &tiles,
                        &layout,
                        (x, &group),
                        (panel, steps.start),
                        &mut sums[at.clone()],
                        fresh,
                        &mut ahead,
                    );
                    if !done {
                        continue;
                    }
                    let width = columns.len();
                    let (before, sums) = sums.split_at_mut(of_turn);
                    let last = layout.rows(&group, &mut sums[of_group.clone()], width, products);
                    let of_rows = layout.rows_of(&group);
                    let of_rows = rows.start + of_rows.start..rows.start + of_rows.end;
                    if of_piece == 1 {
                        self.finish(io, which, of_rows, columns.clone(), [last, &mut [], line]);
                    } else {
                        let gate = &mut before[of_turn - slot..][of_group];
                        let gate = layout.rows(&group, gate, width, gated);
                        self.finish(io, which, of_rows, columns.clone(), [gate, last, line]);
                    }
                }
            }
            pieces_now = pieces_next;
        }
    }
}
