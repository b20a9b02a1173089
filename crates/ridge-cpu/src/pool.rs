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

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::PoisonError;
#[cfg(not(ridge_loom))]
use std::time::{Duration, Instant};

use crate::gate::{Gate, Waiting};
use crate::scratch::Scratch;
use crate::sync::thread::JoinHandle;
use crate::sync::{
    Arc, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering,
    order_sequentially_consistent_accesses, spin_loop, thread, thread_local,
};

/// Work that the pool runs: launches in order, each of a number of chunks in any order.
pub(crate) trait LaunchSequence: Send + Sync {
    /// Number of launches.
    fn launches(&self) -> usize;
    /// Chunks of launch `launch`, from 1 to [`MAX_CHUNKS`].
    fn chunks(&self, launch: usize) -> u16;
    /// Runs one chunk.
    fn run(&self, launch: usize, chunk: u16, scratch: &mut Scratch);
    /// A chunk panicked, with these words.
    fn failed(&self, _why: &str) {}
    /// What `launch` waits for beside the launches before it: so many collectives.
    fn gate(&self, _launch: usize) -> Option<(&Gate, usize)> {
        None
    }
}

/// The most chunks of a launch.
pub(crate) const MAX_CHUNKS: u16 = u16::MAX - 1;

/// How long a thread looks for work before it sleeps.
#[cfg(not(ridge_loom))]
const SPIN: Duration = Duration::from_micros(50);

/// A step in flight.
pub(crate) struct PoolJob {
    steps: Box<dyn LaunchSequence>,
    /// Is any launch cut into several chunks?
    parallel: bool,
    finished: AtomicBool,
    /// The job submitted after this one, while this one is queued or running.
    next: AtomicPtr<PoolJob>,
    failed: AtomicBool,
    failure: Mutex<Option<String>>,
}

impl PoolJob {
    pub(crate) fn new(steps: Box<dyn LaunchSequence>) -> Self {
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
        // Sequentially consistent, as is `closing` below: a thread looks at these after it has said that it
        // sleeps, and whoever changes them looks for sleepers afterwards. One of the two must see the other.
        self.finished.load(Ordering::SeqCst)
    }

    /// What a kernel that panicked said.
    pub(crate) fn failure(&self) -> Option<String> {
        if self.failed.load(Ordering::Acquire) { lock(&self.failure).clone() } else { None }
    }
}

/// The pool's threads, with the caller's as one of them or not.
pub(crate) struct ThreadPool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// Are all threads the pool's own?
    own: bool,
}

struct PoolState {
    /// `launch << 32 | chunks << 16 | next chunk` of the launch that is open. Chunks all taken: nothing to do.
    open: AtomicU64,
    /// The job that the open launch belongs to. Stable while any of its chunks is taken and unfinished.
    job: AtomicPtr<PoolJob>,
    /// Chunks of the open launch that are not finished.
    left: AtomicU32,
    /// The job submitted last, null when all are finished. Each job in the list is kept alive by a reference of its own.
    last: AtomicPtr<PoolJob>,
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

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<String>().map(String::as_str);
    said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a kernel panicked").to_owned()
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl ThreadPool {
    /// A pool of `threads` threads. The caller's is one of them unless they are all the pool's own, which then run what
    /// is submitted whether or not anybody waits.
    pub(crate) fn new(threads: usize, own: bool) -> std::io::Result<Self> {
        let shared = Arc::new(PoolState {
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
        let workers = (usize::from(!own)..threads)
            .map(|i| {
                let shared = Arc::clone(&shared);
                thread::Builder::new().name(format!("ridge-cpu-{i}")).spawn(move || shared.work(&Until::Closing))
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Self { shared, workers, own })
    }

    pub(crate) fn threads(&self) -> usize {
        self.shared.threads
    }

    /// For the lane of communication.
    pub(crate) fn handle(&self) -> PoolHandle {
        PoolHandle(Arc::clone(&self.shared))
    }

    /// Queues a step of `job`, which must be finished.
    pub(crate) fn submit(&self, job: &Arc<PoolJob>) {
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
        if job.parallel || self.own {
            self.shared.wake_all();
        }
    }

    /// Has `job` finished? Where no worker would run it, runs it now.
    pub(crate) fn poll(&self, job: &PoolJob) -> bool {
        if !self.own && !job.is_finished() && (self.workers.is_empty() || !job.parallel) {
            self.wait(job);
        }
        job.is_finished()
    }

    /// Takes part until `job` has finished, or waits where all threads are the pool's own.
    pub(crate) fn wait(&self, job: &PoolJob) {
        if self.own {
            while !job.is_finished() {
                self.shared.idle(&Until::Only(job));
            }
        } else if !job.is_finished() {
            self.shared.work(&Until::Finished(job));
            // What is left for others must not wait for the next caller.
            if !self.shared.last.load(Ordering::Acquire).is_null() {
                self.shared.wake_all();
            }
        }
    }
}

/// What opens launches of a pool from outside.
#[derive(Clone)]
pub(crate) struct PoolHandle(Arc<PoolState>);

impl PoolHandle {
    /// Opens a launch that has waited for collectives. Nobody runs any, so all are woken.
    pub(crate) fn open(&self, waiting: Waiting) {
        // SAFETY: the pool's list holds a reference until the job is finished, which it cannot be before this launch.
        self.0.open(unsafe { &*waiting.job.cast::<PoolJob>() }, waiting.launch);
        self.0.wake_all();
    }
}

impl Drop for ThreadPool {
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
    Finished(&'a PoolJob),
    /// Nothing: it only waits for this job's end.
    Only(&'a PoolJob),
    /// The end of the pool.
    Closing,
}

fn pack(launch: usize, chunks: u16, next: u16) -> u64 {
    (launch as u64) << 32 | u64::from(chunks) << 16 | u64::from(next)
}

impl PoolState {
    /// Runs chunks until `until` has come.
    fn work(&self, until: &Until<'_>) {
        SCRATCH.with(|scratch| {
            let scratch = &mut *scratch.borrow_mut();
            while !self.done(until) {
                if !self.take_one(scratch) {
                    self.idle(until);
                }
            }
        });
    }

    fn done(&self, until: &Until<'_>) -> bool {
        match until {
            Until::Finished(job) | Until::Only(job) => job.is_finished(),
            Until::Closing => self.closing.load(Ordering::SeqCst),
        }
    }

    /// Takes and runs one chunk, or several launches that are of one chunk each, if there is one.
    fn take_one(&self, scratch: &mut Scratch) -> bool {
        let open = self.open.load(Ordering::Acquire);
        let (launch, chunks, next) = ((open >> 32) as usize, (open >> 16) as u16, open as u16);
        if next >= chunks || self.open.compare_exchange(open, open + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return next < chunks;
        }
        // SAFETY: a chunk of this job's open launch is ours and unfinished, so the job cannot finish and `job` cannot
        // change before it is; the queue's reference keeps it alive until `finish`.
        let job = unsafe { &*self.job.load(Ordering::Acquire) };
        // Launches of one chunk that follow one such are not opened: nobody could share them.
        let mut last = launch;
        let run = || {
            job.steps.run(launch, next, scratch);
            let is_open = |launch| job.steps.gate(launch).is_none_or(|(gate, after)| gate.is_open(after));
            while chunks == 1 && last + 1 < job.steps.launches() && job.steps.chunks(last + 1) == 1 && is_open(last + 1)
            {
                last += 1;
                job.steps.run(last, 0, scratch);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            let said = panic_message(&*panic);
            job.steps.failed(&said);
            *lock(&job.failure) = Some(said);
            job.failed.store(true, Ordering::Release);
        }
        // A launch of one chunk has nobody to wait for.
        if chunks == 1 || self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.advance(job, last);
        }
        true
    }

    /// Opens what follows a launch whose chunks are all finished.
    fn advance(&self, job: &PoolJob, launch: usize) {
        let next = launch + 1;
        if next < job.steps.launches() {
            // Whoever completes the collectives that the launch waits for opens it.
            if job.steps.gate(next).is_none_or(|(gate, after)| gate.pass(after, std::ptr::from_ref(job).cast(), next)) {
                self.open(job, next);
            }
        } else {
            self.finish(job);
        }
    }

    fn open(&self, job: &PoolJob, launch: usize) {
        let chunks = job.steps.chunks(launch);
        self.left.store(u32::from(chunks), Ordering::Relaxed);
        // Sequentially consistent with the look at `sleepers`: either we see a sleeper or it sees the launch.
        self.open.store(pack(launch, chunks, 0), Ordering::SeqCst);
        order_sequentially_consistent_accesses();
        if chunks > 1 {
            self.wake_all();
        }
    }

    fn finish(&self, job: &PoolJob) {
        let this = std::ptr::from_ref(job).cast_mut();
        self.open.store(0, Ordering::SeqCst);
        let next = if self.last.compare_exchange(this, null_mut(), Ordering::SeqCst, Ordering::Acquire).is_ok() {
            null_mut()
        } else {
            // Somebody is after us, and may be about to say so.
            loop {
                let next = job.next.load(Ordering::Acquire);
                if !next.is_null() {
                    break next;
                }
                spin_loop();
            }
        };
        job.finished.store(true, Ordering::SeqCst);
        if !next.is_null() {
            self.start(next);
        }
        order_sequentially_consistent_accesses();
        if self.sleeping_callers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
        // SAFETY: the reference that `submit` put into the list; nobody finds the job there anymore.
        drop(unsafe { Arc::from_raw(this.cast_const()) });
    }

    /// Opens the first launch of a job of the list, when no other job is running.
    fn start(&self, job: *mut PoolJob) {
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

    /// Is there something to do or to return for?
    fn wanted(&self, until: &Until<'_>) -> bool {
        !matches!(until, Until::Only(_)) && self.has_chunk() || self.done(until)
    }

    /// Spins for a moment. Gives whether there is something to do or to return for.
    #[cfg(not(ridge_loom))]
    fn spin(&self, until: &Until<'_>) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                if self.wanted(until) {
                    return true;
                }
                spin_loop();
            }
            if start.elapsed() > SPIN {
                return false;
            }
        }
    }

    /// A thread may always be too late to find work while it spins.
    #[cfg(ridge_loom)]
    #[allow(clippy::unused_self)] // as where it spins
    fn spin(&self, _until: &Until<'_>) -> bool {
        false
    }

    /// Spins for a moment, then sleeps until there is something to do or to return for.
    fn idle(&self, until: &Until<'_>) {
        if self.spin(until) {
            return;
        }
        let caller = usize::from(!matches!(until, Until::Closing));
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        self.sleeping_callers.fetch_add(caller, Ordering::SeqCst);
        order_sequentially_consistent_accesses();
        while !self.wanted(until) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.sleeping_callers.fetch_sub(caller, Ordering::SeqCst);
    }
}

#[cfg(all(test, ridge_loom))]
mod loom;
#[cfg(all(test, not(ridge_loom)))]
mod tests;
