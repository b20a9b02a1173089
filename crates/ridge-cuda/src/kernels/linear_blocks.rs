//! Linears by weights in the block formats of GGUF: `kernels/linear_blocks.cu` reads them in their own bits for few rows (`kernels/blocks_row.cu` for one,
//! `kernels/blocks_rows.cu` for up to 16 on Hopper); for many, `kernels/decode_blocks.cu` decodes them ahead of matrix products.

use ridge_graph::{DType, Function};

use super::block_text::{BlockText, CHUNK, Formats};
use super::entry::CudaKernelEntry;
use super::linear_call::{ALIGN, LinearCall, LinearEpilogue, gated_pair, sums, weights};
use super::norm;
use super::{blocks_row, blocks_rows};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, blocks, flag, input,
    name, numbers,
};

/// The weights are prefetched; see [`crate::kernel::DeviceAction::Launch`].
pub(super) const ROWS: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/blocks.cuh"), include_str!("../../kernels/linear_blocks.cu")))
        .with_tiles()
        .early_launch();
/// The same for groups of rows.
pub(super) const GROUPS: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/blocks.cuh"),
    include_str!("../../kernels/groups.cuh"),
    include_str!("../../kernels/linear_blocks.cu")
))
.with_tiles()
.early_launch();
pub(super) const DECODE: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/blocks.cuh"), include_str!("../../kernels/decode_blocks.cu")))
        .with_tiles()
        .early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entries = [
        CudaKernelEntry::new("linear_blocks", "linear(x, w)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("linear_blocks_bias", "linear(x, w, b)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("linear_blocks_group", "linear_group(x, ...)", supports, |s| {
            make(s, LinearEpilogue::Nothing)
        }),
        CudaKernelEntry::new("norm_linear_blocks", "linear(rms_norm(x, w), m)", normed, |s| {
            make(s, LinearEpilogue::Nothing)
        }),
        CudaKernelEntry::new("norm_linear_blocks_group", "linear_group(rms_norm(x, w), ...)", normed, |s| {
            make(s, LinearEpilogue::Nothing)
        }),
        CudaKernelEntry::new("linear_blocks_add", "add(r, linear(x, w))", adds, |s| make(s, LinearEpilogue::Add)),
        CudaKernelEntry::new("linear_blocks_bias_add", "add(r, linear(x, w, b))", adds, |s| {
            make(s, LinearEpilogue::Add)
        }),
        CudaKernelEntry::new("linear_blocks_swiglu", "swiglu(g@linear_group(x, ...).0, g.1)", gates, |s| {
            make(s, LinearEpilogue::Swiglu)
        }),
        CudaKernelEntry::new(
            "norm_linear_blocks_swiglu",
            "swiglu(g@linear_group(rms_norm(x, w), ...).0, g.1)",
            |body| gates(body) && normed(body),
            |s| make(s, LinearEpilogue::Swiglu),
        ),
    ];
    // Few rows are streamed, many go by tiles: their sums are in other orders.
    entries.map(CudaKernelEntry::numerics_by_extents).into()
}

/// What chunks of all formats begin at multiples of 4 bytes for; those of one format need 2.
const ALIGNED_DEPTH: usize = 128;
/// Maximum number of rows whose weights are streamed.
const FEW_ROWS: usize = 32;
/// Shared memory of a block's ring: at most, so that every GPU has it, and up to which a third stage is worth its room.
const MAX_RING_BYTES: usize = 80 << 10;
const SMALL_RING_BYTES: usize = 48 << 10;

/// Everything is plain but the weights, each in a format of blocks that the text has; x is a 16-bit float.
fn supports(body: &Function) -> bool {
    matches!(body.args[0].ty.dtype, DType::BF16 | DType::F16) && in_blocks(body)
}

/// The weights are all that is not plain.
pub(super) fn in_blocks(body: &Function) -> bool {
    let weights = weights(body);
    let plain = body.args.iter().filter(|a| a.ty.format.is_some()).count() == weights.len();
    plain
        && weights.iter().all(|w| {
            let depth = w.ty.shape.last().as_const().unwrap_or(1);
            depth.is_multiple_of(ALIGNED_DEPTH) && w.ty.format.as_ref().is_some_and(|f| BlockText::find(f).is_some())
        })
}

fn normed(body: &Function) -> bool {
    supports(body) && norm::wide(&body.args[0].ty)
}

fn adds(body: &Function) -> bool {
    supports(body) && sums(body)
}

/// Gate and up have one format.
fn gates(body: &Function) -> bool {
    let weights = weights(body);
    supports(body) && gated_pair(body) && weights[0].ty.format == weights[1].ty.format
}

/// The formats of the weights.
///
/// # Errors
/// When one is in another format.
pub(super) fn formats(linears: &LinearCall<'_>) -> Result<Vec<BlockText>, String> {
    let formats = linears.weights().iter().map(|w| w.format.as_ref().and_then(BlockText::find)).collect();
    Option::ok_or_else(formats, || "a weight is not in blocks".into())
}

fn make(spec: &CudaKernelSpec<'_>, after: LinearEpilogue) -> Result<CudaKernel, String> {
    let linears = LinearCall::new(spec, after)?;
    let formats = formats(&linears)?;
    let streams = (1..=FEW_ROWS).contains(&linears.rows) && linears.depth.is_multiple_of(CHUNK) && linears.depth > 0;
    if !streams {
        return decoded(&linears, &formats);
    }
    let formats = Formats::new(formats);
    let several = || several(&linears, &formats);
    if linears.rows == 1 { blocks_row::linear(&linears, &formats, several) } else { several() }
}

/// Every weight read once for several rows: by the kernel of Hopper where there is one for so many.
fn several(linears: &LinearCall<'_>, formats: &Formats) -> Result<CudaKernel, String> {
    let others = streamed(linears, formats)?;
    if !blocks_rows::serves(linears, formats) {
        return Ok(others);
    }
    let hopper = blocks_rows::linear(linears, formats)?;
    let scratch = hopper.scratch.max(others.scratch);
    let action = DeviceAction::ByArch { arch: blocks_rows::ARCH, actions: hopper.actions, otherwise: others.actions };
    Ok(CudaKernel { scratch, ..action.into() })
}

/// The same on every GPU.
fn streamed(linears: &LinearCall<'_>, formats: &Formats) -> Result<CudaKernel, String> {
    let gated = linears.after == LinearEpilogue::Swiglu;
    let sides: usize = if gated { 2 } else { 1 };
    let ring = |warps: usize, stages: usize| {
        formats.distinct().map(|f| sides * warps * f.ring_bytes(stages)).max().unwrap_or(0)
    };
    // Fewer warps are more blocks to a multiprocessor, which pays where a warp has much to do.
    let warps = if linears.rows > 8 || gated || ring(8, 2) > MAX_RING_BYTES { 4 } else { 8 };
    let stages = if ring(warps, 3) <= SMALL_RING_BYTES { 3 } else { 2 };
    let ring = ring(warps, stages);
    // A norm of several rows on the way would keep the weights waiting.
    let (mut kernel, x) = linears.normed()?;
    let rows = linears.rows.next_power_of_two().max(8);
    let defines = [
        ("GROUPED", "0"),
        ("D", name(linears.x().dtype)),
        ("ROWS", &*rows.to_string()),
        ("WARPS", &*warps.to_string()),
        ("STAGES", &*stages.to_string()),
        ("COUNT", &*linears.count.to_string()),
        ("EACH_FORMAT(F)", &*formats.each()),
        ("FORMATS", &*formats.places()),
        ("ADD", flag(linears.after == LinearEpilogue::Add)),
        ("BIAS", flag(linears.biases)),
        ("BIAS_TYPE", name(linears.spec.inputs[linears.bias(0)].dtype)),
        ("SWIGLU", flag(gated)),
    ];
    let source = CudaSource::new("linear_blocks", &defines, &ROWS);
    let threads = 32 * warps as u32;
    let launch = linears.streaming_launch(source, FEW_ROWS, threads, ring as u32, linears.streaming_args(x))?;
    kernel.actions.extend(launch.actions);
    Ok(kernel)
}

/// Columns below which a row of results may cancel as a whole, so that its weights need more digits than x has.
pub(super) const NARROW: usize = 128;

/// Products of weights that are decoded to the dtype of x first: narrow ones of more digits in two parts, as a product of twice
/// the depth.
fn decoded(linears: &LinearCall<'_>, formats: &[BlockText]) -> Result<CudaKernel, String> {
    let (mut kernel, mut x) = linears.normed()?;
    let dtype = linears.x().dtype;
    let parts = if linears.weights().iter().any(|w| w.dtype != dtype && w.shape[0] < NARROW) { 2 } else { 1 };
    if parts == 2 {
        let to = (OperandSlot::Scratch, kernel.scratch);
        let vectors = linears.depth * dtype.size_bytes() / 16;
        let args =
            vec![LaunchArg::Pointer(x.0, x.1), LaunchArg::Pointer(to.0, to.1), numbers(&[linears.rows, vectors])];
        let defines = [("D", name(dtype)), ("FORMAT", formats[0].name), ("PARTS", "2")];
        let source = CudaSource::new("twice", &defines, &DECODE);
        kernel.actions.extend(blocks(source, (linears.rows * vectors).div_ceil(256), 256, args).actions);
        kernel.scratch += (parts * linears.x().bytes).next_multiple_of(ALIGN);
        x = to;
    }
    let linears = &LinearCall { depth: parts * linears.depth, ..*linears };
    let mut places = Vec::new();
    for (i, (w, format)) in linears.weights().iter().zip(formats).enumerate() {
        let groups = w.len() / 32;
        let place = (OperandSlot::Scratch, kernel.scratch);
        let defines = [("D", name(dtype)), ("FORMAT", format.name), ("PARTS", if parts == 2 { "2" } else { "1" })];
        let args = vec![
            input(linears.first + i),
            LaunchArg::Pointer(place.0, place.1),
            numbers(&[groups, linears.depth / parts / 32]),
        ];
        let source = CudaSource::new("decode_blocks", &defines, &DECODE);
        kernel.actions.extend(blocks(source, groups.div_ceil(64), 256, args).actions);
        kernel.scratch += (parts * w.len() * dtype.size_bytes()).next_multiple_of(ALIGN);
        places.push(place);
    }
    linears.multiplied(kernel, x, &places, &vec![dtype; places.len()])
}
