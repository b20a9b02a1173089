//! The GPU backend, held against the f64 meaning of graphs. Without a GPU every test is reported as skipped.

#[path = "../common/cache.rs"]
mod cache;
#[path = "../common/cases.rs"]
mod cases;
#[path = "../common/codes.rs"]
mod codes;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/convolution.rs"]
mod convolution;
#[path = "../../../ridge-runtime/tests/common/decoder.rs"]
mod decoder;
#[path = "../common/few.rs"]
mod few;
#[path = "../../../ridge-runtime/tests/common/host_weights.rs"]
mod host_weights;
#[path = "../../../ridge-runtime/tests/common/in_flight.rs"]
mod in_flight;
#[path = "../common/latents.rs"]
mod latents;
#[path = "../common/mixer.rs"]
mod mixer;
#[path = "../common/one_row.rs"]
mod one_row;
#[path = "../common/processes.rs"]
mod processes;
#[path = "../../../ridge-runtime/tests/common/random.rs"]
mod random;
#[path = "../common/rotated.rs"]
mod rotated;
#[path = "../../../ridge-cpu/tests/common/mod.rs"]
mod running;
#[path = "../common/sparse.rs"]
mod sparse;
#[path = "../common/training.rs"]
mod training;
#[path = "../common/views.rs"]
mod views;

mod conformance;
mod deterministic;
mod gemm;
mod graphs;
mod kernels;
mod ranks;
mod steps;
