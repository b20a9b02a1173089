//! Linears of quantised x by quantised weights: cuBLASLt for 8-bit floats with a scale for each tensor, or for each row of
//! both, else `kernels/linear_scaled.cu`.

use ridge_graph::format::{BLOCK, CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::Linear;
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use super::quantize::scaled;
use crate::cublaslt::{GemmScales, GemmShape};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, blocks,
    input, name, numbers, output,
};

pub(super) const SCALED: KernelText<'_> = KernelText::new(include_str!("../../kernels/linear_scaled.cu"));

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("linear_scaled", "linear(x, w)", supports, make),
        CudaKernelEntry::new("linear_scaled_bias", "linear(x, w, b)", supports, make),
    ]
}

fn supports(body: &Function) -> bool {
    body.args[..2].iter().all(|arg| scaled(&arg.ty).is_some())
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
        (CodeType::F8E4M3, CodeType::F8E4M3, ScaleLayout::Row, ScaleLayout::Row) => GemmScales::Rows,
        _ => GemmScales::None,
    }
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let bias = spec.composite::<Linear>().ok_or("no linear in the group")?.bias;
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let format = |of: &CudaOperand| of.format.as_ref().and_then(|f| f.downcast::<ScaledFormat>().copied());
    let (Some(of_x), Some(of_w)) = (format(x), format(w)) else { return Err("an operand has no scales".into()) };
    let (columns, depth) = (w.shape[0], w.shape[1]);
    let rows = y.len().checked_div(columns).unwrap_or(0);
    let (xs, ws) = (x.component_offsets()?[1], w.component_offsets()?[1]);
    let of_bias = if bias { spec.inputs[2].dtype } else { DType::F32 };
    let defines = [
        ("X", name(of_x.codes.dtype())),
        ("W", name(of_w.codes.dtype())),
        ("Y", name(y.dtype)),
        ("B", name(of_bias)),
        ("BIAS", if bias { "1" } else { "0" }),
    ];
    let pointer = |i, offset| LaunchArg::Pointer(OperandSlot::Input(i), offset);
    let extents = [&[rows, columns, depth][..], &shared(of_x, rows, depth), &shared(of_w, columns, depth)].concat();
    let args = vec![
        input(0),
        pointer(0, xs),
        input(1),
        pointer(1, ws),
        // Where there is no bias, any address will do.
        input(if bias { 2 } else { 0 }),
        output(0),
        numbers(&extents),
    ];
    let simple = blocks(CudaSource::new("linear_scaled", &defines, &SCALED), y.len().div_ceil(8), 256, args);
    let scales = gemm_scales(of_x, of_w);
    let shape = GemmShape {
        rows,
        columns,
        depth,
        operands: DType::F8E4M3,
        result: y.dtype,
        added: false,
        biased: false,
        scales,
        by_depth: [false; 2],
    };
    // Tensor cores add 8-bit floats with fewer bits than f32 has, so what is to be f32 is summed in f32.
    if bias || scales == GemmScales::None || y.len() == 0 || !shape.fits() {
        return Ok(simple);
    }
    Ok(DeviceAction::Product {
        shape,
        x: (OperandSlot::Input(0), 0),
        w: (OperandSlot::Input(1), 0),
        r: None,
        bias: None,
        y: (OperandSlot::Output(0), 0),
        scales: Some([(OperandSlot::Input(0), xs), (OperandSlot::Input(1), ws)]),
        otherwise: simple.actions,
    }
    .into())
}
