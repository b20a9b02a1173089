//! Quantisation to codes with scales: `kernels/quantize.cu`.

use std::sync::Arc;

use ridge_graph::format::{ScaleLayout, ScaledFormat};
use ridge_graph::ops::{Quantize, QuantizeDelayed, RmsNorm};
use ridge_graph::{DType, Function, Type};

use super::entry::CudaKernelEntry;
use crate::gemm::PROCESSORS;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset, blocks, grid,
    input, name, numbers, output,
};

pub(super) const QUANTIZE: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/scaled.cuh"), include_str!("../../kernels/quantize.cu")))
        .early_launch();

/// Threads of a block.
const THREADS: usize = 256;
/// Threads of a block that makes one of few rows, of which a GPU has fewer than multiprocessors.
const MOST_THREADS: usize = 1024;

/// What is quantised: `SOURCE` of the text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Plain,
    Norm,
    Sum,
    Gate,
}

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("quantize", "quantize(x)", supports, |s| make(s, Source::Plain)),
        CudaKernelEntry::new("quantize_delayed", "quantize_delayed(x, amax)", |_| true, make_delayed),
        CudaKernelEntry::new("rms_norm_quantize", "quantize(rms_norm(x, w))", by_rows, |s| make(s, Source::Norm)),
        CudaKernelEntry::new("add_rms_norm_quantize", "quantize(rms_norm(*add(x, r), w))", sums_by_rows, |s| {
            make(s, Source::Sum)
        }),
        CudaKernelEntry::new("swiglu_quantize", "quantize(swiglu(gate, up))", by_rows, |s| make(s, Source::Gate)),
    ]
}

/// The format of a value.
pub(super) fn scaled(ty: &Type) -> Option<ScaledFormat> {
    ty.format.as_ref().and_then(|format| format.downcast::<ScaledFormat>().copied())
}

fn supports(body: &Function) -> bool {
    scaled(body.ty(body.outputs[0].var)).is_some_and(|format| format.scales != ScaleLayout::Block)
}

/// Scales of rows, or of groups of them.
fn by_rows(body: &Function) -> bool {
    let format = scaled(body.ty(body.outputs[0].var));
    format.is_some_and(|format| matches!(format.scales, ScaleLayout::Row | ScaleLayout::Group(_)))
}

fn sums_by_rows(body: &Function) -> bool {
    by_rows(body) && body.args[0].ty == body.args[1].ty
}

/// `entry` of the text for x of `dtype` and a norm's weight of `weight`; `vectors` of [`PIECE`] elements are what a thread holds, of up to
/// `threads` of a block, for each of its `roles`: it has what so many threads of a norm alone have.
fn text(
    entry: &str,
    format: ScaledFormat,
    [dtype, weight]: [DType; 2],
    source: Source,
    [vectors, threads, roles]: [usize; 3],
) -> Arc<CudaSource> {
    // Blocks that a multiprocessor has registers for.
    let resident = match (vectors, source) {
        _ if threads > THREADS => 1,
        _ if roles > 1 => 8,
        (..=4, _) if format.scales == ScaleLayout::Row => 6,
        (..=4, _) | (_, Source::Plain) => 4,
        _ => 3,
    };
    let number = (source as usize).to_string();
    let lanes = if let ScaleLayout::Group(size) = format.scales { size / PIECE } else { 1 };
    let flag = |on: bool| if on { "1" } else { "0" };
    let defines = [
        ("D", name(dtype)),
        ("W", name(weight)),
        ("SOURCE", &*number),
        ("CODE", name(format.codes.dtype())),
        ("WHOLE", flag(format.scales == ScaleLayout::Row)),
        ("TENSOR", flag(format.scales == ScaleLayout::Tensor)),
        ("VECTORS", &*vectors.to_string()),
        ("LANES", &*lanes.to_string()),
        ("THREADS", &*threads.to_string()),
        ("ROLES", &*roles.to_string()),
        ("RESIDENT", &*resident.to_string()),
    ];
    CudaSource::new(entry, &defines, &QUANTIZE)
}

/// Elements that a thread reads at once.
const PIECE: usize = 8;
/// Vectors of [`PIECE`] elements that a thread holds at most.
const MAX_VECTORS: usize = 8;

/// Rows from which on threads of norms have two roles, and vectors that they hold at most in each.
const MANY_ROWS: usize = 1024;
const MAX_VECTORS_OF_TWO: usize = 2;

/// What makes `count` rows of `inner` elements into codes with scales, and the threads of a block, which makes a row.
fn rows(
    format: ScaledFormat,
    dtypes: [DType; 2],
    source: Source,
    [count, inner]: [usize; 2],
) -> (Arc<CudaSource>, u32) {
    // The sums of a norm are those that it has alone.
    let normed = matches!(source, Source::Norm | Source::Sum);
    let most = if count <= PROCESSORS && !normed { MOST_THREADS } else { THREADS };
    let held = inner.div_ceil(PIECE * most);
    let vectors = format.scales != ScaleLayout::Tensor && inner.is_multiple_of(PIECE) && dtypes[0].size_bytes() == 2;
    if vectors && (1..=MAX_VECTORS).contains(&held) {
        let threads = (inner / PIECE).div_ceil(held).next_multiple_of(32);
        let two =
            source == Source::Norm && count >= MANY_ROWS && held <= MAX_VECTORS_OF_TWO && threads.is_multiple_of(64);
        let (roles, most) = if two { (2, THREADS / 2) } else { (1, most) };
        return (text("quantize_row", format, dtypes, source, [held, most, roles]), (threads / roles) as u32);
    }
    (text("quantize", format, dtypes, source, [0, THREADS, 1]), inner.next_multiple_of(32).clamp(32, THREADS) as u32)
}

/// What makes rows of `inner` elements of `dtype` into codes with a scale for each row, and the threads of a block, which
/// makes a row.
pub(crate) fn plain_rows(format: ScaledFormat, dtype: DType, inner: usize) -> (Arc<CudaSource>, u32) {
    rows(format, [dtype; 2], Source::Plain, [usize::MAX, inner])
}

/// Codes with a scale for each row, of x at input `x` or of its norm by the weight behind it, in `codes` and `scales`.
pub(super) fn quantised_rows(
    spec: &CudaKernelSpec<'_>,
    x: usize,
    format: ScaledFormat,
    [codes, scales]: [SlotOffset; 2],
) -> Result<CudaKernel, String> {
    let of = &spec.inputs[x];
    let inner = of.shape.last().copied().unwrap_or(1);
    let norm = spec.composite::<RmsNorm>();
    let weight = if norm.is_some() { x + 1 } else { x };
    let source = if norm.is_some() { Source::Norm } else { Source::Plain };
    let [codes, scales] = [codes, scales].map(|(slot, offset)| LaunchArg::Pointer(slot, offset));
    let args = vec![
        input(x),
        input(x),
        input(weight),
        codes,
        scales,
        // There is no sum: any address will do.
        input(x),
        LaunchArg::Float(norm.map_or(0.0, |norm| norm.eps as f32)),
        numbers(&[inner, inner]),
    ];
    let count = of.len() / inner.max(1);
    let (text, threads) = rows(format, [of.dtype, spec.inputs[weight].dtype], source, [count, inner]);
    Ok(gains_ahead(grid(text, [count, 1, 1], threads, args)?, source, weight))
}

/// Codes of 8-bit floats with a scale for each of `count` rows of `inner` values of `dtype` at `x`, in `codes` and `scales`.
pub(super) fn codes_of_rows(
    dtype: DType,
    x: SlotOffset,
    to: [SlotOffset; 2],
    extents: [usize; 2],
) -> Result<CudaKernel, String> {
    codes_of(Source::Plain, dtype, [x, x], to, extents)
}

/// The same of what is gated: `silu(gate) * up`.
pub(super) fn codes_of_gates(
    dtype: DType,
    gate_and_up: [SlotOffset; 2],
    to: [SlotOffset; 2],
    extents: [usize; 2],
) -> Result<CudaKernel, String> {
    codes_of(Source::Gate, dtype, gate_and_up, to, extents)
}

fn codes_of(
    source: Source,
    dtype: DType,
    from: [SlotOffset; 2],
    to: [SlotOffset; 2],
    [count, inner]: [usize; 2],
) -> Result<CudaKernel, String> {
    let pointer = |(slot, offset): SlotOffset| LaunchArg::Pointer(slot, offset);
    let ([x, other], [codes, scales]) = (from.map(pointer), to.map(pointer));
    // There is no norm's weight and no sum: any address will do.
    let args = vec![x.clone(), other, x.clone(), codes, scales, x, LaunchArg::Float(0.0), numbers(&[inner, inner])];
    let (text, threads) = rows(ScaledFormat::F8_ROWS, [dtype; 2], source, [count, inner]);
    grid(text, [count, 1, 1], threads, args)
}

/// The launch may ask for a norm's weight, input `weight`, before the launch ahead has ended.
fn gains_ahead(kernel: CudaKernel, source: Source, weight: usize) -> CudaKernel {
    kernel.prefetching(matches!(source, Source::Norm | Source::Sum).then_some(weight))
}

fn make(spec: &CudaKernelSpec<'_>, source: Source) -> Result<CudaKernel, String> {
    let format = spec.composite::<Quantize>().ok_or("no quantize in the group")?.format;
    let (x, out) = (&spec.inputs[0], &spec.outputs[0]);
    let offsets = out.component_offsets()?;
    let (codes, scales) = (output(0), LaunchArg::Pointer(OperandSlot::Output(0), offsets[1]));
    let weight = spec.inputs.last().map_or(x.dtype, |weight| weight.dtype);
    let dtypes = [x.dtype, weight];
    if format.scales == ScaleLayout::Tensor {
        // The largest magnitude is found in scratch memory, which begins as 0.
        let amax = || LaunchArg::Pointer(OperandSlot::Scratch, 0);
        let zero = DeviceAction::Constant { bytes: vec![0; 4], to: OperandSlot::Scratch };
        let groups = x.len().div_ceil(THREADS * 8).max(1);
        let mut kernel = CudaKernel::from(zero);
        for (entry, args) in [
            ("amax_of", vec![input(0), amax(), numbers(&[x.len()])]),
            ("quantize_all", vec![input(0), amax(), codes, scales, numbers(&[x.len()])]),
        ] {
            kernel.actions.extend(
                blocks(text(entry, format, dtypes, source, [0, THREADS, 1]), groups, THREADS as u32, args).actions,
            );
        }
        kernel.scratch = 4;
        return Ok(kernel);
    }
    let inner = out.shape.last().copied().unwrap_or(1);
    let count = out.len().checked_div(inner).unwrap_or(0);
    let group = format.group(inner).ok_or("scales are not of rows")?;
    // Where there is no residual, weight or sum, any address will do.
    let (r, weight) = match source {
        Source::Plain => (input(0), input(0)),
        Source::Norm => (input(0), input(1)),
        Source::Sum => (input(1), input(2)),
        Source::Gate => (input(1), input(0)),
    };
    let sum = output(usize::from(source == Source::Sum));
    let eps = spec.composite::<RmsNorm>().map_or(0.0, |norm| norm.eps as f32);
    let args = vec![input(0), r, weight, codes, scales, sum, LaunchArg::Float(eps), numbers(&[inner, group])];
    let (text, threads) = rows(format, dtypes, source, [count, inner]);
    Ok(gains_ahead(grid(text, [count, 1, 1], threads, args)?, source, spec.inputs.len() - 1))
}

/// Codes of x for values up to an earlier largest magnitude, and the one of x.
fn make_delayed(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let format = spec.composite::<QuantizeDelayed>().ok_or("no quantize_delayed in the group")?.format;
    let x = &spec.inputs[0];
    let scales = LaunchArg::Pointer(OperandSlot::Output(0), spec.outputs[0].component_offsets()?[1]);
    let groups = x.len().div_ceil(THREADS * 8).max(1);
    let mut kernel = CudaKernel::from(DeviceAction::Constant { bytes: vec![0; 4], to: OperandSlot::Output(1) });
    for (entry, args) in [
        ("amax_of", vec![input(0), output(1), numbers(&[x.len()])]),
        ("quantize_delayed", vec![input(0), input(1), output(0), scales, numbers(&[x.len()])]),
    ] {
        let text = text(entry, format, [x.dtype; 2], Source::Plain, [0, THREADS, 1]);
        kernel.actions.extend(blocks(text, groups, THREADS as u32, args).actions);
    }
    Ok(kernel)
}
