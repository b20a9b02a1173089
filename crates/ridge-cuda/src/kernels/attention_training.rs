//! Attention without a cache, and its gradient: on Hopper `kernels/attention_sm90.cu`, where attention is causal, and
//! `kernels/attention_backward_sm90.cu`; elsewhere `kernels/attention_training.cu`.

use std::sync::Arc;

use ridge_graph::ops::{BlockSparseAttention, RaggedAttention, RaggedAttentionBackward, RaggedAttentionSaving};
use ridge_graph::{Composite, DType, Function};

use super::attention::{PROMPT, PROMPT_ARCH, PROMPT_COLUMNS, set_shared};
use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, composite, each, grid,
    input, name, numbers, output,
};

pub(super) const TRAINING: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/attention_training.cu")).with_tiles();
pub(super) const GRADIENT_SM90: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/attention_backward_sm90.cu")).with_hopper().early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    // With dropout there are a key and the heads' numbers too.
    let plain = |name: &'static str, pattern| {
        CudaKernelEntry::new(name, pattern, |body| supports::<RaggedAttention>(body, |op| op), forward)
    };
    let saving = |name: &'static str, pattern| {
        CudaKernelEntry::new(name, pattern, |body| supports::<RaggedAttentionSaving>(body, |op| &op.0), forward)
    };
    let gradient = |name: &'static str, pattern| {
        CudaKernelEntry::new(name, pattern, |body| supports::<RaggedAttentionBackward>(body, |op| &op.0), backward)
    };
    vec![
        CudaKernelEntry::new(
            "block_sparse_attention",
            "block_sparse_attention(q, k, v, seq_ids, positions)",
            |body| fits_tiles(body) && composite::<BlockSparseAttention>(body).is_some_and(|op| op.scale > 0.0),
            in_blocks,
        ),
        plain("ragged_attention", "ragged_attention(q, k, v, seq_ids)"),
        plain("ragged_attention_dropped", "ragged_attention(q, k, v, seq_ids, key, heads)"),
        saving("ragged_attention_saving", "ragged_attention_saving(q, k, v, seq_ids)"),
        saving("ragged_attention_saving_dropped", "ragged_attention_saving(q, k, v, seq_ids, key, heads)"),
        gradient("ragged_attention_backward", "ragged_attention_backward(q, k, v, seq_ids, y, lse, dy)"),
        gradient(
            "ragged_attention_backward_dropped",
            "ragged_attention_backward(q, k, v, seq_ids, y, lse, key, heads, dy)",
        ),
    ]
}

/// Heads of 32, 64 or 128 elements of 16 bits, in which tiles are laid out.
fn fits_tiles(body: &Function) -> bool {
    let q = &body.args[0].ty;
    let fits = matches!(q.dtype, DType::BF16 | DType::F16) && matches!(q.shape.0[2].as_const(), Some(32 | 64 | 128));
    fits && q.shape.0[1].as_const().is_some_and(|heads| heads > 0)
}

fn supports<T: Composite>(body: &Function, of: impl Fn(&T) -> &RaggedAttention) -> bool {
    fits_tiles(body) && composite::<T>(body).map(of).is_some_and(|op| op.scale > 0.0)
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

/// How a block of Hopper's gradient works: see its text.
struct HopperTiling {
    columns: usize,
    slots: usize,
    stages: usize,
}

impl HopperTiling {
    /// Measured on an H200; see `benches/results/2026-11-24-h200-training-and-serving.md`.
    fn new(dim: usize, for_keys: bool) -> Self {
        match (dim, for_keys) {
            (64, true) => Self { columns: 64, slots: 2, stages: 3 },
            (64, false) => Self { columns: 128, slots: 2, stages: 2 },
            (_, true) => Self { columns: 64, slots: 1, stages: 2 },
            (_, false) => Self { columns: 128, slots: 1, stages: 2 },
        }
    }
}

/// Warpgroups that multiply in a block of Hopper's gradient, and the tokens that it makes.
const CONSUMERS: usize = 2;
const CONSUMER_ROWS: usize = 64 * CONSUMERS;

struct AttentionCall<'a> {
    op: &'a RaggedAttention,
    /// What of it is by blocks of tokens.
    blocks: Option<&'a BlockSparseAttention>,
    tokens: usize,
    heads: usize,
    keys: usize,
    dim: usize,
    dtype: DType,
}

impl<'a> AttentionCall<'a> {
    fn new(spec: &CudaKernelSpec<'_>, op: &'a RaggedAttention) -> Self {
        let (q, k) = (&spec.inputs[0], &spec.inputs[1]);
        Self {
            op,
            blocks: None,
            tokens: q.shape[0],
            heads: q.shape[1],
            keys: k.shape[1],
            dim: q.shape[2],
            dtype: q.dtype,
        }
    }

    fn source(&self, entry: &str, also: &[(&'static str, String)], text: &KernelText<'_>) -> Arc<CudaSource> {
        let flag = |on: bool| u8::from(on).to_string();
        let mut defines = vec![
            ("D", name(self.dtype).to_owned()),
            ("DIM", self.dim.to_string()),
            ("SHARE", (self.heads / self.keys).to_string()),
            ("CAUSAL", flag(self.op.causal)),
            ("WINDOW", self.op.window.map_or(0, |w| w.min(1 << 30)).to_string()),
            ("SOFTCAP", flag(self.op.softcap.is_some())),
            ("CAP", format!("{:e}f", self.op.softcap.unwrap_or(1.0))),
        ];
        defines.extend_from_slice(also);
        let defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
        CudaSource::new(entry, &defines, text)
    }

    /// Are a key and the heads' numbers among the inputs?
    fn drops(&self) -> bool {
        self.op.dropout != 0.0
    }

    /// The key and the heads' numbers, of which the first is input `at`, if there are.
    fn random(&self, at: usize) -> Vec<LaunchArg> {
        if self.drops() { vec![input(at), input(at + 1)] } else { Vec::new() }
    }

    /// A kernel of the text for every GPU.
    fn training(&self, entry: &str, saving: bool, for_keys: bool, scattered: bool, tiling: Tiling) -> Arc<CudaSource> {
        let flag = |on: bool| u8::from(on).to_string();
        let dropout = self.op.share_dropout();
        let mut also = vec![
            ("DROPPED", flag(self.drops())),
            ("THRESHOLD", dropout.map_or(0, |dropout| dropout.threshold).to_string()),
            ("KEPT", format!("{:e}f", dropout.map_or(1.0, |dropout| dropout.scale))),
            ("SAVING", flag(saving)),
            ("FOR_KEYS", flag(for_keys)),
            ("IF_SCATTERED", flag(scattered)),
            ("COLUMNS", tiling.columns.to_string()),
            ("WARPS", tiling.warps.to_string()),
        ];
        if let Some(blocks) = self.blocks {
            also.extend([
                ("IN_BLOCKS", blocks.block.min(1 << 30).to_string()),
                ("DENSE", blocks.dense_tokens().min(1 << 30).to_string()),
                ("MORE", format!("{:e}f", (blocks.repeats as f64).ln_1p())),
            ]);
        }
        self.source(entry, &also, &TRAINING)
    }

    /// The bounds of each sequence, at the beginning of scratch memory, and a flag behind them, which is cleared.
    fn bounds(&self) -> CudaKernel {
        let source = |entry| self.training(entry, false, false, false, FORWARD);
        let n = || numbers(&[self.tokens]);
        let args = vec![scratch(0), scratch(self.flag_offset()), n()];
        let mut kernel = each(source("bounds_clear"), self.tokens, args);
        kernel.actions.extend(each(source("bounds_find"), self.tokens, vec![input(3), scratch(0), n()]).actions);
        kernel
    }

    /// Where a flag tells that tokens of a sequence do not follow each other.
    fn flag_offset(&self) -> usize {
        self.tokens * 8
    }

    fn bounds_bytes(&self) -> usize {
        (self.flag_offset() + 4).next_multiple_of(256)
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
        set_shared(&mut kernel, 2 * 2 * tiling.columns * self.dim * 2);
        Ok(kernel.actions)
    }

    /// A matrix of one row for each token and `heads` heads in it, in boxes of so many rows and 64 columns.
    fn matrix(&self, at: usize, heads: usize, rows: usize) -> LaunchArg {
        LaunchArg::Matrix {
            at: (OperandSlot::Input(at), 0),
            dtype: self.dtype,
            extents: [self.tokens, heads * self.dim],
            tile: [rows, 64],
        }
    }

    /// Are the kernels of Hopper for such heads, do they drop no shares, and can they number the tokens and heads?
    fn fits_hopper(&self) -> bool {
        self.dim >= 64
            && !self.drops()
            && self.tokens > 0
            && self.tokens <= i32::MAX as usize - 512
            && self.heads * self.dim <= i32::MAX as usize
    }

    /// Causal attention on Hopper, where the tokens of every sequence follow each other; scratch memory is taken from
    /// `offset` on for positions. It does nothing if the flag tells otherwise.
    fn hopper_forward(&self, saving: bool, lse: LaunchArg, offset: usize) -> Result<Vec<DeviceAction>, String> {
        let n = numbers(&[self.tokens]);
        let flag = scratch(self.flag_offset());
        let source = self.training("positions_find", false, false, false, FORWARD);
        let mut actions =
            each(source, self.tokens, vec![input(3), scratch(0), scratch(offset), flag.clone(), n]).actions;
        let plain = self.op.window.is_none() && self.op.softcap.is_none();
        let (consumers, stages) = if self.dim == 64 { (if plain { 3 } else { 2 }, 3) } else { (2, 2) };
        let rows = 64 * consumers;
        let also = [
            ("BLOCK", "8".to_owned()),
            ("PAGED", "0".to_owned()),
            ("CODED", "0".to_owned()),
            ("INT8_SCORES", "0".to_owned()),
            ("FEW", "0".to_owned()),
            ("LSE", u8::from(saving).to_string()),
            ("CONSUMERS", consumers.to_string()),
            ("STAGES", stages.to_string()),
        ];
        let mut args = vec![self.matrix(0, self.heads, rows)];
        args.extend([1, 2].map(|i| self.matrix(i, self.keys, PROMPT_COLUMNS)));
        // Keys that are not paged have no table; the ids stand in its place.
        args.extend([flag, input(3), input(3), scratch(offset), output(0)]);
        if saving {
            args.push(lse);
        }
        args.extend([LaunchArg::Float(self.op.scale as f32), numbers(&[self.tokens, self.heads, 0, 0])]);
        let items = self.tokens.div_ceil(rows) * self.heads;
        let source = self.source("attention_sm90", &also, &PROMPT);
        let mut tiles = grid(source, [items, 1, 1], 128 * (consumers as u32 + 1), args)?;
        set_shared(&mut tiles, (2 * rows + 2 * stages * PROMPT_COLUMNS) * self.dim * 2 + 1024);
        actions.extend(tiles.actions);
        Ok(actions)
    }

    /// The gradient on Hopper, with scratch memory from `offset` on, and the bytes of scratch memory in all.
    fn hopper_backward(&self, offset: usize) -> Result<(Vec<DeviceAction>, usize), String> {
        let padded = self.tokens.next_multiple_of(256);
        let (statistics, ids) = (offset, offset + self.heads * padded * 8);
        let also = |for_keys: bool, tiling: &HopperTiling| {
            [
                ("FOR_KEYS", u8::from(for_keys).to_string()),
                ("COLUMNS", tiling.columns.to_string()),
                ("CONSUMERS", CONSUMERS.to_string()),
                ("SLOTS", tiling.slots.to_string()),
                ("STAGES", tiling.stages.to_string()),
            ]
        };
        let n = || numbers(&[self.tokens, self.heads]);
        let args = vec![input(4), input(6), input(5), input(3), scratch(statistics), scratch(ids), n()];
        let tiling = HopperTiling::new(self.dim, true);
        let source = self.source("attention_statistics", &also(true, &tiling), &GRADIENT_SM90);
        let mut actions = each(source, padded * self.heads * (self.dim / 8), args).actions;
        for (for_keys, heads, outputs) in [(false, self.heads, [0, 0]), (true, self.keys, [1, 2])] {
            let tiling = HopperTiling::new(self.dim, for_keys);
            let (of_queries, of_keys) =
                if for_keys { (tiling.columns, CONSUMER_ROWS) } else { (CONSUMER_ROWS, tiling.columns) };
            let mut args = vec![
                self.matrix(0, self.heads, of_queries),
                self.matrix(1, self.keys, of_keys),
                self.matrix(2, self.keys, of_keys),
                self.matrix(6, self.heads, of_queries),
            ];
            args.extend([scratch(ids), scratch(0), scratch(statistics), LaunchArg::Pointer(OperandSlot::Zeros, 0)]);
            args.extend([output(outputs[0]), output(outputs[1]), LaunchArg::Float(self.op.scale as f32), n()]);
            let source = self.source("attention_backward_sm90", &also(for_keys, &tiling), &GRADIENT_SM90.persistent(1));
            let items = self.tokens.div_ceil(CONSUMER_ROWS) * heads;
            let mut tiles = grid(source, [items, 1, 1], 128 * (CONSUMERS as u32 + 1), args)?;
            let rows = tiling.slots * CONSUMER_ROWS + tiling.stages * tiling.columns;
            set_shared(&mut tiles, 2 * rows * self.dim * 2 + 1024);
            actions.extend(tiles.actions);
        }
        Ok((actions, ids + padded * 4))
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
    let tiles = |scattered: bool| {
        let scale = LaunchArg::Float(op.scale as f32);
        let flag = scratch(call.flag_offset());
        let mut args = vec![input(0), input(1), input(2), input(3), scratch(0), flag];
        args.extend(call.random(4));
        args.extend([output(0), lse.clone(), scale, numbers(&[call.tokens, call.heads])]);
        let source = call.training("attention_forward", saving.is_some(), false, scattered, FORWARD);
        call.tiles(source, call.heads, FORWARD, args)
    };
    kernel.scratch = call.bounds_bytes();
    if op.causal && call.fits_hopper() {
        let mut there = call.hopper_forward(saving.is_some(), lse.clone(), kernel.scratch)?;
        there.extend(tiles(true)?);
        kernel.scratch += call.tokens * 4;
        kernel.actions.push(DeviceAction::ByArch { arch: PROMPT_ARCH, actions: there, otherwise: tiles(false)? });
    } else {
        kernel.actions.extend(tiles(false)?);
    }
    Ok(kernel)
}

fn in_blocks(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let blocks = spec.composite::<BlockSparseAttention>().ok_or("no attention in the group")?;
    let op = RaggedAttention::new(blocks.scale, blocks.pairs.clone());
    let call = AttentionCall { blocks: Some(blocks), ..AttentionCall::new(spec, &op) };
    let mut kernel = call.bounds();
    let mut args = vec![input(0), input(1), input(2), input(3), scratch(0), scratch(call.flag_offset())];
    let scale = LaunchArg::Float(op.scale as f32);
    args.extend([output(0), output(0), scale, numbers(&[call.tokens, call.heads])]);
    let source = call.training("attention_forward", false, false, false, FORWARD);
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
    let dy = input(if call.drops() { 8 } else { 6 });
    let args = vec![input(4), dy.clone(), scratch(along), n()];
    let source = call.training("attention_along", false, false, false, FORWARD);
    let mut elsewhere = each(source, rows * 32, args).actions;
    for (for_keys, heads, outputs) in [(false, call.heads, [0, 0]), (true, call.keys, [1, 2])] {
        let mut args = vec![input(0), input(1), input(2), input(3), scratch(0), dy.clone(), input(5), scratch(along)];
        args.extend(call.random(6));
        args.extend([output(outputs[0]), output(outputs[1]), LaunchArg::Float(op.scale as f32), n()]);
        let source = call.training("attention_backward", false, for_keys, false, GRADIENT);
        elsewhere.extend(call.tiles(source, heads, GRADIENT, args)?);
    }
    kernel.scratch = along + rows * 4;
    if call.fits_hopper() {
        let (there, scratch) = call.hopper_backward(along)?;
        kernel.scratch = kernel.scratch.max(scratch);
        kernel.actions.push(DeviceAction::ByArch { arch: PROMPT_ARCH, actions: there, otherwise: elsewhere });
    } else {
        kernel.actions.extend(elsewhere);
    }
    Ok(kernel)
}
