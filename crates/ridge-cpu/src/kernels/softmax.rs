//! Softmax of rows.
//!
//! Floor: each row read and written once; one exponential an element.

use std::ops::Range;

use ridge_graph::DType;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("softmax", "softmax(x)", |_| true, make)]
}

struct Softmax {
    rows: usize,
    n: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let x = &spec.inputs[0];
    Ok(Box::new(Softmax { rows: if x.last() == 0 { 0 } else { x.rows() }, n: x.last(), dtype: x.dtype }))
}

impl CpuKernel for Softmax {
    fn pieces(&self) -> usize {
        self.rows
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.n as f64 * 0.6
    }

    fn run(&self, io: &KernelIo<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let [room] = scratch.slices::<f32, 1>([self.n]);
        for row in rows {
            let at = row * self.n;
            // SAFETY: this row is ours alone.
            let y = unsafe { simd::place(io, 0, self.dtype, at, &mut *room) };
            simd::load(io, 0, self.dtype, at, y);
            let total = simd::exp_sum(y, simd::max(y));
            simd::scale(y, 1.0 / total);
            // SAFETY: as above.
            unsafe { simd::put(io, 0, self.dtype, at, y) };
        }
    }
}
