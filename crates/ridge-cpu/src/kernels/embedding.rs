//! Rows of a table by token id.
//!
//! Floor: each row asked for read once, each row of the result written once.

use std::ops::Range;

use ridge_graph::{DType, Function};

use super::quant;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, OperandType};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("embedding", "embedding(table, ids)", supports, make)]
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
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let table = spec.inputs[0].clone();
    let stored = table.format.as_ref().and_then(|format| quant::BlockRows::new(format, table.last()));
    Ok(Box::new(Embedding { table, tokens: spec.inputs[1].len(), dtype: spec.outputs[0].dtype, stored }))
}

impl CpuKernel for Embedding {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.table.last() as f64 * 0.2
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let (vocab, hidden) = (self.table.shape[0], self.table.shape[1]);
        let ids = io.input::<i32>(1);
        let [room] = scratch.slices::<f32, 1>([hidden]);
        for token in tokens {
            // SAFETY: this row is ours alone.
            let row = unsafe { simd::place(io, 0, self.dtype, token * hidden, &mut *room) };
            match usize::try_from(ids[token]) {
                Ok(id) if id < vocab => self.read(io, id, row),
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
}
