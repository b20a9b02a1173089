//! The engine on the CPU and on a simulated device.

mod activations;
mod candidates;
mod costs;
mod families;
mod fixed;
mod generate;
mod inputs;
#[path = "../../../ridge-models/tests/common/mixed.rs"]
mod mixed;
mod predictions;
mod service;
mod simulation;
mod updates;
