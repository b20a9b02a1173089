//! The order of the steps of one device, and the effect of a failed step on later ones. Backends share it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::error::{Result, RuntimeError};

/// Numbers the steps of a device in the order of submission.
///
/// A step that is *held* waits for its late inputs; nothing is queued behind it before it is released. A step that failed
/// fails those submitted before somebody learnt of the failure.
#[derive(Debug, Default)]
pub struct StepOrder {
    state: Mutex<OrderState>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct OrderState {
    /// Steps submitted so far.
    submitted: u64,
    /// The step that is held, and the thread that submitted it.
    held: Option<(u64, ThreadId)>,
    failure: Option<StepFailure>,
}

#[derive(Debug)]
struct StepFailure {
    step: u64,
    why: String,
    /// The last step that fails with it; unknown until the failure was reported.
    until: Option<u64>,
}

impl StepOrder {
    /// Waits while a step of another thread is held.
    fn free(&self) -> Result<MutexGuard<'_, OrderState>> {
        let mut state = self.lock();
        while let Some((_, thread)) = state.held {
            if thread == thread::current().id() {
                let why = "a step that was submitted before waits for its late inputs; release it first".into();
                return Err(RuntimeError::Argument { kind: "step", name: "submit".into(), why });
            }
            state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state)
    }

    fn lock(&self) -> MutexGuard<'_, OrderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers the next step and queues it with `queue`; with `held`, nothing else is queued before
    /// [`release`](Self::release). Steps are queued in the order of their numbers. Waits while a step that another thread
    /// submitted is held.
    ///
    /// # Errors
    /// When a step that this thread submitted is held, or that of `queue`: the step is then neither queued nor held.
    pub fn submit(&self, held: bool, queue: impl FnOnce(u64) -> Result<()>) -> Result<u64> {
        let mut state = self.free()?;
        let number = state.submitted + 1;
        queue(number)?;
        state.submitted = number;
        state.held = held.then(|| (number, thread::current().id()));
        Ok(number)
    }

    /// Returns once no step is held, for accesses to memory that steps use; see [`submit`](Self::submit).
    ///
    /// # Errors
    /// When a step that this thread submitted is held.
    pub fn wait_released(&self) -> Result<()> {
        self.free().map(drop)
    }

    /// Queues the rest of step `number` with `queue`, behind which others may be queued then, whether or not it fails.
    ///
    /// # Errors
    /// That of `queue`.
    pub fn release(&self, number: u64, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.lock();
        let outcome = queue();
        if state.held.is_some_and(|(held, _)| held == number) {
            state.held = None;
            self.released.notify_all();
        }
        outcome
    }

    /// Why step `number` must not run or does not count: the failure of a step before it.
    pub fn failed_before(&self, number: u64) -> Option<String> {
        let state = self.lock();
        let failure = state.failure.as_ref()?;
        let concerns = number > failure.step && failure.until.is_none_or(|until| number <= until);
        concerns.then(|| format!("a step submitted before it failed: {}", failure.why))
    }

    /// Step `number` failed by itself.
    pub fn failed(&self, number: u64, why: &str) {
        let mut state = self.lock();
        if state.failure.as_ref().is_none_or(|failure| failure.until.is_some_and(|until| number > until)) {
            state.failure = Some(StepFailure { step: number, why: why.to_owned(), until: None });
        }
    }

    /// Whoever submitted step `number` learns of its failure: steps submitted from now on do not fail with it.
    pub fn reported(&self, number: u64) {
        let mut state = self.lock();
        let submitted = state.submitted;
        if let Some(failure) = state.failure.as_mut().filter(|failure| failure.step == number) {
            failure.until.get_or_insert(submitted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submit(order: &StepOrder, held: bool) -> u64 {
        order.submit(held, |_| Ok(())).expect("is queued")
    }

    #[test]
    fn a_failure_concerns_the_steps_in_flight_behind_it() {
        let order = StepOrder::default();
        let [before, failing, behind] = [(); 3].map(|()| submit(&order, false));
        order.failed(failing, "out of paper");
        assert_eq!((order.failed_before(before), order.failed_before(failing)), (None, None));
        // Nobody knows of the failure yet.
        let later = submit(&order, false);
        order.reported(failing);
        order.reported(failing);
        let next = submit(&order, false);
        for step in [behind, later] {
            assert!(order.failed_before(step).is_some_and(|why| why.ends_with("failed: out of paper")));
        }
        assert_eq!(order.failed_before(next), None);
        order.failed(next, "out of ink");
        assert!(order.failed_before(next + 1).is_some_and(|why| why.ends_with("out of ink")));
    }

    #[test]
    fn nothing_is_queued_behind_a_held_step_before_it_is_released() {
        let order = StepOrder::default();
        let held = submit(&order, true);
        assert!(order.submit(false, |_| Ok(())).is_err_and(|e| e.to_string().contains("release it first")));
        assert!(order.wait_released().is_err());
        // Another thread waits.
        let mut released = false;
        thread::scope(|scope| {
            let other = scope.spawn(|| submit(&order, false));
            order
                .release(held, || {
                    released = true;
                    Ok(())
                })
                .expect("is queued");
            assert_eq!(other.join().expect("is queued"), held + 1);
        });
        assert!(released);
        assert_eq!(submit(&order, false), held + 2);
    }

    #[test]
    fn a_step_that_is_not_queued_has_no_number() {
        let order = StepOrder::default();
        let refused = || RuntimeError::Device { backend: "test", why: "full".into() };
        assert!(order.submit(true, |_| Err(refused())).is_err());
        assert_eq!(submit(&order, false), 1);
    }
}
