//! Integration tests: runs of small models on the CPU.

mod common;
mod optimisers;
mod runs;
