//! The patterns that hand-written kernels claim, one file a subject; their texts are in `kernels/`.

mod attention;
mod linear;
mod norm;
mod rope;
mod sampling;
mod tokens;

use ridge_graph::Function;
use ridge_graph::passes::{self, Pattern};

use crate::kernel::{Kernel, Spec};

/// A hand-written kernel.
struct Entry {
    /// Its name.
    name: &'static str,
    /// What it computes; see [`Pattern`].
    pattern: &'static str,
    /// Does it support these ops, types and attributes? Symbolic extents have no numbers yet.
    supports: fn(&Function) -> bool,
    /// Makes it for fixed shapes.
    make: fn(&Spec<'_>) -> Result<Kernel, String>,
}

fn all() -> impl Iterator<Item = &'static Entry> {
    let subjects =
        [attention::ENTRIES, linear::ENTRIES, norm::ENTRIES, rope::ENTRIES, sampling::ENTRIES, tokens::ENTRIES];
    subjects.into_iter().flatten()
}

/// What they claim. Needs no GPU.
pub fn patterns() -> Vec<passes::Kernel> {
    let pattern =
        |e: &Entry| passes::Kernel { name: e.name.into(), pattern: Pattern::parse(e.pattern), supports: e.supports };
    all().map(pattern).collect()
}

/// The kernel of this name for what it claimed.
pub(crate) fn make(name: &str, spec: &Spec<'_>) -> Result<Kernel, String> {
    let entry = all().find(|e| e.name == name).ok_or_else(|| format!("there is no kernel {name}"))?;
    (entry.make)(spec)
}
