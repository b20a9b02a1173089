//! The primitives that the thread pool synchronises with: those of `std`, or under `--cfg ridge_loom` those of loom, which
//! runs a test under every order of threads and memory operations that the memory model allows.

#[cfg(not(ridge_loom))]
mod primitives {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread;
    pub(crate) use std::thread_local;

    /// Does nothing: what calls it stands between sequentially consistent accesses, whose order is total.
    pub(crate) fn order_sequentially_consistent_accesses() {}
}

#[cfg(ridge_loom)]
mod primitives {
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread;
    pub(crate) use loom::thread_local;

    /// A fence. Loom takes sequentially consistent accesses for acquire and release ones, but not fences.
    pub(crate) fn order_sequentially_consistent_accesses() {
        fence(Ordering::SeqCst);
    }
}

pub(crate) use primitives::*;
