//! Threads that run steps.
//!
//! A step is a list of launches, each cut into chunks. One word for each group of threads says which chunk of which launch
//! is next (`chunks.rs`), so a thread takes work with a single
//! compare-and-swap, and whoever finishes a launch's last chunk opens the
//! next launch. No thread is in charge: `n` threads are the caller that waits for a step and `n - 1` workers, and any of them
//! can join or leave at any moment. A thread without work spins for a moment, offers its core to others for a while, then
//! sleeps; nobody is woken for steps so small that one thread is quickest.
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

mod chunks;

use crate::gate::{Gate, Waiting};
use crate::placement::Placement;
use crate::scratch::Scratch;
use crate::sync::thread::JoinHandle;
use crate::sync::{
    Arc, AtomicBool, AtomicPtr, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering,
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

pub(crate) use chunks::MAX_CHUNKS;
use chunks::OpenChunks;

/// How long a thread looks for work before it lets others have its core.
#[cfg(not(ridge_loom))]
const SPIN: Duration = Duration::from_micros(50);

/// How long it looks for work before it sleeps. To wake many threads takes longer than most launches, so they stay awake
/// for launches of a single chunk and for what the host does between two steps.
#[cfg(not(ridge_loom))]
const AWAKE: Duration = Duration::from_micros(400);

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
    /// The launch that is open. Chunks all taken: nothing to do.
    open: OpenChunks,
    /// The job that the open launch belongs to. Stable while any of its chunks is taken and unfinished.
    job: AtomicPtr<PoolJob>,
    /// The job submitted last, null when all are finished. Each job in the list is kept alive by a reference of its own.
    last: AtomicPtr<PoolJob>,
    /// Threads asleep, and those of them that are callers, who must hear of a job's end.
    sleepers: AtomicUsize,
    sleeping_callers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    closing: AtomicBool,
    placement: Placement,
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
    /// A pool of the threads of `placement`. The caller's is the first of them, which is not bound, unless they are all the
    /// pool's own, which then run what is submitted whether or not anybody waits.
    pub(crate) fn new(placement: Placement, own: bool) -> std::io::Result<Self> {
        let threads = placement.threads();
        let shared = Arc::new(PoolState {
            open: OpenChunks::new(placement.nodes().map(|node| node.len())),
            job: AtomicPtr::new(null_mut()),
            last: AtomicPtr::new(null_mut()),
            sleepers: AtomicUsize::new(0),
            sleeping_callers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            closing: AtomicBool::new(false),
            placement,
        });
        let workers = (usize::from(!own)..threads)
            .map(|i| {
                let shared = Arc::clone(&shared);
                thread::Builder::new().name(format!("ridge-cpu-{i}")).spawn(move || {
                    shared.placement.bind(i);
                    shared.work(&Until::Closing, shared.open.group_of(i));
                })
            })
            .collect::<std::io::Result<_>>()?;
        Ok(Self { shared, workers, own })
    }

    pub(crate) fn threads(&self) -> usize {
        self.shared.placement.threads()
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.shared.placement
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
            self.shared.work(&Until::Finished(job), 0);
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

impl PoolState {
    /// Runs chunks until `until` has come, those of a group of threads first.
    fn work(&self, until: &Until<'_>, group: usize) {
        SCRATCH.with(|scratch| {
            let scratch = &mut *scratch.borrow_mut();
            while !self.done(until) {
                if !self.take_one(group, scratch) {
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
    fn take_one(&self, group: usize, scratch: &mut Scratch) -> bool {
        let Some(taken) = self.open.take(group) else { return false };
        let launch = taken.launch;
        // SAFETY: a chunk of this job's open launch is ours and unfinished, so the job cannot finish and `job` cannot
        // change before it is; the queue's reference keeps it alive until `finish`.
        let job = unsafe { &*self.job.load(Ordering::Acquire) };
        let is_only = job.steps.chunks(launch) == 1;
        // Launches of one chunk that follow one such are not opened: nobody could share them.
        let mut last = launch;
        let run = || {
            job.steps.run(launch, taken.chunk, scratch);
            let is_open = |launch| job.steps.gate(launch).is_none_or(|(gate, after)| gate.is_open(after));
            while is_only && last + 1 < job.steps.launches() && job.steps.chunks(last + 1) == 1 && is_open(last + 1) {
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
        if is_only || self.open.finish(taken) {
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
        // Sequentially consistent with the look at `sleepers`: either we see a sleeper or it sees the launch.
        self.open.open(launch, chunks);
        order_sequentially_consistent_accesses();
        if chunks > 1 {
            self.wake_all();
        }
    }

    fn finish(&self, job: &PoolJob) {
        let this = std::ptr::from_ref(job).cast_mut();
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

    /// Is there something to do or to return for?
    fn wanted(&self, until: &Until<'_>) -> bool {
        !matches!(until, Until::Only(_)) && self.open.has_chunk() || self.done(until)
    }

    /// Stays awake for a moment. Gives whether there is something to do or to return for.
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
            match start.elapsed() {
                awake if awake > AWAKE => return false,
                awake if awake > SPIN => std::thread::yield_now(),
                _ => {}
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
