//! Gated activation, where no product claims it.
//!
//! Floor: both inputs read and the output written once.

use std::ops::Range;

use ridge_graph::DType;

use super::Entry;
use crate::kernel::{Io, Kernel, Scratch, Spec};
use crate::simd;

pub(super) const ENTRIES: &[Entry] = &[Entry { name: "swiglu", pattern: "swiglu(gate, up)", supports: |_| true, make }];

/// Elements of a piece: what passes through the scratch memory stays in L1.
const PIECE: usize = 1024;

struct Swiglu {
    len: usize,
    dtype: DType,
}

fn make(spec: &Spec<'_>) -> Result<Box<dyn Kernel>, String> {
    Ok(Box::new(Swiglu { len: spec.outputs[0].len(), dtype: spec.outputs[0].dtype }))
}

impl Kernel for Swiglu {
    fn pieces(&self) -> usize {
        self.len.div_ceil(PIECE)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.len.min(PIECE) as f64 * 0.5
    }

    fn run(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
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
