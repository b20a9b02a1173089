//! The device that a model runs on.

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_cuda::{Cuda, CudaOptions};
use ridge_hw::units::Bytes;
use ridge_runtime::Backend;

use crate::error::Result;

/// Which device a model is to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The CPU.
    Cpu,
    /// The GPU of this number among those that the process sees.
    Cuda(usize),
    /// The first GPU if it can be used, else the CPU.
    Auto,
}

/// An opened device.
pub(crate) struct OpenDevice {
    pub(crate) backend: Arc<dyn Backend>,
    /// Its name, such as `cpu` or `NVIDIA H200`.
    pub(crate) name: String,
    /// Threads that compute, of a CPU; `None` of a GPU.
    pub(crate) threads: Option<usize>,
    /// Bytes of its memory that this process may still allocate, if known.
    pub(crate) available: Option<Bytes>,
}

impl OpenDevice {
    /// Opens the device, with `threads` threads if it is the CPU (all usable cores if `None`).
    ///
    /// # Errors
    /// When a GPU is asked for and there is none, or a library of NVIDIA's is missing; when threads cannot be started.
    pub(crate) fn open(choice: DeviceChoice, threads: Option<usize>) -> Result<Self> {
        match choice {
            DeviceChoice::Cpu => Self::cpu(threads),
            DeviceChoice::Cuda(ordinal) => Self::cuda(ordinal),
            DeviceChoice::Auto => Self::cuda(0).or_else(|_| Self::cpu(threads)),
        }
    }

    /// Whether it is the CPU.
    pub(crate) fn is_cpu(&self) -> bool {
        self.threads.is_some()
    }

    fn cpu(threads: Option<usize>) -> Result<Self> {
        let cpu = Cpu::new(CpuOptions { threads, ..CpuOptions::default() })?;
        Ok(Self {
            name: cpu.name().to_owned(),
            threads: Some(cpu.threads()),
            available: ridge_hw::cpu::Cpu::detect().available_memory(),
            backend: Arc::new(cpu),
        })
    }

    fn cuda(ordinal: usize) -> Result<Self> {
        let cuda = Cuda::new(CudaOptions { ordinal, ..CudaOptions::default() })?;
        Ok(Self {
            name: cuda.gpu().to_owned(),
            threads: None,
            available: Some(Bytes(cuda.free_memory()? as u64)),
            backend: Arc::new(cuda),
        })
    }
}
