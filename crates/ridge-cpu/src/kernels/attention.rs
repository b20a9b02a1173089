//! Causal attention over a paged cache.
//!
//! Floor: at decoding, the keys and values of each sequence read once (a group of query heads shares them); at prompts,
//! `4 dim` operations a (query, key) pair of each head.
//!
//! A softmax goes over spans of [`SPAN`] positions, counted from position 0: scores of a span, its largest, its
//! exponentials and their sum, then values weighed by them, with what came before scaled to the new largest (Milakov and
//! Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention", algorithm 1). Within
//! a span keys come in order. So a token's bits depend on its own position, never on the tokens beside it. With a window
//! the spans before it are passed over, and keys before it in its first span weigh nothing.
//!
//! Of a cache of codes, scores are multiplied by the scales of keys, and weights by those of values; tiles take codes times
//! scales.

#[cfg(target_arch = "x86_64")]
mod by_lane;
mod in_lanes;
mod index;
mod kernel;
mod narrow;
mod online;
#[cfg(target_arch = "x86_64")]
mod packed;
mod selected;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod values;

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use ridge_graph::DType;
use ridge_graph::ops::PagedAttention;

#[cfg(target_arch = "x86_64")]
use crate::amx;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
#[cfg(target_arch = "x86_64")]
use crate::simd;
use kernel::{AttentionKernel, TOKENS};

pub(super) fn entries() -> [KernelEntry; 8] {
    [
        KernelEntry::new("attention", "attention(q, kv, block_table, seq_ids, positions)", |_| true, make),
        KernelEntry::new(
            "attention_codes",
            // Scales of a cache of codes, or slopes, sinks or lengths of prompts, which tokens are computed alike for.
            "attention(q, kv, block_table, seq_ids, positions, scales)",
            |_| true,
            make,
        ),
        KernelEntry::new(
            "attention_codes_heads",
            "attention(q, kv, block_table, seq_ids, positions, scales, heads)",
            |_| true,
            make,
        ),
        KernelEntry::new(
            "attention_codes_heads_prompts",
            "attention(q, kv, block_table, seq_ids, positions, scales, heads, prompt_lengths)",
            |_| true,
            make,
        ),
        KernelEntry::new(
            "selected_attention",
            "selected_attention(q, kv, block_table, seq_ids, selected)",
            |_| true,
            selected::make,
        ),
        KernelEntry::new(
            "selected_attention_codes",
            "selected_attention(q, kv, block_table, seq_ids, selected, scales)",
            |_| true,
            selected::make,
        ),
        KernelEntry::new(
            "index_topk",
            "index_topk(q, w, keys, block_table, seq_ids, positions)",
            |_| true,
            index::make,
        ),
        KernelEntry::new(
            "index_topk_codes",
            "index_topk(q, w, keys, block_table, seq_ids, positions, scales)",
            |_| true,
            index::make,
        ),
    ]
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<PagedAttention>().ok_or("no attention in the group")?;
    let [q, kv, table, ..] = &spec.inputs[..] else { return Err("attention takes five inputs".into()) };
    let others = [op.slopes, op.sinks, op.prompt_lengths].map(usize::from).iter().sum::<usize>();
    let scaled = spec.inputs.len() > 5 + others;
    // Single tokens leave more pieces to a few tokens, which rarely are of one sequence.
    let together = if q.shape[0] > TOKENS { TOKENS } else { 1 };
    #[cfg(target_arch = "x86_64")]
    let on_tiles = simd::isa() == simd::Isa::Amx
        && amx::takes(q.dtype, q.shape[2])
        && !(op.chunked || op.slopes || op.sinks)
        && (!scaled || kv.dtype == DType::I8);
    #[cfg(target_arch = "x86_64")]
    let together = match q.shape[1].checked_div(kv.shape[2]) {
        Some(group) if on_tiles && together > 1 => tiles::together(q.shape[0], group),
        Some(group) if simd::isa() >= simd::Isa::Avx2 && !narrow::is_narrow(q.shape[2]) && together > 1 => {
            by_lane::together(q.shape[0], [kv.shape[2], group], together)
        }
        _ => together,
    };
    Ok(Box::new(AttentionKernel {
        scale: op.scale as f32,
        window: op.window,
        chunked: op.chunked,
        softcap: op.softcap.map(|cap| cap as f32),
        slopes: op.slopes.then_some(5 + usize::from(scaled)),
        sinks: op.sinks.then_some(5 + usize::from(scaled) + usize::from(op.slopes)),
        tokens: q.shape[0],
        heads: q.shape[1],
        kv_heads: kv.shape[2],
        sides: kv.shape[1],
        dim: q.shape[2],
        dtype: q.dtype,
        blocks: kv.shape[0],
        block_size: kv.shape[3],
        cache: kv.dtype,
        scaled,
        sequences: table.shape[0],
        table: table.shape[1],
        together,
        #[cfg(target_arch = "x86_64")]
        on_tiles,
    }))
}

impl CpuKernel for AttentionKernel {
    fn pieces(&self) -> usize {
        if self.heads * self.dim == 0 { 0 } else { self.kv_heads * self.tokens.div_ceil(self.together) }
    }

    fn nanos_per_piece(&self) -> f64 {
        #[cfg(target_arch = "x86_64")]
        if self.preparation_on_tiles().is_some() {
            return self.nanos_to_merge();
        }
        // Half the context, for want of knowing.
        let keys = (self.table * self.block_size).div_ceil(2);
        let pairs = self.together * self.group() * self.window.map_or(keys, |window| keys.min(window));
        100.0 + pairs as f64 * self.nanos_per_pair()
    }

    #[cfg(target_arch = "x86_64")]
    fn preparation(&self) -> Option<crate::kernel::Preparation> {
        self.preparation_on_tiles()
    }

    #[cfg(target_arch = "x86_64")]
    fn prepare(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        self.prepare_on_tiles(io, pieces, scratch);
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return self.run_on_tiles(io, pieces, scratch);
        }
        #[cfg(target_arch = "x86_64")]
        if packed::takes(self.dim) && !self.scaled && self.slopes.is_none() && self.sinks.is_none() {
            return self.run_packed(io, pieces, scratch);
        }
        self.run_in_lanes(io, pieces, scratch);
    }
}
