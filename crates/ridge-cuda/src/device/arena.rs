//! The workspace that all programs of a GPU share, and its use by steps.
//!
//! Steps of one GPU run in the order of submission, so they can use one block of memory, as large as the largest bucket
//! needs. A bucket holds it only while one of its steps is in flight: when the block has grown, the old one is freed with
//! the last step that uses it, and idle buckets do not keep it alive.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A block that grows. `M` is its memory.
pub(crate) struct SharedArena<M> {
    state: Mutex<ArenaState<M>>,
    /// How many blocks there have been. It changes under the lock of `state` alone, and is read without it, so that a
    /// step whose block is still the present one takes no lock.
    generation: AtomicU64,
}

struct ArenaState<M> {
    /// `None` before the first lease, and after an allocation failed.
    block: Option<Arc<M>>,
    bytes: usize,
}

/// A bucket's use of the arena.
pub(crate) struct ArenaLease<M> {
    /// The block, while a step may use it.
    block: Option<Arc<M>>,
    /// The block that was leased last, which this does not keep alive.
    last: Weak<M>,
    /// Its size.
    bytes: usize,
    /// Which block that was; 0 for none.
    generation: u64,
}

impl<M> Default for ArenaLease<M> {
    fn default() -> Self {
        Self { block: None, last: Weak::new(), bytes: 0, generation: 0 }
    }
}

impl<M> ArenaLease<M> {
    /// The block, while it is leased.
    pub(crate) fn block(&self) -> Option<&M> {
        self.block.as_deref()
    }

    /// Gives the block back: no step of the bucket is in flight.
    pub(crate) fn release(&mut self) {
        self.block = None;
    }

    /// Gives the block to a step, which keeps it alive while it is in flight.
    pub(crate) fn take(&mut self) -> Option<Arc<M>> {
        self.block.take()
    }
}

impl<M> SharedArena<M> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(ArenaState { block: None, bytes: 0 }), generation: AtomicU64::new(0) }
    }

    /// Leases a block of at least `bytes` bytes, allocating a larger one with `allocate` if need be. Gives true where the
    /// block is another than the one that `lease` had last, so that addresses have to be resolved again.
    ///
    /// The old block is given up before the larger one is allocated, so that both are never needed at a time, unless a
    /// step in flight uses the old one.
    ///
    /// # Errors
    /// When `allocate` fails; the next lease tries again.
    pub(crate) fn lease<E>(
        &self,
        lease: &mut ArenaLease<M>,
        bytes: usize,
        allocate: impl FnOnce(usize) -> Result<M, E>,
    ) -> Result<bool, E> {
        if lease.generation == self.generation.load(Ordering::Acquire)
            && lease.bytes >= bytes
            && let Some(block) = lease.last.upgrade()
        {
            lease.block = Some(block);
            return Ok(false);
        }
        // An older block that the lease still has would stay alive during the allocation.
        lease.block = None;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.block.is_none() || state.bytes < bytes {
            let wanted = bytes.max(state.bytes);
            state.block = None;
            state.block = Some(Arc::new(allocate(wanted)?));
            state.bytes = wanted;
            self.generation.fetch_add(1, Ordering::Release);
        }
        lease.block.clone_from(&state.block);
        lease.last = state.block.as_ref().map_or_else(Weak::new, Arc::downgrade);
        lease.bytes = state.bytes;
        let generation = self.generation.load(Ordering::Relaxed);
        Ok(std::mem::replace(&mut lease.generation, generation) != generation)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Memory that counts itself.
    struct Counted<'a>(usize, &'a AtomicUsize);

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.1.fetch_sub(self.0, Ordering::Relaxed);
        }
    }

    fn counted<'a>(live: &'a AtomicUsize) -> impl FnOnce(usize) -> Result<Counted<'a>, ()> {
        |bytes| {
            live.fetch_add(bytes, Ordering::Relaxed);
            Ok(Counted(bytes, live))
        }
    }

    #[test]
    fn idle_buckets_do_not_keep_a_block_that_was_replaced() {
        let live = AtomicUsize::new(0);
        let arena = SharedArena::new();
        let mut small: [ArenaLease<Counted<'_>>; 3] = std::array::from_fn(|_| ArenaLease::default());
        for lease in &mut small {
            arena.lease(lease, 100, counted(&live)).expect("allocates");
            lease.release();
        }
        assert_eq!(live.load(Ordering::Relaxed), 100, "buckets share one block");
        let mut large = ArenaLease::default();
        assert!(arena.lease(&mut large, 1000, counted(&live)).expect("allocates"));
        assert_eq!(live.load(Ordering::Relaxed), 1000, "the old block is freed");
        assert!(arena.lease(&mut small[0], 100, counted(&live)).expect("is there"), "its addresses are stale");
        assert!(!arena.lease(&mut small[0], 100, counted(&live)).expect("is there"));
        assert_eq!(small[0].block().map(|block| block.0), Some(1000));
        assert_eq!(live.load(Ordering::Relaxed), 1000);
    }

    #[test]
    fn a_step_in_flight_keeps_its_block() {
        let live = AtomicUsize::new(0);
        let arena = SharedArena::new();
        let (mut flying, mut large) = (ArenaLease::default(), ArenaLease::default());
        arena.lease(&mut flying, 100, counted(&live)).expect("allocates");
        arena.lease(&mut large, 1000, counted(&live)).expect("allocates");
        assert_eq!(live.load(Ordering::Relaxed), 1100);
        flying.release();
        assert_eq!(live.load(Ordering::Relaxed), 1000);
    }

    #[test]
    fn steps_of_one_bucket_share_a_block_until_it_grows() {
        let live = AtomicUsize::new(0);
        let arena = SharedArena::new();
        let (mut lease, mut large) = (ArenaLease::default(), ArenaLease::default());
        arena.lease(&mut lease, 100, counted(&live)).expect("allocates");
        let first = lease.take();
        assert!(!arena.lease(&mut lease, 100, counted(&live)).expect("is there"), "the addresses are the same");
        let second = lease.take();
        arena.lease(&mut large, 1000, counted(&live)).expect("allocates");
        assert!(arena.lease(&mut lease, 100, counted(&live)).expect("is there"), "its addresses are stale");
        drop(first);
        assert_eq!(live.load(Ordering::Relaxed), 1100, "a step is in flight in the old block");
        drop(second);
        assert_eq!(live.load(Ordering::Relaxed), 1000);
    }

    #[test]
    fn an_allocation_that_fails_is_tried_again() {
        let live = AtomicUsize::new(0);
        let arena = SharedArena::new();
        let mut lease = ArenaLease::default();
        arena.lease(&mut lease, 100, counted(&live)).expect("allocates");
        lease.release();
        assert!(arena.lease(&mut lease, 1000, |_| Err(())).is_err());
        assert!(lease.block().is_none());
        assert_eq!(live.load(Ordering::Relaxed), 0);
        assert!(arena.lease(&mut lease, 100, counted(&live)).expect("allocates"));
        assert_eq!(live.load(Ordering::Relaxed), 100);
    }
}
