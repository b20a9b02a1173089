//! The CUDA context of one GPU and its streams.

use std::sync::Arc;

use ridge_hw::gpu::{Library, Nvidia};
use ridge_runtime::{MemoryLedger, Result};

use crate::driver::{CudaDriver, Handle};
use crate::error::device as failed;
use crate::library;

/// Attributes by their numbers in `CUdevice_attribute`.
const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
const COMPUTE_CAPABILITY_MINOR: i32 = 76;
const MULTIPROCESSORS: i32 = 16;
/// The minimum compute capability: bf16 conversions are instructions since then.
const MIN_CAPABILITY: (i32, i32) = (8, 0);

/// The GPU's context and streams; it outlives everything that was made with it.
pub(crate) struct CudaContext {
    pub(super) driver: CudaDriver,
    gpu: i32,
    handle: Handle,
    pub(super) stream: Handle,
    /// The stream of the lane of communication.
    pub(super) side: Handle,
    pub(super) name: String,
    /// The architecture that kernels are compiled for, such as `sm_90a`.
    pub(super) arch: String,
    /// May launches begin before those ahead of them have ended?
    pub(super) overlaps: bool,
    /// Multiprocessors.
    pub(super) processors: u32,
    /// Counts all memory that is allocated here. What the driver takes besides (its context, loaded code, captured
    /// graphs, the rounding of allocations) is known from the GPU's free memory alone.
    pub(super) ledger: Arc<MemoryLedger>,
}

// SAFETY: the driver's functions may be called from any thread, and the handles are only ever given to them.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

/// The architecture that kernels are compiled for on GPUs of this compute capability.
pub(crate) fn architecture(major: u32, minor: u32) -> String {
    // From 9.0 on, the suffix opens the instructions of exactly this architecture.
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

impl CudaContext {
    pub(super) fn open(nvidia: &Nvidia, ordinal: usize) -> Result<Arc<Self>> {
        let driver = CudaDriver::open(library::path(nvidia, Library::Driver)?)?;
        let count = driver.devices()?;
        if ordinal >= count {
            let has = if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") };
            return Err(failed(format!(
                "there is no GPU {ordinal}: this process sees {has}; check --device and CUDA_VISIBLE_DEVICES"
            )));
        }
        let gpu = driver.device(ordinal)?;
        let name = driver.name(gpu)?;
        let attribute = |number| driver.attribute(gpu, number);
        let (major, minor) = (attribute(COMPUTE_CAPABILITY_MAJOR)?, attribute(COMPUTE_CAPABILITY_MINOR)?);
        if (major, minor) < MIN_CAPABILITY {
            let (min_major, min_minor) = MIN_CAPABILITY;
            return Err(failed(format!(
                "{name} has compute capability {major}.{minor}, needs at least {min_major}.{min_minor}; use --device cpu"
            )));
        }
        let processors = attribute(MULTIPROCESSORS)?.unsigned_abs();
        let handle = driver.retain(gpu)?;
        let mut context = Self {
            driver,
            gpu,
            handle,
            stream: std::ptr::null_mut(),
            side: std::ptr::null_mut(),
            name,
            arch: architecture(major.unsigned_abs(), minor.unsigned_abs()),
            overlaps: major >= 9,
            processors,
            ledger: Arc::default(),
        };
        context.enter()?;
        context.stream = context.driver.stream()?;
        context.side = context.driver.stream()?;
        Ok(Arc::new(context))
    }

    /// Makes it the context of this thread.
    pub(super) fn enter(&self) -> Result<()> {
        self.driver.enter(self.handle)
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            for stream in [self.stream, self.side].into_iter().filter(|stream| !stream.is_null()) {
                self.driver.end_stream(stream);
            }
        }
        self.driver.release(self.gpu);
    }
}
