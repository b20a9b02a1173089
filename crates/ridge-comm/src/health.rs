//! What is known of a group's ranks: whether it can continue, and how far this rank is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ridge_runtime::CollectiveError;

/// Shared by whoever exchanges and whoever watches the ranks. The first failure stays.
#[derive(Debug, Default)]
pub(crate) struct Health {
    failed: AtomicBool,
    failure: Mutex<Option<CollectiveError>>,
    /// Exchanges begun by this rank, and whether it is within the last of them.
    begun: AtomicU64,
    within: AtomicBool,
}

impl Health {
    /// The group is of no use from now on. Gives the reason that counts: the first.
    pub(crate) fn fail(&self, error: CollectiveError) -> CollectiveError {
        let first = self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error).clone();
        self.failed.store(true, Ordering::Release);
        first
    }

    /// # Errors
    /// When the group has failed.
    pub(crate) fn check(&self) -> Result<(), CollectiveError> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Err(failure.unwrap_or_else(|| CollectiveError::Aborted { why: "the group was aborted".into() }))
    }

    /// Numbers the next exchange, from 1.
    pub(crate) fn begin(&self) -> u64 {
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        self.within.store(true, Ordering::Release);
        number
    }

    /// The exchange is over.
    pub(crate) fn end(&self) {
        self.within.store(false, Ordering::Release);
    }

    /// Exchanges begun, and whether this rank is within the last.
    pub(crate) fn progress(&self) -> (u64, bool) {
        let within = self.within.load(Ordering::Acquire);
        (self.begun.load(Ordering::Relaxed), within)
    }

    /// Waits a moment for somebody who may know better why a rank is gone. Gives `guess` if nobody does.
    pub(crate) fn verdict(&self, guess: CollectiveError) -> CollectiveError {
        const PATIENCE: Duration = Duration::from_millis(400);
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Err(error) = self.check() {
                return error;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.fail(guess)
    }
}

/// Waits that spin for a moment, then give the processor away for longer and longer.
pub(crate) struct Backoff {
    started: Option<Instant>,
}

impl Backoff {
    /// How long is spun, and how long the processor is given to others but not left.
    const SPIN: Duration = Duration::from_micros(20);
    const YIELD: Duration = Duration::from_micros(200);
    const SLEEP: Duration = Duration::from_micros(50);
    const SLEEP_LONG: Duration = Duration::from_millis(1);

    pub(crate) fn new() -> Self {
        Self { started: None }
    }

    /// Something happened.
    pub(crate) fn reset(&mut self) {
        self.started = None;
    }

    /// Nothing happened: waits a little.
    pub(crate) fn wait(&mut self) {
        let waited = self.started.get_or_insert_with(Instant::now).elapsed();
        if waited < Self::SPIN {
            (0..32).for_each(|_| std::hint::spin_loop());
        } else if waited < Self::YIELD {
            std::thread::yield_now();
        } else if waited < 100 * Self::YIELD {
            std::thread::sleep(Self::SLEEP);
        } else {
            std::thread::sleep(Self::SLEEP_LONG);
        }
    }
}
