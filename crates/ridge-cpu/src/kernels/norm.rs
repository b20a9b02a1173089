//! Root-mean-square normalisation, alone and after a residual addition.
//!
//! Floor: each row read and written once; at decode sizes the rows stay in L1 and the arithmetic of some 4 operations
//! an element is what counts.

use std::ops::Range;

use ridge_graph::ops::RmsNorm;
use ridge_graph::{DType, Function};

use super::Entry;
use crate::kernel::{Io, Kernel, Scratch, Spec};
use crate::simd;

pub(super) const ENTRIES: &[Entry] = &[
    Entry { name: "rms_norm", pattern: "rms_norm(x, w)", supports: |_| true, make },
    Entry { name: "add_rms_norm", pattern: "rms_norm(*add(x, r), w)", supports: same_rows, make },
];

/// The residual has the shape of `x`, so that rows match; always so for what `add` accepts.
fn same_rows(body: &Function) -> bool {
    body.args[0].ty.shape == body.args[1].ty.shape
}

struct Norm {
    eps: f32,
    rows: usize,
    hidden: usize,
    dtype: DType,
    weight: DType,
    /// Adds the second input first, and gives the sum as the second output.
    residual: bool,
}

fn make(spec: &Spec<'_>) -> Result<Box<dyn Kernel>, String> {
    let op = spec.composite::<RmsNorm>().ok_or("no rms_norm in the group")?;
    Ok(Box::new(Norm {
        eps: op.eps as f32,
        rows: spec.inputs[0].rows(),
        hidden: spec.inputs[0].last(),
        dtype: spec.inputs[0].dtype,
        weight: spec.inputs[spec.inputs.len() - 1].dtype,
        residual: spec.inputs.len() == 3,
    }))
}

impl Kernel for Norm {
    fn pieces(&self) -> usize {
        self.rows
    }

    fn nanos_per_piece(&self) -> f64 {
        self.hidden as f64 * 0.3
    }

    fn run(&self, io: &Io<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let n = self.hidden;
        let [x, r, w] = scratch.slices::<f32, 3>([n; 3]);
        simd::load(io, usize::from(self.residual) + 1, self.weight, 0, w);
        for row in rows {
            let at = row * n;
            simd::load(io, 0, self.dtype, at, x);
            if self.residual {
                simd::load(io, 1, self.dtype, at, r);
                simd::add(x, r);
                // SAFETY: this row is ours alone.
                unsafe { simd::store(io, 1, self.dtype, at, x) };
                // The norm sees the sum as it was rounded for the others.
                simd::round(self.dtype, x);
            }
            let scale = 1.0 / (simd::dot(x, x) / n as f32 + self.eps).sqrt();
            simd::scale_mul(x, scale, w);
            // SAFETY: this row is ours alone.
            unsafe { simd::store(io, 0, self.dtype, at, x) };
        }
    }
}
