//! Products with weights of bf16 in rows by matrix tiles: x is laid out as tiles by all threads, then tiles of the weight pass by.

use std::ops::Range;

use half::{bf16, f16};
use ridge_graph::DType;

use super::kernel::{After, LinearKernel};
use crate::amx;
use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::kernels::tile_product;
use crate::scratch::Scratch;

/// Products of 32 rows of a weight whose sums wait for the next part of K, where K is cut: half a MiB.
pub(super) const WAITING: usize = 16;

/// Calls a method for the type of elements of x.
macro_rules! of_x {
    ($self:ident.$method:ident($($arg:expr),*)) => {
        match $self.dtype {
            DType::BF16 => $self.$method::<bf16>($($arg),*),
            DType::F16 => $self.$method::<f16>($($arg),*),
            _ => $self.$method::<f32>($($arg),*),
        }
    };
}
pub(super) use of_x;

impl LinearKernel {
    fn layout(&self, rows: usize) -> amx::ColumnLayout {
        amx::ColumnLayout::new(rows, self.inner, amx::terms(self.dtype))
    }

    /// Rows that fill no tile are laid out where they are used.
    pub(super) fn preparation_on_tiles(&self) -> Option<Preparation> {
        let layout = self.layout(self.rows);
        (!layout.compact).then(|| Preparation {
            bytes: layout.x_room() * size_of::<u32>(),
            pieces: self.rows.div_ceil(amx::SIDE),
            nanos_per_piece: (self.inner * amx::terms(self.dtype)) as f64 * 2.0,
        })
    }

    pub(super) fn prepare_on_tiles(&self, io: &KernelIo<'_>, pieces: Range<usize>) {
        of_x!(self.prepare_of(io, pieces));
    }

    fn prepare_of<T: amx::Terms>(&self, io: &KernelIo<'_>, pieces: Range<usize>) {
        let rows = pieces.start * amx::SIDE..(pieces.end * amx::SIDE).min(self.rows);
        let x = &io.input::<T>(self.x)[rows.start * self.inner..rows.end * self.inner];
        let layout = self.layout(self.rows).of_rows(rows.len());
        let from = layout.x_before(rows.start);
        // SAFETY: the tiles of these rows are those of these pieces.
        let to = unsafe { io.room::<u32>().part(from..from + layout.x_room()) };
        layout.pack_x(x, self.inner, to.as_chunks_mut().0);
    }

    pub(super) fn run_on_tiles(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        of_x!(self.run_on_tiles_of(io, pieces, scratch));
    }

    fn run_on_tiles_of<T: amx::Terms>(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let all = self.layout(self.rows);
        let most = all.of_rows(self.row_block.min(self.rows));
        let outputs = 3 * amx::SIDE * amx::COLUMNS;
        let gates = self.after == After::Swiglu;
        let of_piece = if gates { 2 } else { 1 };
        let cuts = amx::parts(self.inner);
        let waiting = if cuts > 1 { WAITING } else { of_piece };
        let [packed, weights, sums, products, gated, line] = scratch.slices::<u32, 6>([
            if all.compact { all.x_room() } else { 0 },
            amx::ColumnLayout::weight_room(),
            waiting * most.sums_room(),
            outputs,
            if gates { outputs } else { 0 },
            self.tile,
        ]);
        let [packed, weights, sums] = [packed, weights, sums].map(|words| words.as_chunks_mut().0);
        let [products, gated, line] = [products, gated, line].map(amx::floats);
        if all.compact {
            all.pack_x(io.input::<T>(self.x), self.inner, packed);
        }
        let tiles = amx::TileSession::begin();
        // Pieces from one on that are multiplied together, all of one block of rows of x.
        let group =
            |first: usize| first..pieces.end.min((first / self.tiles + 1) * self.tiles).min(first + waiting / of_piece);
        // What is multiplied in turn for a group: for each part of K the pieces, for each of them the weights.
        let part = |group: &Range<usize>, nth: usize| {
            let (steps, nth) = (nth / (group.len() * of_piece), nth % (group.len() * of_piece));
            let (which, columns) = self.place((group.start + nth / of_piece) % self.tiles);
            let which = which + nth % of_piece;
            let weight = &self.weights[which];
            let input = self.x + 1 + which;
            let data = &io.input(input)[..weight.columns * self.inner];
            let weight = tile_product::TileWeight { data, inner: self.inner };
            tile_product::WeightPart { weight, rows: columns, steps: amx::part(self.inner, steps) }
        };
        let slot = most.sums_room() / (amx::SIDE * amx::SIDE);
        let mut pieces_now = group(pieces.start);
        while !pieces_now.is_empty() {
            let pieces_next = group(pieces_now.end);
            let block = pieces_now.start / self.tiles;
            let rows = block * self.row_block..((block + 1) * self.row_block).min(self.rows);
            let layout = all.of_rows(rows.len());
            let x: &[amx::Words] =
                if all.compact { packed } else { io.prepared::<u32>()[all.x_before(rows.start)..].as_chunks().0 };
            let parts = pieces_now.len() * of_piece;
            let all_parts = parts * cuts;
            for nth in 0..all_parts {
                let next = if nth + 1 < all_parts {
                    Some(part(&pieces_now, nth + 1))
                } else {
                    (!pieces_next.is_empty()).then(|| part(&pieces_next, 0))
                };
                let now = part(&pieces_now, nth);
                // Where K is cut, each part of a group brings its share of x for the next part of K.
                let shares = if cuts > 1 { parts } else { 0 };
                let after = amx::part(self.inner, nth / parts + 1);
                let of_x = (shares > 0).then(|| layout.share(x, after, nth % parts, shares)).into_iter().flatten();
                let ahead = next.as_ref().and_then(tile_product::WeightPart::together).into_iter().chain(of_x);
                let mut ahead = amx::Ahead::new(ahead, layout.groups().count(), now.steps.len());
                let (which, columns) = self.place((pieces_now.start + nth % parts / of_piece) % self.tiles);
                let whole = now.steps.end == layout.depth && nth % of_piece == of_piece - 1;
                let (before, sums) = sums.split_at_mut(nth % parts * slot);
                let finish = |group: &Range<usize>, sums: &[amx::Words]| {
                    if !whole {
                        return;
                    }
                    let of_rows = layout.rows_of(group);
                    layout.unpack(group, sums, columns.len(), products);
                    if gates {
                        let gate = &before[before.len() - slot..][2 * group.start..2 * group.end];
                        layout.unpack(group, gate, columns.len(), gated);
                    }
                    let of_rows = rows.start + of_rows.start..rows.start + of_rows.end;
                    // The gate comes first.
                    let [first, second] =
                        if gates { [&mut *gated, &mut *products] } else { [&mut *products, &mut *gated] };
                    self.finish(io, which, of_rows, columns.clone(), [first, second, line]);
                };
                tile_product::multiply(&tiles, &layout, &now, next.as_ref(), &mut ahead, x, weights, sums, finish);
            }
            pieces_now = pieces_next;
        }
    }
}
