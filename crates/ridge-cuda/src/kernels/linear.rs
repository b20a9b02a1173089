//! Linears with what follows them: `kernels/linear_rows.cu` for few rows, matrix products with a second pass for many.

use ridge_graph::ops::RmsNorm;
use ridge_graph::{DType, Function, Op};

use super::entry::CudaKernelEntry;
use super::linear_call::{LinearCall, LinearEpilogue, gated_pair, sums};
use super::linear_rows::{MAX_ROWS, StreamedX};
use super::norm;
use crate::kernel::{CudaKernel, CudaKernelSpec, OperandSlot};

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entries = [
        CudaKernelEntry::new("linear", "linear(x, w)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("linear_bias", "linear(x, w, b)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("linear_group", "linear_group(x, ...)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("norm_linear_group", "linear_group(rms_norm(x, w), ...)", normed, |s| {
            make(s, LinearEpilogue::Nothing)
        }),
        CudaKernelEntry::new("norm_linear", "linear(cast(rms_norm(x, n))?, w)", normed, |s| {
            make(s, LinearEpilogue::Nothing)
        }),
        CudaKernelEntry::new("norm_linear_bias", "linear(cast(rms_norm(x, n))?, w, b)", normed, |s| {
            make(s, LinearEpilogue::Nothing)
        }),
        CudaKernelEntry::new("linear_add", "add(r, linear(x, w))", adds, |s| make(s, LinearEpilogue::Add)),
        CudaKernelEntry::new("linear_bias_add", "add(r, linear(x, w, b))", adds, |s| make(s, LinearEpilogue::Add)),
        CudaKernelEntry::new(
            "norm_linear_add",
            "add(r, linear(cast(rms_norm(x, n))?, w))",
            |body| adds(body) && normed(body),
            |s| make(s, LinearEpilogue::Add),
        ),
        CudaKernelEntry::new(
            "norm_linear_bias_add",
            "add(r, linear(cast(rms_norm(x, n))?, w, b))",
            |body| adds(body) && normed(body),
            |s| make(s, LinearEpilogue::Add),
        ),
        CudaKernelEntry::new("linear_swiglu", "swiglu(g@linear_group(x, ...).0, g.1)", gates, |s| {
            make(s, LinearEpilogue::Swiglu)
        }),
        CudaKernelEntry::new(
            "norm_linear_swiglu",
            "swiglu(g@linear_group(rms_norm(x, w), ...).0, g.1)",
            |body| gates(body) && normed(body),
            |s| make(s, LinearEpilogue::Swiglu),
        ),
    ];
    // Few rows are streamed, many go by tiles: their sums are in other orders.
    entries.map(CudaKernelEntry::numerics_by_extents_unless_deterministic).into()
}

/// Plain weights, and x as it is.
fn supports(body: &Function) -> bool {
    body.args.iter().all(|a| a.ty.format.is_none())
}

/// The norm's row is one that its kernel takes, and rounds as the product's operand, if it is not of its dtype.
fn normed(body: &Function) -> bool {
    let of_norm = body.nodes.iter().find(|n| matches!(&n.op, Op::Composite(op) if op.downcast::<RmsNorm>().is_some()));
    let x = of_norm.map(|norm| body.ty(norm.inputs[0]));
    supports(body) && x.is_some_and(|x| norm::wide(x) && norm::rounds(x, body.ty(body.outputs[0].var).dtype))
}

fn adds(body: &Function) -> bool {
    supports(body) && sums(body)
}

fn gates(body: &Function) -> bool {
    supports(body) && gated_pair(body)
}

/// A linear, or several of one input, without anything before or behind.
pub(super) fn alone(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    make(spec, LinearEpilogue::Nothing)
}

fn make(spec: &CudaKernelSpec<'_>, after: LinearEpilogue) -> Result<CudaKernel, String> {
    let linears = LinearCall::new(spec, after)?;
    if streams(&linears) {
        return linears.stream_rows(StreamedX::Plain, (OperandSlot::Input(linears.x), 0), None);
    }
    let (kernel, x) = linears.normed()?;
    let weights: Vec<_> = (0..linears.count).map(|i| (OperandSlot::Input(linears.first + i), 0)).collect();
    let dtypes: Vec<_> = linears.weights().iter().map(|w| w.dtype).collect();
    linears.multiplied(kernel, x, &weights, &dtypes)
}

/// Are there few rows, of a dtype that tensor cores take?
fn streams(linears: &LinearCall<'_>) -> bool {
    let dtype = linears.dtype;
    matches!(dtype, DType::BF16 | DType::F16)
        && linears.weights().iter().all(|w| w.dtype == dtype)
        && !linears.spec.deterministic
        && (1..=MAX_ROWS).contains(&linears.rows)
        && linears.depth.is_multiple_of(8)
        && linears.depth > 0
}
