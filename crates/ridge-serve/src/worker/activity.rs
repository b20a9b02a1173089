//! How many jobs there are and when the engine last made progress, from which admission and health are decided.
//!
//! Any thread may enter, leave or ask, and none waits. `jobs` is written with release and read with acquire ordering, so
//! whoever sees the first job of a busy period also sees the progress that was recorded before it.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

use crate::sync::{AtomicU64, AtomicUsize};

/// Jobs that run or wait, and the last sign of progress. Times count from the server's start.
pub(super) struct Activity {
    jobs: AtomicUsize,
    progress_millis: AtomicU64,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self { jobs: AtomicUsize::new(0), progress_millis: AtomicU64::new(0) }
    }

    /// Counts one job more, unless there are `max_jobs`.
    ///
    /// # Errors
    /// The number of jobs, when it has reached `max_jobs`.
    pub(super) fn enter(&self, now: Duration, max_jobs: usize) -> Result<(), usize> {
        if self.jobs.load(Acquire) == 0 {
            // The time without any work is no stall. Recorded before the job can be seen.
            self.progressed(now);
        }
        self.jobs.fetch_update(AcqRel, Acquire, |jobs| (jobs < max_jobs).then_some(jobs + 1)).map(|_| ())
    }

    /// Counts one job less, of those that entered.
    pub(super) fn leave(&self) {
        self.jobs.fetch_sub(1, Release);
    }

    /// Jobs that have entered and not left.
    pub(super) fn jobs(&self) -> usize {
        self.jobs.load(Acquire)
    }

    /// A step has ended, or there is nothing to do.
    pub(super) fn progressed(&self, now: Duration) {
        self.progress_millis.store(now.as_millis() as u64, Relaxed);
    }

    /// The time since the last progress, while there are jobs.
    pub(super) fn waiting_for(&self, now: impl FnOnce() -> Duration) -> Option<Duration> {
        // Jobs first: progress that is read after them is no older than they are.
        if self.jobs() == 0 {
            return None;
        }
        let progress = Duration::from_millis(self.progress_millis.load(Relaxed));
        Some(now().saturating_sub(progress))
    }
}

#[cfg(test)]
impl Activity {
    /// As if nothing had happened since the server's start.
    pub(super) fn forget_progress(&self) {
        self.progress_millis.store(0, Relaxed);
    }
}

/// Models of all interleavings and of the reorderings that the orderings above allow.
#[cfg(all(test, ridge_loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    const LATE: Duration = Duration::from_secs(100);

    #[test]
    fn loom_first_job_after_idleness_is_never_seen_without_progress() {
        loom::model(|| {
            let activity = Arc::new(Activity::new());
            let enter = |activity: &Arc<Activity>| {
                let activity = Arc::clone(activity);
                thread::spawn(move || {
                    activity.enter(LATE, 2).unwrap();
                    activity.leave();
                })
            };
            let threads = [enter(&activity), enter(&activity)];
            let waiting = activity.waiting_for(|| LATE);
            assert!(waiting.is_none_or(|time| time.is_zero()), "{waiting:?}");
            threads.map(|thread| thread.join().unwrap());
            assert_eq!(activity.jobs(), 0);
        });
    }

    #[test]
    fn loom_jobs_never_exceed_their_limit_and_a_free_place_is_given() {
        loom::model(|| {
            let activity = Arc::new(Activity::new());
            let other = Arc::clone(&activity);
            let thread = thread::spawn(move || other.enter(LATE, 1));
            let own = activity.enter(LATE, 1);
            let theirs = thread.join().unwrap();
            // Nobody leaves, so exactly one of the two is admitted.
            assert!(own.is_ok() != theirs.is_ok());
            assert_eq!(own.and(theirs), Err(1));
            activity.leave();
            assert_eq!(activity.enter(LATE, 1), Ok(()));
        });
    }
}
