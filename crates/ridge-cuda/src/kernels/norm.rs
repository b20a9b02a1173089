//! Root-mean-square norms: `kernels/norm.cu`.

use ridge_graph::ops::RmsNorm;
use ridge_graph::{DType, Function, Type};

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, grid, input, name, numbers, output,
};

pub(super) const NORM: KernelText<'_> = KernelText::new(include_str!("../../kernels/norm.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("rms_norm", "rms_norm(x, w)", |body| wide(&body.args[0].ty), make),
        CudaKernelEntry::new("rms_norm_cast", "cast(rms_norm(x, w))", narrows, make),
        CudaKernelEntry::new("gated_rms_norm", "cast(swiglu(cast(g), reshape(rms_norm(x, w))?))", opens, gated),
        CudaKernelEntry::new("add_rms_norm", "rms_norm(*add(x, r), w)", same_rows, make),
    ]
}

/// Threads of a block, and 16-byte vectors that each holds at most.
const THREADS: usize = 256;
const MAX_VECTORS: usize = 16;
/// Rows of a block of which each is a warp's.
const LINES: usize = 8;

/// Threads among which `kernels/norm.cu` divides a row of so many 16-byte vectors.
pub(super) fn threads_of(vectors: usize) -> usize {
    vectors.next_multiple_of(32).min(THREADS)
}

/// Rows are whole vectors, and fit into a block's registers.
pub(super) fn wide(x: &Type) -> bool {
    let size = x.dtype.size_bytes();
    x.shape.last().as_const().is_some_and(|row| {
        row > 0 && (row * size).is_multiple_of(16) && row * size <= 16 * THREADS * MAX_VECTORS && size >= 2
    })
}

fn same_rows(body: &Function) -> bool {
    body.args[0].ty == body.args[1].ty && wide(&body.args[0].ty)
}

/// The norm is rounded to 16 bits.
fn narrows(body: &Function) -> bool {
    let x = &body.args[0].ty;
    wide(x) && rounds(x, body.ty(body.outputs[0].var).dtype)
}

/// Is `dtype` that of a norm of `x`, or one that it may be rounded to on the way?
pub(super) fn rounds(x: &Type, dtype: DType) -> bool {
    x.dtype == dtype || x.dtype == DType::F32 && matches!(dtype, DType::BF16 | DType::F16)
}

/// An f32 norm is multiplied by a gate of 16 bits, and rounded to as many.
fn opens(body: &Function) -> bool {
    let (gate, x, y) = (&body.args[0].ty, &body.args[1].ty, body.ty(body.outputs[0].var));
    let narrow = |ty: &Type| matches!(ty.dtype, DType::BF16 | DType::F16);
    wide(x) && x.dtype == DType::F32 && narrow(gate) && narrow(y)
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let added = spec.inputs.len() == 3;
    let norm = NormCall { x: 0, added, gate: None, dtype: spec.outputs[0].dtype };
    launch(spec, norm, [output(0), output(usize::from(added))])
}

fn gated(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let norm = NormCall { x: 1, added: false, gate: Some(0), dtype: spec.outputs[0].dtype };
    launch(spec, norm, [output(0), output(0)])
}

/// A norm, and what goes before and after it.
pub(super) struct NormCall {
    /// The input whose rows are normed; the weight is behind it.
    pub(super) x: usize,
    /// Is the input behind it added first? The weight is behind that then.
    pub(super) added: bool,
    /// The input whose SiLU the norm is multiplied by.
    pub(super) gate: Option<usize>,
    /// The dtype of the result.
    pub(super) dtype: DType,
}

/// The norm to the first of the outputs, and the sum that it is taken of, if there is one, to the second.
pub(super) fn launch(
    spec: &CudaKernelSpec<'_>,
    norm: NormCall,
    [out, sum]: [LaunchArg; 2],
) -> Result<CudaKernel, String> {
    let op = spec.composite::<RmsNorm>().ok_or("no rms_norm in the group")?;
    let x = &spec.inputs[norm.x];
    let last = norm.x + 1 + usize::from(norm.added);
    let gate = norm.gate.unwrap_or(last);
    let row = x.shape.last().copied().unwrap_or(1);
    let vectors = row * x.dtype.size_bytes() / 16;
    let rows = x.len() / row;
    // A thread for each vector as far as that goes.
    let threads = threads_of(vectors);
    // Short rows, as those of heads, by a warp each.
    let lines = if threads == 32 && rows >= LINES { LINES } else { 1 };
    let [each, threads_text, lines_text] = [vectors.div_ceil(threads), threads, lines].map(|n| n.to_string());
    let flag = |on: bool| if on { "1" } else { "0" };
    let defines = [
        ("D", name(x.dtype)),
        ("O", name(norm.dtype)),
        ("W", name(spec.inputs[last].dtype)),
        ("ADD", flag(norm.added)),
        ("GATE", flag(norm.gate.is_some())),
        ("G", name(spec.inputs[gate].dtype)),
        ("VECTORS", &each),
        ("THREADS", &threads_text),
        ("LINES", &lines_text),
        ("WHOLE", flag(vectors.is_multiple_of(threads))),
    ];
    let eps = LaunchArg::Float(op.eps as f32);
    let args = vec![input(norm.x), input(last - 1), input(last), input(gate), out, sum, eps, numbers(&[row, rows])];
    let source = CudaSource::new("rms_norm", &defines, &NORM);
    grid(source, [rows.div_ceil(lines), 1, 1], (threads * lines) as u32, args)
}
