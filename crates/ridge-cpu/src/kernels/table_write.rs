//! Changes of single elements of a table.
//!
//! Floor: the changes read once and written once.

use std::ops::Range;

use ridge_graph::DType;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("table_write", "table_write(table, values, places)", |_| true, make)]
}

struct TableWrite {
    elements: usize,
    changes: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let (table, values) = (&spec.inputs[0], &spec.inputs[1]);
    Ok(Box::new(TableWrite { elements: table.len(), changes: values.len(), dtype: table.dtype }))
}

impl CpuKernel for TableWrite {
    fn pieces(&self) -> usize {
        // One, so that equal places are written in order.
        usize::from(self.changes > 0)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.changes as f64
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {
        let bytes = self.dtype.size_bytes();
        // SAFETY: the only piece.
        let table = unsafe { io.output::<u8>(0).part(0..self.elements * bytes) };
        let values = io.input::<u8>(1)[..self.changes * bytes].chunks_exact(bytes);
        for (value, place) in values.zip(io.input::<i32>(2)) {
            if let Some(element) = usize::try_from(*place).ok().filter(|place| *place < self.elements) {
                table[element * bytes..][..bytes].copy_from_slice(value);
            }
        }
    }
}
