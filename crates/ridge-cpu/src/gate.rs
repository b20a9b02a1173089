//! What a launch waits for beside the launches before it.

use crate::sync::{AtomicUsize, Mutex, MutexGuard, Ordering};

/// How many collectives of a step are complete, and who waits for more.
pub(crate) struct Gate {
    complete: AtomicUsize,
    waiting: Mutex<Option<Waiting>>,
}

/// A launch that is opened once `after` collectives are complete.
#[derive(Clone, Copy)]
pub(crate) struct Waiting {
    after: usize,
    /// A job of the pool.
    pub(crate) job: *const (),
    pub(crate) launch: usize,
}

// SAFETY: the job is kept alive by the pool's list until its last launch is complete, and this one has not begun.
unsafe impl Send for Waiting {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Default for Gate {
    fn default() -> Self {
        Self { complete: AtomicUsize::new(0), waiting: Mutex::new(None) }
    }
}

impl Gate {
    /// A step begins.
    pub(crate) fn reset(&self) {
        self.complete.store(0, Ordering::Relaxed);
    }

    /// Are so many complete?
    pub(crate) fn is_open(&self, after: usize) -> bool {
        self.complete.load(Ordering::Acquire) >= after
    }

    /// Whether so many are complete. If not, `launch` of `job` is opened when they are.
    pub(crate) fn pass(&self, after: usize, job: *const (), launch: usize) -> bool {
        if self.is_open(after) {
            return true;
        }
        let mut waiting = lock(&self.waiting);
        if self.is_open(after) {
            return true;
        }
        *waiting = Some(Waiting { after, job, launch });
        false
    }

    /// One more is complete. Gives the launch that is to be opened now, if there is one.
    pub(crate) fn completed(&self) -> Option<Waiting> {
        let mut waiting = lock(&self.waiting);
        let complete = self.complete.fetch_add(1, Ordering::AcqRel) + 1;
        waiting.take_if(|waiting| waiting.after <= complete)
    }
}
