//! Attention over the paged cache. On Hopper `kernels/attention_sm90.cu` takes prompts and `kernels/attention_decode.cu` the
//! tokens that a step has few of a sequence; elsewhere `kernels/attention_tiles.cu` takes steps of prompts.
//! `kernels/attention_latent.cu` is for caches of latents on Hopper, and `kernels/attention.cu` for any dtype and head size.

pub(super) mod decode;
mod latent;
mod latent_queries;
mod one_order;
pub(super) mod patterns;
mod tokens;

use std::sync::Arc;

use ridge_graph::ops::{PagedAttention, RmsNorm, Rope};
use ridge_graph::{DType, Sym};

use self::latent_queries::LatentQueries;
use super::rope;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, grid, input, name,
    numbers, output,
};

pub(super) const ATTENTION: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/angles.cuh"),
    include_str!("../../kernels/rotate.cuh"),
    include_str!("../../kernels/attention.cu")
))
.with_tiles()
.early_launch();
pub(super) const LATENT: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/attention_latent.cu")).with_tiles().early_launch();
pub(super) const LATENT_SM90: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/attention_latent_sm90.cu")).with_hopper().early_launch();
pub(super) const PROMPT: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/codes.cuh"),
    include_str!("../../kernels/runs.cuh"),
    include_str!("../../kernels/attention_items.cuh"),
    include_str!("../../kernels/attention_int8_sm90.cuh"),
    include_str!("../../kernels/attention_codes_sm90.cuh"),
    include_str!("../../kernels/rotate_tile.cuh"),
    include_str!("../../kernels/attention_sm90.cu")
))
.with_hopper()
.early_launch()
.persistent(1);
pub(super) const TILES: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/codes.cuh"),
    include_str!("../../kernels/runs.cuh"),
    include_str!("../../kernels/attention_tiles.cu")
))
.with_tiles()
.early_launch();

/// Elements of the widest heads: those that [`LATENT`] has room for.
pub(super) const MOST: usize = 640;
/// Positions of a cache below which another span is not worth its joining.
const LEAST: usize = 64;
/// The most spans of a token: `SPANS` of the text.
const SPANS: usize = 64;
/// Blocks up to which a GPU has room for one head each.
const FEW: usize = 264;
/// Blocks beyond which the GPU is full without spans.
pub(super) const ENOUGH: usize = 528;
/// Tokens of a sequence from which on tiles are quicker.
const MANY: usize = 8;
/// Rows and columns of a tile: `ROWS` and `COLUMNS` of the text of tiles.
const ROWS: usize = 128;
const COLUMNS: usize = 64;

/// Which tokens of a step a kernel takes, or leaves to the kernel of single tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Apart {
    /// Those in runs of fewer tokens of a sequence; all of them, or none, where this is 0.
    Runs(usize),
    /// Those behind their sequence's prompt, whose lengths are the last input.
    Generated,
}

impl Apart {
    /// What `kernels/runs.cuh` takes.
    fn defines(self) -> [(&'static str, String); 2] {
        let (few, prompts) = match self {
            Self::Runs(few) => (few, "0"),
            Self::Generated => (0, "1"),
        };
        [("FEW", few.to_string()), ("PROMPTS", prompts.to_owned())]
    }
}

/// The most tokens of a step that the decode kernel takes alone.
const DECODE_TOKENS: usize = 2048;

/// The architecture of the prompt kernel, and the positions of a tile: `COLUMNS` of its text.
pub(super) const PROMPT_ARCH: &str = "sm_90a";
pub(super) const PROMPT_COLUMNS: usize = 128;

/// Extents and what the kernels define.
pub(super) struct AttentionCall<'a> {
    op: &'a PagedAttention,
    /// How many positions a selection in the place of the positions has of each token.
    selected: Option<usize>,
    /// What is done to q on the way.
    rope: Option<&'a Rope>,
    /// Is q normed before that, by input 1?
    normed: bool,
    /// Or made of a product and a part that is rotated?
    of_latents: Option<LatentQueries>,
    /// The first input after q, what it is normed with and its positions: cache, block table, rows of it, positions.
    first: usize,
    tokens: usize,
    heads: usize,
    keys: usize,
    dim: usize,
    /// Blocks of a sequence, of the cache, and tokens of a block.
    columns: usize,
    blocks: usize,
    /// Sides of the cache: keys and values, or one that is both.
    sides: usize,
    block: usize,
    cache: DType,
    /// Has the cache scales of its rows?
    coded: bool,
    /// Are scores of prompts products of int8?
    int8_scores: bool,
    /// The dtype of scores without values, if there are such.
    sink: DType,
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
            ("SINKS", u8::from(self.op.sinks).to_string()),
            ("SINK", name(self.sink).into()),
            ("CODED", u8::from(self.coded).to_string()),
            ("CODE", name(self.cache).into()),
            ("SELECTED", self.selected.unwrap_or(0).to_string()),
        ]
    }

    /// The lengths of prompts, the last input, where the tokens behind them are taken apart.
    fn prompts(&self, apart: Apart) -> Option<LaunchArg> {
        (apart == Apart::Generated).then(|| input(self.first + 4 + self.more()))
    }

    /// The block table, rows of it, and positions.
    fn whereabouts(&self) -> [usize; 3] {
        [1, 2, 3].map(|nth| self.first + nth)
    }

    /// Inputs behind the positions: scales and sinks, if there are such.
    fn more(&self) -> usize {
        usize::from(self.coded) + usize::from(self.op.sinks)
    }

    /// q, then cache, block table, rows of it, positions, and what is behind them.
    fn inputs(&self, q: OperandSlot) -> Vec<LaunchArg> {
        self.inputs_from(q, 0)
    }

    /// The same from a token on.
    fn inputs_from(&self, q: OperandSlot, token: usize) -> Vec<LaunchArg> {
        let inputs = (0..4 + self.more()).map(|nth| {
            let of_token = if matches!(nth, 2 | 3) { DType::I32.size_bytes() } else { 0 };
            LaunchArg::Pointer(OperandSlot::Input(self.first + nth), token * of_token)
        });
        std::iter::once(LaunchArg::Pointer(q, token * self.row_bytes())).chain(inputs).collect()
    }

    /// Bytes of the heads of a token.
    fn row_bytes(&self) -> usize {
        self.heads * self.dim * self.dtype.size_bytes()
    }

    /// q rotated to scratch memory, once rather than by each block that meets it, and where it is then; q itself without a
    /// rotation.
    fn rotated(&self, spec: &CudaKernelSpec<'_>) -> Result<(CudaKernel, OperandSlot), String> {
        let Some(rope) = self.rope else { return Ok((CudaKernel::default(), OperandSlot::Input(0))) };
        let kernel = match &self.of_latents {
            Some(queries) => queries.make(spec, rope, OperandSlot::Scratch)?,
            None => rope::rotate(spec, OperandSlot::Scratch)?,
        };
        Ok((CudaKernel { scratch: self.tokens * self.row_bytes(), ..kernel }, OperandSlot::Scratch))
    }

    /// On tensor cores, a tile of tokens at a time; with `mixed`, tokens of sequences that have fewer than [`MANY`] in the step
    /// each for themselves.
    fn tiles(&self, spec: &CudaKernelSpec<'_>, mixed: bool) -> Result<CudaKernel, String> {
        let n = numbers(&[self.tokens, self.heads, self.columns, self.blocks]);
        let (mut kernel, q) = self.rotated(spec)?;
        let mut args = self.inputs(q);
        args.extend([output(0), LaunchArg::Float(self.op.scale as f32), n]);
        let mut defines = self.defines();
        defines.extend(Apart::Runs(if mixed { MANY } else { 0 }).defines());
        let source = source("attention_tiles", &defines, &TILES);
        let mut tiles = grid(source, [self.tokens.div_ceil(ROWS), self.heads, 1], 256, args)?;
        set_shared(&mut tiles, 2 * 2 * COLUMNS * self.dim * 2);
        kernel.actions.extend(tiles.actions);
        if mixed {
            self.and_singles(spec, (q, None), &mut kernel)?;
        }
        Ok(kernel)
    }

    /// `kernel` of tiles, and the tokens that it leaves out, each for itself; `q` is rotated by a rotation beside it.
    fn and_singles(
        &self,
        spec: &CudaKernelSpec<'_>,
        q: (OperandSlot, Option<&Rope>),
        kernel: &mut CudaKernel,
    ) -> Result<(), String> {
        let singles = self.decode(spec, q, kernel.scratch, Apart::Runs(MANY), 0)?;
        kernel.actions.extend(singles.actions);
        kernel.scratch = singles.scratch;
        Ok(())
    }

    /// Is it a step of single tokens? One that gives as many rows of logits as it has tokens is, and so is a layer that computes the
    /// rows of logits alone.
    fn is_of_singles(&self, spec: &CudaKernelSpec<'_>) -> bool {
        spec.bindings.get(&Sym::new("seqs")).is_some_and(|lines| lines >= self.tokens)
    }

    /// Do the kernels on tensor cores take heads of this dtype?
    fn on_cores(&self) -> bool {
        self.sides == 2
            && self.op.scale > 0.0
            && matches!(self.dtype, DType::BF16 | DType::F16)
            && (self.coded || self.cache == self.dtype)
    }

    /// Are rows of the cache few enough for their numbers of 32 bits?
    fn is_numbered(&self) -> bool {
        self.blocks * 2 * self.keys * self.block <= i32::MAX as usize
    }

    /// Does the prompt kernel take this cache?
    fn fits_prompt(&self) -> bool {
        (self.coded || self.cache == self.dtype)
            && matches!(self.dim, 64 | 128)
            && self.block.is_multiple_of(8)
            && PROMPT_COLUMNS.is_multiple_of(self.block)
    }

    /// On Hopper's tensor cores, a tile of tokens at a time; with `mixed`, tokens of sequences that have fewer than [`MANY`]
    /// in the step each for themselves.
    fn prompt(&self, spec: &CudaKernelSpec<'_>, mixed: bool) -> Result<CudaKernel, String> {
        let on_the_way = self.rope.filter(|rope| !self.normed && rope::has_table(rope));
        let (mut kernel, q) = match on_the_way {
            Some(rope) => (rope::table(rope, self.tokens), OperandSlot::Input(0)),
            None => self.rotated(spec)?,
        };
        let tiles = self.prompt_tiles(q, on_the_way, Apart::Runs(if mixed { MANY } else { 0 }))?;
        kernel.actions.extend(tiles.actions);
        if mixed {
            self.and_singles(spec, (q, on_the_way), &mut kernel)?;
        }
        Ok(kernel)
    }

    /// The launch on Hopper's tensor cores, a tile of tokens at a time, without the tokens that are taken `apart`; q is at `q`,
    /// rotated already or else to be rotated by the table of `rope` at the beginning of scratch memory.
    fn prompt_tiles(&self, q: OperandSlot, rope: Option<&Rope>, apart: Apart) -> Result<CudaKernel, String> {
        // Short rows leave registers for a third warpgroup, whose softmax hides more of the products, where scores are plain.
        // Producers that convert codes take those registers.
        let plain = self.op.window.is_none() && self.op.softcap.is_none() && !self.coded;
        let (consumers, stages) = match (self.dim, plain) {
            (64, true) => (3, 3),
            (64, false) => (2, 3),
            _ => (2, 2),
        };
        let rows = 64 * consumers;
        let mut defines = self.defines();
        defines.extend([
            ("PAGED", "1".into()),
            ("LSE", "0".into()),
            ("INT8_SCORES", u8::from(self.int8_scores).to_string()),
            ("CONSUMERS", consumers.to_string()),
            ("STAGES", stages.to_string()),
            ("PAIRS", rope.map_or(0, |rope| rope.inv_freq.len()).to_string()),
        ]);
        defines.extend(apart.defines());
        let q_rows = LaunchArg::Matrix {
            at: (q, 0),
            dtype: self.dtype,
            extents: [self.tokens, self.heads * self.dim],
            tile: [rows, 64],
        };
        let (at, dtype) = ((OperandSlot::Input(self.first), 0), self.cache);
        let extents = [self.blocks * 2 * self.keys * self.block, self.dim];
        let mut args = vec![q_rows];
        if self.int8_scores {
            // Boxes of keys, of which each of four warps brings 32 positions.
            args.push(LaunchArg::CodeRows { at, dtype, extents, rows: self.block.min(PROMPT_COLUMNS / 4) });
        }
        args.push(match self.coded {
            true => input(self.first),
            false => LaunchArg::Groups { at, dtype, extents, groups: self.block / 8 },
        });
        args.extend((self.first + 1..self.first + 4 + self.more()).map(input));
        args.extend(self.prompts(apart));
        args.extend(rope.map(|_| LaunchArg::Pointer(OperandSlot::Scratch, 0)));
        let n = numbers(&[self.tokens, self.heads, self.columns, self.blocks]);
        args.extend([output(0), LaunchArg::Float(self.op.scale as f32), n]);
        let items = self.tokens.div_ceil(rows) * self.heads;
        let source = source("attention_sm90", &defines, &PROMPT);
        let mut tiles = grid(source, [items, 1, 1], 128 * (consumers as u32 + 1), args)?;
        // Two tiles of q, the rings of keys and values, room to align them, and of codes what the text has for each column.
        let (key_bytes, of_column) = match (self.coded, self.int8_scores) {
            (_, true) => (1, 4),
            (true, false) => (2, 12),
            (false, false) => (2, 0),
        };
        let of_position = self.dim * (key_bytes + 2);
        let of_columns = (stages + 1) * PROMPT_COLUMNS * of_column;
        set_shared(&mut tiles, 2 * rows * self.dim * 2 + stages * PROMPT_COLUMNS * of_position + 1024 + of_columns);
        Ok(tiles)
    }
}

/// Spans of a token of a launch that is `across` blocks wide, and of whose positions at most `visible` are seen. Where the
/// GPU is half full without, only long contexts are worth joining.
fn spans(across: usize, visible: usize) -> usize {
    let least = if 2 * across > ENOUGH { 8 * LEAST } else { LEAST };
    ENOUGH.div_ceil(across.max(1)).min(SPANS).min(visible.div_ceil(least)).max(1)
}

fn source(entry: &str, defines: &[(&'static str, String)], text: &KernelText<'_>) -> Arc<CudaSource> {
    let defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
    CudaSource::new(entry, &defines, text)
}

impl<'a> AttentionCall<'a> {
    /// `op` of these operands, after `selected` positions where there is a selection of them.
    pub(super) fn new(
        spec: &'a CudaKernelSpec<'_>,
        op: &'a PagedAttention,
        selected: Option<usize>,
    ) -> Result<Self, String> {
        let rope = spec.composite::<Rope>();
        let normed = spec.composite::<RmsNorm>().is_some();
        let of_latents = rope.and_then(|_| LatentQueries::read(spec.body));
        let first = match of_latents {
            Some(_) => latent_queries::INPUTS,
            None => 1 + usize::from(rope.is_some()) + usize::from(normed),
        };
        let coded = spec.inputs.len() > first + 4 + usize::from(op.sinks) + usize::from(op.prompt_lengths);
        let (q, kv, table) = (&spec.inputs[0], &spec.inputs[first], &spec.inputs[first + 1]);
        let ([tokens, heads, _], [blocks, sides, keys, block, dim]) = (&q.shape[..], &kv.shape[..]) else {
            return Err("q must have three axes and the cache five".into());
        };
        Ok(Self {
            op,
            selected,
            rope,
            normed,
            of_latents,
            first,
            tokens: *tokens,
            heads: *heads,
            keys: *keys,
            dim: *dim,
            columns: table.shape[1],
            blocks: *blocks,
            sides: *sides,
            block: *block,
            cache: kv.dtype,
            coded,
            int8_scores: spec.int8_attention && coded && kv.dtype == DType::I8,
            sink: if op.sinks { spec.inputs[first + 4 + usize::from(coded)].dtype } else { DType::F32 },
            dtype: q.dtype,
        })
    }
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<PagedAttention>().ok_or("no attention in the group")?;
    let call = AttentionCall::new(spec, op, None)?;
    if spec.deterministic {
        return call.in_one_order(spec);
    }
    if call.fits_latent() {
        return call.of_tokens(spec);
    }
    let table = &spec.inputs[call.first + 1];
    let (tokens, dim) = (call.tokens, call.dim);
    let (cores, numbered) = (call.on_cores(), call.is_numbered());
    let decodes = |most| cores && dim.is_multiple_of(if call.coded { 64 } else { 16 }) && tokens <= most && numbered;
    let sequences = table.shape[0].max(1);
    let tiled = cores && matches!(dim, 64 | 128);
    let elsewhere = if tiled && tokens >= MANY * sequences {
        call.tiles(spec, false)?
    } else if decodes(DECODE_TOKENS) {
        call.decode_all(spec, 0)?
    } else {
        call.tokens(spec)?
    };
    if tokens < MANY || call.is_of_singles(spec) || !(tiled && numbered) || (sequences > 1 && !decodes(usize::MAX)) {
        return Ok(elsewhere);
    }
    if !call.fits_prompt() {
        return call.tiles(spec, sequences > 1);
    }
    let there = call.prompt(spec, sequences > 1)?;
    Ok(CudaKernel {
        scratch: there.scratch.max(elsewhere.scratch),
        actions: vec![DeviceAction::ByArch { arch: PROMPT_ARCH, actions: there.actions, otherwise: elsewhere.actions }],
    })
}

/// Gives the launches of `kernel` this much shared memory in bytes.
pub(super) fn set_shared(kernel: &mut CudaKernel, bytes: usize) {
    for action in &mut kernel.actions {
        if let DeviceAction::Launch { shared, .. } = action {
            *shared = bytes as u32;
        }
    }
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
