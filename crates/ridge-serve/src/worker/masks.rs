//! Threads for masks of grammars that take long.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use ridge_engine::service::Executor;

/// Threads: few, since they take cores from the steps, and more than one, so that one costly grammar does not hold up
/// all others.
const THREADS: usize = 2;

/// Threads that end with the last clone of what is returned.
///
/// # Errors
/// When the system gives no thread.
pub(super) fn executor() -> io::Result<Executor> {
    let (jobs, queue) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
    let queue = Arc::new(Mutex::new(queue));
    for _ in 0..THREADS {
        let queue = Arc::clone(&queue);
        thread::Builder::new().name("masks".to_owned()).spawn(move || {
            loop {
                let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(job) = job else { return };
                // An answer whose job panics is failed by the service when its time is over.
                let _ = catch_unwind(AssertUnwindSafe(job));
            }
        })?;
    }
    // Jobs that no thread takes any more are dropped.
    Ok(Arc::new(move |job| drop(jobs.send(job))))
}
