//! Loss of target tokens, and its gradient from the saved logarithm of the sum of exponentials.
//!
//! Floor: the logits read once, with an exponential each (twice where they are not f32 and do not stay in cache); the
//! gradient written once.

use std::ops::Range;

use ridge_graph::DType;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 3] {
    [
        KernelEntry::new("cross_entropy", "cross_entropy(logits, targets)", |_| true, forward),
        KernelEntry::new("cross_entropy_saving", "cross_entropy_saving(logits, targets)", |_| true, forward),
        KernelEntry::new(
            "cross_entropy_backward",
            "cross_entropy_backward(logits, targets, lse, dloss)",
            |_| true,
            backward,
        ),
    ]
}

#[derive(Clone, Copy)]
struct Logits {
    tokens: usize,
    vocab: usize,
    dtype: DType,
}

impl Logits {
    fn of(spec: &KernelSpec<'_>) -> Self {
        let x = &spec.inputs[0];
        Self { tokens: x.shape[0], vocab: x.shape[1], dtype: x.dtype }
    }

    /// The target of `token`, if it is in the vocabulary.
    fn target(self, io: &KernelIo<'_>, token: usize) -> Option<usize> {
        usize::try_from(io.input::<i32>(1)[token]).ok().filter(|t| *t < self.vocab)
    }

    fn nanos(self) -> f64 {
        20.0 + self.vocab as f64 * 0.5
    }
}

struct Forward {
    logits: Logits,
    /// Gives the logarithm of the sum of exponentials too.
    saving: bool,
}

fn forward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    Ok(Box::new(Forward { logits: Logits::of(spec), saving: spec.outputs.len() > 1 }))
}

impl CpuKernel for Forward {
    fn pieces(&self) -> usize {
        self.logits.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        self.logits.nanos()
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let Logits { vocab, dtype, .. } = self.logits;
        let [room] = scratch.slices::<f32, 1>([vocab]);
        for token in tokens {
            let x = simd::view(io, 0, dtype, token * vocab, &mut *room);
            let largest = simd::max(x);
            let lse = simd::sum_exp(x, largest).ln() + largest;
            let loss = self.logits.target(io, token).map_or(0.0, |target| lse - x[target]);
            // SAFETY: this token's elements are ours alone.
            unsafe {
                io.output::<f32>(0).part(token..token + 1)[0] = loss;
                if self.saving {
                    io.output::<f32>(1).part(token..token + 1)[0] = lse;
                }
            }
        }
    }
}

struct Backward(Logits);

fn backward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    Ok(Box::new(Backward(Logits::of(spec))))
}

impl CpuKernel for Backward {
    fn pieces(&self) -> usize {
        self.0.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        self.0.nanos()
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let Logits { vocab, dtype, .. } = self.0;
        let [x, y] = scratch.slices::<f32, 2>([vocab; 2]);
        let (lse, dloss) = (io.input::<f32>(2), io.input::<f32>(3));
        for token in tokens {
            let at = token * vocab;
            // SAFETY: this row is ours alone.
            let y = unsafe { simd::place(io, 0, dtype, at, &mut *y) };
            match self.0.target(io, token) {
                None => y.fill(0.0),
                Some(target) => {
                    let x = simd::view(io, 0, dtype, at, &mut *x);
                    simd::exp_scaled(x, lse[token], dloss[token], y);
                    // The probability less one, before it is scaled: near one it is exact.
                    let mut hit = [0.0];
                    simd::exp_scaled(&x[target..=target], lse[token], 1.0, &mut hit);
                    y[target] = (hit[0] - 1.0) * dloss[token];
                }
            }
            // SAFETY: as above.
            unsafe { simd::put(io, 0, dtype, at, y) };
        }
    }
}
