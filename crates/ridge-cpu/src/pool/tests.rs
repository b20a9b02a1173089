//! Order and completeness of the pool under stress.

use super::*;
use crate::sync::AtomicU32;

/// Checks, while it runs, that every chunk runs once and after all chunks of the launch before.
struct Checked {
    chunks: Vec<u16>,
    /// Chunks that have run, by launch, over all runs.
    ran: Arc<Vec<AtomicU32>>,
    wrong: Arc<AtomicBool>,
    runs: Arc<AtomicU32>,
    slow: bool,
}

impl LaunchSequence for Checked {
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

fn job(chunks: &[u16], slow: bool) -> (Arc<PoolJob>, impl Fn(u32) + use<>) {
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
    (Arc::new(PoolJob::new(Box::new(steps))), check)
}

#[test]
fn chunks_run_once_and_in_order_of_their_launches() {
    // Threads of one group and of several.
    for (threads, own) in [(1, false), (2, false), (3, false), (7, false), (17, false), (1, true), (2, true), (9, true)]
    {
        let pool = ThreadPool::new(Placement::anywhere(threads), own).unwrap();
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
    for own in [false, true] {
        let pool = ThreadPool::new(Placement::anywhere(3), own).unwrap();
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
}

#[test]
fn queued_jobs_run_in_order_whoever_waits_first() {
    for (threads, own) in [(1, false), (2, false), (4, false), (1, true)] {
        let pool = ThreadPool::new(Placement::anywhere(threads), own).unwrap();
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
    for (threads, own) in [(1, false), (3, false), (2, true)] {
        let pool = ThreadPool::new(Placement::anywhere(threads), own).unwrap();
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
    }
}

#[test]
fn a_step_completes_without_anybody_waiting() {
    // Of a pool's own threads one is enough, and launches need not be worth sharing.
    for (threads, own, chunks) in [(2, false, [2, 2, 1]), (1, true, [2, 2, 1]), (1, true, [1, 1, 1])] {
        let pool = ThreadPool::new(Placement::anywhere(threads), own).unwrap();
        let (job, check) = job(&chunks, false);
        for _ in 0..3 {
            pool.submit(&job);
            let start = Instant::now();
            while !job.is_finished() {
                assert!(start.elapsed() < Duration::from_secs(10), "nobody ran the step");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        check(3);
    }
}

#[test]
fn a_panic_of_a_kernel_is_kept_and_does_not_hang() {
    struct Panics;
    impl LaunchSequence for Panics {
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
    let pool = ThreadPool::new(Placement::anywhere(2), false).unwrap();
    let job = Arc::new(PoolJob::new(Box::new(Panics)));
    pool.submit(&job);
    pool.wait(&job);
    assert_eq!(job.failure().as_deref(), Some("the kernel said so"));
}
