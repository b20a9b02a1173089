//! Layer norms, and the cotangents of the inputs of norms: `kernels/norm_rows.cu`.

use ridge_graph::ops::{LayerNorm, NormInputGradient};
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, KernelText, LaunchArg, grid, input, name, numbers, output,
};

pub(super) const ROWS: KernelText<'_> = KernelText::new(include_str!("../../kernels/norm_rows.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let norms = [("layer_norm", "layer_norm(x, w, b)"), ("add_layer_norm", "layer_norm(*add(x, r), w, b)")];
    let gradients = [
        ("layer_norm_input_gradient", "layer_norm_input_gradient(x, w, dy)"),
        ("rms_norm_input_gradient", "rms_norm_input_gradient(x, w, dy)"),
        ("layer_norm_input_gradient_add", "add(r, layer_norm_input_gradient(x, w, dy))"),
        ("rms_norm_input_gradient_add", "add(r, rms_norm_input_gradient(x, w, dy))"),
    ];
    let norms = norms.map(|(name, pattern)| CudaKernelEntry::new(name, pattern, supports, layer_norm));
    let gradients = gradients.map(|(name, pattern)| CudaKernelEntry::new(name, pattern, supports, input_gradient));
    norms.into_iter().chain(gradients).collect()
}

/// Vectors of 16 bytes up to which a warp makes a row, and those that a thread holds at most: a gradient holds two rows.
const WARP_VECTORS: usize = 128;
const MAX_VECTORS: usize = 4;
/// Threads of a block that makes one row, and rows of a block of warps.
const THREADS: usize = 512;
const LINES: usize = 8;

/// Rows, all of one type, are whole vectors that fit into registers.
fn supports(body: &Function) -> bool {
    let x = &body.args[0].ty;
    let size = x.dtype.size_bytes();
    let fits = |row: usize| row > 0 && (row * size).is_multiple_of(16) && row * size <= 16 * THREADS * MAX_VECTORS;
    let rows = body.args.iter().filter(|arg| arg.ty.shape.rank() > 1);
    size >= 2
        && x.shape.rank() > 1
        && x.shape.last().as_const().is_some_and(fits)
        && rows.into_iter().all(|r| r.ty == *x)
}

/// How a row of `x` is divided, as definitions: vectors of a thread, threads of a row, rows of a block.
fn division(x: &CudaOperand) -> [(&'static str, usize); 3] {
    let vectors = x.shape.last().copied().unwrap_or(1) * x.dtype.size_bytes() / 16;
    let (threads, lines) =
        if vectors <= WARP_VECTORS { (32, LINES) } else { (vectors.next_multiple_of(32).min(THREADS), 1) };
    [("VECTORS", vectors.div_ceil(threads)), ("THREADS", threads), ("LINES", lines)]
}

fn launch(
    spec: &CudaKernelSpec<'_>,
    entry: &str,
    flags: [(&str, bool); 2],
    columns: [DType; 2],
    mut args: Vec<LaunchArg>,
) -> Result<CudaKernel, String> {
    let x = &spec.inputs[0];
    let row = x.shape.last().copied().unwrap_or(1);
    let rows = x.len() / row.max(1);
    let division = division(x);
    let numeric = division.map(|(name, n)| (name, n.to_string()));
    let mut defines = vec![("D", name(x.dtype)), ("W", name(columns[0])), ("B", name(columns[1]))];
    defines.extend(flags.map(|(name, on)| (name, if on { "1" } else { "0" })));
    defines.extend(numeric.iter().map(|(name, n)| (*name, n.as_str())));
    args.push(numbers(&[rows, row]));
    let [_, (_, threads), (_, lines)] = division;
    grid(CudaSource::new(entry, &defines, &ROWS), [rows.div_ceil(lines), 1, 1], (threads * lines) as u32, args)
}

fn layer_norm(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<LayerNorm>().ok_or("no layer_norm in the group")?;
    let added = spec.inputs.len() == 4;
    // The sum is the second output.
    let (weight, sum) = if added { (2, 1) } else { (1, 0) };
    let columns = [weight, weight + 1].map(|i| spec.inputs[i].dtype);
    let eps = LaunchArg::Float(op.eps as f32);
    let args = vec![input(0), input(weight - 1), input(weight), input(weight + 1), output(0), output(sum), eps];
    launch(spec, "layer_norm", [("ADD", added), ("CENTRED", true)], columns, args)
}

fn input_gradient(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<NormInputGradient>().ok_or("no gradient in the group")?;
    let added = spec.inputs.len() == 4;
    // Inputs are in the order of the pattern's text: what it is added to comes first.
    let first = usize::from(added);
    let weight = spec.inputs[first + 1].dtype;
    let args =
        vec![input(first), input(first + 1), input(first + 2), input(0), output(0), LaunchArg::Float(op.eps as f32)];
    launch(spec, "norm_input_gradient", [("ADD", added), ("CENTRED", op.centred)], [weight; 2], args)
}
