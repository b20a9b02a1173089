//! Linears of quantised x by quantised weights: cuBLASLt for 8-bit floats with a scale for each tensor, or for each row of
//! both, else `kernels/linear_scaled.cu`.

use ridge_graph::format::{BLOCK, CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::{Linear, Quantize};
use ridge_graph::{Arg, DType, Function};

use super::entry::CudaKernelEntry;
use super::linear::{ALIGN, LinearCall, LinearEpilogue, RING, StreamedX, flag, gated_pair, sums, weights};
use super::norm;
use super::quantize::{quantised_rows, scaled};
use crate::cublaslt::{GemmScales, GemmShape};
use crate::gemm::{self, Epilogue, GemmProblem, GemmRowScales, GemmSide};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset,
    blocks, composite, input, name, numbers, output,
};

pub(super) const SCALED: KernelText<'_> = KernelText::new(include_str!("../../kernels/linear_scaled.cu"));

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let alone = [
        CudaKernelEntry::new("linear_scaled", "linear(x, w)", supports, make),
        CudaKernelEntry::new("linear_scaled_bias", "linear(x, w, b)", supports, make),
    ];
    // What becomes codes on the way to its products: few rows are streamed, many go by tiles.
    let nothing = |s: &CudaKernelSpec<'_>| quantised(s, LinearEpilogue::Nothing);
    let together = [
        CudaKernelEntry::new("quantize_linear", "linear(quantize(x), w)", by_rows, nothing),
        CudaKernelEntry::new("quantize_linear_bias", "linear(quantize(x), w, b)", by_rows, nothing),
        CudaKernelEntry::new("quantize_linear_group", "linear_group(quantize(x), ...)", by_rows, nothing),
        CudaKernelEntry::new(
            "norm_quantize_linear_group",
            "linear_group(quantize(rms_norm(x, w)), ...)",
            normed,
            nothing,
        ),
        CudaKernelEntry::new("quantize_linear_add", "add(r, linear(quantize(x), w))", adds, |s| {
            quantised(s, LinearEpilogue::Add)
        }),
        CudaKernelEntry::new("quantize_linear_swiglu", "swiglu(g@linear_group(quantize(x), ...).0, g.1)", gates, |s| {
            quantised(s, LinearEpilogue::Swiglu)
        }),
        CudaKernelEntry::new(
            "norm_quantize_linear_swiglu",
            "swiglu(g@linear_group(quantize(rms_norm(x, w)), ...).0, g.1)",
            |body| gates(body) && normed(body),
            |s| quantised(s, LinearEpilogue::Swiglu),
        ),
    ];
    alone.into_iter().chain(together.map(CudaKernelEntry::numerics_by_extents)).collect()
}

fn supports(body: &Function) -> bool {
    body.args[..2].iter().all(|arg| scaled(&arg.ty).is_some())
}

/// The format of codes that tensor cores and `kernels/linear_rows.cu` take.
const BY_ROWS: ScaledFormat = ScaledFormat::F8_ROWS;

/// Elements of x and of a row of a weight are a multiple of this.
const PIECE: usize = 16;
/// Rows up to which weights are streamed.
const FEW_ROWS: usize = 16;

/// Codes of plain 16-bit x and of all weights are [`BY_ROWS`].
fn by_rows(body: &Function) -> bool {
    let (Some(quantize), weights) = (composite::<Quantize>(body), weights(body)) else { return false };
    let stored = |arg: &Arg| {
        let depth = arg.ty.shape.last().as_const().unwrap_or(1);
        scaled(&arg.ty) == Some(BY_ROWS) && depth.is_multiple_of(PIECE) && depth > 0
    };
    quantize.format == BY_ROWS
        && body.args.iter().filter(|arg| arg.ty.format.is_some()).count() == weights.len()
        && matches!(body.args[0].ty.dtype, DType::BF16 | DType::F16)
        && weights.iter().all(stored)
}

fn normed(body: &Function) -> bool {
    by_rows(body) && norm::wide(&body.args[0].ty)
}

fn adds(body: &Function) -> bool {
    by_rows(body) && sums(body)
}

fn gates(body: &Function) -> bool {
    by_rows(body) && gated_pair(body)
}

/// Products of rows that become codes, by weights that are codes.
fn quantised(spec: &CudaKernelSpec<'_>, after: LinearEpilogue) -> Result<CudaKernel, String> {
    let linears = LinearCall::new(spec, after)?;
    let (rows, depth) = (linears.rows, linears.depth);
    if rows == 0 {
        return Ok(CudaKernel::default());
    }
    let warps = linears.streaming_warps();
    if rows == 1 {
        // Every block makes the codes anew, while weights are on their way.
        let norm_threads = if linears.norm.is_some() { norm::threads_of(depth * 2 / 16) } else { 0 };
        let source = linears.rows_source(StreamedX::Quantised, warps, norm_threads);
        let x = (OperandSlot::Input(linears.x), 0);
        let mut args = linears.streaming_args(x);
        args.push(row_scales(&linears, x)?);
        return linears.streaming_launch(source, 32 * warps, RING + depth as u32, args);
    }
    let codes = (OperandSlot::Scratch, 0);
    let scales = (OperandSlot::Scratch, (rows * depth).next_multiple_of(ALIGN));
    let mut kernel = quantised_rows(spec, linears.x, BY_ROWS, [codes, scales])?;
    kernel.scratch = scales.1 + (rows * 4).next_multiple_of(ALIGN);
    if rows <= FEW_ROWS {
        let source = linears.rows_source(StreamedX::Codes, warps, 0);
        let mut args = linears.streaming_args(codes);
        args.push(row_scales(&linears, scales)?);
        kernel.actions.extend(linears.streaming_launch(source, 32 * warps, RING, args)?.actions);
        return Ok(kernel);
    }
    multiplied(&linears, kernel, [codes, scales])
}

/// The addresses of the scales of x and of those of each weight.
fn row_scales(linears: &LinearCall<'_>, x: SlotOffset) -> Result<LaunchArg, String> {
    let mut all = vec![x];
    for (i, w) in linears.weights().iter().enumerate() {
        all.push((OperandSlot::Input(linears.first + i), w.component_offsets()?[1]));
    }
    Ok(LaunchArg::Pointers(all))
}

/// After `kernel`, which prepares codes and scales of x: a product for each weight, and a pass over what needs one.
fn multiplied(
    linears: &LinearCall<'_>,
    mut kernel: CudaKernel,
    [codes, scales]: [SlotOffset; 2],
) -> Result<CudaKernel, String> {
    let (rows, depth, dtype) = (linears.rows, linears.depth, linears.x().dtype);
    let gated = linears.after == LinearEpilogue::Swiglu;
    let beside = kernel.scratch;
    let ahead = kernel.actions.len();
    let (mut sides, mut of_sides) = (Vec::new(), Vec::new());
    for (i, w) in linears.weights().iter().enumerate() {
        let (columns, waits) = (w.shape[0], gated && i == 1);
        let elements = rows * columns;
        // What is rounded once more, and what is combined with another, waits in scratch memory.
        let (y, result) = match (linears.biases, waits) {
            (true, _) => ((OperandSlot::Scratch, beside), DType::F32),
            (_, true) => ((OperandSlot::Scratch, beside), dtype),
            _ => ((OperandSlot::Output(i), 0), dtype),
        };
        if y.0 == OperandSlot::Scratch {
            kernel.scratch = kernel.scratch.max(beside + elements * result.size_bytes());
        }
        let weight = OperandSlot::Input(linears.first + i);
        let of_weight = (weight, w.component_offsets()?[1]);
        let product = ScaledProduct {
            rows,
            columns,
            depth,
            x: codes,
            w: (weight, 0),
            scales: [scales, of_weight],
            formats: [BY_ROWS; 2],
            bias: None,
            y,
            result,
        };
        kernel.actions.extend(product.actions());
        sides.push(GemmSide { columns, w: product.w, y });
        of_sides.push(of_weight);
        if linears.biases || waits || linears.after == LinearEpilogue::Add {
            let (y, other) = if gated { ((OperandSlot::Output(0), 0), y) } else { (y, (OperandSlot::Input(0), 0)) };
            let args = vec![
                LaunchArg::Pointer(y.0, y.1),
                LaunchArg::Pointer(other.0, other.1),
                input(linears.bias(i)),
                output(if gated { 0 } else { i }),
                numbers(&[elements, columns]),
            ];
            linears.follow(&mut kernel, result, elements, args);
        }
    }
    if linears.biases {
        return Ok(kernel);
    }
    let after = match linears.after {
        LinearEpilogue::Nothing => Epilogue::Nothing,
        LinearEpilogue::Add => Epilogue::Add((OperandSlot::Input(0), 0)),
        LinearEpilogue::Swiglu => {
            let gate = sides.remove(0);
            let up = std::mem::replace(&mut sides, vec![gate]);
            Epilogue::Swiglu(up[0].w)
        }
    };
    let of = GemmProblem {
        rows,
        depth,
        operands: DType::F8E4M3,
        result: dtype,
        x: codes,
        sides,
        after,
        scales: Some(GemmRowScales { x: scales, sides: of_sides }),
    };
    let actions = kernel.actions.split_off(ahead);
    let fastest = gemm::fastest(CudaKernel { actions, scratch: kernel.scratch }, &of);
    kernel.actions.extend(fastest.actions);
    Ok(kernel)
}

/// Rows and columns that share a scale, and the scales of a row of them, of a matrix of rows of `inner`.
fn shared(format: ScaledFormat, rows: usize, inner: usize) -> [usize; 3] {
    let (rows, inner) = (rows.max(1), inner.max(1));
    match format.scales {
        ScaleLayout::Tensor => [rows, inner, 1],
        ScaleLayout::Row => [1, inner, 1],
        ScaleLayout::Group(size) => [1, size, inner.div_ceil(size)],
        ScaleLayout::Block => [BLOCK, BLOCK, inner.div_ceil(BLOCK)],
    }
}

/// How cuBLASLt takes the scales of these operands, if it does.
fn gemm_scales(x: ScaledFormat, w: ScaledFormat) -> GemmScales {
    match (x.codes, w.codes, x.scales, w.scales) {
        (CodeType::F8E4M3, CodeType::F8E4M3, ScaleLayout::Tensor, ScaleLayout::Tensor) => GemmScales::Tensor,
        (CodeType::F8E5M2, CodeType::F8E4M3, ScaleLayout::Tensor, ScaleLayout::Tensor) => GemmScales::Gradient,
        (CodeType::F8E4M3, CodeType::F8E4M3, ScaleLayout::Row, ScaleLayout::Row) => GemmScales::Rows,
        _ => GemmScales::None,
    }
}

/// `y[rows, columns]` of x by w, codes with scales of these formats.
struct ScaledProduct {
    rows: usize,
    columns: usize,
    depth: usize,
    x: SlotOffset,
    w: SlotOffset,
    /// Of x and w.
    scales: [SlotOffset; 2],
    formats: [ScaledFormat; 2],
    /// A bias and its dtype.
    bias: Option<(SlotOffset, DType)>,
    y: SlotOffset,
    result: DType,
}

impl ScaledProduct {
    /// By cuBLASLt where it has such a product, else by the kernel of this file.
    fn actions(&self) -> Vec<DeviceAction> {
        let &Self { rows, columns, depth, x, w, scales, formats: [of_x, of_w], bias, y, result } = self;
        let defines = [
            ("X", name(of_x.codes.dtype())),
            ("W", name(of_w.codes.dtype())),
            ("Y", name(result)),
            ("B", name(bias.map_or(DType::F32, |(_, dtype)| dtype))),
            ("BIAS", flag(bias.is_some())),
        ];
        let pointer = |(slot, offset)| LaunchArg::Pointer(slot, offset);
        let extents = [&[rows, columns, depth][..], &shared(of_x, rows, depth), &shared(of_w, columns, depth)].concat();
        let args = vec![
            pointer(x),
            pointer(scales[0]),
            pointer(w),
            pointer(scales[1]),
            // Where there is no bias, any address will do.
            pointer(bias.map_or(x, |(at, _)| at)),
            pointer(y),
            numbers(&extents),
        ];
        let elements = rows * columns;
        let simple = blocks(CudaSource::new("linear_scaled", &defines, &SCALED), elements.div_ceil(8), 256, args);
        let by = gemm_scales(of_x, of_w);
        let shape = GemmShape {
            rows,
            columns,
            depth,
            operands: DType::F8E4M3,
            result,
            added: false,
            biased: false,
            scales: by,
            by_depth: [false; 2],
        };
        // Tensor cores add 8-bit floats with fewer bits than f32 has, so what is to be f32 is summed in f32.
        if bias.is_some() || by == GemmScales::None || elements == 0 || !shape.fits() {
            return simple.actions;
        }
        let otherwise = simple.actions;
        vec![DeviceAction::Product { shape, x, w, r: None, bias: None, y, scales: Some(scales), otherwise }]
    }
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let bias = spec.composite::<Linear>().ok_or("no linear in the group")?.bias;
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let format = |of: &CudaOperand| of.format.as_ref().and_then(|f| f.downcast::<ScaledFormat>().copied());
    let (Some(of_x), Some(of_w)) = (format(x), format(w)) else { return Err("an operand has no scales".into()) };
    let (columns, depth) = (w.shape[0], w.shape[1]);
    let input = |i, offset| (OperandSlot::Input(i), offset);
    let product = ScaledProduct {
        rows: y.len().checked_div(columns).unwrap_or(0),
        columns,
        depth,
        x: input(0, 0),
        w: input(1, 0),
        scales: [input(0, x.component_offsets()?[1]), input(1, w.component_offsets()?[1])],
        formats: [of_x, of_w],
        bias: bias.then(|| (input(2, 0), spec.inputs[2].dtype)),
        y: (OperandSlot::Output(0), 0),
        result: y.dtype,
    };
    Ok(CudaKernel { actions: product.actions(), scratch: 0 })
}
