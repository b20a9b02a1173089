//! The compile pipeline, the memory planner and sessions.

#[path = "../common/decoder.rs"]
mod decoder;
#[path = "../common/random.rs"]
mod random;

mod layout;
mod offload;
mod passes;
mod plan;
mod session;
