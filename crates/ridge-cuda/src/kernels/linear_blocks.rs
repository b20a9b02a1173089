//! Linears by weights in the block formats of GGUF: `kernels/linear_blocks.cu` reads them in their own bits for few rows (`kernels/blocks_row.cu` for one); for
//! many, `kernels/decode_blocks.cu` decodes them ahead of matrix products.

use ridge_graph::format::{self, BlockFormat, CodeType, ScaledFormat};
use ridge_graph::{DType, FormatRef, Function};

use super::blocks_row;
use super::entry::CudaKernelEntry;
use super::linear::{ALIGN, LinearCall, LinearEpilogue, flag, gated_pair, sums, weights};
use super::norm;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, blocks, input, name, numbers,
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

/// Elements of a column that a warp takes at a time: `CHUNK` of the text.
pub(super) const CHUNK: usize = 256;
/// What chunks of all formats begin at multiples of 4 bytes for; those of one format need 2.
const ALIGNED_DEPTH: usize = 128;
/// Maximum number of rows whose weights are streamed.
const FEW_ROWS: usize = 32;
/// Shared memory of a block's ring: at most, so that every GPU has it, and up to which a third stage is worth its room.
const MAX_RING_BYTES: usize = 80 << 10;
const SMALL_RING_BYTES: usize = 48 << 10;

/// A format as the text has it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockText {
    /// Its struct.
    pub(super) name: &'static str,
    /// Bytes of a chunk.
    pub(super) bytes: usize,
    /// Scales of a chunk.
    scales: usize,
}

impl BlockText {
    const fn of<F: BlockFormat>(name: &'static str) -> Self {
        Self { name, bytes: CHUNK / F::ELEMENTS * F::BYTES, scales: CHUNK / F::GROUP }
    }

    /// Codes with scales, which a text of their own decodes; `None` for those that it does not have.
    pub(super) fn of_codes(format: &FormatRef) -> Option<Self> {
        let name = match format.downcast::<ScaledFormat>()?.codes {
            CodeType::F8E4M3 => "Codes<F8E4M3>",
            CodeType::Int8 => "Codes<I8>",
            CodeType::F8E5M2 => return None,
        };
        Some(Self { name, bytes: CHUNK, scales: 0 })
    }

    pub(super) fn find(format: &FormatRef) -> Option<Self> {
        let is = |text: Self, found: bool| found.then_some(text);
        is(Self::of::<format::Q8_0>("Q8_0"), format.downcast::<format::Q8_0>().is_some())
            .or_else(|| is(Self::of::<format::Q4_0>("Q4_0"), format.downcast::<format::Q4_0>().is_some()))
            .or_else(|| is(Self::of::<format::Q4_1>("Q4_1"), format.downcast::<format::Q4_1>().is_some()))
            .or_else(|| is(Self::of::<format::Q5_0>("Q5_0"), format.downcast::<format::Q5_0>().is_some()))
            .or_else(|| is(Self::of::<format::Q5_1>("Q5_1"), format.downcast::<format::Q5_1>().is_some()))
            .or_else(|| is(Self::of::<format::Mxfp4>("MXFP4"), format.downcast::<format::Mxfp4>().is_some()))
            .or_else(|| is(Self::of::<format::Q4K>("Q4K"), format.downcast::<format::Q4K>().is_some()))
            .or_else(|| is(Self::of::<format::Q5K>("Q5K"), format.downcast::<format::Q5K>().is_some()))
            .or_else(|| is(Self::of::<format::Q6K>("Q6K"), format.downcast::<format::Q6K>().is_some()))
    }

    /// Are words of chunks where registers take them from, so that decoding waits for memory?
    pub(super) fn is_light(self) -> bool {
        self.bytes.is_multiple_of(16)
    }

    /// Does its text for single rows take elements of both halves of a group in turn?
    pub(super) fn is_paired(self) -> bool {
        self.name == "MXFP4"
    }

    /// Bytes of a stage of a warp's ring: 16 columns, an odd number of 16-byte pieces apart.
    pub(super) fn stage_bytes(self) -> usize {
        let skew = if self.bytes.is_multiple_of(16) { 0 } else { 14 };
        16 * 16 * ((self.bytes + skew).div_ceil(16) | 1)
    }

    /// The same where columns begin at any address.
    pub(super) fn grouped_stage_bytes(self) -> usize {
        16 * 16 * ((self.bytes + 15).div_ceil(16) | 1)
    }

    /// The same as [`BlockText::ring_bytes`] where columns begin at any address.
    pub(super) fn grouped_ring_bytes(self, stages: usize) -> usize {
        stages * self.grouped_stage_bytes() + 16 * 8 * self.scales
    }

    /// Bytes of a warp's ring of so many stages, with the scales of a chunk.
    fn ring_bytes(self, stages: usize) -> usize {
        stages * self.stage_bytes() + 16 * 8 * self.scales
    }
}

/// Everything is plain but the weights, each in a format of blocks that the text has; x is a 16-bit float.
fn supports(body: &Function) -> bool {
    let weights = weights(body);
    let plain = body.args.iter().filter(|a| a.ty.format.is_some()).count() == weights.len();
    plain
        && matches!(body.args[0].ty.dtype, DType::BF16 | DType::F16)
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

fn make(spec: &CudaKernelSpec<'_>, after: LinearEpilogue) -> Result<CudaKernel, String> {
    let linears = LinearCall::new(spec, after)?;
    let formats: Option<Vec<BlockText>> =
        linears.weights().iter().map(|w| w.format.as_ref().and_then(BlockText::find)).collect();
    let formats = formats.ok_or("a weight is not in blocks")?;
    let streams = (1..=FEW_ROWS).contains(&linears.rows) && linears.depth.is_multiple_of(CHUNK) && linears.depth > 0;
    if !streams {
        return decoded(&linears, &formats);
    }
    let formats = Formats::new(formats);
    let several = || streamed(&linears, &formats);
    if linears.rows == 1 { blocks_row::linear(&linears, &formats, several) } else { several() }
}

/// The formats of a launch's weights.
pub(super) struct Formats {
    of_weights: Vec<BlockText>,
    distinct: Vec<BlockText>,
}

impl Formats {
    fn new(of_weights: Vec<BlockText>) -> Self {
        let mut distinct: Vec<BlockText> = Vec::new();
        for format in &of_weights {
            if !distinct.contains(format) {
                distinct.push(*format);
            }
        }
        Self { of_weights, distinct }
    }

    pub(super) fn distinct(&self) -> impl Iterator<Item = BlockText> {
        self.distinct.iter().copied()
    }

    /// `EACH_FORMAT` of the texts.
    pub(super) fn each(&self) -> String {
        let each: Vec<String> = self.distinct.iter().enumerate().map(|(i, f)| format!("F({i}, {})", f.name)).collect();
        each.join(" ")
    }

    /// `FORMATS` of the texts.
    pub(super) fn places(&self) -> String {
        let place = |format: &BlockText| self.distinct.iter().position(|d| d == format).unwrap_or(0).to_string();
        let places: Vec<String> = self.of_weights.iter().map(place).collect();
        places.join(", ")
    }
}

/// Every weight read once for several rows, by one launch.
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
