//! Attention over the paged cache: `kernels/attention.cu` for any step, `kernels/attention_tiles.cu` for prompts.

use ridge_graph::ops::{PagedAttention, Rope};
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use super::rope;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, composite, grid, input,
    name, numbers, output,
};

pub(super) const ATTENTION: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/rotate.cuh"), include_str!("../../kernels/attention.cu")))
        .with_tiles()
        .early_launch();
pub(super) const TILES: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/attention_tiles.cu")).with_tiles().early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entries = [
        CudaKernelEntry::new(
            "attention",
            "attention(q, kv, block_table, seq_ids, positions)",
            |body| supports(body, 1),
            make,
        ),
        CudaKernelEntry::new(
            "rope_attention",
            "attention(rope(q, positions), kv, block_table, seq_ids, positions)",
            |body| supports(body, 2),
            make,
        ),
    ];
    // Contexts are cut into a number of spans that the bucket's extents give.
    entries.map(CudaKernelEntry::numerics_by_extents).into()
}

/// What a block holds of its heads fits into shared memory.
fn supports(body: &Function, kv: usize) -> bool {
    let kv = &body.args[kv].ty.shape.0;
    // Chunks have no kernel yet; slopes and sinks are further inputs, which the patterns have not.
    let plain = composite::<PagedAttention>(body).is_some_and(|op| !op.chunked);
    plain
        && kv[2].as_const().is_some_and(|heads| heads > 0)
        && kv[4].as_const().is_some_and(|dim| (1..=256).contains(&dim))
}

/// Positions of a cache below which another span is not worth its joining.
const LEAST: usize = 64;
/// The most spans of a token: `SPANS` of the text.
const SPANS: usize = 64;
/// Blocks up to which a GPU has room for one head each.
const FEW: usize = 264;
/// Blocks beyond which the GPU is full without spans.
const ENOUGH: usize = 528;
/// Tokens for each sequence from which on tiles are quicker.
const PROMPT: usize = 8;
/// Rows and columns of a tile: `ROWS` and `COLUMNS` of the text.
const ROWS: usize = 128;
const COLUMNS: usize = 64;

/// Extents and what both kernels define.
struct AttentionCall<'a> {
    op: &'a PagedAttention,
    /// What is done to q on the way.
    rope: Option<&'a Rope>,
    /// The first input after q and its positions: cache, block table, rows of it, positions.
    first: usize,
    tokens: usize,
    heads: usize,
    keys: usize,
    dim: usize,
    /// Blocks of a sequence, of the cache, and tokens of a block.
    columns: usize,
    blocks: usize,
    block: usize,
    cache: DType,
    dtype: DType,
}

impl AttentionCall<'_> {
    fn defines(&self) -> Vec<(&'static str, String)> {
        vec![
            ("D", name(self.dtype).into()),
            ("DIM", self.dim.to_string()),
            ("SHARE", (self.heads / self.keys).to_string()),
            ("BLOCK", self.block.to_string()),
            ("WINDOW", self.op.window.map_or(0, |w| w.min(i32::MAX as usize)).to_string()),
            ("SOFTCAP", u8::from(self.op.softcap.is_some()).to_string()),
            ("CAP", format!("{:e}f", self.op.softcap.unwrap_or(1.0))),
        ]
    }

    /// q, then cache, block table, rows of it, positions.
    fn inputs(&self, q: OperandSlot) -> Vec<LaunchArg> {
        std::iter::once(LaunchArg::Pointer(q, 0)).chain((self.first..self.first + 4).map(input)).collect()
    }

    /// On tensor cores, a tile of tokens at a time.
    fn tiles(&self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        let n = numbers(&[self.tokens, self.heads, self.columns, self.blocks]);
        // Many tokens are rotated once, rather than by each block that meets them.
        let mut kernel = CudaKernel::default();
        if self.rope.is_some() {
            kernel = rope::rotate(spec, OperandSlot::Scratch)?;
            kernel.scratch = spec.inputs[0].bytes;
        }
        let mut args = self.inputs(if self.rope.is_some() { OperandSlot::Scratch } else { OperandSlot::Input(0) });
        args.extend([output(0), LaunchArg::Float(self.op.scale as f32), n]);
        let source = source("attention_tiles", &self.defines(), &TILES);
        let mut tiles = grid(source, [self.tokens.div_ceil(ROWS), self.heads, 1], 256, args)?;
        for action in &mut tiles.actions {
            if let DeviceAction::Launch { shared, .. } = action {
                *shared = (2 * 2 * COLUMNS * self.dim * 2) as u32;
            }
        }
        kernel.actions.extend(tiles.actions);
        Ok(kernel)
    }

    /// Each token for itself.
    fn tokens(&self) -> Result<CudaKernel, String> {
        let share = self.heads / self.keys;
        let size = self.cache.size_bytes();
        let wide = [8, 4, 2, 1].into_iter().find(|w| self.dim.is_multiple_of(*w) && w * size <= 16).unwrap_or(1);
        let lanes = self.dim.div_ceil(wide).next_power_of_two().min(32);
        // Shared memory holds the values of all groups: 36 kB at most.
        let most = 36_864 / (256 / lanes * (self.dim + 2) * 4);
        // A block for each head while there are few; then heads that share a key share its reading.
        let alone = self.tokens * self.heads <= FEW;
        let held = [4, 2].into_iter().filter(|_| !alone).find(|n| *n <= most && *n <= share).unwrap_or(1);
        let parts = share.div_ceil(held);
        let across = self.tokens * self.keys * parts;
        // As many as fill the GPU, whatever the table's width: each token's positions are shared out on the device.
        let visible = (self.columns * self.block).min(self.op.window.unwrap_or(usize::MAX));
        let spans = spans(across, visible);
        let mut defines = self.defines();
        defines.extend(rope::rotation(self.rope));
        defines.extend([
            ("CACHE", name(self.cache).into()),
            ("WIDE", wide.to_string()),
            ("LANES", lanes.to_string()),
            ("HEADS", held.to_string()),
            ("SPANS", SPANS.to_string()),
        ]);
        let n = numbers(&[self.tokens, self.heads, self.columns, self.blocks, spans]);
        let scratch = LaunchArg::Pointer(OperandSlot::Scratch, 0);
        let mut args = self.inputs(OperandSlot::Input(0));
        args.extend([output(0), scratch.clone(), LaunchArg::Float(self.op.scale as f32), n]);
        let source_of = |entry, join: &str| {
            let mut all = defines.clone();
            all.push(("JOIN", join.into()));
            source(entry, &all, &ATTENTION)
        };
        let mut kernel = grid(source_of("attention", "0"), [self.tokens, self.keys * parts, spans], 256, args)?;
        if spans > 1 {
            let rows = self.tokens * self.heads;
            let args = vec![scratch, output(0), numbers(&[self.tokens, self.heads, spans])];
            let threads = self.dim.next_multiple_of(32) as u32;
            kernel.actions.extend(grid(source_of("attention_join", "1"), [rows, 1, 1], threads, args)?.actions);
            kernel.scratch = rows * spans * (self.dim + 2) * 4;
        }
        Ok(kernel)
    }
}

/// Spans of a token of a launch that is `across` blocks wide, and of whose positions at most `visible` are seen. Where the
/// GPU is half full without, only long contexts are worth joining.
fn spans(across: usize, visible: usize) -> usize {
    let least = if 2 * across > ENOUGH { 8 * LEAST } else { LEAST };
    ENOUGH.div_ceil(across.max(1)).min(SPANS).min(visible.div_ceil(least)).max(1)
}

fn source(entry: &str, defines: &[(&'static str, String)], text: &KernelText<'_>) -> std::sync::Arc<CudaSource> {
    let defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
    CudaSource::new(entry, &defines, text)
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<PagedAttention>().ok_or("no attention in the group")?;
    let rope = spec.composite::<Rope>();
    let first = if rope.is_some() { 2 } else { 1 };
    let (q, kv, table) = (&spec.inputs[0], &spec.inputs[first], &spec.inputs[first + 1]);
    let ([tokens, heads, dim], [blocks, _, keys, block, _]) = (&q.shape[..], &kv.shape[..]) else {
        return Err("q must have three axes and the cache five".into());
    };
    let call = AttentionCall {
        op,
        rope,
        first,
        tokens: *tokens,
        heads: *heads,
        keys: *keys,
        dim: *dim,
        columns: table.shape[1],
        blocks: *blocks,
        block: *block,
        cache: kv.dtype,
        dtype: q.dtype,
    };
    let tiled =
        op.scale > 0.0 && matches!(q.dtype, DType::BF16 | DType::F16) && kv.dtype == q.dtype && matches!(dim, 64 | 128);
    if tiled && *tokens >= PROMPT * table.shape[0].max(1) { call.tiles(spec) } else { call.tokens() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_follow_the_step_and_not_the_width_of_the_table() {
        for across in [1, 8, 32, 100, 528, 4096] {
            let wide: Vec<usize> = [8 << 10, 128 << 10, 1 << 20].map(|visible| spans(across, visible)).into();
            assert!(wide.iter().all(|n| *n == wide[0]), "{across} blocks: {wide:?}");
            assert!(across * wide[0] < ENOUGH + across, "{across} blocks: {wide:?}");
        }
        // A short table or window is not cut finer than is worth it, and none at all gives a launch.
        assert_eq!([0, 1, 64, 65, 640].map(|visible| spans(1, visible)), [1, 1, 1, 2, 10]);
        assert_eq!([256, 512, 1024, 8192].map(|visible| spans(512, visible)), [1, 1, 2, 2]);
    }
}
