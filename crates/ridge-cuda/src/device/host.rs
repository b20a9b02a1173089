//! Memory of the host that launches read: how weights come to it, and the rate of the link to it.

use ridge_runtime::{MemoryOwner, Result};

use super::CudaDevice;
use super::memory::DeviceMemory;

/// Bytes of a copy that is timed: enough that its start costs nothing beside it. Less where there is no room for so many.
const TIMED: usize = 64 << 20;
const LEAST_TIMED: usize = 1 << 20;
/// Copies that are timed together, and how often.
const COPIES: usize = 4;
const RUNS: usize = 5;

impl CudaDevice {
    /// A copy of `memory` in page-locked memory of the host, after all that was queued.
    ///
    /// # Errors
    /// When the system gives no more page-locked memory, or the GPU failed.
    pub(crate) fn copied_to_host(&self, memory: &DeviceMemory, owner: MemoryOwner) -> Result<DeviceMemory> {
        let copy = self.allocate_on_host(memory.bytes(), owner)?;
        if memory.bytes() > 0 {
            // SAFETY: both have as many bytes, and live until the copy is over.
            unsafe { self.queue()?.copy(copy.address(), memory.address(), memory.bytes())? };
            self.synchronize()?;
        }
        Ok(copy)
    }

    /// Bytes a second that copies from page-locked memory of the host to that of the GPU reach: the best of some runs.
    ///
    /// # Errors
    /// When memory runs out, or the GPU failed.
    pub(crate) fn host_link(&self) -> Result<f64> {
        let mut bytes = TIMED;
        let to = loop {
            match self.allocate_to_time(bytes) {
                Err(_) if bytes > LEAST_TIMED => bytes /= 2,
                other => break other?,
            }
        };
        let mut from = self.allocate_on_host(bytes, MemoryOwner::Upload)?;
        from.zero_on_host();
        let marks = [self.timed_event()?, self.timed_event()?];
        let queue = self.queue()?;
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            marks[0].record()?;
            for _ in 0..COPIES {
                // SAFETY: both have as many bytes, and live until the copies are over.
                unsafe { queue.copy(to.address(), from.address(), bytes)? };
            }
            marks[1].record()?;
            marks[1].wait()?;
            best = best.min(marks[1].since(&marks[0])?);
        }
        Ok((COPIES * bytes) as f64 / best)
    }
}
