//! The compile pipeline, the memory planner and sessions.

#[path = "../common/decoder.rs"]
mod decoder;
#[path = "../common/host_weights.rs"]
mod mixture;
#[path = "../common/random.rs"]
mod random;

mod host_weights;
mod layout;
mod offload;
mod passes;
mod plan;
mod session;
