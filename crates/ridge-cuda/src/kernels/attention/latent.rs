//! Attention to latents: on Hopper by `kernels/attention_latent.cu`, and by `kernels/attention_latent_sm90.cu` where many query heads share
//! a key head.

use ridge_graph::DType;

use super::{AttentionCall, LATENT, LATENT_SM90, PROMPT_ARCH, set_shared, source};
use crate::gemm::PROCESSORS;
use crate::kernel::{CudaKernel, CudaKernelSpec, DeviceAction};

/// Positions that a block takes at a time: `TILE` of both texts.
const TILE: usize = 64;
/// Query heads of a key head up to which a tile of wgmma, 64 rows, would mostly be empty.
const FEW_HEADS: usize = 16;
/// Elements of a row for which wgmma's queries and rows have room.
const MOST_OF_MANY: usize = 576;
/// The most spans of a token.
const MOST_SPANS: usize = 64;

/// Spans of a token of a launch that is `across` blocks wide, of which a multiprocessor has one at a time, and of whose positions at most
/// `visible` are seen: those with which contexts of 4,096 take the least time.
fn spans(across: usize, visible: usize) -> usize {
    // A span's results are written and read again, which takes as long as some three tiles of 64.
    const JOIN: f64 = 3.0 / 64.0;
    let most = visible.div_ceil(TILE).clamp(1, MOST_SPANS);
    let time = |spans: usize| {
        let blocks = across * spans;
        blocks.div_ceil(PROCESSORS) as f64 / spans as f64 + JOIN * blocks as f64 / PROCESSORS as f64
    };
    (1..=most).min_by(|a, b| time(*a).total_cmp(&time(*b))).unwrap_or(1)
}

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
        let tile = TILE * self.dim * 2;
        let many = self.selected.is_none() && self.dim <= MOST_OF_MANY && self.heads / self.keys > FEW_HEADS;
        let (entry, text, heads, shared) = match many {
            // Queries, two buffers of rows, and weights.
            true => ("attention_latent_sm90", &LATENT_SM90, 64, 3 * tile + 64 * TILE * 2),
            // Two buffers of rows; scores of four quarters of the elements, and weights.
            false => ("attention_latent", &LATENT, 16, 2 * tile + 4 * 16 * 72 * 4 + 16 * TILE * 2),
        };
        let parts = (self.heads / self.keys).div_ceil(heads);
        let spans = spans(self.tokens * self.keys * parts, self.visible());
        let source = source(entry, &self.defines(), text);
        let used = kernel.scratch.next_multiple_of(16);
        let mut rows = self.in_spans(source, q, used, [self.tokens, self.keys * parts], spans)?;
        set_shared(&mut rows, shared);
        if self.selected.is_none() {
            rows = rows.prefetching(self.whereabouts());
        }
        kernel.actions.extend(rows.actions);
        self.join(kernel, used, spans, &self.defines())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_fill_whole_turns_of_the_multiprocessors() {
        assert_eq!([1, 8, 64, 128, 256, 4096].map(|across| spans(across, 1 << 20)), [53, 16, 2, 1, 1, 1]);
        // A short table is not cut finer than its tiles, and none at all gives a launch.
        assert_eq!([0, 1, 65, 640].map(|visible| spans(1, visible)), [1, 1, 2, 10]);
    }
}
