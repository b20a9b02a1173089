//! Single primitives, for any shape and dtype. What a fused group can do is a group of one.

mod along;
mod collective;
mod matmul;
mod moves;
mod order;
mod recurrence;

use ridge_graph::{DType, Prim};

use crate::communicator::MeshRanks;
use crate::kernel::{CudaKernel, CudaKernelSpec, DeviceAction, OperandSlot};

pub(crate) use matmul::{MatrixProduct, product};
pub(crate) use recurrence::{
    LEAST as LEAST_OF_CHUNKS, MAX_KEY, gated as gated_recurrence, over_lines as recurrence_over_lines, takes_gated,
};

/// Every text of this folder.
#[cfg(test)]
pub(crate) const TEXTS: [crate::kernel::KernelText<'_>; 12] = [
    along::ALONG,
    matmul::MATMUL,
    matmul::MATMUL_ROWS,
    moves::ROWS,
    order::SORT,
    recurrence::RECURRENCE,
    recurrence::RECURRENCE_CHUNKS,
    recurrence::RECURRENCE_GATED,
    recurrence::RECURRENCE_GRADIENT,
    recurrence::RECURRENCE_GRADIENT_KEYS,
    recurrence::RECURRENCE_GRADIENT_RANK,
    recurrence::RECURRENCE_PARALLEL,
];

/// The kernel of `prim`.
///
/// # Errors
/// Says what is not supported.
pub(crate) fn make(prim: &Prim, spec: &CudaKernelSpec<'_>, mesh: &MeshRanks) -> Result<CudaKernel, String> {
    let operand = |i: usize| &spec.inputs[i];
    Ok(match prim {
        Prim::Const(literal) => {
            let bytes = if literal.dtype == DType::I64 {
                literal.values.iter().flat_map(|v| (*v as i64).to_le_bytes()).collect()
            } else {
                literal.dtype.encode(literal.values.iter().copied())
            };
            DeviceAction::Constant { bytes, to: OperandSlot::Output(0) }.into()
        }
        Prim::Reduce { op, axis } => along::reduce(spec, *op, *axis),
        Prim::Scan { op, axis } => along::scan(spec, *op, *axis),
        Prim::ArgMax { axis } => along::argmax(spec, *axis),
        Prim::Sort { axis, descending, .. } => order::sort(spec, *axis, *descending)?,
        Prim::LinearRecurrence { .. } => recurrence::recurrence(spec)?,
        Prim::LinearRecurrenceGradient { .. } => recurrence::recurrence_gradient(spec)?,
        Prim::MatMul { trans_a, trans_b, .. } => matmul::matmul(spec, *trans_a, *trans_b),
        Prim::Gather { axis } => moves::gather(spec, *axis),
        Prim::Scatter { axis, add } => moves::scatter(spec, *axis, *add),
        Prim::Slice { axis, start, .. } => moves::slice(spec, *axis, start)?,
        Prim::Concat { axis } => moves::concat(spec, *axis),
        Prim::Pad { axis, before, value, .. } => moves::pad(spec, *axis, before, *value)?,
        Prim::Transpose(perm) => moves::transpose(spec, perm),
        Prim::Broadcast(_) => moves::broadcast_to(spec),
        Prim::Assemble { .. } => moves::assemble(spec)?,
        Prim::Collective { kind, mesh: axis, ranks } => collective::make(spec, *kind, axis, *ranks, mesh)?,
        Prim::StateWrite => moves::copy(spec, 1),
        Prim::Move(_) | Prim::Fetch(_) => moves::copy(spec, 0),
        Prim::Cast(dtype) if *dtype == operand(0).dtype => moves::copy(spec, 0),
        Prim::Iota { .. }
        | Prim::Unary(_)
        | Prim::Binary(_)
        | Prim::Compare(_)
        | Prim::Select
        | Prim::Cast(_)
        | Prim::Random { .. } => return Err("is fused, and never alone".into()),
        Prim::Reshape(_) | Prim::Component(_) | Prim::StateRead => return Err("is another view of its input".into()),
    })
}
