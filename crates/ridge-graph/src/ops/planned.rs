//! Ops that have types and costs and no meaning: enough to plan a model as other programs serve it, and not to run it. They
//! are kept out of the registry, since there is nothing to hold a kernel against, and lowering a graph that has one is an
//! error that says so.

mod latent_attention;
mod refusal;

pub use latent_attention::{Indexer, LatentAttention};
