//! Integration tests: runs of small models on the CPU.

mod common;
mod families;
mod optimisers;
mod runs;
