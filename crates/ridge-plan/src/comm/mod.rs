//! Communication: how long collectives take over links in a node and between nodes, by algorithm and protocol, and what
//! of it compute hides.
//!
//! A collective is `steps` hops that follow one another and `wire` bytes that the busiest link carries one way:
//! `base + hops + wire / (rate x share)`. [`Fabric::estimate`] gives one algorithm and protocol, [`Fabric::best`] the
//! quickest of several. `bytes` are those of the larger buffer of a rank, as nccl-tests counts them.

mod collective;
mod draw;
mod fabric;
mod link;
mod overlap;
#[cfg(test)]
mod tests;

pub use collective::{Collective, CollectiveAlgorithm, CollectiveEstimate};
pub use draw::chart;
pub use fabric::{Fabric, RankGroup};
pub use link::{Link, Protocol};
pub use overlap::{GradientBucket, Overlap, exposed, overlap};
