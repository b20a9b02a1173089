//! Gated activation, where no product claims it.
//!
//! Floor: both inputs read and the output written once.

use std::ops::Range;

use ridge_graph::DType;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("swiglu", "swiglu(gate, up)", |_| true, make)]
}

/// Elements of a piece: what passes through the scratch memory stays in L1.
const PIECE: usize = 1024;

struct Swiglu {
    len: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    Ok(Box::new(Swiglu { len: spec.outputs[0].len(), dtype: spec.outputs[0].dtype }))
}

impl CpuKernel for Swiglu {
    fn pieces(&self) -> usize {
        self.len.div_ceil(PIECE)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.len.min(PIECE) as f64 * 0.5
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let [gate, up] = scratch.slices::<f32, 2>([PIECE; 2]);
        for piece in pieces {
            let at = piece * PIECE;
            let n = PIECE.min(self.len - at);
            // SAFETY: these elements are ours alone.
            let y = unsafe { simd::place(io, 0, self.dtype, at, &mut gate[..n]) };
            simd::load(io, 0, self.dtype, at, y);
            simd::swiglu(y, simd::view(io, 1, self.dtype, at, &mut up[..n]));
            // SAFETY: as above.
            unsafe { simd::put(io, 0, self.dtype, at, y) };
        }
    }
}
