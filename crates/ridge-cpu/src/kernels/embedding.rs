//! Rows of a table by token id.
//!
//! Floor: each row asked for read once, each row of the result written once.

use std::ops::Range;

use ridge_graph::passes::{Layout, OfferRequest};
use ridge_graph::{DType, Function};

use super::quant;
use crate::bytes::{cast, view};
use crate::interleave::{Interleaving, Line};
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, OperandType};
use crate::packing::Packing;
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("embedding", "embedding(table, ids)", supports, make).accepting(layouts)]
}

/// A table that is the head's weight too may be interleaved.
fn layouts(request: &OfferRequest<'_>) -> Vec<(usize, Layout)> {
    match Packing::on_named(&request.target.architecture, &request.body.args[0].ty) {
        Some(packing @ Packing::Words(_)) => vec![(0, Layout::Named(packing.layout().into()))],
        _ => Vec::new(),
    }
}

/// A plain table, or one in blocks.
fn supports(body: &Function) -> bool {
    body.args[0].ty.format.as_ref().is_none_or(quant::supports)
}

struct Embedding {
    table: OperandType,
    tokens: usize,
    dtype: DType,
    stored: Option<quant::BlockRows>,
    /// How rows of the table may be interleaved.
    interleaving: Option<Interleaving>,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let table = spec.inputs[0].clone();
    let stored = table.format.as_ref().and_then(|format| quant::BlockRows::new(format, table.last()));
    let interleaving = match Packing::of_operand(&table) {
        Some(Packing::Words(block)) => Some(Interleaving::new(table.last(), block)),
        _ => None,
    };
    let (tokens, dtype) = (spec.inputs[1].len(), spec.outputs[0].dtype);
    Ok(Box::new(Embedding { table, tokens, dtype, stored, interleaving }))
}

impl CpuKernel for Embedding {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.table.last() as f64 * 0.2
    }

    fn takes_panels(&self) -> Range<usize> {
        0..usize::from(self.interleaving.is_some())
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let (vocab, hidden) = (self.table.shape[0], self.table.shape[1]);
        let ids = io.input::<i32>(1);
        let interleaving = self.interleaving.filter(|_| self.table.panels);
        let bytes = interleaving.map_or(0, |interleaving| interleaving.row_bytes());
        let [room, stored] = scratch.slices::<u8, 2>([hidden * size_of::<f32>(), bytes]);
        let room: &mut [f32] = cast(room);
        for token in tokens {
            // SAFETY: this row is ours alone.
            let row = unsafe { simd::place(io, 0, self.dtype, token * hidden, &mut *room) };
            match usize::try_from(ids[token]) {
                Ok(id) if id < vocab => match interleaving {
                    Some(interleaving) => {
                        let lines: &[Line] = io.input::<u32>(0).as_chunks().0;
                        interleaving.row(lines, id, stored);
                        self.widen(stored, row);
                    }
                    None => self.read(io, id, row),
                },
                _ => row.fill(0.0),
            }
            // SAFETY: as above.
            unsafe { simd::put(io, 0, self.dtype, token * hidden, row) };
        }
    }
}

impl Embedding {
    fn read(&self, io: &KernelIo<'_>, id: usize, row: &mut [f32]) {
        match &self.stored {
            None => simd::load(io, 0, self.table.dtype, id * row.len(), row),
            Some(rows) => rows.read(io.input::<u8>(0), id, 1, row),
        }
    }

    /// A row from its bytes.
    fn widen(&self, stored: &[u8], row: &mut [f32]) {
        match &self.stored {
            None => simd::with_element!(self.table.dtype, T => simd::widen(view::<T>(stored), row)),
            Some(rows) => rows.read(stored, 0, 1, row),
        }
    }
}
