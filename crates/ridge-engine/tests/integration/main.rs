//! The engine on the CPU and on a simulated device.

mod activations;
mod costs;
mod generate;
mod inputs;
mod service;
mod simulation;
