//! Products of groups of rows: `kernels/grouped_linear.cu`, on tensor cores for many rows, and `kernels/grouped_sm90.cu` for Hopper's.

use ridge_graph::format::{BLOCK, ScaleLayout, ScaledFormat};
use ridge_graph::ops::GroupedLinear;
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use super::linear_blocks::BlockText;
use super::quantize::scaled;
use crate::gemm::PROCESSORS;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, grid, input,
    name, numbers, output,
};

pub(super) const ROWS: KernelText<'_> = KernelText::new(include_str!("../../kernels/grouped_linear.cu")).early_launch();
pub(super) const TILES: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/grouped_linear.cu")).with_tiles().early_launch();
pub(super) const HOPPER: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/grouped_sm90.cu")).with_hopper().early_launch();
/// The same for weights in blocks.
const BLOCKS: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/blocks.cuh"), include_str!("../../kernels/grouped_linear.cu")))
        .with_tiles()
        .early_launch();
const HOPPER_BLOCKS: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/blocks.cuh"), include_str!("../../kernels/grouped_sm90.cu")))
        .with_hopper()
        .early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entries = [
        CudaKernelEntry::new("grouped_linear", "grouped_linear(x, w, offsets)", supports, make),
        CudaKernelEntry::new("grouped_linear_rows", "grouped_linear(x, w, offsets, rows)", supports, make),
    ];
    // Few rows are streamed, many go by tiles: their sums are in other orders.
    entries.map(CudaKernelEntry::numerics_by_extents).into()
}

/// Plain weights, codes with scales, or blocks that the text has.
fn supports(body: &Function) -> bool {
    let (x, w) = (&body.args[0].ty, &body.args[1].ty);
    let blocks = w.format.as_ref().and_then(BlockText::find);
    w.format.is_none() || scaled(w).is_some() || (blocks.is_some() && x.dtype.size_bytes() >= 2)
}

/// Rows and columns of a tile: `ROWS` and `COLUMNS` of the text.
const TILE: usize = 64;
/// Rows up to which weights are streamed whatever the number of groups, and rows of a group up to which they are.
const FEW_ROWS: usize = 32;
const FEW_ROWS_OF_GROUP: usize = 4;

/// How the kernel for Hopper divides its work: `CONSUMERS`, `COLUMNS`, `STAGES` and `RAW` of its text, and blocks of a multiprocessor.
#[derive(Clone, Copy)]
struct Tiling {
    consumers: usize,
    columns: usize,
    stages: usize,
    raw: usize,
    per_processor: usize,
}

/// For weights that are read for few rows: much of them is on its way at a time.
const STREAMING: Tiling = Tiling { consumers: 1, columns: 128, stages: 4, raw: 0, per_processor: 2 };
/// For many rows of each group: operands are read from L2 as few times as can be.
const MULTIPLYING: Tiling = Tiling { consumers: 2, columns: 256, stages: 4, raw: 0, per_processor: 1 };
/// Rows of a group, on average, from which on a tile of two consumers has few that are not there.
const MANY_ROWS_OF_GROUP: usize = 96;
/// The same for weights in blocks. Here rows of x are what is read again and again.
const STREAMING_BLOCKS: Tiling = Tiling { consumers: 1, columns: 64, stages: 3, raw: 3, per_processor: 2 };
const MULTIPLYING_BLOCKS: Tiling = Tiling { consumers: 2, columns: 128, stages: 4, raw: 2, per_processor: 1 };
const MANY_ROWS_OF_BLOCKS: usize = 24;
/// Columns of a slice of depth.
const SLICE: usize = 64;

impl Tiling {
    /// Bytes of shared memory: the ring, which begins at a multiple of 1024, and that of chunks of blocks.
    fn shared(self, blocks: Option<BlockText>) -> usize {
        // An odd number of pieces of 16 bytes: `STRIDE` of the text.
        let chunk = blocks.map_or(0, |blocks| 16 * ((blocks.bytes + 30) / 16 | 1));
        self.stages * (64 * self.consumers + self.columns) * SLICE * 2 + self.raw * self.columns * chunk + 1024
    }

    /// The launch over so many rows, of groups' weights `w`.
    fn launch(self, rows: usize, x: &CudaOperand, w: &CudaOperand, gathered: bool) -> DeviceAction {
        let [groups, columns, depth] = [0, 1, 2].map(|axis| w.shape[axis]);
        let blocks = w.format.as_ref().and_then(BlockText::find);
        let texts = [self.consumers, self.columns, self.stages, groups, self.raw].map(|n| n.to_string());
        let names = ["CONSUMERS", "COLUMNS", "STAGES", "GROUPS", "RAW"];
        let mut defines = vec![("D", name(x.dtype)), ("GATHERED", flag(gathered)), ("BLOCKED", flag(blocks.is_some()))];
        defines.extend(names.into_iter().zip(texts.iter().map(String::as_str)));
        defines.extend(blocks.map(of_blocks).into_iter().flatten());
        let matrix = LaunchArg::Matrix {
            at: (OperandSlot::Input(1), 0),
            dtype: w.dtype,
            extents: [groups * columns, depth],
            tile: [self.columns, SLICE],
        };
        let weights = if blocks.is_some() { input(1) } else { matrix };
        let (entry, text) =
            if blocks.is_some() { ("grouped_blocks_sm90", &HOPPER_BLOCKS) } else { ("grouped_sm90", &HOPPER) };
        let index = input(if gathered { 3 } else { 2 });
        // Each group may end with a tile that is not full.
        let tiles = (rows.div_ceil(64 * self.consumers) + groups) * columns.div_ceil(self.columns);
        DeviceAction::Launch {
            source: CudaSource::new(entry, &defines, text),
            grid: [tiles.min(PROCESSORS * self.per_processor) as u32, 1, 1],
            threads: 128 * (self.consumers as u32 + if blocks.is_some() { 2 } else { 1 }),
            shared: self.shared(blocks) as u32,
            args: vec![weights, input(0), input(2), index, output(0), numbers(&[rows, x.shape[0], columns, depth])],
            prefetched: Vec::new(),
        }
    }
}

/// What texts are told of a format of blocks: rows of any depth may begin at any address.
fn of_blocks(blocks: BlockText) -> [(&'static str, &'static str); 2] {
    [("FORMAT", blocks.name), ("ANYWHERE", "1")]
}

fn flag(value: bool) -> &'static str {
    if value { "1" } else { "0" }
}

/// Of scales: those of a group, columns that share some, those of such columns, and elements of a column that share one.
fn scales(format: ScaledFormat, columns: usize, depth: usize) -> [usize; 4] {
    let (columns, depth) = (columns.max(1), depth.max(1));
    match format.scales {
        ScaleLayout::Tensor => [0, columns, 0, depth],
        ScaleLayout::Row => [columns, 1, 1, depth],
        ScaleLayout::Group(size) => [columns * depth.div_ceil(size), 1, depth.div_ceil(size), size],
        ScaleLayout::Block => {
            let across = depth.div_ceil(BLOCK);
            [columns.div_ceil(BLOCK) * across, BLOCK, across, BLOCK]
        }
    }
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let gathered = spec.composite::<GroupedLinear>().ok_or("no grouped_linear in the group")?.gathered;
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let [groups, _, depth] = w.shape[..] else { return Err("a weight is no stack of matrices".into()) };
    let rows = y.shape[0];
    if y.len() == 0 {
        return Ok(CudaKernel::default());
    }
    let blocks = w.format.as_ref().and_then(BlockText::find);
    let half = matches!(x.dtype, DType::BF16 | DType::F16)
        && (blocks.is_some() || (w.dtype == x.dtype && w.format.is_none()))
        && depth.is_multiple_of(8)
        && depth > 0;
    let others = for_all(spec, gathered, half, blocks)?;
    let tiling = match blocks {
        _ if !half => return Ok(others),
        Some(_) if rows >= MANY_ROWS_OF_BLOCKS * groups => MULTIPLYING_BLOCKS,
        Some(_) => STREAMING_BLOCKS,
        None if rows <= FEW_ROWS => return Ok(others),
        None if rows >= MANY_ROWS_OF_GROUP * groups => MULTIPLYING,
        None => STREAMING,
    };
    let actions = vec![tiling.launch(rows, x, w, gathered)];
    Ok(DeviceAction::ByArch { arch: "sm_90a", actions, otherwise: others.actions }.into())
}

/// The kernel for every architecture; `half` says whether tensor cores can multiply x and w, which may be in blocks.
fn for_all(
    spec: &CudaKernelSpec<'_>,
    gathered: bool,
    half: bool,
    blocks: Option<BlockText>,
) -> Result<CudaKernel, String> {
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let [groups, columns, depth] = [0, 1, 2].map(|axis| w.shape[axis]);
    let rows = y.shape[0];
    // Where all rows are in order, any address will do.
    let index = input(if gathered { 3 } else { 2 });
    let extents = [rows, x.shape[0], groups, columns, depth];
    let blocked = [("BLOCKED", flag(blocks.is_some()))].into_iter().chain(blocks.map(of_blocks).into_iter().flatten());
    let text = |plain| if blocks.is_some() { &BLOCKS } else { plain };
    if half && rows > FEW_ROWS.max(FEW_ROWS_OF_GROUP * groups) {
        let mut defines = vec![("TILED", "1"), ("X", name(x.dtype)), ("GATHERED", flag(gathered))];
        defines.extend(blocked);
        let args = vec![input(0), input(1), input(2), index, output(0), numbers(&extents)];
        // As many tiles as there can be: each group may end with one that is not full, and so may what is behind them.
        let tiles = rows / TILE + groups + 1;
        let source = CudaSource::new("grouped_tiles", &defines, text(&TILES));
        return grid(source, [columns.div_ceil(TILE), tiles, 1], 128, args);
    }
    // Fewer rows than groups begin as many of them at most. One more clears the rows behind the last.
    let tiles = [columns.div_ceil(8), groups.min(rows) + 1, 1];
    if blocks.is_some() {
        let mut defines = vec![("X", name(x.dtype)), ("Y", name(y.dtype)), ("GATHERED", flag(gathered))];
        defines.extend(blocked);
        let args = vec![input(0), input(1), input(2), index, output(0), numbers(&extents)];
        return grid(CudaSource::new("grouped_blocks", &defines, &BLOCKS), tiles, 256, args);
    }
    let format = w.format.as_ref().and_then(|format| format.downcast::<ScaledFormat>().copied());
    let stored = format.map_or(w.dtype, |format| format.codes.dtype());
    let (x_size, w_size) = (x.dtype.size_bytes(), stored.size_bytes());
    let vector = if (depth * w_size).is_multiple_of(16) { 16 / w_size } else { 1 };
    let wide = vector > 1 && (vector * x_size).is_multiple_of(16) && (depth * x_size).is_multiple_of(16);
    let defines = [
        ("X", name(x.dtype)),
        ("W", name(stored)),
        ("Y", name(y.dtype)),
        ("GATHERED", flag(gathered)),
        ("BLOCKED", "0"),
        ("VECTOR", &*vector.to_string()),
        ("WIDE", flag(wide)),
        ("SCALED", flag(format.is_some())),
    ];
    let at_scales = if format.is_some() { w.component_offsets()?[1] } else { 0 };
    let of_scales = format.map_or([0, 1, 0, 1], |format| scales(format, columns, depth));
    let args = vec![
        input(0),
        input(1),
        LaunchArg::Pointer(OperandSlot::Input(1), at_scales),
        input(2),
        index,
        output(0),
        numbers(&[&extents[..], &of_scales].concat()),
    ];
    grid(CudaSource::new("grouped_rows", &defines, &ROWS), tiles, 256, args)
}
