//! Ops that have types and costs and no meaning yet: enough to plan a model, and not to run it. They are kept out of
//! the registry, since there is nothing to hold a kernel against, and lowering a graph that has one is an error that
//! says so. An op leaves this folder when its `decompose` gives its meaning.

mod latent_attention;
mod refusal;

pub use latent_attention::{Indexer, LatentAttention};
