//! Root-mean-square normalisation, alone and after a residual addition.
//!
//! Floor: each row read and written once; at decode sizes the rows stay in L1 and the arithmetic of some 4 operations
//! an element is what counts.

use std::ops::Range;

use ridge_graph::ops::RmsNorm;
use ridge_graph::{DType, Function};

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, LANES, fma, sum_lanes, vectorised};

pub(super) fn entries() -> [KernelEntry; 2] {
    [
        KernelEntry::new("rms_norm", "rms_norm(x, w)", |_| true, make),
        KernelEntry::new("add_rms_norm", "rms_norm(*add(x, r), w)", same_rows, make),
    ]
}

/// The residual has the shape of `x`, so that rows match; always so for what `add` accepts.
pub(super) fn same_rows(body: &Function) -> bool {
    body.args[0].ty.shape == body.args[1].ty.shape
}

struct Norm {
    eps: f64,
    rows: usize,
    hidden: usize,
    dtype: DType,
    weight: DType,
    /// Adds the second input first, and gives the sum as the second output.
    residual: bool,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<RmsNorm>().ok_or("no rms_norm in the group")?;
    Ok(Box::new(Norm {
        eps: op.eps,
        rows: spec.inputs[0].rows(),
        hidden: spec.inputs[0].last(),
        dtype: spec.inputs[0].dtype,
        weight: spec.inputs[spec.inputs.len() - 1].dtype,
        residual: spec.inputs.len() == 3,
    }))
}

impl CpuKernel for Norm {
    fn pieces(&self) -> usize {
        self.rows
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.hidden as f64 * 0.2
    }

    fn run(&self, io: &KernelIo<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let n = self.hidden;
        let [weight, x, r, y] = scratch.slices::<f32, 4>([n; 4]);
        let weight = simd::view(io, usize::from(self.residual) + 1, self.weight, 0, weight);
        for row in rows {
            let at = row * n;
            // SAFETY: this row of each output is ours alone.
            let y = unsafe { simd::place(io, 0, self.dtype, at, &mut *y) };
            let x: &[f32] = if self.residual {
                // SAFETY: as above.
                let sum = unsafe { simd::place(io, 1, self.dtype, at, &mut *x) };
                add_rows(simd::view(io, 0, self.dtype, at, &mut *y), simd::view(io, 1, self.dtype, at, &mut *r), sum);
                // SAFETY: as above.
                unsafe { simd::put(io, 1, self.dtype, at, sum) };
                // The norm sees the sum as it was rounded for the others.
                simd::round(self.dtype, sum);
                sum
            } else {
                simd::view(io, 0, self.dtype, at, &mut *x)
            };
            normalise(x, weight, self.eps, y);
            // SAFETY: as above.
            unsafe { simd::put(io, 0, self.dtype, at, y) };
        }
    }
}

vectorised! {
    pub(super) fn add_rows(a: &[f32], b: &[f32], sum: &mut [f32]) {
        for ((s, a), b) in sum.iter_mut().zip(a).zip(b) {
            *s = a + b;
        }
    }
}

vectorised! {
    /// `y = x * rsqrt(mean(x^2) + eps) * weight`.
    pub(super) fn normalise(x: &[f32], weight: &[f32], eps: f64, y: &mut [f32]) {
        let mut lanes = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(chunk[i], chunk[i], lanes[i]);
            }
        }
        for (i, x) in rest.iter().enumerate() {
            lanes[i] = fma::<FMA>(*x, *x, lanes[i]);
        }
        // In f64, which costs a row nothing and rounds the scale once.
        let scale = (1.0 / (f64::from(sum_lanes(lanes)) / x.len() as f64 + eps).sqrt()) as f32;
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = *x * scale * w;
        }
    }
}
