//! The patterns that hand-written kernels claim, one file a subject.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod cross_entropy;
mod embedding;
mod history;
mod int8;
mod kv_write;
mod linear;
mod norm;
mod penalties;
mod quant;
mod ragged_attention;
mod rope;
mod sampling;
mod softmax;
mod swiglu;
mod token_layout;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::panels;
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
    [
        attention::ENTRIES,
        cross_entropy::ENTRIES,
        embedding::ENTRIES,
        history::ENTRIES,
        kv_write::ENTRIES,
        linear::ENTRIES,
        norm::ENTRIES,
        penalties::ENTRIES,
        ragged_attention::ENTRIES,
        rope::ENTRIES,
        sampling::ENTRIES,
        softmax::ENTRIES,
        swiglu::ENTRIES,
        token_layout::ENTRIES,
    ]
    .into_iter()
    .flatten()
}
