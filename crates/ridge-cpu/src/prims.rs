//! Primitives that neither a hand-written kernel nor a fused group runs, one at a time.
//!
//! `moves` copies elements whatever they are, `rows` gathers and scatters rows, `along` combines along an axis, `order`
//! sorts, `recurrence` and `recurrence_gradient` run linear recurrences, `matmul` multiplies and `collective` talks to other ranks. What a fused group could run is a group of one.

mod along;
mod collective;
mod matmul;
mod moves;
mod order;
mod recurrence;
mod recurrence_gradient;
mod rows;

use ridge_graph::{Dim, Prim};

use crate::fused::view::{View, around, strides};
use crate::fused::{self, ChainNode, ChainSource};
use crate::kernel::{CpuKernel, KernelSpec, OperandType};
use crate::mesh::MeshGroups;

/// The kernel of a primitive.
///
/// # Errors
/// Names what it cannot run.
pub(crate) fn make(prim: &Prim, spec: &KernelSpec<'_>, mesh: &MeshGroups) -> Result<Box<dyn CpuKernel>, String> {
    let number = |dim: &Dim| dim.eval(spec.bindings).map_err(|e| e.to_string());
    let output = &spec.outputs[0];
    let copied = |index: usize, view| Ok(moves::copied(output, index, view));
    match prim {
        Prim::Const(literal) => Ok(moves::constant(literal)),
        Prim::Slice { axis, start, .. } => {
            let (input, start, len) = (&spec.inputs[0], number(start)?, output.shape[*axis]);
            if start + len > input.shape[*axis] {
                return Err(format!("takes {start}..{} of an extent of {}", start + len, input.shape[*axis]));
            }
            let steps = strides(&input.shape);
            copied(0, View::new(&output.shape, &steps, start * steps[*axis]))
        }
        Prim::Transpose(perm) => {
            let steps = strides(&spec.inputs[0].shape);
            copied(0, View::new(&output.shape, &perm.iter().map(|&a| steps[a]).collect::<Vec<_>>(), 0))
        }
        Prim::Broadcast(_) => copied(0, View::broadcast(&spec.inputs[0].shape, &output.shape)),
        Prim::StateWrite => copied(1, View::broadcast(&output.shape, &output.shape)),
        Prim::Move(_) => copied(0, View::broadcast(&output.shape, &output.shape)),
        Prim::Fetch(_) => moves::bytes(output),
        Prim::Cast(to) if *to == spec.inputs[0].dtype => copied(0, View::broadcast(&output.shape, &output.shape)),
        Prim::Assemble { .. } => moves::assemble(&spec.inputs, output),
        Prim::Concat { axis } => Ok(moves::concat(&spec.inputs, output, *axis)),
        Prim::Pad { axis, before, value, .. } => {
            Ok(moves::pad(&spec.inputs[0], output, *axis, number(before)?, *value))
        }
        Prim::Gather { axis } => Ok(rows::gather(&spec.inputs, output, *axis)),
        Prim::Scatter { axis, add } => Ok(rows::scatter(&spec.inputs, *axis, *add)),
        Prim::Reduce { op, axis } => {
            let (outer, extent, inner) = around(&spec.inputs[0].shape, *axis);
            match inner {
                1 => rowwise(&Prim::Reduce { op: *op, axis: 1 }, &spec.inputs[0], output, (outer, extent)),
                _ => Ok(along::reduce(*op, output.dtype, (outer, extent, inner))),
            }
        }
        Prim::Scan { op, axis } => Ok(along::scan(*op, output.dtype, around(&output.shape, *axis))),
        Prim::ArgMax { axis } => {
            let input = &spec.inputs[0];
            Ok(order::argmax(input.dtype, around(&input.shape, *axis)))
        }
        Prim::Sort { axis, descending, .. } => {
            let (input, keep) = (&spec.inputs[0], output.shape[*axis]);
            if keep > input.shape[*axis] {
                return Err(format!("keeps {keep} of an extent of {}", input.shape[*axis]));
            }
            Ok(order::sort(input.dtype, around(&input.shape, *axis), *descending, keep))
        }
        Prim::LinearRecurrence { .. } => recurrence::recurrence(spec),
        Prim::LinearRecurrenceGradient { .. } => recurrence_gradient::recurrence_gradient(spec),
        Prim::MatMul { trans_a, trans_b, .. } => Ok(matmul::matmul(&spec.inputs, output, *trans_a, *trans_b)),
        Prim::Collective { kind, mesh: axis, ranks } => {
            collective::make(*kind, axis, *ranks, &spec.inputs[0], output, mesh)
        }
        Prim::Iota { .. }
        | Prim::Unary(_)
        | Prim::Binary(_)
        | Prim::Compare(_)
        | Prim::Select
        | Prim::Cast(_)
        | Prim::Random { .. } => {
            let inputs = (0..spec.inputs.len()).map(ChainSource::Input).collect();
            let node = ChainNode { prim, inputs, dtype: output.dtype, shape: output.shape.clone() };
            fused::chain(&[node], &spec.inputs, &[ChainSource::ChainNode(0)])
        }
        Prim::Reshape(_) | Prim::Component(_) | Prim::StateRead => Err("is a view, which takes no kernel".into()),
    }
}

/// A reduction along the innermost axis of `[outer, extent]`, as a fused group of one.
fn rowwise(
    prim: &Prim,
    input: &OperandType,
    output: &OperandType,
    (outer, extent): (usize, usize),
) -> Result<Box<dyn CpuKernel>, String> {
    let input = OperandType { shape: vec![outer, extent], ..input.clone() };
    let node = ChainNode { prim, inputs: vec![ChainSource::Input(0)], dtype: output.dtype, shape: vec![outer, 1] };
    fused::chain(&[node], &[input], &[ChainSource::ChainNode(0)])
}
