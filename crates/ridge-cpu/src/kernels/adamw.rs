//! A step of AdamW in place, and of the copies that forward and backward read.
//!
//! Floor: parameter and moments read and written once, the gradient read once, and the copy written once.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::AdamWUpdate;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, fma, vectorised};

pub(super) fn entries() -> [KernelEntry; 2] {
    [
        KernelEntry::new("adamw_update", "adamw_update(p, m, v, g, lr, step, scale)", |_| true, make),
        KernelEntry::new("adamw_update_copy", "adamw_update(p, m, v, g, lr, step, scale, copy)", |_| true, make),
    ]
}

/// Elements of a piece.
const PIECE: usize = 4096;

struct Update {
    op: AdamWUpdate,
    elements: usize,
    gradient: DType,
    copy: Option<DType>,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = *spec.composite::<AdamWUpdate>().ok_or("no update in the group")?;
    Ok(Box::new(Update {
        op,
        elements: spec.inputs[0].len(),
        gradient: spec.inputs[3].dtype,
        copy: op.copy.then(|| spec.inputs[7].dtype),
    }))
}

/// What an element's update multiplies by.
#[derive(Clone, Copy)]
struct Factors {
    scale: f32,
    /// Decays, and what is taken of what is new.
    beta: [f32; 2],
    take: [f32; 2],
    /// One over the corrections of the moments.
    correct: [f32; 2],
    eps: f32,
    lr: f32,
    /// Share of the parameter that is kept.
    keep: f32,
}

vectorised! {
    fn update(of: Factors, gradient: &[f32], param: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        for (((g, p), m), v) in gradient.iter().zip(param).zip(m).zip(v) {
            let g = *g * of.scale;
            *m = fma::<FMA>(*m, of.beta[0], g * of.take[0]);
            *v = fma::<FMA>(*v, of.beta[1], g * g * of.take[1]);
            let direction = *m * of.correct[0] / ((*v * of.correct[1]).sqrt() + of.eps);
            *p = fma::<FMA>(*p, of.keep, -(of.lr * direction));
        }
    }
}

impl CpuKernel for Update {
    fn pieces(&self) -> usize {
        self.elements.div_ceil(PIECE)
    }

    fn nanos_per_piece(&self) -> f64 {
        PIECE as f64 * 0.7
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let [room] = scratch.slices::<f32, 1>([PIECE]);
        let number = |input: usize| f64::from(io.input::<f32>(input)[0]);
        let (lr, step, scale) = (number(4), number(5), number(6));
        let a = &self.op.adamw;
        // In f64, since the differences lose digits where a beta is close to 1.
        let corrected = |beta: f64| (1.0 / (1.0 - beta.powf(step))) as f32;
        let of = Factors {
            scale: scale as f32,
            beta: [a.beta1, a.beta2].map(|beta| beta as f32),
            take: [a.beta1, a.beta2].map(|beta| (1.0 - beta) as f32),
            correct: [a.beta1, a.beta2].map(corrected),
            eps: a.eps as f32,
            lr: lr as f32,
            keep: (1.0 - lr * a.weight_decay) as f32,
        };
        for piece in pieces {
            let range = piece * PIECE..((piece + 1) * PIECE).min(self.elements);
            let gradient = simd::view(io, 3, self.gradient, range.start, &mut room[..range.len()]);
            // SAFETY: these elements of the states are this piece's alone.
            let [param, m, v] = [0, 1, 2].map(|i| unsafe { io.output::<f32>(i).part(range.clone()) });
            update(of, gradient, param, m, v);
            if let Some(dtype) = self.copy {
                // SAFETY: as above.
                unsafe { simd::store(io, 3, dtype, range.start, param) };
            }
        }
    }
}
