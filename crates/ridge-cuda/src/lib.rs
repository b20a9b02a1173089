//! The NVIDIA GPU backend: NVIDIA's libraries opened at run time, kernels instantiated by NVRTC.
//!
//! Read `kernel` first (what a kernel is), then `fused` (groups of primitives as generated CUDA C++), `prims` (single
//! primitives, over the texts in the folder `kernels`) and `kernels` (hand-written kernels and their registry); `compile`
//! chooses among them for the nodes of a lowered graph. `program` binds buckets, `device` runs their launches (and
//! autotunes where there are several candidates, as for large matrix products in `gemm`), `communicator` talks to other
//! ranks, and `planned` is a GPU that need not be there. `driver`, `nvrtc`, `cublaslt` and `nccl` call NVIDIA's libraries. A machine without a GPU runs the same program: what is missing is an error of
//! [`Cuda::new`].
//!
//! On one machine every result is a function of the operands and their extents alone: extents fix the order of sums, and
//! autotuned choices are stored on disk.
#![allow(unsafe_code)] // the doors to NVIDIA's libraries; each block says why it is sound

mod args;
mod backend;
mod cache;
mod choices;
mod communicator;
mod compile;
mod cublaslt;
mod deterministic;
mod device;
mod driver;
mod encode;
mod error;
mod fused;
mod gemm;
mod iteration_space;
mod kernel;
mod kernels;
mod launches;
mod library;
mod nccl;
mod nvrtc;
mod options;
mod planned;
mod prims;
mod program;

pub use backend::Cuda;
pub use compile::sources;
pub use kernel::{CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, KernelText, LaunchArg, OperandSlot, SlotOffset};
pub use kernels::{CudaKernelEntry, CudaKernelRegistry};
pub use launches::StepLaunch;
pub use nvrtc::{CompiledSource, Nvrtc};
pub use options::CudaOptions;
pub use planned::PlannedGpu;
