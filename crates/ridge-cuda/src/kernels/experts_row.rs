//! Experts of a few tokens in block formats: `kernels/experts_row.cu`. Most groups of rows have one at most.

use ridge_graph::ops::{ClampedSwiglu, ExpertCombine};
use ridge_graph::{DType, Function, Op, Type};

use super::block_text::BlockText;
use super::blocks_row::{self, COLUMNS, Division, EVERY, HOPPER, Room};
use super::entry::CudaKernelEntry;
use crate::gemm::PROCESSORS;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, ZERO_BYTES, flag, input,
    name, numbers, output,
};

pub(super) const RING: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/blocks.cuh"),
    include_str!("../../kernels/block_bytes.cuh"),
    include_str!("../../kernels/digits.cuh"),
    include_str!("../../kernels/blocks_ring.cuh"),
    include_str!("../../kernels/experts_row.cu")
))
.with_tiles()
.early_launch();
/// The same by the copy engine of Hopper.
pub(super) const BULK: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/blocks.cuh"),
    include_str!("../../kernels/block_bytes.cuh"),
    include_str!("../../kernels/digits.cuh"),
    include_str!("../../kernels/blocks_bulk.cuh"),
    include_str!("../../kernels/experts_row.cu")
))
.with_hopper()
.early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let product = "grouped_bias(grouped_linear(x, w, offsets), b, offsets)";
    let entries = [
        CudaKernelEntry::new(
            "expert_gate_clamped",
            "clamped_swiglu(grouped_bias(grouped_linear(x, g, offsets, rows), b, offsets), \
             grouped_bias(grouped_linear(x, u, offsets, rows), c, offsets))",
            |body| in_blocks(body, &[1, 7], &[4, 10]),
            |spec| made(clamped(spec)),
        )
        .where_it_pays(|spec| clamped(spec).is_some()),
        CudaKernelEntry::new(
            "expert_sum_biased",
            &format!("expert_combine({product}, places, weights)"),
            |body| in_blocks(body, &[1], &[3]),
            |spec| made(summed(spec, 0)),
        )
        .where_it_pays(|spec| summed(spec, 0).is_some()),
        CudaKernelEntry::new(
            "expert_sum_biased_add",
            &format!("add(r, expert_combine({product}, places, weights))"),
            |body| in_blocks(body, &[2], &[4]) && stays(body),
            |spec| made(summed(spec, 1)),
        )
        .where_it_pays(|spec| summed(spec, 1).is_some()),
    ];
    // Few rows are summed in an order of their own.
    entries.map(CudaKernelEntry::numerics_by_extents).into()
}

fn made(kernel: Option<CudaKernel>) -> Result<CudaKernel, String> {
    kernel.ok_or_else(|| "not for these shapes".into())
}

/// x is of a 16-bit float, these inputs are weights of one type in blocks, and these biases of one type.
fn in_blocks(body: &Function, weights: &[usize], biases: &[usize]) -> bool {
    let ty = |i: usize| &body.args[i].ty;
    let alike = |of: &[usize]| of.iter().all(|i| ty(*i) == ty(of[0]));
    let is_half = |ty: &Type| matches!(ty.dtype, DType::BF16 | DType::F16) && ty.format.is_none();
    is_half(ty(weights[0] - 1))
        && alike(weights)
        && alike(biases)
        && ty(weights[0]).format.as_ref().and_then(BlockText::find).is_some()
        && ty(biases[0]).is_plain()
}

/// What the sum is added to is of its type.
fn stays(body: &Function) -> bool {
    let r = &body.args[0].ty;
    let is_combine = |op: &Op| matches!(op, Op::Composite(op) if op.downcast::<ExpertCombine>().is_some());
    let combined = body.nodes.iter().find(|n| is_combine(&n.op));
    *r == *body.ty(body.outputs[0].var) && combined.is_some_and(|n| n.outputs[0] == *r)
}

/// Are so many rows, of so many groups, few enough that few groups have two?
pub(super) fn is_few(rows: usize, groups: usize) -> bool {
    const GROUPS_OF_ROW: usize = 4;
    rows <= groups / GROUPS_OF_ROW
}

/// Gate and up with their biases, and what the gate lets through.
fn clamped(spec: &CudaKernelSpec<'_>) -> Option<CudaKernel> {
    let gate = *spec.composite::<ClampedSwiglu>()?;
    let blocks = few_in_blocks(spec, spec.inputs[3].shape[0], 1)?;
    let rows = SingleRows::new(spec, 0, &[1, 7], Some(3), blocks);
    SingleRows { biases: &[4, 10], clamped: Some(gate), ..rows }.kernel()
}

/// The last product of experts with its bias and the sum of what they give, added to the first input if `added` is 1.
fn summed(spec: &CudaKernelSpec<'_>, added: usize) -> Option<CudaKernel> {
    let blocks = few_in_blocks(spec, spec.inputs[added].shape[0], added + 1)?;
    let weights = [added + 1];
    let biases = [added + 3];
    let places = &spec.inputs[added + 5];
    let [tokens, top_k] = places.shape[..] else { return None };
    let rows = SingleRows { biases: &biases, ..SingleRows::new(spec, added, &weights, None, blocks) };
    let sum = Sum { places: added + 5, tokens, top_k, add: added == 1 };
    (rows.rows == tokens * top_k).then(|| SingleRows { sum: Some(sum), ..rows }.kernel())?
}

/// The format of weight `w`, where there are rows, and few.
fn few_in_blocks(spec: &CudaKernelSpec<'_>, rows: usize, w: usize) -> Option<BlockText> {
    let w = &spec.inputs[w];
    let whole = rows > 0 && w.shape.iter().all(|extent| *extent > 0) && is_few(rows, w.shape[0]);
    whole.then(|| w.format.as_ref().and_then(BlockText::find))?
}

/// Which tokens rows are added up for, by weights that are the input behind `places`.
#[derive(Clone, Copy)]
struct Sum {
    places: usize,
    tokens: usize,
    top_k: usize,
    /// Is it added to the first input?
    add: bool,
}

/// Products of rows, of each by the weight of its group, and what is done with them.
#[derive(Clone, Copy)]
pub(super) struct SingleRows<'a> {
    spec: &'a CudaKernelSpec<'a>,
    /// The input that is x, whose offsets are the second input behind it.
    x: usize,
    /// The inputs that are weights, two of which are gated.
    weights: &'a [usize],
    blocks: BlockText,
    rows: usize,
    /// The input that says which rows of x there are.
    index: Option<usize>,
    /// The inputs that are biases, as many as weights or none.
    biases: &'a [usize],
    clamped: Option<ClampedSwiglu>,
    sum: Option<Sum>,
}

/// Rows whose groups a block finds ahead.
const MAX_ROWS: usize = 256;
/// Hopper's shared memory of a block, all of a multiprocessor.
const SHARED: usize = 227 << 10;
/// Warps of a block there that multiply. Found by trying (H200).
const MAX_WARPS: usize = 12;
/// Tiles that are on their way at a time.
const MAX_SLOTS: usize = 4;

impl<'a> SingleRows<'a> {
    /// Of the rows of the input `x`, or of those of them that the input `index` says, without biases.
    pub(super) fn new(
        spec: &'a CudaKernelSpec<'a>,
        x: usize,
        weights: &'a [usize],
        index: Option<usize>,
        blocks: BlockText,
    ) -> Self {
        let rows = spec.inputs[index.unwrap_or(x)].shape[0];
        Self { spec, x, weights, blocks, rows, index, biases: &[], clamped: None, sum: None }
    }

    /// The kernel; `None` where blocks have no room for x, or a sum has too many columns.
    pub(super) fn kernel(self) -> Option<CudaKernel> {
        let rows = self.rows;
        let counters = self.across() * size_of::<u32>();
        if rows > MAX_ROWS || (self.sum.is_some() && counters > ZERO_BYTES) {
            return None;
        }
        let others = self.in_rings(EVERY)?;
        let hopper = self.in_bulk().or_else(|| self.in_rings(HOPPER));
        let scratch = if self.sum.is_some() { rows * self.extents()[1] * size_of::<f32>() } else { 0 };
        let kernel = match hopper {
            Some(hopper) => blocks_row::by_arch(hopper.into(), others.into()),
            None => others.into(),
        };
        Some(CudaKernel { scratch, ..kernel })
    }

    /// Groups, columns and depth.
    fn extents(&self) -> [usize; 3] {
        [0, 1, 2].map(|axis| self.spec.inputs[self.weights[0]].shape[axis])
    }

    /// Tiles of a row.
    fn across(&self) -> usize {
        self.extents()[1].div_ceil(COLUMNS)
    }

    /// Do all rows have the digits of one row of x?
    fn is_one(&self) -> bool {
        self.index.is_some() && self.spec.inputs[self.x].shape[0] == 1
    }

    /// Bytes of the digits of x of a block that has so many tiles, which follow each other.
    fn staged(&self, tiles: usize) -> usize {
        let rows = if self.is_one() { 1 } else { (tiles.saturating_sub(1).div_ceil(self.across()) + 1).min(self.rows) };
        rows * blocks_row::digits(self.extents()[2])
    }

    /// By warps that copy for themselves.
    fn in_rings(&self, room: Room) -> Option<DeviceAction> {
        let depth = self.extents()[2];
        let (stage, tiles) = (self.weights.len() * self.blocks.grouped_stage_bytes(), self.rows * self.across());
        let division = |staged: usize| Division::new(room, depth, [stage, staged], self.blocks.is_light());
        let one = division(blocks_row::digits(depth))?;
        let division = division(self.staged(tiles.div_ceil(one.blocks(tiles))))?;
        if division.blocks(tiles) < one.blocks(tiles) {
            return None;
        }
        let defines = self.defines();
        let mut defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
        defines.push(("BULK", "0"));
        Some(division.launch("grouped_blocks_row", &RING, &defines, tiles, self.args(), Vec::new()))
    }

    /// By the copy engine, which takes whole columns from multiples of 16 bytes on.
    fn in_bulk(&self) -> Option<DeviceAction> {
        let [_, columns, depth] = self.extents();
        if !columns.is_multiple_of(COLUMNS) || !depth.is_multiple_of(64) {
            return None;
        }
        let tiles = self.rows * self.across();
        let blocks = tiles.min(PROCESSORS);
        let of_block = tiles.div_ceil(blocks);
        let units = depth.div_ceil(self.blocks.unit);
        // As many warps as share the units evenly.
        let warps = (2..=MAX_WARPS).rev().min_by_key(|&warps| units.div_ceil(warps) * warps)?;
        let sides = self.weights.len();
        let row_bytes = depth * self.blocks.bytes / super::block_text::CHUNK;
        // `Slot` of the text.
        let slot = sides * COLUMNS * (((row_bytes + 30) / 16) | 1) * 16;
        let sums = warps * sides * COLUMNS * size_of::<f32>() + 16;
        let staged = self.staged(of_block);
        let left = SHARED.checked_sub(staged + self.rows * 16 + 256)?;
        let slots = (left / (slot + sums)).min(MAX_SLOTS).min(of_block);
        if slots < of_block.min(2) {
            return None;
        }
        let texts = [warps, slots, staged].map(|n| n.to_string());
        let defines = self.defines();
        let mut defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
        defines.extend(["WARPS", "SLOTS", "STAGED"].into_iter().zip(texts.iter().map(String::as_str)));
        defines.push(("BULK", "1"));
        Some(DeviceAction::Launch {
            source: CudaSource::new("grouped_blocks_row", &defines, &BULK),
            grid: [blocks as u32, 1, 1],
            threads: 32 * (warps as u32 + 1),
            shared: (staged + slots * slot) as u32,
            args: self.args(),
            prefetched: Vec::new(),
        })
    }

    fn defines(&self) -> Vec<(&'static str, String)> {
        let [_, columns, depth] = self.extents();
        let bias = self.biases.first().map_or(DType::F32, |bias| self.spec.inputs[*bias].dtype);
        let sum = self.sum.unwrap_or(Sum { places: 0, tokens: 0, top_k: 0, add: false });
        let gate = self.clamped.unwrap_or(ClampedSwiglu { alpha: 1.0, limit: 0.0 });
        let flags = [
            ("SWIGLU", self.weights.len() == 2),
            ("GATHERED", self.index.is_some()),
            ("ONE_X", self.is_one()),
            ("BIAS", !self.biases.is_empty()),
            ("CLAMPED", self.clamped.is_some()),
            ("SUM", self.sum.is_some()),
            ("ADD", sum.add),
            ("GROUPED", true),
            ("ANYWHERE", true),
            ("SLACK", true),
        ];
        let sizes =
            [("DEPTH", depth), ("COLUMNS", columns), ("ROWS", self.rows), ("TOKENS", sum.tokens), ("TOP_K", sum.top_k)];
        let names =
            [("D", name(self.spec.inputs[self.x].dtype)), ("BIAS_TYPE", name(bias)), ("FORMATS", self.blocks.name)];
        let floats = [("ALPHA", gate.alpha), ("LIMIT", gate.limit)];
        let flags = flags.into_iter().map(|(name, on)| (name, flag(on).to_owned()));
        flags
            .chain(sizes.map(|(name, n)| (name, n.to_string())))
            .chain(names.map(|(name, text)| (name, text.to_owned())))
            .chain(floats.map(|(name, x)| (name, format!("{:e}f", x as f32))))
            .collect()
    }

    fn args(&self) -> Vec<LaunchArg> {
        let groups = self.extents()[0];
        let offsets = self.x + 2;
        let mut args = vec![input(self.x)];
        args.extend(self.weights.iter().copied().map(input));
        // Where all rows are in order, any address will do.
        args.extend([input(offsets), input(self.index.unwrap_or(offsets)), output(0)]);
        args.extend(self.biases.iter().copied().map(input));
        if let Some(sum) = self.sum {
            args.extend([sum.places, sum.places + 1, 0].map(input));
            args.extend([OperandSlot::Scratch, OperandSlot::Zeros].map(|slot| LaunchArg::Pointer(slot, 0)));
        }
        args.push(numbers(&[self.spec.inputs[self.x].shape[0], groups]));
        args
    }
}
