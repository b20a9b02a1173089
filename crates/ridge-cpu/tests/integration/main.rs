//! The integration tests of this crate, one module a subject.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../ridge-runtime/tests/common/decoder.rs"]
mod decoder;
#[path = "../../../ridge-runtime/tests/common/host_weights.rs"]
mod host_weights;
#[path = "../../../ridge-runtime/tests/common/in_flight.rs"]
mod in_flight;
#[path = "../../../ridge-runtime/tests/common/random.rs"]
mod random_graphs;
mod rerun;
mod schedule;

mod attention;
mod conformance;
mod executor;
mod fused;
mod kernels;
mod lanes;
mod params;
mod patterns;
mod random;
mod registry;
mod results;
mod steady_state;
mod steps;
mod weights;
