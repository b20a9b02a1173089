//! Rotary position embedding.
//!
//! Floor: x read and written once. Sine and cosine of an angle are taken once a token for all heads, in f64: at
//! position 10^6 an angle in f32 would be off by a 30th of a radian.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, vectorised};

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("rope", "rope(x, positions)", |_| true, make)]
}

struct Rope {
    op: ops::Rope,
    tokens: usize,
    heads: usize,
    dim: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<ops::Rope>().ok_or("no rope in the group")?.clone();
    let x = &spec.inputs[0];
    Ok(Box::new(Rope { op, tokens: x.shape[0], heads: x.shape[1], dim: x.shape[2], dtype: x.dtype }))
}

/// What a token's rope takes without its heads, in nanoseconds.
pub(super) fn nanos(op: &ops::Rope) -> f64 {
    20.0 + 3.0 * op.inv_freq.len() as f64
}

/// Cosine and sine of each pair's angle at `position`, scaled.
pub(super) fn angles(op: &ops::Rope, position: i32, cos: &mut [f32], sin: &mut [f32]) {
    simd::angles(f64::from(position), &op.inv_freq, op.scale, cos, sin);
}

vectorised! {
    /// Rotates pairs `(i, i + cos.len())` of each head of `dim` elements of `x`.
    pub(super) fn rotate(x: &mut [f32], dim: usize, cos: &[f32], sin: &[f32]) {
        for head in x.chunks_exact_mut(dim) {
            let (a, b) = head.split_at_mut(cos.len());
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

impl CpuKernel for Rope {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        nanos(&self.op) + (self.heads * self.dim) as f64 * 0.2
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let (pairs, n) = (self.op.inv_freq.len(), self.heads * self.dim);
        let [cos, sin, room] = scratch.slices::<f32, 3>([pairs, pairs, n]);
        let positions = io.input::<i32>(1);
        for token in tokens {
            angles(&self.op, positions[token], cos, sin);
            let at = token * n;
            // SAFETY: this token's elements are ours alone.
            let y = unsafe { simd::place(io, 0, self.dtype, at, &mut *room) };
            simd::load(io, 0, self.dtype, at, y);
            rotate(y, self.dim.max(1), cos, sin);
            // SAFETY: as above.
            unsafe { simd::put(io, 0, self.dtype, at, y) };
        }
    }
}
