//! Memory that steps work in: aligned, zeroed, of fixed size, written through shared pointers while a step runs.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};
use ridge_runtime::{MemoryCharge, MemoryLedger, MemoryOwner, Result, RuntimeError};

use crate::bytes::MemoryBlock;

/// Alignment of every allocation: a cache line and a full vector register.
pub(crate) const ALIGN: usize = 64;

/// A huge page.
const PAGE: usize = 2 << 20;

/// Address space that weights share. Only what is used of it becomes memory.
const REGION: usize = 256 << 20;

/// What is at most this large shares pages with others. Where a whole model is in cache, looking up its small pages and
/// reading vectors that cross lines takes as long as the reading itself.
pub(crate) const SMALL: usize = 256 << 10;

/// Zeroed memory of fixed size.
pub(crate) struct AlignedMemory {
    ptr: NonNull<u8>,
    bytes: usize,
    /// What it is part of, which is given back with the last memory in it.
    _pages: Arc<Pages>,
    _charge: MemoryCharge,
}

// SAFETY: plain bytes. Who may touch them when is the device's order of steps: see `pool`.
unsafe impl Send for AlignedMemory {}
// SAFETY: as above; shared references give only the address.
unsafe impl Sync for AlignedMemory {}

/// Zeroed pages of the system.
struct Pages {
    map: MmapRaw,
    /// Where a huge page may begin.
    first: usize,
}

impl Pages {
    /// At least `bytes` bytes from `first` on, as many of them as fill huge pages in such, where the system has them.
    fn new(bytes: usize) -> std::io::Result<Self> {
        let map = MmapRaw::from(MmapMut::map_anon(bytes.saturating_add(PAGE))?);
        let at = map.as_mut_ptr() as usize;
        let first = at.next_multiple_of(PAGE) - at;
        // Without huge pages it is slower, and nothing else.
        #[cfg(target_os = "linux")]
        let _ = map.advise_range(memmap2::Advice::HugePage, first, bytes / PAGE * PAGE);
        Ok(Self { map, first })
    }
}

/// Pages that memory is taken from, and how much of them is taken. What is given back is not taken again until all of them
/// is: most lives as long as a model.
type SharedPages = Mutex<Option<(Arc<Pages>, usize)>>;

/// Those of small memory, and those of weights: a weight that ended within a huge page would have the rest of it in small
/// pages, which are read at a third of the rate, and a page of its own would be up to 2 MiB more.
static SHARED: [SharedPages; 2] = [const { Mutex::new(None) }; 2];

/// Room for `bytes` bytes of `owner` in pages, and where in them it begins.
fn place(owner: MemoryOwner, bytes: usize) -> std::io::Result<(Arc<Pages>, usize)> {
    let (shared, whole) = match owner {
        _ if bytes <= SMALL => (&SHARED[0], PAGE),
        MemoryOwner::Weights if bytes <= REGION => (&SHARED[1], REGION),
        _ => {
            let pages = Pages::new(bytes)?;
            let first = pages.first;
            return Ok((Arc::new(pages), first));
        }
    };
    // Never of no bytes, so that each has an address of its own.
    let bytes = padded(bytes);
    let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let (pages, taken) = match shared.take() {
        Some((pages, taken)) if taken + bytes <= whole => (pages, taken),
        _ => (Arc::new(Pages::new(whole)?), 0),
    };
    *shared = Some((Arc::clone(&pages), taken + bytes));
    let at = pages.first + taken;
    Ok((pages, at))
}

/// Bytes that memory of `bytes` bytes takes: cache lines of shared pages, or small pages of its own. The room by which a
/// mapping begins on a huge page is address space that nobody touches.
pub(crate) fn padded(bytes: usize) -> usize {
    /// A page of the system.
    const SMALL_PAGE: usize = 4096;
    bytes.max(1).next_multiple_of(if bytes > SMALL { SMALL_PAGE } else { ALIGN })
}

impl AlignedMemory {
    /// Memory that `ledger` counts for `owner`.
    ///
    /// # Errors
    /// When the machine does not give so much.
    pub(crate) fn zeroed(ledger: &Arc<MemoryLedger>, owner: MemoryOwner, bytes: usize) -> Result<Self> {
        let (pages, at) = place(owner, bytes).map_err(|_| RuntimeError::OutOfMemory {
            what: owner.to_string(),
            needed: bytes,
            remedy: "use a smaller context, batch or model",
        })?;
        // SAFETY: `place` found room for so many bytes there, and a mapping is never at address 0.
        let ptr = unsafe { NonNull::new_unchecked(pages.map.as_mut_ptr().add(at)) };
        Ok(Self { ptr, bytes, _pages: pages, _charge: ledger.charge(owner, padded(bytes)) })
    }

    pub(crate) fn block(&self) -> MemoryBlock {
        MemoryBlock { ptr: self.ptr.as_ptr(), bytes: self.bytes }
    }

    /// # Safety
    /// No step that uses this memory is running, and none is started while the slice is alive.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: mapped and zeroed for `bytes`; not written meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.bytes) }
    }

    /// # Safety
    /// As [`AlignedMemory::bytes`], and no other slice of it is alive.
    #[allow(clippy::mut_from_ref)] // shared with steps by address; the caller promises that none runs
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_nobody_elses() {
        // Small ones that fill shared pages more than once, and larger ones on both sides of a huge page.
        let sizes = [0, 1, 63, 64, 65, SMALL - 1, SMALL, SMALL + 1, PAGE - 1, PAGE, 2 * PAGE + 7];
        let ledger = Arc::new(MemoryLedger::default());
        let owners = [MemoryOwner::States, MemoryOwner::Weights];
        let zeroed = |(nth, bytes): (usize, &usize)| AlignedMemory::zeroed(&ledger, owners[nth / 66], *bytes).unwrap();
        let held: Vec<AlignedMemory> = sizes.iter().cycle().take(132).enumerate().map(zeroed).collect();
        let counted: usize = sizes.iter().cycle().take(66).map(|bytes| padded(*bytes)).sum();
        assert!(owners.iter().all(|owner| ledger.usage().live.get(*owner) == counted));
        for (i, memory) in held.iter().enumerate() {
            assert!((memory.block().ptr as usize).is_multiple_of(ALIGN));
            // SAFETY: no step knows it.
            let bytes = unsafe { memory.bytes_mut() };
            assert!(bytes.len() == sizes[i % sizes.len()] && bytes.iter().all(|x| *x == 0), "{i}");
            bytes.fill(i as u8 + 1);
        }
        for (i, memory) in held.iter().enumerate() {
            // SAFETY: no step knows it.
            assert!(unsafe { memory.bytes() }.iter().all(|x| *x == i as u8 + 1), "{i}");
        }
    }
}
