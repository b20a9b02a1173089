//! Root-mean-square norms: `kernels/norm.cu`.

use ridge_graph::ops::RmsNorm;
use ridge_graph::{Function, Type};

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, grid, input, name, numbers, output,
};

pub(super) const NORM: KernelText<'_> = KernelText::new(include_str!("../../kernels/norm.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("rms_norm", "rms_norm(x, w)", |body| wide(&body.args[0].ty), make),
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

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let last = spec.inputs.len() - 1;
    launch(spec, [0, last - 1, last], [output(0), output(last - 1)])
}

/// The norm of input `x` by input `weight`, after input `summand` was added if that is another than `x`, to the first of the
/// outputs; the sum to the second.
pub(super) fn launch(
    spec: &CudaKernelSpec<'_>,
    [x_at, summand, weight]: [usize; 3],
    [out, sum]: [LaunchArg; 2],
) -> Result<CudaKernel, String> {
    let op = spec.composite::<RmsNorm>().ok_or("no rms_norm in the group")?;
    let x = &spec.inputs[x_at];
    let row = x.shape.last().copied().unwrap_or(1);
    let vectors = row * x.dtype.size_bytes() / 16;
    let rows = x.len() / row;
    // A thread for each vector as far as that goes.
    let threads = threads_of(vectors);
    // Short rows, as those of heads, by a warp each.
    let lines = if threads == 32 && rows >= LINES { LINES } else { 1 };
    let (each, threads_text) = (vectors.div_ceil(threads).to_string(), threads.to_string());
    let lines_text = lines.to_string();
    let add = if summand == x_at { "0" } else { "1" };
    let defines = [
        ("D", name(x.dtype)),
        ("W", name(spec.inputs[weight].dtype)),
        ("ADD", add),
        ("VECTORS", &each),
        ("THREADS", &threads_text),
        ("LINES", &lines_text),
    ];
    let eps = LaunchArg::Float(op.eps as f32);
    let args = vec![input(x_at), input(summand), input(weight), out, sum, eps, numbers(&[row, rows])];
    let source = CudaSource::new("rms_norm", &defines, &NORM);
    grid(source, [rows.div_ceil(lines), 1, 1], (threads * lines) as u32, args)
}
