//! The patterns that hand-written kernels claim, one file a subject.

mod linear;
mod norm;

use ridge_graph::Function;

use crate::kernel::{Kernel, Spec};

/// A hand-written kernel.
pub(crate) struct Entry {
    /// Its name.
    pub(crate) name: &'static str,
    /// What it computes; see [`ridge_graph::passes::Pattern`].
    pub(crate) pattern: &'static str,
    /// Does it support these ops, types and attributes? Symbolic extents have no numbers yet.
    pub(crate) supports: fn(&Function) -> bool,
    /// Makes it for fixed shapes.
    pub(crate) make: fn(&Spec<'_>) -> Result<Box<dyn Kernel>, String>,
}

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static Entry> {
    [linear::ENTRIES, norm::ENTRIES].into_iter().flatten()
}
