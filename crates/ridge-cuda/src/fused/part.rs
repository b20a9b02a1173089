//! What the parts of a kernel are to the kernel.

use ridge_graph::Combine;

/// The code of a part, and how it is launched.
pub(super) struct PartText {
    pub(super) text: String,
    /// The most that have something to do.
    pub(super) blocks: usize,
    pub(super) threads: u32,
    /// The most threads of a block under any bindings.
    pub(super) max_threads: u32,
}

/// The struct of the header that combines so.
pub(crate) fn combine(op: Combine) -> &'static str {
    match op {
        Combine::Sum => "Sum",
        Combine::Max => "Max",
        Combine::Min => "Min",
    }
}
