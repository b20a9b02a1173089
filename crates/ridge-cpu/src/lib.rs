//! The CPU backend: kernels and thread pool.
//!
//! A module stands on those below it and imports none above:
//!
//! ```text
//! measure                         what this machine reaches
//! backend                         the backend: options, buffers, the list of kernels
//! program                         kernels for the fixed shapes of a bucket, and its memory
//! run, repack                     a bucket that runs; which of its weights are repacked
//! kernels     prims, fused        claimed patterns; one primitive; chains of primitives, tile by tile
//!   attention, linear, ...        one file or folder a subject
//!   tile_product                  products of weights on matrix tiles
//!   quant, int8                   weights in blocks: as floats, and as 8-bit integers
//! device, storage                 what programs share; what a buffer holds
//! weight, pool                    weights and their layouts; threads that run steps
//! amx                             matrix tiles: layouts and instructions
//! simd                            vector loops for each instruction set, conversions
//! parts                           kernels in safe code, for other crates
//! kernel, io                      what a kernel is, how it is registered, and its operands
//! scratch, memory, bytes          working memory, aligned memory, blocks of bytes
//! placement                       where threads run, and pages with them
//! mesh, sync                      groups of ranks; what the pool synchronises with, std's or loom's
//! ```
//!
//! Read `kernel` and `io` first, then one file of `kernels`. In a folder such as `kernels/linear`, the file of its name
//! registers the kernels, `kernel.rs` has what all ways to compute them share, and the other files are those ways.
//!
//! Results never depend on the number of threads, on who shares a batch or on where a chunk of a prompt ends: every
//! output element is computed by one thread in an order that its own extents fix.
#![allow(unsafe_code)] // kernels, and memory that threads share; each block says why it is sound

#[cfg(target_arch = "x86_64")]
mod amx;
mod backend;
mod bucket;
mod bytes;
mod device;
mod fused;
mod gate;
mod gemm;
mod interleave;
mod io;
mod kernel;
mod kernels;
mod lane;
pub mod measure;
mod memory;
mod mesh;
mod packing;
mod parts;
mod placement;
mod pool;
mod prims;
mod program;
mod repack;
mod run;
mod scratch;
mod simd;
mod slot;
mod storage;
mod sync;
mod weight;

pub use backend::{Cpu, CpuOptions};
pub use bytes::Pod;
pub use io::{KernelIo, KernelOutput};
pub use kernel::{CpuKernel, KernelEntry, KernelSpec, MakeKernel, OperandType, Preparation};
pub use parts::{PartKernel, part_kernel};
pub use scratch::Scratch;

/// The instruction set that kernels of this process use, as `RIDGE_CPU_ISA` names it.
pub fn instruction_set() -> &'static str {
    simd::isa().name()
}

/// All instruction sets that this machine has kernels for, as `RIDGE_CPU_ISA` names them, the best last.
pub fn instruction_sets() -> Vec<&'static str> {
    simd::available().into_iter().map(simd::Isa::name).collect()
}

/// Does this process multiply on matrix tiles (AMX)? Exact activations of bf16 are faster for many rows then, whatever
/// weights are stored in; without, products of 8-bit codes are.
pub fn has_tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    return simd::isa() == simd::Isa::Amx;
    #[cfg(not(target_arch = "x86_64"))]
    false
}
