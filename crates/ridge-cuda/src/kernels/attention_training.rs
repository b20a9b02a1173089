//! Attention without a cache, and its gradient: `kernels/attention_training.cu`.

use std::sync::Arc;

use ridge_graph::ops::{RaggedAttention, RaggedAttentionBackward, RaggedAttentionSaving};
use ridge_graph::{Composite, DType, Dim, Function};

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, composite, each, grid,
    input, name, numbers, output,
};

pub(super) const TRAINING: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/attention_training.cu")).with_tiles();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new(
            "ragged_attention",
            "ragged_attention(q, k, v, seq_ids)",
            |body| supports::<RaggedAttention>(body, |op| op),
            forward,
        ),
        CudaKernelEntry::new(
            "ragged_attention_saving",
            "ragged_attention_saving(q, k, v, seq_ids)",
            |body| supports::<RaggedAttentionSaving>(body, |op| &op.0),
            forward,
        ),
        CudaKernelEntry::new(
            "ragged_attention_backward",
            "ragged_attention_backward(q, k, v, seq_ids, y, lse, dy)",
            |body| supports::<RaggedAttentionBackward>(body, |op| &op.0),
            backward,
        ),
    ]
}

/// Heads of 64 or 128 elements of 16 bits, in which tiles are laid out.
fn supports<T: Composite>(body: &Function, of: impl Fn(&T) -> &RaggedAttention) -> bool {
    let q = &body.args[0].ty;
    let fits = matches!(q.dtype, DType::BF16 | DType::F16) && matches!(q.shape.0[2].as_const(), Some(64 | 128));
    let heads = q.shape.0[1].as_const().is_some_and(|heads| heads > 0) && q.shape.0[1] != Dim::from(0);
    fits && heads && composite::<T>(body).is_some_and(|op| of(op).scale > 0.0)
}

/// How a block works.
#[derive(Clone, Copy)]
struct Tiling {
    /// Warps, of 16 rows each.
    warps: usize,
    /// Tokens of the other side that pass at a time.
    columns: usize,
}

const FORWARD: Tiling = Tiling { warps: 8, columns: 64 };

/// Of the gradient: smaller blocks of few columns, whose registers allow several blocks, which hide each other's latency.
const GRADIENT: Tiling = Tiling { warps: 4, columns: 32 };

struct AttentionCall<'a> {
    op: &'a RaggedAttention,
    tokens: usize,
    heads: usize,
    keys: usize,
    dim: usize,
    dtype: DType,
}

impl<'a> AttentionCall<'a> {
    fn new(spec: &CudaKernelSpec<'_>, op: &'a RaggedAttention) -> Self {
        let (q, k) = (&spec.inputs[0], &spec.inputs[1]);
        Self { op, tokens: q.shape[0], heads: q.shape[1], keys: k.shape[1], dim: q.shape[2], dtype: q.dtype }
    }

    fn source(&self, entry: &str, saving: bool, for_keys: bool, tiling: Tiling) -> Arc<CudaSource> {
        let flag = |on: bool| u8::from(on).to_string();
        let defines = [
            ("D", name(self.dtype).to_owned()),
            ("DIM", self.dim.to_string()),
            ("SHARE", (self.heads / self.keys).to_string()),
            ("CAUSAL", flag(self.op.causal)),
            ("WINDOW", self.op.window.map_or(0, |w| w.min(1 << 30)).to_string()),
            ("SOFTCAP", flag(self.op.softcap.is_some())),
            ("CAP", format!("{:e}f", self.op.softcap.unwrap_or(1.0))),
            ("SAVING", flag(saving)),
            ("FOR_KEYS", flag(for_keys)),
            ("COLUMNS", tiling.columns.to_string()),
            ("WARPS", tiling.warps.to_string()),
        ];
        let defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
        CudaSource::new(entry, &defines, &TRAINING)
    }

    /// The bounds of each sequence, at the beginning of scratch memory.
    fn bounds(&self) -> CudaKernel {
        let source = |entry| self.source(entry, false, false, FORWARD);
        let n = || numbers(&[self.tokens]);
        let mut kernel = each(source("bounds_clear"), self.tokens, vec![scratch(0), n()]);
        kernel.actions.extend(each(source("bounds_find"), self.tokens, vec![input(3), scratch(0), n()]).actions);
        kernel
    }

    fn bounds_bytes(&self) -> usize {
        (self.tokens * 8).next_multiple_of(256)
    }

    /// Blocks for the tokens of each of `heads` heads.
    fn tiles(
        &self,
        source: Arc<CudaSource>,
        heads: usize,
        tiling: Tiling,
        args: Vec<LaunchArg>,
    ) -> Result<Vec<DeviceAction>, String> {
        let across = self.tokens.div_ceil(16 * tiling.warps);
        let mut kernel = grid(source, [across, heads, 1], 32 * tiling.warps as u32, args)?;
        for action in &mut kernel.actions {
            if let DeviceAction::Launch { shared, .. } = action {
                *shared = (2 * 2 * tiling.columns * self.dim * 2) as u32;
            }
        }
        Ok(kernel.actions)
    }
}

fn scratch(offset: usize) -> LaunchArg {
    LaunchArg::Pointer(OperandSlot::Scratch, offset)
}

fn forward(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let saving = spec.composite::<RaggedAttentionSaving>();
    let op = saving.map(|op| &op.0).or_else(|| spec.composite()).ok_or("no attention in the group")?;
    let call = AttentionCall::new(spec, op);
    let mut kernel = call.bounds();
    let lse = output(if saving.is_some() { 1 } else { 0 });
    let n = numbers(&[call.tokens, call.heads]);
    let scale = LaunchArg::Float(op.scale as f32);
    let args = vec![input(0), input(1), input(2), input(3), scratch(0), output(0), lse, scale, n];
    let source = call.source("attention_forward", saving.is_some(), false, FORWARD);
    kernel.actions.extend(call.tiles(source, call.heads, FORWARD, args)?);
    kernel.scratch = call.bounds_bytes();
    Ok(kernel)
}

fn backward(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = &spec.composite::<RaggedAttentionBackward>().ok_or("no attention in the group")?.0;
    let call = AttentionCall::new(spec, op);
    let mut kernel = call.bounds();
    let along = call.bounds_bytes();
    let n = || numbers(&[call.tokens, call.heads]);
    let rows = call.tokens * call.heads;
    let args = vec![input(4), input(6), scratch(along), n()];
    kernel.actions.extend(each(call.source("attention_along", false, false, FORWARD), rows * 32, args).actions);
    for (for_keys, heads, outputs) in [(false, call.heads, [0, 0]), (true, call.keys, [1, 2])] {
        let mut args = vec![input(0), input(1), input(2), input(3), scratch(0), input(6), input(5), scratch(along)];
        args.extend([output(outputs[0]), output(outputs[1]), LaunchArg::Float(op.scale as f32), n()]);
        let source = call.source("attention_backward", false, for_keys, GRADIENT);
        kernel.actions.extend(call.tiles(source, heads, GRADIENT, args)?);
    }
    kernel.scratch = along + rows * 4;
    Ok(kernel)
}
