//! A gated MLP of many rows by weights of 8-bit floats with a scale for each row, from its norm to the residual addition: between its
//! products rows become codes, by the pass that gates two products of cuBLASLt, or behind products with gates of their own, whichever is
//! faster.

use ridge_graph::format::ScaledFormat;
use ridge_graph::ops::Quantize;
use ridge_graph::{DType, Function, Op};

use super::entry::CudaKernelEntry;
use super::linear_call::{ALIGN, LinearCall, LinearEpilogue, gated_pair, sums};
use super::linear_scaled::ScaledProduct;
use super::norm;
use super::quantize::{codes_of_gates, codes_of_rows, quantised_rows, scaled};
use crate::gemm::{self, Epilogue, GemmCodeScales, GemmProblem, GemmSide};
use crate::kernel::{CudaKernel, CudaKernelSpec, OperandSlot, SlotOffset, input, numbers, output};

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let pattern = "add(r, linear(quantize(swiglu(g@linear_group(quantize(rms_norm(x, w)), ...).0, g.1)), down))";
    vec![CudaKernelEntry::new("scaled_mlp", pattern, supports, make).where_it_pays(many_rows).numerics_by_extents()]
}

/// Rows from which on products by tiles are bound by tensor cores.
const MANY_ROWS: usize = 1024;
const FORMAT: ScaledFormat = ScaledFormat::F8_ROWS;

/// Inputs: what is added to; x, mostly the same; the norm's weight; those of gate, up and the product behind both.
const X: usize = 1;
const WEIGHT: usize = 3;

fn supports(body: &Function) -> bool {
    let (plain, weights) = body.args.split_at(WEIGHT.min(body.args.len()));
    let quantises = |op: &Op| match op {
        Op::Composite(op) => op.downcast::<Quantize>().is_none_or(|quantize| quantize.format == FORMAT),
        _ => true,
    };
    gated_pair(body)
        && sums(body)
        && norm::wide(&body.args[X].ty)
        && matches!(body.args[X].ty.dtype, DType::BF16 | DType::F16)
        && plain.iter().all(|arg| arg.ty.format.is_none())
        && weights.len() == 3
        && weights.iter().all(|arg| scaled(&arg.ty) == Some(FORMAT) && arg.ty.shape.rank() == 2)
        && body.nodes.iter().all(|node| quantises(&node.op))
}

fn many_rows(spec: &CudaKernelSpec<'_>) -> bool {
    let x = &spec.inputs[0].shape;
    x[..x.len() - 1].iter().product::<usize>() >= MANY_ROWS
}

/// One product, of rows of `depth` at `x` by the weight at `w`; each with its scales.
struct Side {
    x: [SlotOffset; 2],
    w: [SlotOffset; 2],
    columns: usize,
    depth: usize,
    y: SlotOffset,
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let x = &spec.inputs[X];
    let (depth, inner) = (x.shape.last().copied().unwrap_or(1), spec.inputs[WEIGHT].shape[0]);
    let (rows, dtype) = (x.shape[..x.shape.len() - 1].iter().product::<usize>(), x.dtype);
    // In scratch memory: the gate's product, or what is gated; the other's; codes and scales of the norm; those of what is gated.
    let wide = (rows * inner * dtype.size_bytes()).next_multiple_of(ALIGN);
    let [gate, up] = [0, wide].map(|at| (OperandSlot::Scratch, at));
    let mut scratch = 2 * wide;
    let mut room_for_codes = |width: usize| {
        let (codes, scales) = (scratch, scratch + (rows * width).next_multiple_of(ALIGN));
        scratch = scales + (rows * 4).next_multiple_of(ALIGN);
        [codes, scales].map(|at| (OperandSlot::Scratch, at))
    };
    let (normed, gated) = (room_for_codes(depth), room_for_codes(inner));
    let weight = |input: usize| -> Result<[SlotOffset; 2], String> {
        let offsets = spec.inputs[input].component_offsets()?;
        Ok([0, offsets[1]].map(|at| (OperandSlot::Input(input), at)))
    };
    let [of_gate, of_up, of_down] = [0, 1, 2].map(|i| weight(WEIGHT + i));
    let (of_gate, of_up, of_down) = (of_gate?, of_up?, of_down?);
    let product = |side: &Side| {
        let &Side { x: [x, of_x], w: [w, of_w], columns, depth, y } = side;
        let (scales, formats) = ([of_x, of_w], [FORMAT; 2]);
        ScaledProduct { rows, columns, depth, x, w, scales, formats, bias: None, y, result: dtype }.actions()
    };
    let problem = |side: &Side, after: Epilogue| GemmProblem {
        rows,
        depth: side.depth,
        operands: DType::F8E4M3,
        result: dtype,
        x: side.x[0],
        sides: vec![GemmSide { columns: side.columns, w: side.w[0], y: side.y }],
        after,
        scales: Some(GemmCodeScales { in_blocks: false, x: side.x[1], sides: vec![side.w[1]], biases: None }),
        deterministic: false,
    };
    let mut kernel = quantised_rows(spec, X, FORMAT, normed)?;
    kernel.scratch = scratch;

    let [of_gate, of_up] = [(of_gate, gate), (of_up, up)].map(|(w, y)| Side { x: normed, w, columns: inner, depth, y });
    let mut apart = product(&of_gate);
    apart.extend(product(&of_up));
    apart.extend(codes_of_gates(dtype, [gate, up], gated, [rows, inner])?.actions);
    let mut together = problem(&of_gate, Epilogue::Swiglu(of_up.w[0]));
    together.scales.iter_mut().for_each(|scales| scales.sides.push(of_up.w[1]));
    let behind = codes_of_rows(dtype, gate, gated, [rows, inner])?.actions;
    let made = gemm::fastest_before(CudaKernel { actions: apart, scratch }, &together, &behind, "made codes");
    kernel.actions.extend(made.actions);

    let columns = spec.inputs[WEIGHT + 2].shape[0];
    let y = (OperandSlot::Output(0), 0);
    let last = Side { x: gated, w: of_down, columns, depth: inner, y };
    let mut down = CudaKernel { actions: product(&last), scratch };
    let after = LinearEpilogue::Add;
    let sum = LinearCall {
        spec,
        after,
        x: X,
        norm: None,
        first: WEIGHT + 2,
        count: 1,
        biases: false,
        rows,
        depth: inner,
        dtype,
    };
    let args = vec![output(0), input(0), input(0), output(0), numbers(&[rows * columns, columns])];
    sum.follow(&mut down, dtype, [rows * columns, columns], args);
    let down = gemm::fastest(down, &problem(&last, Epilogue::Add((OperandSlot::Input(0), 0))));
    kernel.actions.extend(down.actions);
    Ok(kernel)
}
