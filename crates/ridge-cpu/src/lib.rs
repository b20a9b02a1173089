//! The CPU backend: kernels, thread pool and loopback collectives.
//!
//! Read `kernel` first (what a kernel is and what it may touch), then one file of `kernels` (the claimed patterns),
//! `prims` (what no kernel claims, one primitive at a time) and `fused` (chains of primitives, tile by tile);
//! `program` makes them into steps, and `pool` runs the steps on threads.
//!
//! Results never depend on the number of threads, on who shares a batch or on where a chunk of a prompt ends: every
//! output element is computed by one thread in an order that its own extents fix.
#![allow(unsafe_code)] // kernels, and memory that threads share; each block says why it is sound

mod backend;
mod buffer;
mod fused;
mod kernel;
mod kernels;
mod loopback;
pub mod measure;
mod pool;
mod prims;
mod program;
mod simd;
mod weight;

pub use backend::{Cpu, CpuOptions};
pub use loopback::Loopback;

/// Does this process multiply on matrix tiles (AMX)? Exact activations of bf16 are faster for many rows then, whatever
/// weights are stored in; without, products of 8-bit codes are.
pub fn has_tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    return simd::isa() == simd::Isa::Amx;
    #[cfg(not(target_arch = "x86_64"))]
    false
}
