//! Linears of quantised x by quantised weights. What tensor cores take goes to `kernels/linear_rows.cu` for few rows, and for many to
//! `kernels/gemm_sm90.cu`, or to cuBLASLt for 8-bit floats with a scale for each row of both. Other formats: cuBLASLt for 8-bit floats
//! with a scale for each tensor, else `kernels/linear_scaled.cu`.

use ridge_graph::format::{BLOCK, CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::{Linear, Quantize};
use ridge_graph::{Arg, DType, Function};

use super::entry::CudaKernelEntry;
use super::linear_call::{ALIGN, LinearCall, LinearEpilogue, gated_pair, sums, weights, x_of};
use super::linear_rows::{MAX_ROWS, StreamedX};
use super::norm;
use super::quantize::{quantised_rows, scaled};
use crate::cublaslt::{GemmActivation, GemmScales, GemmShape};
use crate::gemm::{self, Epilogue, GemmCodeScales, GemmProblem, GemmSide};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset,
    blocks, composite, flag, input, name, numbers, output,
};

pub(super) const SCALED: KernelText<'_> = KernelText::new(include_str!("../../kernels/linear_scaled.cu"));

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let alone = [
        CudaKernelEntry::new("linear_scaled", "linear(x, w)", supports, make),
        CudaKernelEntry::new("linear_scaled_bias", "linear(x, w, b)", supports, make),
    ];
    // What becomes codes on the way to its products, or is codes: few rows are streamed, many go by tiles.
    let nothing = |s: &CudaKernelSpec<'_>| coded(s, LinearEpilogue::Nothing);
    let together = [
        CudaKernelEntry::new("quantize_linear", "linear(quantize(x)?, w)", matched, nothing),
        CudaKernelEntry::new("quantize_linear_bias", "linear(quantize(x)?, w, b)", matched, nothing),
        CudaKernelEntry::new("norm_quantize_linear", "linear(quantize(rms_norm(x, w)), m)", normed, nothing),
        CudaKernelEntry::new("quantize_linear_group", "linear_group(quantize(x)?, ...)", matched, nothing),
        CudaKernelEntry::new(
            "norm_quantize_linear_group",
            "linear_group(quantize(rms_norm(x, w)), ...)",
            normed,
            nothing,
        ),
        CudaKernelEntry::new("quantize_linear_add", "add(r, linear(quantize(x)?, w))", adds, |s| {
            coded(s, LinearEpilogue::Add)
        }),
        CudaKernelEntry::new(
            "quantize_linear_swiglu",
            "swiglu(g@linear_group(quantize(x)?, ...).0, g.1)",
            gates,
            |s| coded(s, LinearEpilogue::Swiglu),
        ),
        CudaKernelEntry::new(
            "norm_quantize_linear_swiglu",
            "swiglu(g@linear_group(quantize(rms_norm(x, w)), ...).0, g.1)",
            |body| gates(body) && normed(body),
            |s| coded(s, LinearEpilogue::Swiglu),
        ),
    ];
    // The first of equals claims.
    together.into_iter().chain(alone).map(CudaKernelEntry::numerics_by_extents).collect()
}

fn supports(body: &Function) -> bool {
    body.args[..2].iter().all(|arg| scaled(&arg.ty).is_some())
}

/// Elements of x and of a row of a weight are a multiple of this.
const PIECE: usize = 16;
/// Rows up to which weights are streamed.
const FEW_ROWS: usize = MAX_ROWS;

/// Elements of a row up to which sums of int8 products, -128 x 127 each, fit into 32 bits.
const DEEPEST_INT8: usize = 1 << 17;

/// Weights are codes of one format, and those of 16-bit x, which are made here or there already, are of the one that tensor cores take
/// with them.
pub(super) fn matched(body: &Function) -> bool {
    let x = x_of(body);
    let (weights, ty) = (weights(body), &body.args[x].ty);
    let Some(format) = scaled(&weights[0].ty) else { return false };
    let stored = |arg: &Arg| {
        let depth = arg.ty.shape.last().as_const().unwrap_or(1);
        let fits = format.codes != CodeType::Int8 || depth <= DEEPEST_INT8;
        scaled(&arg.ty) == Some(format) && depth.is_multiple_of(PIECE) && depth > 0 && fits
    };
    let quantize = composite::<Quantize>(body);
    let of_x = if let Some(quantize) = quantize { Some(quantize.format) } else { scaled(ty) };
    let formatted = weights.len() + usize::from(quantize.is_none());
    of_x.is_some()
        && of_x == format.of_activations()
        && body.args.iter().filter(|arg| arg.ty.format.is_some()).count() == formatted
        && matches!(ty.dtype, DType::BF16 | DType::F16)
        && weights.iter().all(stored)
}

fn normed(body: &Function) -> bool {
    matched(body) && norm::wide(&body.args[x_of(body)].ty)
}

fn adds(body: &Function) -> bool {
    matched(body) && sums(body)
}

fn gates(body: &Function) -> bool {
    matched(body) && gated_pair(body)
}

/// Products of rows that are or become codes, by weights that are codes.
pub(super) fn coded(spec: &CudaKernelSpec<'_>, after: LinearEpilogue) -> Result<CudaKernel, String> {
    let linears = LinearCall::new(spec, after)?;
    let format = |of: &CudaOperand| of.format.as_ref().and_then(|f| f.downcast::<ScaledFormat>().copied());
    let w = format(&linears.weights()[0]).ok_or("a weight has no scales")?;
    let x = w.of_activations().ok_or("the weights' codes are not multiplied by others")?;
    let (rows, depth) = (linears.rows, linears.depth);
    if rows == 0 {
        return Ok(CudaKernel::default());
    }
    let codes_given = format(linears.x()).is_some();
    if !codes_given && StreamedX::quantises(rows, depth) {
        // Every block makes the codes anew, while weights are on their way.
        return streamed(&linears, StreamedX::Quantised(w), [(OperandSlot::Input(linears.x), 0); 2]);
    }
    let (mut kernel, codes) = if codes_given {
        let at = |offset| (OperandSlot::Input(linears.x), offset);
        (CudaKernel::default(), [at(0), at(linears.x().component_offsets()?[1])])
    } else {
        let codes = [(OperandSlot::Scratch, 0), (OperandSlot::Scratch, (rows * depth).next_multiple_of(ALIGN))];
        let mut kernel = quantised_rows(spec, linears.x, x, codes)?;
        let scales = rows * x.group(depth).map_or(1, |group| depth.div_ceil(group));
        kernel.scratch = codes[1].1 + (scales * 4).next_multiple_of(ALIGN);
        (kernel, codes)
    };
    if rows > FEW_ROWS && w == ScaledFormat::F8_ROWS {
        return multiplied(&linears, kernel, codes);
    }
    let products = streamed(&linears, StreamedX::Codes(w), codes)?;
    if rows <= FEW_ROWS {
        kernel.actions.extend(products.actions);
        return Ok(kernel);
    }
    // Elsewhere weights are streamed for every few rows.
    let of = problem(&linears, w, codes)?;
    let fastest = gemm::fastest_on_hopper(CudaKernel { scratch: kernel.scratch, ..products }, &of);
    kernel.actions.extend(fastest.actions);
    Ok(kernel)
}

/// One launch that reads weights once for every few rows; `x` is where codes and scales are, or what becomes codes.
fn streamed(linears: &LinearCall<'_>, by: StreamedX, [x, scales]: [SlotOffset; 2]) -> Result<CudaKernel, String> {
    let scales = LaunchArg::Pointers([&[scales][..], &scales_of_weights(linears)?].concat());
    linears.stream_rows(by, x, Some(scales))
}

/// Where the scales of each weight are.
fn scales_of_weights(linears: &LinearCall<'_>) -> Result<Vec<SlotOffset>, String> {
    let of = |(i, w): (usize, &CudaOperand)| Ok((OperandSlot::Input(linears.first + i), w.component_offsets()?[1]));
    linears.weights().iter().enumerate().map(of).collect()
}

/// The products of codes of many rows, with what follows them.
fn problem(
    linears: &LinearCall<'_>,
    format: ScaledFormat,
    [x, scales]: [SlotOffset; 2],
) -> Result<GemmProblem, String> {
    let weight = |i| (OperandSlot::Input(linears.first + i), 0);
    let side =
        |(i, w): (usize, &CudaOperand)| GemmSide { columns: w.shape[0], w: weight(i), y: (OperandSlot::Output(i), 0) };
    let mut sides: Vec<GemmSide> = linears.weights().iter().enumerate().map(side).collect();
    let after = match linears.after {
        LinearEpilogue::Nothing => Epilogue::Nothing,
        LinearEpilogue::Add => Epilogue::Add((OperandSlot::Input(0), 0)),
        LinearEpilogue::Swiglu => {
            sides.truncate(1);
            Epilogue::Swiglu(weight(1))
        }
        LinearEpilogue::Cache => return Err("keys and values of many rows are written apart".into()),
    };
    let biases = linears.biases.then(|| {
        let at = (0..linears.count).map(|i| (OperandSlot::Input(linears.bias(i)), 0)).collect();
        (at, linears.spec.inputs[linears.bias(0)].dtype)
    });
    Ok(GemmProblem {
        rows: linears.rows,
        depth: linears.depth,
        operands: format.codes.dtype(),
        result: linears.x().dtype,
        x,
        sides,
        after,
        scales: Some(GemmCodeScales {
            in_blocks: format.scales == ScaleLayout::Block,
            x: scales,
            sides: scales_of_weights(linears)?,
            biases,
        }),
        deterministic: false,
    })
}

/// After `kernel`, which prepares codes and scales of x: a product by rows for each weight, by cuBLASLt where it has one, and a pass over
/// what needs one; or those of [`problem`], if they are faster.
fn multiplied(linears: &LinearCall<'_>, mut kernel: CudaKernel, codes: [SlotOffset; 2]) -> Result<CudaKernel, String> {
    let (rows, depth, dtype) = (linears.rows, linears.depth, linears.x().dtype);
    let gated = linears.after == LinearEpilogue::Swiglu;
    let beside = kernel.scratch;
    let ahead = kernel.actions.len();
    for ((i, w), of_weight) in linears.weights().iter().enumerate().zip(scales_of_weights(linears)?) {
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
        let product = ScaledProduct {
            rows,
            columns,
            depth,
            x: codes[0],
            w: (OperandSlot::Input(linears.first + i), 0),
            scales: [codes[1], of_weight],
            formats: [ScaledFormat::F8_ROWS; 2],
            bias: None,
            y,
            result,
        };
        kernel.actions.extend(product.actions());
        if linears.biases || waits || linears.after == LinearEpilogue::Add {
            let (y, other) = if gated { ((OperandSlot::Output(0), 0), y) } else { (y, (OperandSlot::Input(0), 0)) };
            let args = vec![
                LaunchArg::Pointer(y.0, y.1),
                LaunchArg::Pointer(other.0, other.1),
                input(linears.bias(i)),
                output(if gated { 0 } else { i }),
                numbers(&[elements, columns]),
            ];
            linears.follow(&mut kernel, result, [elements, columns], args);
        }
    }
    let of = problem(linears, ScaledFormat::F8_ROWS, codes)?;
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
pub(super) struct ScaledProduct {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) depth: usize,
    pub(super) x: SlotOffset,
    pub(super) w: SlotOffset,
    /// Of x and w.
    pub(super) scales: [SlotOffset; 2],
    pub(super) formats: [ScaledFormat; 2],
    /// A bias and its dtype.
    pub(super) bias: Option<(SlotOffset, DType)>,
    pub(super) y: SlotOffset,
    pub(super) result: DType,
}

impl ScaledProduct {
    /// By cuBLASLt where it has such a product, else by the kernel of this file.
    pub(super) fn actions(&self) -> Vec<DeviceAction> {
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
            activation: GemmActivation::None,
            scales: by,
            by_depth: [false; 2],
        };
        // Tensor cores add 8-bit floats with fewer bits than f32 has, so what is to be f32 is summed in f32.
        if bias.is_some() || by == GemmScales::None || elements == 0 || !shape.fits() {
            return simple.actions;
        }
        let otherwise = simple.actions;
        vec![DeviceAction::Product { shape, x, w, r: None, bias: None, aux: None, y, scales: Some(scales), otherwise }]
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
