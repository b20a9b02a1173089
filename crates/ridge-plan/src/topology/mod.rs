//! Which rank goes on which GPU: the axes of a layout laid over the links of a machine that `nvidia-smi topo -m` shows,
//! the axis that sends most on the shortest ways.
//!
//! Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism; experts are spread
//! over neighbours of the context and data axes. What is left to choose is which GPU each place of a node is: places are
//! swapped while that makes the busiest axis quicker, and then the next. `links` says what a way carries.

mod advice;
mod degrees;
mod links;
mod place;
#[cfg(test)]
mod tests;

pub use advice::{PlacementAdvice, ways};
pub use degrees::{Degrees, ParallelAxis};
pub use links::{Rates, SOURCE};
pub use place::{AxisUse, RankPlacement, Seat};
