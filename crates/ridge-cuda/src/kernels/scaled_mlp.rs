//! A gated MLP of rows of 8-bit floats with a scale each, by weights of such rows, for many rows: between its products rows become codes, by
//! the pass that gates two products of cuBLASLt, or behind products with gates of their own, whichever is faster.

use ridge_graph::format::ScaledFormat;
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use super::linear_call::{ALIGN, gated_pair};
use super::linear_scaled::ScaledProduct;
use super::quantize::{codes_of_gates, codes_of_rows, scaled};
use crate::gemm::{self, Epilogue, GemmCodeScales, GemmProblem, GemmSide};
use crate::kernel::{CudaKernel, CudaKernelSpec, OperandSlot, SlotOffset};

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let pattern = "linear(quantize(swiglu(g@linear_group(x, ...).0, g.1)), down)";
    vec![CudaKernelEntry::new("scaled_mlp", pattern, supports, make).where_it_pays(many_rows).numerics_by_extents()]
}

/// Inputs: x, the weights of gate and up, and that of the product behind them.
const WEIGHTS: usize = 3;
/// Rows from which on products by tiles are bound by tensor cores.
const MANY_ROWS: usize = 1024;

fn supports(body: &Function) -> bool {
    gated_pair(body)
        && body.args.len() == 1 + WEIGHTS
        && matches!(body.args[0].ty.dtype, DType::BF16 | DType::F16)
        && body.args.iter().all(|arg| scaled(&arg.ty) == Some(ScaledFormat::F8_ROWS))
        && body.args[1..].iter().all(|arg| arg.ty.shape.rank() == 2)
}

fn many_rows(spec: &CudaKernelSpec<'_>) -> bool {
    let x = &spec.inputs[0].shape;
    x[..x.len() - 1].iter().product::<usize>() >= MANY_ROWS
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let (x, out) = (&spec.inputs[0], &spec.outputs[0]);
    let (depth, inner) = (x.shape.last().copied().unwrap_or(1), spec.inputs[1].shape[0]);
    let (rows, dtype) = (x.shape[..x.shape.len() - 1].iter().product::<usize>(), x.dtype);
    // In scratch memory: the gate's product, or what is gated; the other's; their codes and scales.
    let wide = (rows * inner * dtype.size_bytes()).next_multiple_of(ALIGN);
    let [gate, up, codes] = [0, wide, 2 * wide].map(|at| (OperandSlot::Scratch, at));
    let scales = (OperandSlot::Scratch, (2 * wide + rows * inner).next_multiple_of(ALIGN));
    let of = |input: usize| -> Result<[SlotOffset; 2], String> {
        let offsets = spec.inputs[input].component_offsets()?;
        Ok([0, offsets[1]].map(|at| (OperandSlot::Input(input), at)))
    };
    let of_x = of(0)?;
    let product = |[x, of_x]: [SlotOffset; 2], [w, of_w]: [SlotOffset; 2], [columns, depth]: [usize; 2], y| {
        let scales = [of_x, of_w];
        let formats = [ScaledFormat::F8_ROWS; 2];
        ScaledProduct { rows, columns, depth, x, w, scales, formats, bias: None, y, result: dtype }.actions()
    };
    let problem =
        |[x, of_x]: [SlotOffset; 2], [w, of_w]: [SlotOffset; 2], [columns, depth]: [usize; 2], y| GemmProblem {
            rows,
            depth,
            operands: DType::F8E4M3,
            result: dtype,
            x,
            sides: vec![GemmSide { columns, w, y }],
            after: Epilogue::Nothing,
            scales: Some(GemmCodeScales { in_blocks: false, x: of_x, sides: vec![of_w], biases: None }),
            deterministic: false,
        };
    let scratch = scales.1 + rows * 4;

    let mut apart = product(of_x, of(1)?, [inner, depth], gate);
    apart.extend(product(of_x, of(2)?, [inner, depth], up));
    apart.extend(codes_of_gates(dtype, [gate, up], [codes, scales], [rows, inner])?.actions);
    let mut gated = problem(of_x, of(1)?, [inner, depth], gate);
    let [weight, of_weight] = of(2)?;
    gated.after = Epilogue::Swiglu(weight);
    gated.scales.iter_mut().for_each(|scales| scales.sides.push(of_weight));
    let behind = codes_of_rows(dtype, gate, [codes, scales], [rows, inner])?.actions;
    let mut kernel = gemm::fastest_before(CudaKernel { actions: apart, scratch }, &gated, &behind, "made codes");

    let columns = out.shape.last().copied().unwrap_or(1);
    let down = [codes, scales];
    let last = product(down, of(3)?, [columns, inner], (OperandSlot::Output(0), 0));
    let of_last = problem(down, of(3)?, [columns, inner], (OperandSlot::Output(0), 0));
    kernel.actions.extend(gemm::fastest(CudaKernel { actions: last, scratch }, &of_last).actions);
    Ok(kernel)
}
