//! Integration tests: runs of small models on the CPU.

mod admission;
mod common;
mod experts;
mod families;
mod fp8;
mod memory;
mod mup;
mod optimisers;
mod precision;
mod runs;
mod stopping;
