//! Products with weights in panels, or in blocks that become panels of bf16, part by part: x is laid out in tiles of its rows by
//! all threads, then panels of the weight pass by. Values in blocks are rounded, which for x of bf16, whose products are rounded to as
//! much, is what the dtype means.

use std::ops::Range;

use half::{bf16, f16};
use ridge_graph::DType;

use super::float_codes::FloatCodes;
use super::kernel::{After, LinearKernel};
use super::on_tiles::{WAITING, of_x};
use crate::amx::{self, panels};
use crate::interleave::{Interleaving, Line};
use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::kernels::int8;
use crate::scratch::Scratch;

impl LinearKernel {
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

    pub(super) fn prepare_on_panels(&self, io: &KernelIo<'_>, pieces: Range<usize>) {
        of_x!(self.prepare_rows_of(io, pieces));
    }

    fn prepare_rows_of<T: amx::Terms>(&self, io: &KernelIo<'_>, pieces: Range<usize>) {
        let rows = pieces.start * amx::SIDE..(pieces.end * amx::SIDE).min(self.rows);
        let x = &io.input::<T>(self.x)[rows.start * self.inner..rows.end * self.inner];
        let all = self.row_tiles(self.rows);
        let (from, layout) = (all.before(rows.start), all.of_rows(rows.len()));
        // SAFETY: the tiles of these rows are those of these pieces.
        let to = unsafe { io.room::<u32>().part(from..from + layout.room()) };
        layout.pack(x, self.inner, to);
    }

    pub(super) fn run_on_panels(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        of_x!(self.run_on_panels_of(io, pieces, scratch));
    }

    fn run_on_panels_of<T: amx::Terms>(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let all = self.row_tiles(self.rows);
        let most = all.of_rows(self.row_block.min(self.rows));
        let cut = Cut { weights: if self.after == After::Swiglu { 2 } else { 1 }, parts: amx::parts(self.inner) };
        // Where K is cut, sums wait for its next part; else those of a gate do for the weight that it gates.
        let waiting = if cut.parts > 1 { WAITING } else { cut.weights };
        let slot = most.tiles * most.sums_of_tile();
        let of_group = 3 * most.sums_of_tile();
        let in_blocks = self.weights.iter().any(|w| w.stored.is_some() || w.float_codes);
        let in_rows = !self.packed && self.weights.iter().any(|w| w.float_codes);
        let of_part = panels::panel_tiles(self.inner.min(amx::BLOCK)) * size_of::<amx::Words>() / size_of::<u32>();
        let [packed, decoded, turned, waiting_sums, now, products, gated, line] = scratch.slices::<u32, 8>([
            if all.compact { all.room() } else { 0 },
            if in_blocks { of_part } else { 0 },
            // A byte for two of a tile, of 16 rows.
            if in_rows { of_part / 4 } else { 0 },
            waiting * slot,
            of_group,
            of_group,
            of_group,
            amx::COLUMNS,
        ]);
        let [waiting_sums, now, products, gated, line] = [waiting_sums, now, products, gated, line].map(amx::floats);
        let (decoded, turned) = (decoded.as_chunks_mut().0, turned.as_chunks_mut().0);
        if all.compact {
            all.pack(io.input::<T>(self.x), self.inner, packed);
        }
        let tiles = most.configure();
        // Pieces from one on that are multiplied together, all of one block of rows of x.
        let together = |first: usize| {
            first..pieces.end.min((first / self.tiles + 1) * self.tiles).min(first + waiting / cut.weights)
        };
        let mut pieces_now = together(pieces.start);
        while !pieces_now.is_empty() {
            let pieces_next = together(pieces_now.end);
            let block = pieces_now.start / self.tiles;
            let rows = block * self.row_block..((block + 1) * self.row_block).min(self.rows);
            let layout = all.of_rows(rows.len());
            let x: &[u32] = if all.compact { packed } else { &io.prepared::<u32>()[all.before(rows.start)..] };
            let turns = pieces_now.len() * cut.weights;
            for nth in 0..turns * cut.parts {
                let turn = self.turn(io, cut, &pieces_now, nth);
                let next = if nth + 1 < turns * cut.parts {
                    Some(self.turn(io, cut, &pieces_now, nth + 1))
                } else {
                    (!pieces_next.is_empty()).then(|| self.turn(io, cut, &pieces_next, 0))
                };
                let panel = turn.panel(decoded, turned);
                // Where K is cut, each turn of a part brings its share of x for the next.
                let after = amx::part(self.inner, nth / turns + 1);
                let shares = if cut.parts > 1 { turns } else { 0 };
                let of_x = (shares > 0).then(|| layout.share(x, after, nth % turns, shares)).into_iter().flatten();
                let ahead = next.iter().flat_map(Turn::memory).chain(of_x);
                let mut ahead = amx::Ahead::new(ahead, layout.groups().count(), turn.steps.len());
                let (before, waiting_sums) = waiting_sums.split_at_mut(nth % turns * slot);
                for group in layout.groups() {
                    let of_group = group.start * layout.sums_of_tile()..group.end * layout.sums_of_tile();
                    // What waits for nothing stays in L1.
                    let sums = match turn.done && cut.parts == 1 {
                        true => &mut now[..of_group.len()],
                        false => &mut waiting_sums[of_group.clone()],
                    };
                    let (w, fresh) = ((panel, turn.steps.start), turn.steps.start == 0);
                    panels::multiply(&tiles, &layout, (x, &group), w, sums, fresh, &mut ahead);
                    if !turn.done {
                        continue;
                    }
                    let width = turn.columns.len();
                    let of_rows = layout.rows_of(&group);
                    let of_rows = rows.start + of_rows.start..rows.start + of_rows.end;
                    let last = layout.rows(&group, sums, width, products);
                    let values = if cut.weights == 1 {
                        [last, &mut [], line]
                    } else {
                        let gate = &mut before[nth % turns * slot - slot..][of_group];
                        [layout.rows(&group, gate, width, gated), last, line]
                    };
                    self.finish(io, turn.which, of_rows, turn.columns.clone(), values);
                }
            }
            pieces_now = pieces_next;
        }
    }

    /// What is multiplied in turn `nth` of pieces that are multiplied together: for each part of K the pieces, for each of
    /// them the weights.
    fn turn<'a>(&self, io: &KernelIo<'a>, cut: Cut, pieces: &Range<usize>, nth: usize) -> Turn<'a> {
        let (part, nth) = (nth / (pieces.len() * cut.weights), nth % (pieces.len() * cut.weights));
        let (which, columns) = self.place((pieces.start + nth / cut.weights) % self.tiles);
        let steps = amx::part(self.inner, part);
        let weight = &self.weights[which + nth % cut.weights];
        let input = self.x + 1 + which + nth % cut.weights;
        let part_of = match &weight.stored {
            _ if weight.float_codes => PartOf::Floats(self.float_codes(io, which + nth % cut.weights)),
            Some(rows) => PartOf::Blocks(int8::CodeWeight {
                data: io.input(input),
                codes: rows.codes(),
                inner: self.inner,
                interleaved: self.packed.then(|| Interleaving::new(self.inner, rows.codes().block)),
            }),
            None => {
                let of_panel = panels::panel_tiles(self.inner);
                let panels: &[amx::Words] = io.input::<u32>(input).as_chunks().0;
                PartOf::Panel(&panels[columns.start / amx::COLUMNS * of_panel..][..of_panel])
            }
        };
        let done = part + 1 == cut.parts && nth % cut.weights == cut.weights - 1;
        Turn { part_of, steps, which, columns, done }
    }
}

/// How the work of pieces is cut into turns.
#[derive(Clone, Copy)]
struct Cut {
    /// Weights that make a piece of the output: a gate and what it gates, or one.
    weights: usize,
    /// Parts of K.
    parts: usize,
}

/// What 32 rows of a weight are stored in.
enum PartOf<'a> {
    Panel(&'a [amx::Words]),
    Blocks(int8::CodeWeight<'a>),
    Floats(FloatCodes<'a>),
}

struct Turn<'a> {
    part_of: PartOf<'a>,
    /// Of K.
    steps: Range<usize>,
    /// The output and its columns.
    which: usize,
    columns: Range<usize>,
    /// Are the sums whole, and the last that the output needs?
    done: bool,
}

impl<'a> Turn<'a> {
    /// Part of a panel: where it lies, or in `room`.
    fn panel<'b>(&self, room: &'b mut [amx::Words], turned: &mut [Line]) -> &'b [amx::Words]
    where
        'a: 'b,
    {
        match &self.part_of {
            PartOf::Panel(panel) => &panel[panels::of_steps(&self.steps)],
            PartOf::Blocks(weight) => {
                let room = &mut room[..panels::panel_tiles(self.steps.len() * amx::DEPTH)];
                (weight.codes.to_panel)(weight, self.columns.clone(), self.steps.clone(), room);
                room
            }
            PartOf::Floats(codes) => {
                let room = &mut room[..panels::panel_tiles(self.steps.len() * amx::DEPTH)];
                codes.to_panel(&self.columns, &self.steps, turned, room);
                room
            }
        }
    }

    /// The memory that [`Turn::panel`] reads, but of parts of rows that are not interleaved.
    fn memory(&self) -> [&'a [u32]; 2] {
        let elements = self.steps.start * amx::DEPTH..self.steps.end * amx::DEPTH;
        match &self.part_of {
            PartOf::Panel(panel) => [panel[panels::of_steps(&self.steps)].as_flattened(), &[]],
            PartOf::Blocks(weight) => weight.memory(&self.columns, &elements),
            PartOf::Floats(codes) => codes.memory(&self.columns, &elements),
        }
    }
}
