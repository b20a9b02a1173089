//! Attention of few tokens a sequence, each for itself, on tensor cores: `kernels/attention_decode.cu`.

use std::sync::Arc;

use ridge_graph::ops::Rope;

use super::super::rope;
use super::{Apart, AttentionCall, set_shared, source};
use crate::kernel::{CudaKernel, CudaKernelSpec, KernelText, LaunchArg, OperandSlot, ZERO_BYTES, grid, numbers};

pub(in crate::kernels) const DECODE: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../../kernels/codes.cuh"),
    include_str!("../../../kernels/angles.cuh"),
    include_str!("../../../kernels/rotate.cuh"),
    include_str!("../../../kernels/runs.cuh"),
    include_str!("../../../kernels/attention_decode.cu")
))
.with_tiles()
.early_launch();

/// Blocks of the decode kernel: two for each multiprocessor of a full GPU. Each has a counter in [`OperandSlot::Zeros`].
const DECODE_BLOCKS: usize = 264;
/// The same over codes, which take more instructions for their bytes: three.
const DECODE_BLOCKS_OF_CODES: usize = 396;
const _: () = assert!(DECODE_BLOCKS_OF_CODES * 4 <= ZERO_BYTES);
/// The most tokens of a launch, whose prefix sums are in shared memory, beside the prompt kernel. More are several launches, of which each takes a run that
/// ends or begins with it for what it has of it: what it takes for few tokens of more, it computes again after the prompt kernel.
const MIXED_TOKENS: usize = 32 << 10;
/// The least shared memory of its blocks in bytes: two fit on a multiprocessor, but not a third, which would be of the next launch
/// where launches overlap, and leave that launch with blocks unevenly placed (23 % slower at 256 x 1024).
const DECODE_SHARED: usize = 80 << 10;
/// The same where three fit.
const DECODE_SHARED_OF_CODES: usize = 60 << 10;
/// Shared memory of a multiprocessor, and what a block takes beside what it asks for, in bytes.
const SHARED_BYTES: usize = 228 << 10;
const BLOCK_OVERHEAD: usize = 3 << 10;
/// Stages of a warp's ring in the decode kernel.
const DECODE_STAGES: usize = 2;

impl AttentionCall<'_> {
    /// On tensor cores, every token for itself, in spans of so many positions; see [`AttentionCall::decode`].
    pub(super) fn decode_all(&self, spec: &CudaKernelSpec<'_>, span: usize) -> Result<CudaKernel, String> {
        // The widest heads leave no registers for a rotation on the way.
        if self.dim <= 192 {
            return self.decode(spec, (OperandSlot::Input(0), self.rope), 0, Apart::Runs(0), span);
        }
        let (mut kernel, q) = self.rotated(spec)?;
        let decode = self.decode(spec, (q, None), kernel.scratch, Apart::Runs(0), span)?;
        kernel.actions.extend(decode.actions);
        kernel.scratch = decode.scratch;
        Ok(kernel)
    }

    /// On tensor cores, each token for itself of those that are taken `apart`.
    /// q is rotated by `rope` on the way, after its norm. Scratch memory is taken behind the first `used` bytes. With `span` a token's
    /// sums have the order of spans of so many positions; without, one that the other tokens of the step decide as well.
    pub(super) fn decode(
        &self,
        spec: &CudaKernelSpec<'_>,
        (q, rope): (OperandSlot, Option<&Rope>),
        used: usize,
        apart: Apart,
        span: usize,
    ) -> Result<CudaKernel, String> {
        if self.tokens == 0 {
            return Ok(CudaKernel::default());
        }
        let share = self.heads / self.keys;
        let heads = share.min(16);
        // Wide heads take more registers and shared memory for each warp.
        let warps = if self.dim > 128 { 2 } else { 4 };
        // Codes are half as many bytes.
        let stages = if self.coded { DECODE_STAGES + 1 } else { DECODE_STAGES };
        // A row of a ring is a multiple of 128 bytes, or an odd number of 16-byte chunks; codes have scales behind them.
        let chunks = self.dim * self.cache.size_bytes() / 16;
        let row = if self.coded || chunks.is_multiple_of(8) { chunks } else { chunks | 1 } * 16;
        let stage = 2 * 16 * row + if self.coded { 128 } else { 0 };
        let ring = warps * stages * stage;
        let most = if self.coded { DECODE_BLOCKS_OF_CODES } else { DECODE_BLOCKS };
        let results = (warps * heads * self.dim * 4).max(heads * most * 4);
        let least = if self.coded { DECODE_SHARED_OF_CODES } else { DECODE_SHARED };
        let folded = if span > 0 { heads * self.dim * 4 } else { 0 };
        // So many at a time.
        let tokens = self.tokens.min(MIXED_TOKENS);
        let shared = (ring.max(results) + folded + (tokens + 1) * 4).max(least);
        // Few units are cut into fewer pieces.
        let units = tokens * self.keys * share.div_ceil(heads);
        // Three fit where tokens are not too many.
        let full = if 3 * (shared + BLOCK_OVERHEAD) <= SHARED_BYTES { most } else { DECODE_BLOCKS };
        let blocks = if apart == Apart::Runs(0) && units <= DECODE_BLOCKS / 8 { DECODE_BLOCKS / 2 } else { full };
        let mut defines = self.defines();
        defines.extend(rope::rotation(rope));
        let normed = rope.is_some() && self.normed;
        let (norm, gain) = if normed { rope::head_norm(spec, 1) } else { rope::no_norm() };
        defines.extend(norm.map(|(name, value)| (name, value.to_owned())));
        defines.extend([
            ("HEADS", heads.to_string()),
            ("SPAN", span.to_string()),
            ("WARPS", warps.to_string()),
            ("STAGES", stages.to_string()),
            ("MAX_BLOCKS", most.to_string()),
        ]);
        defines.extend(apart.defines());
        let used = used.next_multiple_of(16);
        let scratch = LaunchArg::Pointer(OperandSlot::Scratch, used);
        // Those of `Piece` in the text.
        let held = if span > 0 { self.pieces_of_spans(units, blocks, span) } else { 2 };
        let counters = LaunchArg::Pointer(OperandSlot::Zeros, 0);
        let source = source("attention_decode", &defines, &DECODE);
        let mut kernel = CudaKernel::default();
        for first in (0..self.tokens).step_by(tokens) {
            let count = tokens.min(self.tokens - first);
            let mut args = self.inputs_from(q, first);
            args.extend(self.prompts(apart));
            let n = numbers(&[count, self.heads, self.columns, self.blocks, held]);
            let out = LaunchArg::Pointer(OperandSlot::Output(0), first * self.row_bytes());
            args.extend([out, scratch.clone(), counters.clone(), LaunchArg::Float(self.op.scale as f32)]);
            args.extend(gain.iter().cloned());
            args.push(n);
            let launch = grid(Arc::clone(&source), [blocks, 1, 1], warps as u32 * 32, args)?;
            kernel.actions.extend(launch.actions);
        }
        set_shared(&mut kernel, shared);
        if apart != Apart::Generated {
            kernel = kernel.prefetching(self.whereabouts());
        }
        // Pieces of every head's maximum, sum and values.
        kernel.scratch = used + blocks * held * ((2 * heads * 4).next_multiple_of(16) + heads * self.dim * 4);
        Ok(kernel)
    }
}
