//! Primitives that neither a hand-written kernel nor a fused group runs, one at a time.

use ridge_graph::Prim;

use crate::backend::Mesh;
use crate::kernel::{Kernel, Spec};

/// The kernel of a primitive.
///
/// # Errors
/// Names what it cannot run.
pub(crate) fn make(prim: &Prim, _spec: &Spec<'_>, _mesh: &Mesh) -> Result<Box<dyn Kernel>, String> {
    Err(prim.name().into())
}
