//! Products of groups of rows: `kernels/grouped_linear.cu`, on tensor cores for many rows, and `kernels/grouped_sm90.cu` for Hopper's.

use ridge_graph::format::{BLOCK, ScaleLayout, ScaledFormat};
use ridge_graph::ops::GroupedLinear;
use ridge_graph::{DType, Function};

use super::attention::set_shared;
use super::block_text::BlockText;
use super::entry::CudaKernelEntry;
use super::experts_few;
use super::experts_row::{self, SingleRows};
use super::linear_blocks;
use super::quantize::scaled;
use crate::gemm::PROCESSORS;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, flag, grid,
    input, name, numbers, output,
};

pub(super) const ROWS: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/groups.cuh"), include_str!("../../kernels/grouped_linear.cu")))
        .early_launch();
pub(super) const TILES: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/groups.cuh"), include_str!("../../kernels/grouped_linear.cu")))
        .with_tiles()
        .early_launch();
pub(super) const HOPPER: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/grouped_sm90.cu")).with_hopper().early_launch();
/// The same for weights in blocks.
pub(super) const BLOCKS: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/blocks.cuh"),
    include_str!("../../kernels/groups.cuh"),
    include_str!("../../kernels/grouped_linear.cu")
))
.with_tiles()
.early_launch();
pub(super) const HOPPER_BLOCKS: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/blocks.cuh"), include_str!("../../kernels/grouped_sm90.cu")))
        .with_hopper()
        .early_launch();

/// And for codes with scales.
pub(super) const HOPPER_CODES: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/decode_codes.cuh"),
    include_str!("../../kernels/grouped_sm90.cu")
))
.with_hopper()
.early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entries = [
        CudaKernelEntry::new("grouped_linear", "grouped_linear(x, w, offsets)", supports, make),
        CudaKernelEntry::new("grouped_linear_rows", "grouped_linear(x, w, offsets, rows)", supports, make),
        CudaKernelEntry::new(
            "grouped_linear_swiglu",
            "swiglu(grouped_linear(x, g, offsets, rows), grouped_linear(x, u, offsets, rows))",
            gates,
            make,
        ),
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

/// Gates and what they are multiplied with are of one type, without scales.
fn gates(body: &Function) -> bool {
    let (gate, up) = (&body.args[1].ty, &body.args[GATED_WEIGHT].ty);
    supports(body) && gate == up && scaled(gate).is_none()
}

/// The input that is the second weight of a gated pair: each place of the pattern's text is an input.
const GATED_WEIGHT: usize = 5;

/// Rows and columns of a tile: `ROWS` and `COLUMNS` of the text.
const TILE: usize = 64;
/// Rows up to which weights are streamed whatever the number of groups, and rows of a group up to which they are.
const FEW_ROWS: usize = 32;
const FEW_ROWS_OF_GROUP: usize = 4;

/// How the kernel for Hopper divides its work: `CONSUMERS`, `COLUMNS`, `STAGES`, `ATOMS`, `RAW` and `DECODERS` of its text, and blocks of a
/// multiprocessor.
#[derive(Clone, Copy)]
struct Tiling {
    consumers: usize,
    columns: usize,
    stages: usize,
    atoms: usize,
    raw: usize,
    decoders: usize,
    per_processor: usize,
}

/// For weights that are read for few rows: much of them is on its way at a time.
const STREAMING: Tiling =
    Tiling { consumers: 1, columns: 128, stages: 4, atoms: 1, raw: 0, decoders: 0, per_processor: 2 };
/// For many rows of each group: operands are read from L2 as few times as can be.
const MULTIPLYING: Tiling =
    Tiling { consumers: 2, columns: 256, stages: 4, atoms: 1, raw: 0, decoders: 0, per_processor: 1 };
/// Rows of a group, on average, from which on a tile of two consumers has few that are not there.
const MANY_ROWS_OF_GROUP: usize = 96;
/// The same for weights in blocks, whose decoding takes as long as their products, and rows of a group, on average, from which on two
/// consumers share it.
const DECODING: Tiling =
    Tiling { consumers: 1, columns: 128, stages: 3, atoms: 2, raw: 2, decoders: 2, per_processor: 1 };
const DECODING_MANY: Tiling =
    Tiling { consumers: 2, columns: 128, stages: 4, atoms: 1, raw: 2, decoders: 1, per_processor: 1 };
const MANY_ROWS_OF_BLOCKS: usize = 96;
/// Rows of a group, on average, up to which weights in blocks are streamed.
const FEW_ROWS_OF_BLOCKS: usize = 4;
/// Elements of depth of an atom of a slice.
const SLICE: usize = 64;

impl Tiling {
    /// Bytes of shared memory: the ring, which begins at a multiple of 1024, and that of chunks of blocks.
    fn shared(self, blocks: Option<BlockText>) -> usize {
        // An odd number of pieces of 16 bytes: `STRIDE` of the text.
        let chunk = blocks.map_or(0, |blocks| 16 * (((blocks.bytes + 30) / 16) | 1));
        self.stages * self.atoms * (64 * self.consumers + self.columns) * SLICE * 2
            + self.raw * self.columns * chunk
            + 1024
    }

    /// The launch over so many rows, of groups' weights `w`, two of which are gated.
    fn launch(
        self,
        rows: usize,
        x: &CudaOperand,
        w: &CudaOperand,
        gathered: bool,
        gated: bool,
    ) -> Result<DeviceAction, String> {
        let [groups, columns, depth] = [0, 1, 2].map(|axis| w.shape[axis]);
        let codes = w.format.as_ref().and_then(|format| format.downcast::<ScaledFormat>());
        let of_scales = codes.map(|format| scales(*format, columns, depth));
        let blocks =
            w.format.as_ref().and_then(|format| BlockText::find(format).or_else(|| BlockText::of_codes(format)));
        // A scale of a whole column needs no place along it.
        let span = of_scales.map_or(0, |[.., span]| if span < depth { span } else { 0 }).to_string();
        let Self { consumers, columns: width, stages, atoms, raw, decoders, per_processor } = self;
        let texts = [consumers, width, stages, atoms, groups, raw, decoders, per_processor].map(|n| n.to_string());
        let names = ["CONSUMERS", "COLUMNS", "STAGES", "ATOMS", "GROUPS", "RAW", "DECODERS", "RESIDENT"];
        let mut defines = vec![("D", name(x.dtype)), ("GATHERED", flag(gathered)), ("BLOCKED", flag(blocks.is_some()))];
        defines.extend([("GATED", flag(gated)), ("SCALED", flag(codes.is_some())), ("SPAN", &*span)]);
        defines.extend(names.into_iter().zip(texts.iter().map(String::as_str)));
        defines.extend(blocks.map(of_blocks).into_iter().flatten());
        // In shared memory there are words behind a chunk.
        defines.push(("SLACK", "1"));
        let sides = if gated { 2 } else { 1 };
        let weight = |slot| match blocks {
            Some(_) => input(slot),
            None => LaunchArg::Matrix {
                at: (OperandSlot::Input(slot), 0),
                dtype: w.dtype,
                extents: [groups * columns, depth],
                tile: [self.columns / sides, SLICE],
            },
        };
        let mut args: Vec<LaunchArg> = [1, GATED_WEIGHT].into_iter().take(sides).map(weight).collect();
        let (entry, text) = match (codes, blocks) {
            (Some(_), _) => ("grouped_codes_sm90", &HOPPER_CODES),
            (None, Some(_)) => ("grouped_blocks_sm90", &HOPPER_BLOCKS),
            (None, None) => ("grouped_sm90", &HOPPER),
        };
        if codes.is_some() {
            args.push(LaunchArg::Pointer(OperandSlot::Input(1), w.component_offsets()?[1]));
        }
        let index = input(if gathered { 3 } else { 2 });
        // Each group may end with a tile that is not full.
        let tiles = (rows.div_ceil(64 * self.consumers) + groups) * columns.div_ceil(self.columns / sides);
        let mut n = vec![rows, x.shape[0], columns, depth];
        n.extend(of_scales.iter().flat_map(|of| &of[..3]));
        args.extend([input(0), input(2), index, output(0), numbers(&n)]);
        Ok(DeviceAction::Launch {
            source: CudaSource::new(entry, &defines, text),
            grid: [tiles.min(PROCESSORS * self.per_processor) as u32, 1, 1],
            // One warpgroup copies, or two where weights are not copied by the copy engine.
            threads: 128 * (self.consumers + 1 + usize::from(blocks.is_some()) + self.decoders) as u32,
            shared: self.shared(blocks) as u32,
            args,
            prefetched: Vec::new(),
        })
    }
}

/// What texts are told of a format of blocks: rows of any depth may begin at any address.
fn of_blocks(blocks: BlockText) -> [(&'static str, &'static str); 2] {
    [("FORMAT", blocks.name), ("ANYWHERE", "1")]
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
    let gated = spec.inputs.len() > GATED_WEIGHT;
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
    if half
        && gated
        && blocks.is_none()
        && (1..=experts_few::TOKENS).contains(&x.shape[0])
        && rows <= experts_few::ROWS * groups
    {
        return experts_few::open(spec, GATED_WEIGHT);
    }
    let others = for_all(spec, [gathered, gated], half, blocks)?;
    let codes = decodes(x, w);
    if !half && !codes {
        return Ok(others);
    }
    let tiling = match blocks {
        // Decoded values are rounded to the dtype of x, which the codes that are streamed are not.
        Some(blocks) if experts_row::is_few(rows, groups) => {
            let weights = if gated { &[1, GATED_WEIGHT][..] } else { &[1] };
            let product = SingleRows::new(spec, 0, weights, gathered.then_some(3), blocks);
            return product.kernel().map_or_else(|| streamed_blocks(spec, [gathered, gated], blocks), Ok);
        }
        Some(blocks) if rows <= FEW_ROWS_OF_BLOCKS * groups || w.shape[1] < linear_blocks::NARROW => {
            return streamed_blocks(spec, [gathered, gated], blocks);
        }
        None if rows <= FEW_ROWS && !codes => return Ok(others),
        None if rows >= MANY_ROWS_OF_GROUP * groups && !codes => MULTIPLYING,
        None if !codes => STREAMING,
        // Codes with scales however few the rows are: one of each of 8 experts of 2048 x 7168 takes 66 us so, and 375 us by warps (H100).
        _ if rows >= MANY_ROWS_OF_BLOCKS * groups => DECODING_MANY,
        _ => DECODING,
    };
    let actions = vec![tiling.launch(rows, x, w, gathered, gated)?];
    Ok(DeviceAction::ByArch { arch: "sm_90a", actions, otherwise: others.actions }.into())
}

/// Are weights codes with scales which become 16-bit floats, as x is, on the way to tensor cores? Groups of 32 share a scale there.
fn decodes(x: &CudaOperand, w: &CudaOperand) -> bool {
    const GROUP: usize = 32;
    let depth = w.shape[2];
    matches!(x.dtype, DType::BF16 | DType::F16)
        && w.format.as_ref().and_then(BlockText::of_codes).is_some()
        && depth.is_multiple_of(GROUP)
        && depth > 0
}

/// Weights in blocks for few rows of a group, read once for eight of them: `kernels/linear_blocks.cu`.
fn streamed_blocks(
    spec: &CudaKernelSpec<'_>,
    [gathered, gated]: [bool; 2],
    blocks: BlockText,
) -> Result<CudaKernel, String> {
    const WARPS: usize = 4;
    const STAGES: usize = 2;
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let [groups, columns, depth] = [0, 1, 2].map(|axis| w.shape[axis]);
    let rows = y.shape[0];
    let sides = if gated { 2 } else { 1 };
    let defines = [
        ("GROUPED", "1"),
        ("D", name(x.dtype)),
        ("GATHERED", flag(gathered)),
        ("SWIGLU", flag(gated)),
        ("ROWS", "8"),
        ("WARPS", &*WARPS.to_string()),
        ("STAGES", &*STAGES.to_string()),
        ("FORMATS", blocks.name),
        ("ANYWHERE", "1"),
        ("SLACK", "1"),
        ("COUNT", "1"),
    ];
    let index = input(if gathered { 3 } else { 2 });
    let weights = [1, GATED_WEIGHT].into_iter().take(sides).map(input);
    let n = numbers(&[rows, x.shape[0], groups, columns, depth]);
    let args = std::iter::once(input(0)).chain(weights).chain([input(2), index, output(0), n]).collect();
    let source = CudaSource::new("grouped_blocks_rows", &defines, &linear_blocks::GROUPS);
    let tiles = [columns.div_ceil(16), groups.min(rows) + 1, 1];
    let mut kernel = grid(source, tiles, 32 * WARPS as u32, args)?;
    set_shared(&mut kernel, sides * WARPS * blocks.grouped_ring_bytes(STAGES));
    Ok(kernel)
}

/// The kernel for every architecture; `half` says whether tensor cores can multiply x and w, which may be in blocks.
fn for_all(
    spec: &CudaKernelSpec<'_>,
    [gathered, gated]: [bool; 2],
    half: bool,
    blocks: Option<BlockText>,
) -> Result<CudaKernel, String> {
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let [groups, columns, depth] = [0, 1, 2].map(|axis| w.shape[axis]);
    let rows = y.shape[0];
    // Where all rows are in order, any address will do.
    let index = input(if gathered { 3 } else { 2 });
    let extents = [rows, x.shape[0], groups, columns, depth];
    let weights = || [1, GATED_WEIGHT].into_iter().take(if gated { 2 } else { 1 }).map(input);
    let args_of = |rest: &[LaunchArg]| std::iter::once(input(0)).chain(weights()).chain(rest.iter().cloned()).collect();
    let blocked = [("GATED", flag(gated)), ("BLOCKED", flag(blocks.is_some()))]
        .into_iter()
        .chain(blocks.map(of_blocks).into_iter().flatten());
    let text = |plain| if blocks.is_some() { &BLOCKS } else { plain };
    if half && rows > FEW_ROWS.max(FEW_ROWS_OF_GROUP * groups) {
        let mut defines = vec![("TILED", "1"), ("X", name(x.dtype)), ("GATHERED", flag(gathered))];
        defines.extend(blocked);
        let args = args_of(&[input(2), index, output(0), numbers(&extents)]);
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
        let args = args_of(&[input(2), index, output(0), numbers(&extents)]);
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
        ("GATED", flag(gated)),
        ("BLOCKED", "0"),
        ("VECTOR", &*vector.to_string()),
        ("WIDE", flag(wide)),
        ("SCALED", flag(format.is_some())),
    ];
    let at_scales = if format.is_some() { w.component_offsets()?[1] } else { 0 };
    let of_scales = format.map_or([0, 1, 0, 1], |format| scales(format, columns, depth));
    let mut rest = vec![input(2), index, output(0), numbers(&[&extents[..], &of_scales].concat())];
    if !gated {
        rest.insert(0, LaunchArg::Pointer(OperandSlot::Input(1), at_scales));
    }
    let args = args_of(&rest);
    grid(CudaSource::new("grouped_rows", &defines, &ROWS), tiles, 256, args)
}

#[cfg(test)]
mod tests {
    use ridge_graph::passes::is_read_by_group;
    use ridge_graph::{Type, format};

    use super::*;

    #[test]
    fn weights_that_stay_on_the_host_are_read_there_by_group_in_the_formats_that_kernels_have() {
        for format in format::all() {
            let ty = Type::tensor(DType::F32, [2, 4, 256]).stored_as(format.clone());
            let has_kernel = scaled(&ty).is_some() || BlockText::find(&format).is_some();
            assert_eq!(is_read_by_group(&ty), has_kernel, "{}", format.name());
        }
    }
}
