//! Threads that run steps.
//!
//! A step is a list of launches, each cut into chunks. One word says which chunk of which launch is next, so a thread
//! takes work with a single compare-and-swap, and whoever finishes a launch's last chunk opens the next launch. No
//! thread is in charge: `n` threads are the caller that waits for a step and `n - 1` workers, and any of them can join
//! or leave at any moment. A thread without work spins for a moment, then sleeps; nobody is woken for steps so small
//! that one thread is quickest.
//!
//! Steps run one after another in the order of submission. Those that wait form a list in which each knows the next
//! (the queue of Mellor-Crummey and Scott 1991), so submitting takes no lock either.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::kernel::Scratch;

/// Work that the pool runs: launches in order, each of a number of chunks in any order.
pub(crate) trait Steps: Send + Sync {
    /// Number of launches.
    fn launches(&self) -> usize;
    /// Chunks of launch `launch`, from 1 to [`MAX_CHUNKS`].
    fn chunks(&self, launch: usize) -> u16;
    /// Runs one chunk.
    fn run(&self, launch: usize, chunk: u16, scratch: &mut Scratch);
}

/// The most chunks of a launch.
pub(crate) const MAX_CHUNKS: u16 = u16::MAX - 1;

/// How long a thread looks for work before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// A step in flight.
pub(crate) struct Job {
    steps: Box<dyn Steps>,
    /// Is any launch cut into several chunks?
    parallel: bool,
    finished: AtomicBool,
    /// The job submitted after this one, while this one is queued or running.
    next: AtomicPtr<Job>,
    failed: AtomicBool,
    failure: Mutex<Option<String>>,
}

impl Job {
    pub(crate) fn new(steps: Box<dyn Steps>) -> Self {
        let parallel = (0..steps.launches()).any(|l| steps.chunks(l) > 1);
        Self {
            steps,
            parallel,
            finished: AtomicBool::new(true),
            next: AtomicPtr::new(null_mut()),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Is no step of it queued or running?
    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// What a kernel that panicked said.
    pub(crate) fn failure(&self) -> Option<String> {
        if self.failed.load(Ordering::Acquire) { lock(&self.failure).clone() } else { None }
    }
}

/// The pool's threads, with the caller's as one of them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    /// `launch << 32 | chunks << 16 | next chunk` of the launch that is open. Chunks all taken: nothing to do.
    open: AtomicU64,
    /// The job that the open launch belongs to. Stable while any of its chunks is taken and unfinished.
    job: AtomicPtr<Job>,
    /// Chunks of the open launch that are not finished.
    left: AtomicU32,
    /// The job submitted last, null when all are finished. Each job in the list is kept alive by a reference of its own.
    last: AtomicPtr<Job>,
    /// Threads asleep, and those of them that are callers, who must hear of a job's end.
    sleepers: AtomicUsize,
    sleeping_callers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    closing: AtomicBool,
    threads: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::default();
}

impl Pool {
    /// A pool of `threads` threads, the caller's included.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            open: AtomicU64::new(0),
            job: AtomicPtr::new(null_mut()),
            left: AtomicU32::new(0),
            last: AtomicPtr::new(null_mut()),
            sleepers: AtomicUsize::new(0),
            sleeping_callers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            closing: AtomicBool::new(false),
            threads,
        });
        let workers = (1..threads)
            .map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new().name(format!("ridge-cpu-{i}")).spawn(move || shared.work(&Until::Closing))
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Self { shared, workers })
    }

    pub(crate) fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Queues a step of `job`, which must be finished.
    pub(crate) fn submit(&self, job: &Arc<Job>) {
        debug_assert!(job.is_finished(), "a job is queued once at a time");
        if job.steps.launches() == 0 {
            return;
        }
        job.finished.store(false, Ordering::Relaxed);
        job.next.store(null_mut(), Ordering::Relaxed);
        let this = Arc::into_raw(Arc::clone(job)).cast_mut();
        let before = self.shared.last.swap(this, Ordering::AcqRel);
        if before.is_null() {
            self.shared.start(this);
        } else {
            // SAFETY: a job that is not the last one anymore stays until it has seen the one after it.
            unsafe { &*before }.next.store(this, Ordering::Release);
        }
        if job.parallel {
            self.shared.wake_all();
        }
    }

    /// Has `job` finished? Where no worker would run it, runs it now.
    pub(crate) fn poll(&self, job: &Job) -> bool {
        if !job.is_finished() && (self.workers.is_empty() || !job.parallel) {
            self.wait(job);
        }
        job.is_finished()
    }

    /// Takes part until `job` has finished.
    pub(crate) fn wait(&self, job: &Job) {
        if !job.is_finished() {
            self.shared.work(&Until::Finished(job));
            // What is left for others must not wait for the next caller.
            if !self.shared.last.load(Ordering::Acquire).is_null() {
                self.shared.wake_all();
            }
        }
    }

    /// Takes part until every job submitted has finished.
    pub(crate) fn drain(&self) {
        self.shared.work(&Until::Idle);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// What a thread runs chunks for.
enum Until<'a> {
    /// This job's end.
    Finished(&'a Job),
    /// The end of all jobs.
    Idle,
    /// The end of the pool.
    Closing,
}

fn pack(launch: usize, chunks: u16, next: u16) -> u64 {
    (launch as u64) << 32 | u64::from(chunks) << 16 | u64::from(next)
}

impl Shared {
    /// Runs chunks until `until` has come.
    fn work(&self, until: &Until<'_>) {
        SCRATCH.with_borrow_mut(|scratch| {
            while !self.done(until) {
                if !self.take_one(scratch) {
                    self.idle(until);
                }
            }
        });
    }

    fn done(&self, until: &Until<'_>) -> bool {
        match until {
            Until::Finished(job) => job.is_finished(),
            Until::Idle => self.last.load(Ordering::Acquire).is_null(),
            Until::Closing => self.closing.load(Ordering::Acquire),
        }
    }

    /// Takes and runs one chunk, if there is one.
    fn take_one(&self, scratch: &mut Scratch) -> bool {
        let open = self.open.load(Ordering::Acquire);
        let (launch, chunks, next) = ((open >> 32) as usize, (open >> 16) as u16, open as u16);
        if next >= chunks || self.open.compare_exchange(open, open + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return next < chunks;
        }
        // SAFETY: a chunk of this job's open launch is ours and unfinished, so the job cannot finish and `job` cannot
        // change before it is; the queue's reference keeps it alive until `finish`.
        let job = unsafe { &*self.job.load(Ordering::Acquire) };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job.steps.run(launch, next, scratch))) {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a kernel panicked");
            *lock(&job.failure) = Some(said.into());
            job.failed.store(true, Ordering::Release);
        }
        // A launch of one chunk has nobody to wait for.
        if chunks == 1 || self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.advance(job, launch);
        }
        true
    }

    /// Opens what follows a launch whose chunks are all finished.
    fn advance(&self, job: &Job, launch: usize) {
        if launch + 1 < job.steps.launches() {
            self.open(job, launch + 1);
        } else {
            self.finish(job);
        }
    }

    fn open(&self, job: &Job, launch: usize) {
        let chunks = job.steps.chunks(launch);
        self.left.store(u32::from(chunks), Ordering::Relaxed);
        // Sequentially consistent with the look at `sleepers`: either we see a sleeper or it sees the launch.
        self.open.store(pack(launch, chunks, 0), Ordering::SeqCst);
        if chunks > 1 {
            self.wake_all();
        }
    }

    fn finish(&self, job: &Job) {
        let this = std::ptr::from_ref(job).cast_mut();
        self.open.store(0, Ordering::SeqCst);
        let next = if self.last.compare_exchange(this, null_mut(), Ordering::AcqRel, Ordering::Acquire).is_ok() {
            null_mut()
        } else {
            // Somebody is after us, and may be about to say so.
            loop {
                let next = job.next.load(Ordering::Acquire);
                if !next.is_null() {
                    break next;
                }
                std::hint::spin_loop();
            }
        };
        job.finished.store(true, Ordering::SeqCst);
        if !next.is_null() {
            self.start(next);
        }
        if self.sleeping_callers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
        // SAFETY: the reference that `submit` put into the list; nobody finds the job there anymore.
        drop(unsafe { Arc::from_raw(this.cast_const()) });
    }

    /// Opens the first launch of a job of the list, when no other job is running.
    fn start(&self, job: *mut Job) {
        self.job.store(job, Ordering::Release);
        // SAFETY: the list holds a reference until the job is finished, which it cannot be before it is opened.
        self.open(unsafe { &*job }, 0);
    }

    fn wake_all(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&self.sleep);
            self.wake.notify_all();
        }
    }

    fn has_chunk(&self) -> bool {
        let open = self.open.load(Ordering::SeqCst);
        (open as u16) < (open >> 16) as u16
    }

    /// Spins for a moment, then sleeps until there is something to do or to return for.
    fn idle(&self, until: &Until<'_>) {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                if self.has_chunk() || self.done(until) {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN {
                break;
            }
        }
        let caller = usize::from(!matches!(until, Until::Closing));
        let guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        self.sleeping_callers.fetch_add(caller, Ordering::SeqCst);
        let nothing = |_: &mut ()| !self.has_chunk() && !self.done(until);
        drop(self.wake.wait_while(guard, nothing).unwrap_or_else(PoisonError::into_inner));
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.sleeping_callers.fetch_sub(caller, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks, while it runs, that every chunk runs once and after all chunks of the launch before.
    struct Checked {
        chunks: Vec<u16>,
        /// Chunks that have run, by launch, over all runs.
        ran: Arc<Vec<AtomicU32>>,
        wrong: Arc<AtomicBool>,
        runs: Arc<AtomicU32>,
        slow: bool,
    }

    impl Steps for Checked {
        fn launches(&self) -> usize {
            self.chunks.len()
        }

        fn chunks(&self, launch: usize) -> u16 {
            self.chunks[launch]
        }

        fn run(&self, launch: usize, chunk: u16, _scratch: &mut Scratch) {
            if launch == 0 && chunk == 0 {
                self.runs.fetch_add(1, Ordering::SeqCst);
            }
            let run = self.runs.load(Ordering::SeqCst);
            if launch > 0 {
                let before = self.ran[launch - 1].load(Ordering::SeqCst);
                if before != run * u32::from(self.chunks[launch - 1]) {
                    self.wrong.store(true, Ordering::SeqCst);
                }
            }
            if self.slow && chunk % 3 == 1 {
                std::thread::sleep(Duration::from_micros(80));
            }
            self.ran[launch].fetch_add(1, Ordering::SeqCst);
        }
    }

    fn job(chunks: &[u16], slow: bool) -> (Arc<Job>, impl Fn(u32) + use<>) {
        let ran: Arc<Vec<AtomicU32>> = Arc::new(chunks.iter().map(|_| AtomicU32::new(0)).collect());
        let (wrong, runs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let steps = Checked {
            chunks: chunks.to_vec(),
            ran: Arc::clone(&ran),
            wrong: Arc::clone(&wrong),
            runs: Arc::clone(&runs),
            slow,
        };
        let chunks = chunks.to_vec();
        let check = move |expected: u32| {
            assert!(!wrong.load(Ordering::SeqCst), "a chunk ran before the launch before had ended");
            assert_eq!(runs.load(Ordering::SeqCst), expected);
            for (launch, n) in chunks.iter().enumerate() {
                assert_eq!(ran[launch].load(Ordering::SeqCst), expected * u32::from(*n), "launch {launch}");
            }
        };
        (Arc::new(Job::new(Box::new(steps))), check)
    }

    #[test]
    fn chunks_run_once_and_in_order_of_their_launches() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads).unwrap();
            let (job, check) = job(&[1, 5, 1, 1, 17, 2, 1], false);
            for _ in 0..2000 {
                pool.submit(&job);
                pool.wait(&job);
            }
            check(2000);
        }
    }

    #[test]
    fn sleeping_threads_are_woken_for_work_and_for_the_end() {
        let pool = Pool::new(3).unwrap();
        let (job, check) = job(&[4, 1, 6], true);
        for i in 0..60 {
            if i % 7 == 0 {
                std::thread::sleep(Duration::from_micros(300));
            }
            pool.submit(&job);
            pool.wait(&job);
        }
        check(60);
    }

    #[test]
    fn queued_jobs_run_in_order_whoever_waits_first() {
        for threads in [1, 2, 4] {
            let pool = Pool::new(threads).unwrap();
            let jobs: Vec<_> = (0..5).map(|i| job(&[1, 3 + i, 1], false)).collect();
            for _ in 0..300 {
                jobs.iter().for_each(|(j, _)| pool.submit(j));
                // Waiting for the last means that all have finished.
                pool.wait(&jobs[4].0);
                assert!(jobs.iter().all(|(j, _)| j.is_finished()));
            }
            jobs.iter().for_each(|(_, check)| check(300));
        }
    }

    #[test]
    fn many_callers_share_a_pool() {
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            std::thread::scope(|scope| {
                for i in 0..4 {
                    let pool = &pool;
                    scope.spawn(move || {
                        let (job, check) = job(&[2, 1, 3 + i], i == 2);
                        let rounds = if i == 2 { 100 } else { 1000 };
                        for round in 0..rounds {
                            pool.submit(&job);
                            if round % 5 == 0 {
                                while !pool.poll(&job) {
                                    std::thread::yield_now();
                                }
                            }
                            pool.wait(&job);
                        }
                        check(rounds);
                    });
                }
            });
            pool.drain();
        }
    }

    #[test]
    fn a_step_completes_without_anybody_waiting() {
        let pool = Pool::new(2).unwrap();
        let (job, check) = job(&[2, 2, 1], false);
        pool.submit(&job);
        let start = Instant::now();
        while !job.is_finished() {
            assert!(start.elapsed() < Duration::from_secs(10), "nobody ran the step");
            std::thread::sleep(Duration::from_millis(1));
        }
        check(1);
    }

    #[test]
    fn a_panic_of_a_kernel_is_kept_and_does_not_hang() {
        struct Panics;
        impl Steps for Panics {
            fn launches(&self) -> usize {
                2
            }
            fn chunks(&self, _launch: usize) -> u16 {
                3
            }
            fn run(&self, launch: usize, chunk: u16, _scratch: &mut Scratch) {
                assert!(launch != 0 || chunk != 1, "the kernel said so");
            }
        }
        let pool = Pool::new(2).unwrap();
        let job = Arc::new(Job::new(Box::new(Panics)));
        pool.submit(&job);
        pool.wait(&job);
        assert_eq!(job.failure().as_deref(), Some("the kernel said so"));
    }
}
