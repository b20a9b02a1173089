//! Memory of the GPU and page-locked memory of the host, freed with their owners.

use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};

use ridge_runtime::{Buffer, MemoryCharge, MemoryOwner, Result, RuntimeError};

use super::context::CudaContext;
use crate::driver::Address;
use crate::error::device as failed;

/// Memory of the GPU, or memory of the host that the GPU reads and writes at its address as if it were its own.
pub(crate) struct DeviceMemory {
    context: Arc<CudaContext>,
    address: Address,
    bytes: usize,
    is_on_host: bool,
    _charge: MemoryCharge,
}

/// Kernels copy pieces of 16 bytes, of which the last may reach behind the end of what is stored.
const PIECE: usize = 16;

impl DeviceMemory {
    /// `bytes` bytes, uninitialised, which the ledger counts for `owner`.
    ///
    /// # Errors
    /// When there is not enough free memory.
    pub(super) fn allocate(context: &Arc<CudaContext>, bytes: usize, owner: MemoryOwner) -> Result<Self> {
        context.enter()?;
        let address = if bytes == 0 { Some(0) } else { context.driver.allocate(bytes.next_multiple_of(PIECE))? };
        let address = address.ok_or_else(|| RuntimeError::OutOfMemory {
            what: format!("{owner} on {}", context.name),
            needed: bytes,
            remedy: "choose a smaller model, a smaller context, or --format q8_0",
        })?;
        let charge = context.ledger.charge(owner, bytes);
        Ok(Self { context: Arc::clone(context), address, bytes, is_on_host: false, _charge: charge })
    }

    /// `bytes` bytes of page-locked memory of the host, uninitialised, which the ledger counts for `owner`. Under unified
    /// addressing (CUDA Driver API, section 6.14) it has one address for host and GPU, which kernels and copies take.
    ///
    /// # Errors
    /// When the system gives no more page-locked memory.
    pub(super) fn allocate_on_host(context: &Arc<CudaContext>, bytes: usize, owner: MemoryOwner) -> Result<Self> {
        context.enter()?;
        let pointer = if bytes == 0 {
            Some(std::ptr::null_mut())
        } else {
            context.driver.allocate_host(bytes.next_multiple_of(PIECE))?
        };
        let pointer = pointer.ok_or_else(|| RuntimeError::OutOfMemory {
            what: format!("{owner} in page-locked memory of the host"),
            needed: bytes,
            remedy: "offload less, or raise the limit of locked memory (ulimit -l)",
        })?;
        let charge = context.ledger.charge(owner, bytes);
        Ok(Self { context: Arc::clone(context), address: pointer as Address, bytes, is_on_host: true, _charge: charge })
    }

    /// Makes all of it zeros, which no launch uses yet and which is memory of the host.
    pub(crate) fn zero_on_host(&mut self) {
        assert!(self.is_on_host, "memory of the GPU is filled by the GPU");
        if self.bytes > 0 {
            // SAFETY: page-locked memory of this length, at one address for host and GPU, that only `self` knows of.
            unsafe { (self.address as *mut u8).write_bytes(0, self.bytes) };
        }
    }

    /// The memory of `buffer`.
    ///
    /// # Errors
    /// When the buffer is another backend's.
    pub(crate) fn of(buffer: &Buffer) -> Result<&Arc<Self>> {
        buffer.inner().ok_or_else(|| failed("the buffer is another backend's"))
    }

    /// Where it begins, in the address space that the GPU shares with the host; 0 where it is empty.
    pub(crate) fn address(&self) -> Address {
        self.address
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes > 0 && self.context.enter().is_ok() {
            match self.is_on_host {
                true => self.context.driver.free_host(self.address as *mut u8),
                false => self.context.driver.free(self.address),
            }
        }
    }
}

/// Page-locked memory of the host, which the GPU reads and writes by itself.
pub(crate) struct PinnedMemory {
    context: Arc<CudaContext>,
    pub(super) pointer: *mut u8,
    bytes: usize,
    _charge: MemoryCharge,
}

// SAFETY: memory like any other; its owner decides who uses it when.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// `bytes` bytes, zeroed, which the ledger counts for `owner`.
    ///
    /// # Errors
    /// When the system gives no more page-locked memory.
    pub(super) fn allocate(context: &Arc<CudaContext>, bytes: usize, owner: MemoryOwner) -> Result<Self> {
        context.enter()?;
        let pointer = if bytes == 0 { Some(std::ptr::null_mut()) } else { context.driver.allocate_host(bytes)? };
        let pointer = pointer.ok_or_else(|| RuntimeError::OutOfMemory {
            what: "page-locked staging memory".into(),
            needed: bytes,
            remedy: "raise the limit of locked memory (ulimit -l), or lower --chunk",
        })?;
        let charge = context.ledger.charge(owner, bytes);
        let pinned = Self { context: Arc::clone(context), pointer, bytes, _charge: charge };
        if bytes > 0 {
            // SAFETY: just allocated, of this length.
            unsafe { pinned.pointer.write_bytes(0, bytes) };
        }
        Ok(pinned)
    }

    /// The bytes; the GPU must not use them meanwhile.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: allocated, zeroed at first, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// Some of the bytes, the only ones that the GPU must not use meanwhile.
    pub(crate) fn part_mut(&mut self, part: std::ops::Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= self.bytes, "{part:?} of {} bytes", self.bytes);
        if part.is_empty() {
            return &mut [];
        }
        // SAFETY: within what was allocated and zeroed, lives as long as `self`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(part.start), part.len()) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.bytes > 0 && self.context.enter().is_ok() {
            self.context.driver.free_host(self.pointer);
        }
    }
}

/// Bytes for which another thread pays, and threads that keep the link busy.
const LEAST_COPIED: usize = 2 << 20;
const COPYING_THREADS: usize = 8;

fn copy_part(to: &Mutex<&mut [u8]>, from: &[u8]) {
    to.lock().unwrap_or_else(PoisonError::into_inner).copy_from_slice(from);
}

/// Copies `from` to `to`, which is as long. One thread reads a file that the system holds in memory at some 5 GB/s, and the link takes ten times
/// as much.
pub(super) fn copy_by_threads(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "lengths of a copy");
    if from.len() < 2 * LEAST_COPIED {
        return to.copy_from_slice(from);
    }
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(COPYING_THREADS);
    let part = from.len().div_ceil(threads).max(LEAST_COPIED);
    let parts: Vec<_> = to.chunks_mut(part).map(Mutex::new).zip(from.chunks(part)).collect();
    std::thread::scope(|scope| {
        for (to, from) in &parts[1..] {
            // Where the system gives no more threads, this one copies.
            if std::thread::Builder::new().spawn_scoped(scope, || copy_part(to, from)).is_err() {
                copy_part(to, from);
            }
        }
        copy_part(&parts[0].0, parts[0].1);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_copy_every_byte_of_any_length() {
        for bytes in [0, 1, LEAST_COPIED, LEAST_COPIED + 1, 9 * LEAST_COPIED + 5, 20 * LEAST_COPIED - 1] {
            let from: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
            let mut to = vec![255; bytes];
            copy_by_threads(&mut to, &from);
            assert!(to == from, "{bytes} bytes");
        }
    }
}
