//! The streams on which the work of a GPU is queued.

use std::ops::Range;

use ridge_runtime::Result;

use super::context::CudaContext;
use super::handles::{CapturedGraph, CudaEvent, LoadedKernel};
use super::memory::{DeviceMemory, PinnedMemory};
use crate::driver::{Address, CudaDriver, Handle};

/// A stream of a context that this thread has entered.
pub(crate) struct StreamQueue<'a> {
    driver: &'a CudaDriver,
    stream: Handle,
}

impl<'a> StreamQueue<'a> {
    /// Enters the context and gives its stream.
    pub(super) fn new(context: &'a CudaContext) -> Result<Self> {
        context.enter()?;
        Ok(Self { driver: &context.driver, stream: context.stream })
    }

    /// Enters the context and gives the stream of its lane of communication.
    pub(super) fn side(context: &'a CudaContext) -> Result<Self> {
        context.enter()?;
        Ok(Self { driver: &context.driver, stream: context.side })
    }

    /// Puts the mark behind what is queued here.
    pub(crate) fn record(&self, event: &CudaEvent) -> Result<()> {
        self.driver.record(event.handle, self.stream)
    }

    /// What is queued here from now on waits for what `event` was recorded behind.
    pub(crate) fn wait_for(&self, event: &CudaEvent) -> Result<()> {
        self.driver.stream_waits(self.stream, event.handle)
    }

    /// The stream itself, for a library that queues on it.
    pub(crate) fn stream(&self) -> Handle {
        self.stream
    }

    /// Queues a kernel; with `early`, it may begin before the launch ahead of it has ended.
    ///
    /// # Safety
    /// As for [`CudaDriver::launch`]; the memory outlives the kernel's run.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &LoadedKernel,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        early: bool,
        params: &mut [*mut std::ffi::c_void],
    ) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.driver.launch(kernel.function, grid, threads, shared, early, params, self.stream) }
    }

    /// Queues a captured step.
    ///
    /// # Safety
    /// As for [`CudaDriver::launch_graph`].
    pub(crate) unsafe fn launch_captured(&self, step: &CapturedGraph) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.driver.launch_graph(step.handle, self.stream) }
    }

    /// Queues a copy on the GPU.
    ///
    /// # Safety
    /// As for [`CudaDriver::on_device`]; the memory outlives the copy.
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.driver.on_device(to, from, bytes, self.stream) }
    }

    /// Queues the filling of bytes with zeros.
    ///
    /// # Safety
    /// As for [`CudaDriver::fill`]; the memory outlives it.
    pub(crate) unsafe fn zero(&self, at: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: by the caller's promise.
        unsafe { self.driver.fill(at, 0, bytes, self.stream) }
    }

    /// Queues the filling of memory with one byte.
    pub(crate) fn fill(&self, memory: &DeviceMemory, byte: u8, bytes: usize) -> Result<()> {
        assert!(bytes <= memory.bytes(), "{bytes} bytes of {}", memory.bytes());
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: within the memory, as just checked.
        unsafe { self.driver.fill(memory.address(), byte, bytes, self.stream) }
    }

    /// Queues a copy of these bytes of `from` to the same place in `to`, and with `fill` fills them in `from` afterwards.
    ///
    /// # Safety
    /// Nobody uses these bytes of `from`, and both live, until the copy is done.
    pub(crate) unsafe fn to_device(
        &self,
        to: &DeviceMemory,
        from: &PinnedMemory,
        bytes: Range<usize>,
        fill: Option<u8>,
    ) -> Result<()> {
        let part = &from.bytes()[bytes.clone()];
        assert!(bytes.end <= to.bytes(), "{bytes:?} of {}", to.bytes());
        if part.is_empty() {
            return Ok(());
        }
        // SAFETY: within both sides, as just checked; the rest by the caller's promise.
        unsafe { self.driver.to_device(to.address() + bytes.start as u64, part.as_ptr(), part.len(), self.stream)? };
        let Some(byte) = fill else { return Ok(()) };
        // SAFETY: as above; page-locked memory has the same address on the GPU.
        unsafe { self.driver.fill(part.as_ptr() as Address, byte, part.len(), self.stream) }
    }

    /// Queues a copy of the front of `from` over all of `to`.
    ///
    /// # Safety
    /// Nobody uses `to`, and both live, until the copy is done.
    pub(crate) unsafe fn to_host(&self, to: &mut PinnedMemory, from: &DeviceMemory) -> Result<()> {
        assert!(to.bytes().len() <= from.bytes(), "{} bytes of {}", to.bytes().len(), from.bytes());
        if to.bytes().is_empty() {
            return Ok(());
        }
        // SAFETY: both sides are as long, as just checked; the rest by the caller's promise.
        unsafe { self.driver.to_host(to.pointer, from.address(), to.bytes().len(), self.stream) }
    }
}
