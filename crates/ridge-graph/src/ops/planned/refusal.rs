//! Why an op without a meaning is not decomposed.

use crate::error::{GraphError, Result};
use crate::graph::{Builder, Var};

/// Why such an op is not decomposed.
pub(super) fn planned_only(g: &Builder, op: &str) -> Result<Vec<Var>> {
    let why = format!("{op} is for plans alone: it has a type and a cost and no decomposition");
    Err(GraphError::usage(g.scope(), why))
}
