//! Objects of the driver, destroyed with their owners: events, captured graphs and loaded kernels.

use std::sync::{Arc, Mutex, PoisonError};

use ridge_runtime::Result;

use super::context::CudaContext;
use crate::driver::Handle;

/// An event: a mark in the stream.
pub(crate) struct CudaEvent {
    context: Arc<CudaContext>,
    pub(super) handle: Handle,
}

// SAFETY: as for `CudaContext`.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    /// A new event; a `timed` one records when the stream passes it.
    pub(super) fn new(context: &Arc<CudaContext>, timed: bool) -> Result<Self> {
        context.enter()?;
        Ok(Self { context: Arc::clone(context), handle: context.driver.event(timed)? })
    }

    /// Puts the mark behind what is queued to be computed.
    pub(crate) fn record(&self) -> Result<()> {
        self.context.enter()?;
        self.context.driver.record(self.handle, self.context.stream)
    }

    /// Has the stream passed it?
    pub(crate) fn passed(&self) -> Result<bool> {
        self.context.enter()?;
        self.context.driver.has_come(self.handle)
    }

    /// Waits until the stream has passed it.
    pub(crate) fn wait(&self) -> Result<()> {
        self.context.enter()?;
        self.context.driver.await_event(self.handle)
    }

    /// Seconds since `earlier`; both are timed and have come.
    pub(crate) fn since(&self, earlier: &Self) -> Result<f64> {
        self.context.enter()?;
        Ok(f64::from(self.context.driver.elapsed(earlier.handle, self.handle)?) / 1e3)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.context.driver.end_event(self.handle);
        }
    }
}

/// A captured step, which is launched as one.
pub(crate) struct CapturedGraph {
    context: Arc<CudaContext>,
    pub(super) handle: Handle,
}

// SAFETY: as for `CudaContext`.
unsafe impl Send for CapturedGraph {}

impl CapturedGraph {
    /// Owns `handle`, a graph that can be launched.
    pub(super) fn new(context: &Arc<CudaContext>, handle: Handle) -> Self {
        Self { context: Arc::clone(context), handle }
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.context.driver.end_graph(self.handle);
        }
    }
}

/// A loaded kernel.
pub(crate) struct LoadedKernel {
    context: Arc<CudaContext>,
    module: Handle,
    pub(super) function: Handle,
    /// Bytes of shared memory that the driver was asked for.
    reserved: Mutex<u32>,
}

// SAFETY: as for `CudaContext`.
unsafe impl Send for LoadedKernel {}
// SAFETY: as for `CudaContext`.
unsafe impl Sync for LoadedKernel {}

impl LoadedKernel {
    /// Owns `module`, and `function` of it.
    pub(super) fn new(context: &Arc<CudaContext>, module: Handle, function: Handle) -> Self {
        // What every kernel may have without asking.
        const GRANTED: u32 = 16 << 10;
        Self { context: Arc::clone(context), module, function, reserved: Mutex::new(GRANTED) }
    }

    /// Lets the kernel be launched with this much shared memory beside its own, and with less: launches of other sizes share it.
    pub(crate) fn reserve(&self, shared: u32) -> Result<()> {
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        if shared > *reserved {
            self.context.enter()?;
            self.context.driver.reserve_shared(self.function, shared)?;
            *reserved = shared;
        }
        Ok(())
    }
}

impl Drop for LoadedKernel {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.context.driver.unload(self.module);
        }
    }
}
