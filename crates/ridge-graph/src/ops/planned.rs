//! Ops that have types and costs and no meaning yet: enough to plan a model, and not to run it. They are kept out of
//! the registry, since there is nothing to hold a kernel against, and lowering a graph that has one is an error that
//! says so. An op leaves this folder when its `decompose` gives its meaning.

mod latent_attention;
mod mamba2;

pub use latent_attention::{Indexer, LatentAttention};
pub use mamba2::Mamba2;

use crate::builder::Builder;
use crate::error::{GraphError, Result};
use crate::graph::Var;

/// Why such an op is not decomposed.
fn planned_only(g: &Builder, op: &str) -> Result<Vec<Var>> {
    let why = format!("{op} can be planned and not run yet: it has a type and a cost and no decomposition");
    Err(GraphError::usage(g.scope(), why))
}
