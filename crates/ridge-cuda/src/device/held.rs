//! What the driver made and takes back when its owner goes: marks in the stream, captured steps, loaded kernels.

use std::sync::Arc;

use ridge_runtime::Result;

use super::Context;
use crate::driver::Handle;

/// A mark in the stream.
pub(crate) struct Event {
    pub(super) context: Arc<Context>,
    pub(super) handle: Handle,
}

// SAFETY: as for `Context`.
unsafe impl Send for Event {}

impl Event {
    /// Puts the mark behind what is queued.
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
}

impl Event {
    /// Seconds since `earlier`; both are timed and have come.
    pub(crate) fn since(&self, earlier: &Self) -> Result<f64> {
        self.context.enter()?;
        Ok(f64::from(self.context.driver.elapsed(earlier.handle, self.handle)?) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.context.driver.end_event(self.handle);
        }
    }
}

/// A step that was captured, as one thing to launch.
pub(crate) struct Captured {
    pub(super) context: Arc<Context>,
    pub(super) handle: Handle,
}

// SAFETY: as for `Context`.
unsafe impl Send for Captured {}

impl Drop for Captured {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.context.driver.end_graph(self.handle);
        }
    }
}

/// A loaded kernel.
pub(crate) struct Loaded {
    pub(super) context: Arc<Context>,
    pub(super) module: Handle,
    pub(super) function: Handle,
}

// SAFETY: as for `Context`.
unsafe impl Send for Loaded {}
// SAFETY: as for `Context`.
unsafe impl Sync for Loaded {}

impl Loaded {
    /// Lets the kernel be launched with this much shared memory beside its own.
    pub(crate) fn reserve(&self, shared: u32) -> Result<()> {
        // What every kernel may have without asking.
        const GRANTED: u32 = 16 << 10;
        if shared <= GRANTED {
            return Ok(());
        }
        self.context.enter()?;
        self.context.driver.reserve_shared(self.function, shared)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            self.context.driver.unload(self.module);
        }
    }
}
