//! Attention whose sums have one order: a token's bits follow from its position, its sequence and where its prompt ends, and not from
//! what else is in the step. Tokens of prompts go by tiles of keys from key 0 on, so that it does not matter how a prompt is divided;
//! tokens behind them one by one, in spans of positions that are computed apart and folded in order.

use ridge_graph::ops::PagedAttention;
use ridge_graph::{DType, Function, Sym};

use super::{Apart, AttentionCall, PROMPT_ARCH};
use crate::kernel::{CudaKernel, CudaKernelSpec, DeviceAction, composite};

/// Positions of a span. Longer ones are fewer blocks for a single long sequence, shorter ones more results to fold.
const SPAN: usize = 256;

/// Have the kernels of these heads one order? `kv` is the cache among the arguments.
pub(super) fn has_one_order(body: &Function, kv: usize) -> bool {
    let (q, kv) = (&body.args[0].ty, &body.args[kv].ty);
    let coded = matches!(kv.dtype, DType::I8 | DType::F8E4M3);
    // Wider heads leave no registers for spans.
    let wide = |dim: usize| dim.is_multiple_of(if coded { 64 } else { 16 }) && dim <= 192;
    matches!(q.dtype, DType::BF16 | DType::F16)
        && (coded || kv.dtype == q.dtype)
        && kv.shape.0[1].as_const() == Some(2)
        && kv.shape.0[4].as_const().is_some_and(wide)
        && composite::<PagedAttention>(body).is_some_and(|op| op.scale > 0.0)
}

impl AttentionCall<'_> {
    /// Tokens of prompts by tiles where there is a kernel, and others one by one.
    pub(super) fn in_one_order(&self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        if !self.on_cores() || !self.is_numbered() {
            let (dtype, cache) = (self.dtype, self.cache);
            return Err(format!("{dtype} over {} blocks of {cache} has no deterministic kernel", self.blocks));
        }
        // How a token is computed must not depend on the step: of this cache all go one by one.
        let elsewhere = if self.normed { self.decode_normed(spec)? } else { self.decode_all(spec, SPAN)? };
        if !self.fits_prompt() {
            return Ok(elsewhere);
        }
        // No token of a prompt is in a step of single tokens: engines take other steps for them. Of a prompt's step, a layer may have
        // its last row alone, which is computed as where it has all.
        if self.op.prompt_lengths && self.is_of_singles(spec) && !self.is_of_rows(spec) {
            return Ok(elsewhere);
        }
        let (mut there, q) = self.rotated(spec)?;
        if self.op.prompt_lengths {
            there.actions.extend(self.prompt_tiles(q, None, Apart::Generated)?.actions);
            let singles = self.decode(spec, (q, None), there.scratch, Apart::Generated, SPAN)?;
            there.actions.extend(singles.actions);
            there.scratch = singles.scratch;
        } else {
            there.actions.extend(self.prompt_tiles(q, None, Apart::Runs(0))?.actions);
        }
        let scratch = there.scratch.max(elsewhere.scratch);
        let action = DeviceAction::ByArch { arch: PROMPT_ARCH, actions: there.actions, otherwise: elsewhere.actions };
        Ok(CudaKernel { scratch, actions: vec![action] })
    }

    /// Are the tokens some of those of the step?
    fn is_of_rows(&self, spec: &CudaKernelSpec<'_>) -> bool {
        spec.bindings.get(&Sym::new("tokens")).is_some_and(|tokens| tokens > self.tokens)
    }

    /// One by one, with the norms of heads as [`AttentionCall::rotated`] makes them: on the way their sums have another order.
    fn decode_normed(&self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        let (mut kernel, q) = self.rotated(spec)?;
        let decode = self.decode(spec, (q, None), kernel.scratch, Apart::Runs(0), SPAN)?;
        kernel.actions.extend(decode.actions);
        kernel.scratch = decode.scratch;
        Ok(kernel)
    }

    /// Pieces of a block of the decode kernel, which is one of `blocks`: of `units` units in all, each of as many spans as the table has
    /// positions for.
    pub(super) fn pieces_of_spans(&self, units: usize, blocks: usize, span: usize) -> usize {
        let spans = self.visible().div_ceil(span).max(1);
        1 + spans.min(units * spans / blocks + 1)
    }
}
