//! The lane of communication: a thread beside the pool that runs collectives while the pool computes, one after another in
//! the order in which steps come to them. No thread of the pool waits in a collective: a launch that needs what one gives is
//! opened by whoever completes it.

use std::collections::VecDeque;

use crate::pool::{PoolHandle, PoolJob};
use crate::scratch::Scratch;
use crate::sync::{Arc, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, thread};

/// How many collectives of a step are complete, and who waits for more.
pub(crate) struct Gate {
    complete: AtomicUsize,
    waiting: Mutex<Option<Waiting>>,
}

/// A launch that is opened once `after` collectives are complete.
#[derive(Clone, Copy)]
pub(crate) struct Waiting {
    after: usize,
    pub(crate) job: *const PoolJob,
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
    pub(crate) fn pass(&self, after: usize, job: *const PoolJob, launch: usize) -> bool {
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

/// A collective of a step, as the lane runs it.
pub(crate) trait Communication: Send {
    /// Runs it. What fails fails the step, whose other collectives are still run.
    fn run(&self, scratch: &mut Scratch);
    /// The gate of its step.
    fn gate(&self) -> &Gate;
}

/// The thread, and what it is to do.
pub(crate) struct Lane {
    shared: Arc<LaneState>,
    thread: Option<thread::JoinHandle<()>>,
}

struct LaneState {
    queue: Mutex<(VecDeque<Box<dyn Communication>>, bool)>,
    wake: Condvar,
}

impl Lane {
    /// Starts the thread. `pool` runs the launches that wait for collectives.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn new(pool: PoolHandle) -> std::io::Result<Self> {
        let shared = Arc::new(LaneState { queue: Mutex::new((VecDeque::new(), false)), wake: Condvar::new() });
        let state = Arc::clone(&shared);
        let thread = thread::Builder::new().name("ridge-cpu-comm".into()).spawn(move || state.work(&pool))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Queues a collective.
    pub(crate) fn queue(&self, communication: Box<dyn Communication>) {
        lock(&self.shared.queue).0.push_back(communication);
        self.shared.wake.notify_one();
    }
}

impl LaneState {
    fn work(&self, pool: &PoolHandle) {
        let mut scratch = Scratch::default();
        loop {
            let mut queue = lock(&self.queue);
            let next = loop {
                if let Some(next) = queue.0.pop_front() {
                    break next;
                }
                if queue.1 {
                    return;
                }
                queue = self.wake.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner);
            };
            drop(queue);
            next.run(&mut scratch);
            if let Some(waiting) = next.gate().completed() {
                pool.open(waiting);
            }
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        lock(&self.shared.queue).1 = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
