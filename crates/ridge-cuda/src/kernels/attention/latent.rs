//! Attention to latents: on Hopper by `kernels/attention_latent.cu`.

use ridge_graph::DType;

use super::{AttentionCall, LATENT, PROMPT_ARCH, set_shared, source, spans};
use crate::kernel::{CudaKernel, CudaKernelSpec, DeviceAction};

impl AttentionCall<'_> {
    /// Each token for itself: of latents on Hopper by tensor cores.
    pub(in crate::kernels) fn of_tokens(&self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        let elsewhere = self.tokens(spec)?;
        if !self.fits_latent() {
            return Ok(elsewhere);
        }
        let there = self.latent(spec)?;
        let action = DeviceAction::ByArch { arch: PROMPT_ARCH, actions: there.actions, otherwise: elsewhere.actions };
        Ok(CudaKernel { scratch: there.scratch.max(elsewhere.scratch), actions: vec![action] })
    }

    /// Does [`AttentionCall::latent`] take this cache?
    pub(super) fn fits_latent(&self) -> bool {
        let plain = self.op.window.is_none() && self.op.softcap.is_none() && !self.op.sinks && !self.coded;
        let numbered = self.blocks * self.keys * self.block <= i32::MAX as usize;
        let cores = matches!(self.dtype, DType::BF16 | DType::F16) && self.cache == self.dtype;
        self.sides == 1 && plain && numbered && cores && self.dim.is_multiple_of(64)
    }

    /// On tensor cores, each token for itself, by rows that are keys and values at once.
    fn latent(&self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        let (mut kernel, q) = self.rotated(spec)?;
        let parts = (self.heads / self.keys).div_ceil(16);
        let spans = spans(self.tokens * self.keys * parts, self.visible());
        let source = source("attention_latent", &self.defines(), &LATENT);
        let used = kernel.scratch.next_multiple_of(16);
        let mut rows = self.in_spans(source, q, used, [self.tokens, self.keys * parts], spans)?;
        // Two buffers of rows; scores of four quarters of the elements, and weights.
        set_shared(&mut rows, 2 * 64 * self.dim * 2 + 4 * 16 * 72 * 4 + 16 * 64 * 2);
        if self.selected.is_none() {
            rows = rows.prefetching(self.whereabouts());
        }
        kernel.actions.extend(rows.actions);
        self.join(kernel, used, spans, &self.defines())
    }
}
