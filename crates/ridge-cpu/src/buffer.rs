//! Memory that steps work in: aligned, zeroed, of fixed size, written through shared pointers while a step runs.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;
use ridge_runtime::{Result, RuntimeError, WeightData};

use crate::kernel::Block;

/// Alignment of every allocation: a cache line and a full vector register.
pub(crate) const ALIGN: usize = 64;

/// Bytes from which on memory is pages of its own, huge ones where the system has them: walking through gigabytes takes
/// a look into the page table for every 4 KiB otherwise.
const PAGES: usize = 4 << 20;

/// Zeroed memory of fixed size.
pub(crate) struct Memory {
    ptr: NonNull<u8>,
    bytes: usize,
    /// What it is part of, unless it was allocated.
    pages: Option<MmapMut>,
}

// SAFETY: plain bytes. Who may touch them when is the device's order of steps: see `pool`.
unsafe impl Send for Memory {}
// SAFETY: as above; shared references give only the address.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Errors
    /// When the machine does not give so much.
    pub(crate) fn zeroed(bytes: usize, what: &str) -> Result<Self> {
        let refused = || RuntimeError::OutOfMemory {
            what: what.into(),
            needed: bytes,
            remedy: "use a smaller context, batch or model",
        };
        if bytes >= PAGES {
            let mut pages = MmapMut::map_anon(bytes).map_err(|_| refused())?;
            // Without huge pages it is slower, and nothing else.
            #[cfg(target_os = "linux")]
            let _ = pages.advise(memmap2::Advice::HugePage);
            let ptr = NonNull::from(&mut pages[..]).cast();
            return Ok(Self { ptr, bytes, pages: Some(pages) });
        }
        // Never zero, so that every block has an address of its own.
        let layout = Layout::from_size_align(bytes.max(ALIGN), ALIGN).map_err(|_| refused())?;
        // SAFETY: the layout is not of size zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        Ok(Self { ptr, bytes, pages: None })
    }

    pub(crate) fn block(&self) -> Block {
        Block { ptr: self.ptr.as_ptr(), bytes: self.bytes }
    }

    /// # Safety
    /// No step that uses this memory is running, and none is started while the slice is alive.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialised for `bytes`; not written meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.bytes) }
    }

    /// # Safety
    /// As [`Memory::bytes`], and no other slice of it is alive.
    #[allow(clippy::mut_from_ref)] // shared with steps by address; the caller promises that none runs
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.pages.is_some() {
            return;
        }
        // SAFETY: allocated in `zeroed` with this very layout.
        unsafe { dealloc(self.ptr.as_ptr(), Layout::from_size_align_unchecked(self.bytes.max(ALIGN), ALIGN)) }
    }
}

/// What a [`ridge_runtime::Buffer`] of this backend holds.
pub(crate) enum Storage {
    /// Memory of our own.
    Own(Memory),
    /// A weight used where it lies, such as in a mapped file. Never written.
    Mapped(WeightData),
}

impl Storage {
    pub(crate) fn block(&self) -> Block {
        match self {
            Self::Own(memory) => memory.block(),
            Self::Mapped(data) => {
                let bytes = data.bytes();
                Block { ptr: bytes.as_ptr().cast_mut(), bytes: bytes.len() }
            }
        }
    }
}

/// The storage of a buffer that this backend made.
///
/// # Errors
/// When another backend made it.
pub(crate) fn storage(buffer: &ridge_runtime::Buffer) -> Result<&Arc<Storage>> {
    buffer
        .inner::<Arc<Storage>>()
        .ok_or_else(|| RuntimeError::Device { backend: "cpu", why: "the buffer belongs to another device".into() })
}
