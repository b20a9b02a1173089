//! The lane of communication: a thread beside the pool that runs collectives while the pool computes, one after another in
//! the order in which steps come to them. No thread of the pool waits in a collective: a launch that needs what one gives is
//! opened by whoever completes it.

use std::collections::VecDeque;

use crate::gate::Gate;
use crate::pool::PoolHandle;
use crate::scratch::Scratch;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, thread};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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
