//! Attention in both directions over a batch without padding.
//!
//! Floor: `4 dim` operations a (query, key) pair of each head. Keys and values of one head are widened once for the tokens
//! of a piece, and each token's softmax goes over its own keys in order, so its bits do not depend on other sequences.

use std::ops::Range;

use ridge_graph::ops::RaggedAttention;
use ridge_graph::{DType, Function, Op};

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, vectorised};

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("ragged_attention", "ragged_attention(q, k, v, seq_ids)", both_ways, make)]
}

/// In both directions, without a cap.
fn both_ways(body: &Function) -> bool {
    let op = body.nodes.iter().find_map(|node| match &node.op {
        Op::Composite(op) => op.downcast::<RaggedAttention>(),
        _ => None,
    });
    op.is_some_and(|op| !op.causal && op.softcap.is_none())
}

/// Tokens of a piece.
const TOGETHER: usize = 32;

struct Ragged {
    scale: f32,
    /// Places to each side that a token sees, its own included.
    window: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<RaggedAttention>().ok_or("no attention in the group")?;
    let [q, k, ..] = &spec.inputs[..] else { return Err("attention takes four inputs".into()) };
    Ok(Box::new(Ragged {
        scale: op.scale as f32,
        window: op.window.unwrap_or(usize::MAX),
        tokens: q.shape[0],
        heads: q.shape[1],
        kv_heads: k.shape[1],
        dim: q.shape[2],
        dtype: q.dtype,
    }))
}

impl CpuKernel for Ragged {
    fn pieces(&self) -> usize {
        if self.heads * self.dim == 0 { 0 } else { self.kv_heads * self.tokens.div_ceil(TOGETHER) }
    }

    fn nanos_per_piece(&self) -> f64 {
        let keys = self.window.saturating_mul(2).min(self.tokens);
        let pairs = TOGETHER.min(self.tokens) * keys * self.heads / self.kv_heads.max(1);
        200.0 + pairs as f64 * (1.0 + self.dim as f64 * 0.1)
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let width = self.tokens * self.dim;
        let [k, v, q, out, weights] = scratch.slices::<f32, 5>([width, width, self.dim, self.dim, self.tokens]);
        let ids = io.input::<i32>(3);
        let blocks = self.tokens.div_ceil(TOGETHER);
        let mut widened = None;
        for piece in pieces {
            let (head, block) = (piece / blocks, piece % blocks);
            if widened != Some(head) {
                for token in 0..self.tokens {
                    let (from, to) =
                        ((token * self.kv_heads + head) * self.dim, token * self.dim..(token + 1) * self.dim);
                    simd::load(io, 1, self.dtype, from, &mut k[to.clone()]);
                    simd::load(io, 2, self.dtype, from, &mut v[to]);
                }
                widened = Some(head);
            }
            for token in block * TOGETHER..((block + 1) * TOGETHER).min(self.tokens) {
                let group = self.heads / self.kv_heads;
                for head in head * group..(head + 1) * group {
                    let at = (token * self.heads + head) * self.dim;
                    simd::load(io, 0, self.dtype, at, q);
                    self.attend(ids, token, q, (k, v), weights, out);
                    // SAFETY: this head of this token is this piece's alone.
                    unsafe { simd::store(io, 0, self.dtype, at, out) };
                }
            }
        }
    }
}

impl Ragged {
    /// The query of one token over the keys and values of its sequence.
    fn attend(
        &self,
        ids: &[i32],
        token: usize,
        q: &[f32],
        (k, v): (&[f32], &[f32]),
        weights: &mut [f32],
        out: &mut [f32],
    ) {
        out.fill(0.0);
        let id = ids[token];
        if id < 0 {
            return;
        }
        let near = (token + 1).saturating_sub(self.window)..token.saturating_add(self.window).min(self.tokens);
        let mine = || near.clone().filter(|key| ids[*key] == id);
        let mut count = 0;
        for key in mine() {
            weights[count] = simd::dot(q, &k[key * self.dim..][..self.dim]) * self.scale;
            count += 1;
        }
        let weights = &mut weights[..count];
        let largest = simd::max(weights);
        let total = simd::exp_sum(weights, largest);
        for (key, weight) in mine().zip(&*weights) {
            weigh(out, &v[key * self.dim..][..self.dim], *weight);
        }
        simd::scale(out, 1.0 / total);
    }
}

vectorised! {
    /// `out += weight * value`.
    fn weigh(out: &mut [f32], value: &[f32], weight: f32) {
        for (out, value) in out.iter_mut().zip(value) {
            *out = simd::fma::<FMA>(weight, *value, *out);
        }
    }
}
