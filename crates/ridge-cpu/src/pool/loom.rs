//! The pool's protocol under every order of its threads: each chunk runs once, a launch begins when the one before it has
//! ended, sleeping threads are woken, queued jobs run in order, and the pool shuts down.
//!
//! `RUSTFLAGS="--cfg ridge_loom" cargo test -p ridge-cpu --lib --profile loom --target-dir target/loom loom`

use super::*;

/// Counts chunks by launch, and checks that all chunks of the launches before have run.
struct CountedLaunches {
    chunks: Vec<u16>,
    /// Launches and chunks of the jobs before, which count together with these.
    before: (usize, usize),
    counts: std::sync::Arc<Counts>,
}

/// Chunks that have run. These are no part of the protocol, so that they need not be loom's, whose accesses would all be
/// tried in every order; only one thread runs at a time under loom.
#[derive(Default)]
struct Counts {
    ran: std::sync::Mutex<Vec<(usize, u16)>>,
    /// Was a launch begun before the one before it had ended?
    early: std::sync::atomic::AtomicBool,
}

impl LaunchSequence for CountedLaunches {
    fn launches(&self) -> usize {
        self.chunks.len()
    }

    fn chunks(&self, launch: usize) -> u16 {
        self.chunks[launch]
    }

    fn run(&self, launch: usize, chunk: u16, _scratch: &mut Scratch) {
        let mut ran = self.counts.ran.lock().unwrap();
        let before = self.before.1 + self.chunks[..launch].iter().map(|chunks| usize::from(*chunks)).sum::<usize>();
        let launch = self.before.0 + launch;
        if ran.iter().filter(|(of, _)| *of < launch).count() != before {
            self.counts.early.store(true, Ordering::SeqCst);
        }
        ran.push((launch, chunk));
    }
}

fn job(chunks: &[u16]) -> (Arc<PoolJob>, std::sync::Arc<Counts>) {
    let counts = std::sync::Arc::new(Counts::default());
    (job_after((0, 0), chunks, &counts), counts)
}

fn job_after(before: (usize, usize), chunks: &[u16], counts: &std::sync::Arc<Counts>) -> Arc<PoolJob> {
    let launches = CountedLaunches { chunks: chunks.to_vec(), before, counts: std::sync::Arc::clone(counts) };
    Arc::new(PoolJob::new(Box::new(launches)))
}

/// Requires that each chunk of each launch has run once, in the order of the launches.
fn check(job: &PoolJob, counts: &Counts, chunks: &[u16]) {
    assert!(job.is_finished() && job.failure().is_none());
    assert!(!counts.early.load(Ordering::SeqCst), "a launch began before the one before it had ended");
    let mut ran = counts.ran.lock().unwrap().clone();
    ran.sort_unstable();
    let all = chunks.iter().enumerate().flat_map(|(launch, chunks)| (0..*chunks).map(move |chunk| (launch, chunk)));
    assert_eq!(ran, all.collect::<Vec<_>>(), "every chunk runs once");
}

/// Tries every order with at most `preemptions` switches away from a thread that could continue.
fn model(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut builder = ::loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

#[test]
fn two_threads_run_every_chunk_once_and_launches_in_order() {
    model(2, || {
        let pool = ThreadPool::new(Placement::anywhere(2), false).unwrap();
        let (job, counts) = job(&[2, 2]);
        pool.submit(&job);
        pool.wait(&job);
        check(&job, &counts, &[2, 2]);
    });
}

#[test]
fn launches_of_one_chunk_are_run_between_others() {
    model(2, || {
        let pool = ThreadPool::new(Placement::anywhere(2), false).unwrap();
        let (job, counts) = job(&[2, 1, 2]);
        pool.submit(&job);
        pool.wait(&job);
        check(&job, &counts, &[2, 1, 2]);
    });
}

#[test]
fn threads_of_the_pool_run_what_the_caller_only_waits_for() {
    model(2, || {
        let pool = ThreadPool::new(Placement::anywhere(1), true).unwrap();
        let (job, counts) = job(&[1, 2]);
        pool.submit(&job);
        pool.wait(&job);
        check(&job, &counts, &[1, 2]);
    });
}

#[test]
fn three_threads_run_every_chunk_once() {
    model(1, || {
        let pool = ThreadPool::new(Placement::anywhere(3), false).unwrap();
        let (job, counts) = job(&[3, 2]);
        pool.submit(&job);
        pool.wait(&job);
        check(&job, &counts, &[3, 2]);
    });
}

#[test]
fn queued_jobs_run_in_order() {
    model(2, || {
        let pool = ThreadPool::new(Placement::anywhere(2), false).unwrap();
        let (first, counts) = job(&[1, 2]);
        let second = job_after((2, 3), &[2], &counts);
        pool.submit(&first);
        pool.submit(&second);
        pool.wait(&second);
        check(&second, &counts, &[1, 2, 2]);
        // Its chunks have run, but the thread that ran the last one may not have said so yet.
        pool.wait(&first);
        assert!(first.is_finished());
    });
}

#[test]
fn a_job_that_has_finished_runs_again() {
    model(2, || {
        let pool = ThreadPool::new(Placement::anywhere(2), false).unwrap();
        let (job, counts) = job(&[2]);
        for _ in 0..2 {
            pool.submit(&job);
            pool.wait(&job);
            check(&job, &counts, &[2]);
            counts.ran.lock().unwrap().clear();
        }
    });
}

#[test]
fn callers_on_two_threads_share_a_pool() {
    model(2, || {
        let pool = Arc::new(ThreadPool::new(Placement::anywhere(1), false).unwrap());
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                let (job, counts) = job(&[1, 2]);
                pool.submit(&job);
                pool.wait(&job);
                check(&job, &counts, &[1, 2]);
            })
        };
        let (job, counts) = job(&[2]);
        pool.submit(&job);
        pool.wait(&job);
        check(&job, &counts, &[2]);
        other.join().unwrap();
    });
}

#[test]
fn a_worker_runs_a_job_that_nobody_waits_for() {
    model(3, || {
        let pool = ThreadPool::new(Placement::anywhere(2), false).unwrap();
        let (job, counts) = job(&[2]);
        pool.submit(&job);
        while !job.is_finished() {
            thread::yield_now();
        }
        check(&job, &counts, &[2]);
    });
}

#[test]
fn a_pool_without_work_shuts_down() {
    model(3, || drop(ThreadPool::new(Placement::anywhere(3), false).unwrap()));
}

/// Launches of which the second waits for one collective, which somebody else completes.
struct GatedLaunches {
    gate: Gate,
    counts: std::sync::Arc<Counts>,
    /// Is the collective complete?
    complete: std::sync::atomic::AtomicBool,
}

impl LaunchSequence for std::sync::Arc<GatedLaunches> {
    fn launches(&self) -> usize {
        2
    }

    fn chunks(&self, _launch: usize) -> u16 {
        1
    }

    fn gate(&self, launch: usize) -> Option<(&Gate, usize)> {
        (launch == 1).then_some((&self.gate, 1))
    }

    fn run(&self, launch: usize, chunk: u16, _scratch: &mut Scratch) {
        if launch == 1 && !self.complete.load(Ordering::SeqCst) {
            self.counts.early.store(true, Ordering::SeqCst);
        }
        self.counts.ran.lock().unwrap().push((launch, chunk));
    }
}

#[test]
fn a_launch_begins_when_the_collective_that_it_waits_for_is_complete() {
    for own in [false, true] {
        model(2, move || {
            let counts = std::sync::Arc::new(Counts::default());
            let complete = std::sync::atomic::AtomicBool::new(false);
            let gated = GatedLaunches { gate: Gate::default(), counts: std::sync::Arc::clone(&counts), complete };
            let gated = std::sync::Arc::new(gated);
            let job = Arc::new(PoolJob::new(Box::new(std::sync::Arc::clone(&gated))));
            let pool = ThreadPool::new(Placement::anywhere(1), own).unwrap();
            let handle = pool.handle();
            let lane = thread::spawn(move || {
                gated.complete.store(true, Ordering::SeqCst);
                if let Some(waiting) = gated.gate.completed() {
                    handle.open(waiting);
                }
            });
            pool.submit(&job);
            pool.wait(&job);
            check(&job, &counts, &[1, 1]);
            lane.join().unwrap();
        });
    }
}
