//! Recurrences whose states are lines of a table, which the kernels of the primitive read and write in place.

use ridge_graph::Function;

use super::entry::CudaKernelEntry;
use crate::prims::{MAX_KEY, recurrence_over_lines};

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let inputs = "stateful_recurrence(q, k, v, decay, table, lines, starts";
    let supports = |body: &Function| body.args[0].ty.shape.last().as_const().is_some_and(|key| key <= MAX_KEY);
    let entry = |name, pattern: String| CudaKernelEntry::new(name, &pattern, supports, recurrence_over_lines);
    let entries = [
        entry("stateful_recurrence", format!("{inputs})")),
        entry("stateful_recurrence_low_rank", format!("{inputs}, erase, write)")),
    ];
    // Rows of many tokens go in chunks: their sums are in another order.
    entries.map(CudaKernelEntry::numerics_by_extents).into()
}
