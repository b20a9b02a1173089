//! Attention without a cache as training has it: causal or in both directions, with the logarithms of sums that its
//! gradient needs, and the gradient.
//!
//! Floor: `4 dim` operations a (query, key) pair of each head, and `10 dim` for the gradient, which takes `14 dim` here:
//! scores are computed once for the cotangent of queries and once for those of keys and values, so that each is written
//! by one thread.
//!
//! In f32, the gradient's scores and the cotangents of shares are summed in f64: in f32 sums, rows where they cancel would be
//! further from the exact gradient than the rule of tolerance allows.
//!
//! Blocks of keys (of queries, for the cotangents of keys) are counted from the first token of a sequence, so what a token
//! gets does not depend on the sequences beside it.

mod backward;
mod call;
mod dropping;
mod forward;
mod spans;

use ridge_graph::ops::{RaggedAttention, RaggedAttentionBackward, RaggedAttentionSaving};
use ridge_graph::{Function, Op};

use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use backward::Backward;
use call::Attention;
use forward::Forward;

pub(super) fn entries() -> [KernelEntry; 6] {
    [
        KernelEntry::new("causal_attention", "ragged_attention(q, k, v, seq_ids)", causal, forward),
        KernelEntry::new("ragged_attention_saving", "ragged_attention_saving(q, k, v, seq_ids)", |_| true, forward),
        KernelEntry::new(
            "ragged_attention_backward",
            "ragged_attention_backward(q, k, v, seq_ids, y, lse, dy)",
            |_| true,
            backward,
        ),
        KernelEntry::new("dropped_attention", "ragged_attention(q, k, v, seq_ids, key, heads)", |_| true, forward),
        KernelEntry::new(
            "dropped_attention_saving",
            "ragged_attention_saving(q, k, v, seq_ids, key, heads)",
            |_| true,
            forward,
        ),
        KernelEntry::new(
            "dropped_attention_backward",
            "ragged_attention_backward(q, k, v, seq_ids, y, lse, key, heads, dy)",
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

fn forward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let saving = spec.composite::<RaggedAttentionSaving>();
    let op = saving.map(|saving| &saving.0).or_else(|| spec.composite()).ok_or("no attention in the group")?;
    Ok(Box::new(Forward { attention: Attention::new(spec, op), saving: saving.is_some() }))
}

fn backward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<RaggedAttentionBackward>().ok_or("no attention in the group")?;
    Ok(Box::new(Backward(Attention::new(spec, &op.0))))
}
