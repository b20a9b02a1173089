//! Products of a linear's gradient, sums over rows (`kernels/sum_rows.cu`), and the loss (`kernels/cross_entropy.cu`).

use ridge_graph::Function;
use ridge_graph::ops::NormWeightGradient;

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, KernelText, LaunchArg, OperandSlot, blocks, each, grid, input,
    name, numbers, output,
};
use crate::prims::{MatrixProduct, product};

pub(super) const SUMS: KernelText<'_> = KernelText::new(include_str!("../../kernels/sum_rows.cu"));
pub(super) const LOSS: KernelText<'_> = KernelText::new(include_str!("../../kernels/cross_entropy.cu"));

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let products = [
        CudaKernelEntry::new("linear_input_gradient", "linear_input_gradient(dy, w)", plain, input_gradient),
        CudaKernelEntry::new(
            "linear_group_input_gradient",
            "linear_group_input_gradient(dy, ...)",
            plain,
            input_gradient,
        ),
        CudaKernelEntry::new("linear_weight_gradient", "linear_weight_gradient(dy, x)", plain, weight_gradient),
    ];
    let sums = [
        CudaKernelEntry::new("sum_rows", "sum_rows(x)", |_| true, sum_rows),
        CudaKernelEntry::new("rms_norm_weight_gradient", "rms_norm_weight_gradient(x, dy)", |_| true, norm_weight),
        CudaKernelEntry::new("layer_norm_weight_gradient", "layer_norm_weight_gradient(x, dy)", |_| true, norm_weight),
    ];
    let losses = [
        CudaKernelEntry::new("cross_entropy", "cross_entropy(logits, targets)", |_| true, loss),
        CudaKernelEntry::new("cross_entropy_saving", "cross_entropy_saving(logits, targets)", |_| true, loss),
        CudaKernelEntry::new(
            "cross_entropy_backward",
            "cross_entropy_backward(logits, targets, lse, dloss)",
            |_| true,
            loss_backward,
        ),
    ];
    products.into_iter().chain(sums).chain(losses).map(CudaKernelEntry::numerics_by_extents).collect()
}

/// Plain operands of one dtype: others are converted first.
fn plain(body: &Function) -> bool {
    body.args.iter().all(|arg| arg.ty.format.is_none() && arg.ty.dtype == body.args[0].ty.dtype)
}

/// Extents but the last, and the last.
fn matrix(x: &CudaOperand) -> (usize, usize) {
    let (last, rows) = x.shape.split_last().map_or((1, &[][..]), |(last, rows)| (*last, rows));
    (rows.iter().product(), last)
}

fn operand(spec: &CudaKernelSpec<'_>, i: usize) -> ((OperandSlot, usize), ridge_graph::DType) {
    ((OperandSlot::Input(i), 0), spec.inputs[i].dtype)
}

fn input_gradient(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    input_gradient_of(spec, 0)
}

/// `dy`, `[rows, N]`, by `w`, `[N, K]`, of one linear or more: each product is added to those before. Inputs from `first` on are
/// each linear's `dy`, then each one's `w`.
pub(super) fn input_gradient_of(spec: &CudaKernelSpec<'_>, first: usize) -> Result<CudaKernel, String> {
    let count = (spec.inputs.len() - first) / 2;
    let mut kernel = CudaKernel::default();
    for i in first..first + count {
        let (rows, depth) = matrix(&spec.inputs[i]);
        let one = product(&MatrixProduct {
            batches: 1,
            rows,
            columns: spec.inputs[count + i].shape[1],
            depth,
            a: operand(spec, i),
            b: operand(spec, count + i),
            out: ((OperandSlot::Output(0), 0), spec.outputs[0].dtype),
            transposed: (false, false),
            added: i > first,
            deterministic: false,
        });
        kernel.actions.extend(one.actions);
    }
    Ok(kernel)
}

/// `dy`, `[rows, N]`, transposed, by `x`, `[rows, K]`.
fn weight_gradient(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let ((depth, rows), (_, columns)) = (matrix(&spec.inputs[0]), matrix(&spec.inputs[1]));
    Ok(product(&MatrixProduct {
        batches: 1,
        rows,
        columns,
        depth,
        a: operand(spec, 0),
        b: operand(spec, 1),
        out: ((OperandSlot::Output(0), 0), spec.outputs[0].dtype),
        transposed: (true, false),
        added: false,
        deterministic: false,
    }))
}

/// Lanes of a block's line, and threads of a block, of the text.
const LANES: usize = 32;
const THREADS: u32 = 256;
/// Bytes that a thread takes of a row at a time, if they divide it.
const CHUNK_BYTES: usize = 16;
/// Rows of a part at least, and the most parts.
const LEAST: usize = 64;
const PARTS: usize = 128;

fn sum_rows(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    sums(spec, None)
}

fn norm_weight(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = *spec.composite::<NormWeightGradient>().ok_or("no gradient in the group")?;
    sums(spec, Some(op))
}

fn sums(spec: &CudaKernelSpec<'_>, norm: Option<NormWeightGradient>) -> Result<CudaKernel, String> {
    let (rows, columns) = matrix(&spec.inputs[0]);
    if columns == 0 {
        return Ok(CudaKernel::default());
    }
    let parts = rows.div_ceil(LEAST).clamp(1, PARTS);
    let flag = |on: bool| if on { "1" } else { "0" };
    let dtype = spec.inputs[0].dtype;
    let wide = CHUNK_BYTES / dtype.size_bytes();
    let wide = if columns.is_multiple_of(wide) { wide } else { 1 };
    let wide_text = wide.to_string();
    let defines = [
        ("D", name(dtype)),
        ("WIDE", &wide_text),
        ("OUT", name(spec.outputs[0].dtype)),
        ("NORMED", flag(norm.is_some())),
        ("CENTRED", flag(norm.is_some_and(|op| op.centred))),
    ];
    let source = |entry| CudaSource::new(entry, &defines, &SUMS);
    let n = || numbers(&[rows, columns, parts]);
    let of_parts = (parts * columns * 4).next_multiple_of(256);
    let scratch = |offset| LaunchArg::Pointer(OperandSlot::Scratch, offset);
    let mut kernel = CudaKernel { scratch: of_parts, ..CudaKernel::default() };
    if let Some(op) = norm {
        let args = vec![input(0), scratch(of_parts), LaunchArg::Float(op.eps as f32), n()];
        kernel.actions.extend(each(source("row_statistics"), rows * 32, args).actions);
        kernel.scratch += rows * 8;
    }
    let dy = input(if norm.is_some() { 1 } else { 0 });
    let statistics = scratch(if norm.is_some() { of_parts } else { 0 });
    let args = vec![input(0), dy, statistics, scratch(0), n()];
    kernel
        .actions
        .extend(grid(source("sum_parts"), [columns.div_ceil(LANES * wide), parts, 1], THREADS, args)?.actions);
    let args = vec![scratch(0), output(0), n()];
    kernel.actions.extend(grid(source("sum_join"), [columns.div_ceil(LANES), 1, 1], THREADS, args)?.actions);
    Ok(kernel)
}

/// Threads of a row of logits.
const ROW_THREADS: u32 = 512;

fn loss_source(spec: &CudaKernelSpec<'_>, entry: &str) -> std::sync::Arc<CudaSource> {
    let saving = if spec.outputs.len() > 1 { "1" } else { "0" };
    CudaSource::new(entry, &[("D", name(spec.inputs[0].dtype)), ("SAVING", saving)], &LOSS)
}

fn loss(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let (rows, columns) = matrix(&spec.inputs[0]);
    let lse = output(spec.outputs.len() - 1);
    let args = vec![input(0), input(1), output(0), lse, numbers(&[rows, columns])];
    Ok(blocks(loss_source(spec, "cross_entropy"), rows, ROW_THREADS, args))
}

fn loss_backward(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let (rows, columns) = matrix(&spec.inputs[0]);
    let args = vec![input(0), input(1), input(2), input(3), output(0), numbers(&[rows, columns])];
    Ok(blocks(loss_source(spec, "cross_entropy_backward"), rows, ROW_THREADS, args))
}
