//! Recurrences whose states are lines of a table, which the kernels of the primitive read and write in place.

use ridge_graph::ops::GatedRecurrence;
use ridge_graph::{DType, Function, Op};

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec};
use crate::prims::{MAX_KEY, gated_recurrence, recurrence_over_lines, takes_gated};

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let inputs = "stateful_recurrence(q, k, v, decay, table, lines, starts";
    let supports = |body: &Function| body.args[0].ty.shape.last().as_const().is_some_and(|key| key <= MAX_KEY);
    let entry = |name, pattern: String| CudaKernelEntry::new(name, &pattern, supports, recurrence_over_lines);
    let entries = [
        entry("stateful_recurrence", format!("{inputs})")),
        entry("stateful_recurrence_low_rank", format!("{inputs}, erase, write)")),
        CudaKernelEntry::new(
            "gated_recurrence",
            "gated_recurrence(q, k, v, weight, decay, table, lines, starts)",
            supports_gated,
            make_gated,
        ),
    ];
    // Rows of many tokens go in chunks: their sums are in another order.
    entries.map(CudaKernelEntry::numerics_by_extents).into()
}

fn supports_gated(body: &Function) -> bool {
    let [k, v, decay] = [1, 2, 4].map(|i| &body.args[i].ty);
    let [key, value, decays] = [k, v, decay].map(|ty| ty.shape.last().as_const().unwrap_or_default());
    let delta = body.nodes.iter().any(|node| match &node.op {
        Op::Composite(op) => op.downcast::<GatedRecurrence>().is_some_and(|op| op.delta),
        _ => false,
    });
    v.dtype == DType::BF16 && takes_gated(key, value) && (decays == 1 || !delta)
}

fn make_gated(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<GatedRecurrence>().ok_or("no gated recurrence in the group")?;
    gated_recurrence(spec, op.delta)
}
