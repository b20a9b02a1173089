//! A step of AdamW with moments of 8 bits.
//!
//! Floor: parameter, codes and scales read and written once, the gradient read once; each moment is looked up in one table and
//! searched in another, which stay in L1.

use std::ops::Range;

use ridge_graph::ops::AdamW8;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{fma, vectorised};

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("adamw8", "adamw8(p, g, m, m_scale, v, v_scale, lr, step)", |_| true, make)]
}

/// Elements of a block.
const BLOCK: usize = AdamW8::BLOCK;
/// Blocks of a piece.
const PIECE: usize = 16;

/// The code of each value of a moment, and back.
struct Codes {
    map: [f32; BLOCK],
    /// See [`AdamW8::border_tree`].
    tree: [f32; BLOCK],
}

struct Step {
    op: AdamW8,
    blocks: usize,
    /// Of the first moment and of the second.
    codes: [Codes; 2],
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = *spec.composite::<AdamW8>().ok_or("no step in the group")?;
    let table = |values: Vec<f64>| std::array::from_fn(|i| values[i] as f32);
    let codes = |signed| Codes { map: table(AdamW8::map(signed)), tree: table(AdamW8::border_tree(signed)) };
    Ok(Box::new(Step { op, blocks: spec.inputs[0].len() / BLOCK, codes: [true, false].map(codes) }))
}

/// What an element's update multiplies by.
#[derive(Clone, Copy)]
struct Factors {
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

/// What a moment was, and what it becomes.
struct Moment<'a> {
    of: &'a Codes,
    codes: &'a [u8; BLOCK],
    scale: f32,
    next: &'a mut [u8; BLOCK],
    next_scale: &'a mut f32,
}

vectorised! {
    /// A block's step.
    fn step(by: &Factors, param: &[f32; BLOCK], grad: &[f32; BLOCK], next: &mut [f32; BLOCK], moments: [Moment<'_>; 2]) {
        let [first, second] = moments;
        let (mut m, mut v) = ([0f32; BLOCK], [0f32; BLOCK]);
        for i in 0..BLOCK {
            m[i] = first.of.map[usize::from(first.codes[i])] * first.scale;
            v[i] = second.of.map[usize::from(second.codes[i])] * second.scale;
        }
        for i in 0..BLOCK {
            // Rounded as the op has it, since a code may hang on a bit.
            m[i] = m[i] * by.beta[0] + grad[i] * by.take[0];
            v[i] = v[i] * by.beta[1] + grad[i] * grad[i] * by.take[1];
            let direction = m[i] * by.correct[0] / ((v[i] * by.correct[1]).sqrt() + by.eps);
            next[i] = fma::<FMA>(param[i], by.keep, -(by.lr * direction));
        }
        for (moment, x) in [(first, &mut m), (second, &mut v)] {
            let (mut most, mut odd) = (0f32, 0u32);
            for x in &*x {
                most = if x.abs() > most { x.abs() } else { most };
                odd |= u32::from(x.is_nan());
            }
            let scale = if odd == 0 { most } else { f32::NAN };
            let divisor = if scale < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { scale };
            let mut nodes = [1u32; BLOCK];
            for x in &mut *x {
                *x /= divisor;
            }
            for _ in 0..BLOCK.ilog2() {
                for (node, x) in nodes.iter_mut().zip(&*x) {
                    *node = 2 * *node + u32::from(*x > moment.of.tree[*node as usize % BLOCK]);
                }
            }
            for (code, node) in moment.next.iter_mut().zip(&nodes) {
                *code = *node as u8;
            }
            *moment.next_scale = scale;
        }
    }
}

impl CpuKernel for Step {
    fn pieces(&self) -> usize {
        self.blocks.div_ceil(PIECE)
    }

    fn nanos_per_piece(&self) -> f64 {
        (PIECE * BLOCK) as f64 * 4.0
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        let number = |input: usize| f64::from(io.input::<f32>(input)[0]);
        let (lr, step_number) = (number(6), number(7));
        let a = &self.op.adamw;
        let betas = [a.beta1, a.beta2];
        // In f64, since the differences lose digits where a beta is close to 1.
        let by = Factors {
            beta: betas.map(|beta| beta as f32),
            take: betas.map(|beta| (1.0 - beta) as f32),
            correct: betas.map(|beta| (1.0 / (1.0 - beta.powf(step_number))) as f32),
            eps: a.eps as f32,
            lr: lr as f32,
            keep: (1.0 - lr * a.weight_decay) as f32,
        };
        let floats = |input: usize| io.input::<f32>(input).as_chunks::<BLOCK>().0;
        let (params, grads) = (floats(0), floats(1));
        for block in pieces.start * PIECE..(pieces.end * PIECE).min(self.blocks) {
            let range = block * BLOCK..(block + 1) * BLOCK;
            // SAFETY: this block is the piece's alone.
            let next = unsafe { io.output::<f32>(0).part(range.clone()) };
            let moments = [0, 1].map(|i| Moment {
                of: &self.codes[i],
                codes: &io.input::<u8>(2 + 2 * i).as_chunks().0[block],
                scale: io.input::<f32>(3 + 2 * i)[block],
                // SAFETY: as above.
                next: &mut unsafe { io.output::<u8>(1 + 2 * i).part(range.clone()) }.as_chunks_mut().0[0],
                // SAFETY: as above.
                next_scale: &mut unsafe { io.output::<f32>(2 + 2 * i).part(block..block + 1) }[0],
            });
            step(&by, &params[block], &grads[block], &mut next.as_chunks_mut().0[0], moments);
        }
    }
}
