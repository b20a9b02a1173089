//! Attention without a cache as training has it: causal or in both directions, with the logarithms of sums that its
//! gradient needs, and the gradient.
//!
//! Floor: `4 dim` operations a (query, key) pair of each head, and `10 dim` for the gradient, which takes `14 dim` here:
//! scores are computed once for the cotangent of queries and once for those of keys and values, so that each is written
//! by one thread.
//!
//! Blocks of keys (of queries, for the cotangents of keys) are counted from the first token of a sequence, so what a token
//! gets does not depend on the sequences beside it.

mod backward;
mod forward;
mod spans;

use ridge_graph::ops::{RaggedAttention, RaggedAttentionBackward, RaggedAttentionSaving};
use ridge_graph::{DType, Function, Op};

use crate::gemm::{Lines, TileProduct};
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use backward::Backward;
use forward::Forward;

pub(super) fn entries() -> [KernelEntry; 3] {
    [
        KernelEntry::new("causal_attention", "ragged_attention(q, k, v, seq_ids)", causal, forward),
        KernelEntry::new("ragged_attention_saving", "ragged_attention_saving(q, k, v, seq_ids)", |_| true, forward),
        KernelEntry::new(
            "ragged_attention_backward",
            "ragged_attention_backward(q, k, v, seq_ids, y, lse, dy)",
            |_| true,
            backward,
        ),
    ]
}

/// What has a kernel of its own is in both directions, without a cap.
fn causal(body: &Function) -> bool {
    let op = body.nodes.iter().find_map(|node| match &node.op {
        Op::Composite(op) => op.downcast::<RaggedAttention>(),
        _ => None,
    });
    op.is_some_and(|op| op.causal || op.softcap.is_some())
}

/// Tokens of a piece.
const PIECE: usize = 192;

/// Tokens of the other side that are scored at a time.
const SPAN: usize = 64;

/// What both directions share.
struct Attention {
    op: RaggedAttention,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    dtype: DType,
    tile: TileProduct,
}

impl Attention {
    fn new(spec: &KernelSpec<'_>, op: &RaggedAttention) -> Self {
        let [q, k] = [&spec.inputs[0], &spec.inputs[1]];
        Self {
            op: op.clone(),
            tokens: q.shape[0],
            heads: q.shape[1],
            kv_heads: k.shape[1],
            dim: q.shape[2],
            dtype: q.dtype,
            tile: TileProduct::new(),
        }
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Pieces of a head.
    fn blocks(&self) -> usize {
        self.tokens.div_ceil(PIECE)
    }

    fn pieces(&self) -> usize {
        if self.heads * self.dim == 0 { 0 } else { self.kv_heads * self.blocks() }
    }

    /// Nanoseconds of a piece that computes `products` products for each pair.
    fn nanos(&self, products: f64) -> f64 {
        let pairs = PIECE.min(self.tokens) * self.tokens * self.group() / 2;
        500.0 + pairs as f64 * (1.0 + self.dim as f64 * products * 0.02)
    }

    /// Tokens of one head, of a tensor of `heads` heads, as lines of `dim` steps.
    fn by_token(&self, heads: usize, count: usize) -> Lines {
        Lines { lines: count, line_stride: heads * self.dim, step_stride: 1 }
    }

    /// The same as `dim` lines of tokens.
    fn by_element(&self, heads: usize) -> Lines {
        Lines { lines: self.dim, line_stride: 1, step_stride: heads * self.dim }
    }

    /// Where the elements of `head` of `token` begin in a tensor of `heads` heads.
    fn at(&self, heads: usize, token: usize, head: usize) -> usize {
        (token * heads + head) * self.dim
    }
}

fn forward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let saving = spec.composite::<RaggedAttentionSaving>();
    let op = saving.map(|saving| &saving.0).or_else(|| spec.composite()).ok_or("no attention in the group")?;
    Ok(Box::new(Forward { attention: Attention::new(spec, op), saving: saving.is_some() }))
}

fn backward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<RaggedAttentionBackward>().ok_or("no attention in the group")?;
    Ok(Box::new(Backward(Attention::new(spec, &op.0))))
}
