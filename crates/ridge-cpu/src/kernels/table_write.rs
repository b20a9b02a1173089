//! Changes of single elements or rows of a table.
//!
//! Floor: the changes read once and written once.

use std::ops::Range;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("table_write", "table_write(table, values, places)", |_| true, make)]
}

struct TableWrite {
    /// Elements or rows of the table, and those that change.
    places: usize,
    changes: usize,
    /// Bytes of one.
    bytes: usize,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let (table, values) = (&spec.inputs[0], &spec.inputs[1]);
    let row = if values.shape.len() == 2 { table.shape[1] } else { 1 };
    let (places, changes) = (table.len() / row.max(1), values.shape[0]);
    Ok(Box::new(TableWrite { places, changes, bytes: row * table.dtype.size_bytes() }))
}

impl CpuKernel for TableWrite {
    fn pieces(&self) -> usize {
        // One, so that equal places are written in order.
        usize::from(self.changes > 0)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.changes as f64 * (1.0 + 0.1 * self.bytes as f64)
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {
        let bytes = self.bytes;
        // SAFETY: the only piece.
        let table = unsafe { io.output::<u8>(0).part(0..self.places * bytes) };
        let values = io.input::<u8>(1)[..self.changes * bytes].chunks_exact(bytes.max(1));
        for (value, place) in values.zip(io.input::<i32>(2)) {
            if let Some(place) = usize::try_from(*place).ok().filter(|place| *place < self.places) {
                table[place * bytes..][..bytes].copy_from_slice(value);
            }
        }
    }
}
