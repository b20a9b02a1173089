//! The NVIDIA GPU backend: NVIDIA's libraries opened at run time, kernels instantiated by NVRTC.
//!
//! Read `kernel` first (what a kernel is), then `fused` (groups of primitives as generated CUDA C++) and `prims` (single
//! primitives, over the texts in `kernels/`); `compile` chooses among them for the nodes of a lowered graph. `program`
//! makes them into steps, `device` runs them (where there are several ways, as for large products of matrices in `gemm`,
//! the one that was measured to be fastest), and `driver` and `nvrtc` are the doors to NVIDIA's libraries. A machine
//! without a GPU runs the same program: what is missing is an error of [`Cuda::new`].
//!
//! On one machine every result is a function of the operands and their extents alone: sums have an order that extents
//! fix, and ways that were measured are kept.
#![allow(unsafe_code)] // the doors to NVIDIA's libraries; each block says why it is sound

mod args;
mod backend;
mod cache;
mod compile;
mod cublaslt;
mod device;
mod driver;
mod error;
mod fused;
mod gemm;
mod kernel;
mod kernels;
mod library;
mod nvrtc;
mod prims;
mod program;
mod space;

pub use backend::{Cuda, CudaOptions};
pub use compile::{KernelSource, sources};
pub use kernels::patterns;
pub use nvrtc::{Compiled, Nvrtc};
