//! The one thread that owns the engine, and how requests reach it.
//!
//! The thread never waits for a client: requests come by a channel that it looks into between steps, and tokens leave by
//! a bounded channel for each request. A request whose channel is full is cut. If the thread panics, every channel is
//! dropped, so that every request that waits is told, and [`Worker::health`] says so from then on.

mod live;
mod runner;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc as std_mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ridge_engine::Logprobs;
use ridge_engine::service::{BlockUse, Request, Service, Stats};
use tokio::sync::{mpsc, oneshot};

use crate::error::{ApiError, ApiResult};
use crate::metrics::Metrics;
use live::Live;

/// Tells what a step over sequences of `(tokens in the cache, tokens of the step)` takes at least.
pub type Floor = Box<dyn FnMut(&[(usize, usize)]) -> Option<Duration> + Send>;

/// What comes of a job.
#[derive(Debug)]
pub(crate) enum Event {
    Token {
        choice: usize,
        id: u32,
        logprobs: Option<Logprobs>,
    },
    /// An answer has ended, perhaps by a token that the client named.
    End {
        choice: usize,
        reason: &'static str,
        by: Option<u32>,
    },
    Failed(ApiError),
    /// Tokens of the prompt that were in the cache. The last event of a job, but for `Failed`.
    Cached(usize),
    /// The log-probabilities of the prompt's tokens from the second on, for choices `first` to `first + n`.
    Prompt {
        first: usize,
        n: usize,
        logprobs: Vec<f32>,
    },
}

/// Events of one request that wait for its client at most. A client that reads as fast as the engine writes never has
/// more than a few.
pub(crate) const MOST_EVENTS: usize = 1024;

enum Command {
    Submit(Box<Submit>),
    Cancel {
        job: u64,
        choice: Option<usize>,
    },
    /// Tell what each block of the cache is used for.
    Look(oneshot::Sender<Vec<BlockUse>>),
    /// End when nothing runs any more.
    Drain,
    #[cfg(test)]
    Panic,
}

struct Submit {
    job: Request,
    id: u64,
    /// The first of the request's choices that the job answers.
    first: usize,
    came: Instant,
    events: mpsc::Sender<Event>,
    cut: Arc<OnceLock<ApiError>>,
    reply: oneshot::Sender<ApiResult<()>>,
}

/// What the thread and the requests share.
pub(crate) struct Shared {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) live: Live,
    stats: Mutex<Stats>,
    /// Jobs that were submitted and have not ended.
    jobs: AtomicUsize,
    next: AtomicU64,
    /// Milliseconds from `started` to the last sign of progress.
    progress: AtomicU64,
    dead: AtomicBool,
    started: Instant,
}

/// The way to the engine's thread. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Worker {
    commands: std_mpsc::Sender<Command>,
    pub(crate) shared: Arc<Shared>,
    /// Jobs at a time, waiting ones included.
    most: usize,
}

/// Is the engine well?
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Well,
    /// There is work, and no step has ended for this long.
    Stalled(Duration),
    /// Its thread has ended.
    Dead,
}

impl Worker {
    /// Starts the thread.
    pub(crate) fn start(
        service: Service,
        floor: Option<Floor>,
        most: usize,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<(Self, thread::JoinHandle<()>)> {
        let (commands, orders) = std_mpsc::channel();
        let shared = Arc::new(Shared {
            metrics,
            live: Live::default(),
            stats: Mutex::default(),
            jobs: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            started: Instant::now(),
        });
        // Before anybody can ask.
        shared.publish(&service);
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("engine".to_owned()).spawn(move || {
            // A panic unwinds through the runner, which drops every channel.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                runner::Runner::new(service, floor, Arc::clone(&of_thread)).run(&orders);
            }));
            of_thread.dead.store(true, Relaxed);
            drop(orders);
            if outcome.is_err() {
                tracing::error!(
                    "the engine's thread has panicked; no request is answered any more: start the server again"
                );
            }
        })?;
        Ok((Self { commands, shared, most }, thread))
    }

    /// Hands a job to the engine, which accepts or refuses it between two steps.
    /// Its answers are choices `first` and so on of `events`.
    pub(crate) fn submit(&self, job: Request, first: usize, events: mpsc::Sender<Event>) -> ApiResult<Submitted> {
        let waiting = self.shared.jobs.fetch_add(1, Relaxed);
        if waiting == 0 {
            // What comes after idleness is no standstill.
            self.shared.progressed();
        }
        let id = self.shared.next.fetch_add(1, Relaxed);
        let cut = Arc::new(OnceLock::new());
        // From here on, dropping the ticket undoes what is done.
        let running = (first..first + job.n).collect();
        let ticket = Ticket { worker: self.clone(), id, running, cut: Arc::clone(&cut) };
        if waiting >= self.most {
            let message =
                format!("{waiting} requests run or wait already, as many as this server takes; try again later");
            return Err(ApiError::overloaded(message));
        }
        let (reply, accepted) = oneshot::channel();
        let submit = Submit { job, id, first, came: Instant::now(), events, cut, reply };
        self.commands.send(Command::Submit(Box::new(submit))).map_err(|_| stopped())?;
        Ok(Submitted { ticket, accepted })
    }

    /// Tells the thread to end when all jobs have.
    pub(crate) fn drain(&self) {
        let _ = self.commands.send(Command::Drain);
    }

    /// As the engine was after its last step.
    pub(crate) fn stats(&self) -> Stats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each block of the cache is used for, if the engine finds the time to say so soon.
    pub(crate) async fn blocks(&self) -> Option<Vec<BlockUse>> {
        const SOON: Duration = Duration::from_millis(500);
        let (reply, blocks) = oneshot::channel();
        self.commands.send(Command::Look(reply)).ok()?;
        tokio::time::timeout(SOON, blocks).await.ok()?.ok()
    }

    /// Since the server's start.
    pub(crate) fn uptime(&self) -> Duration {
        self.shared.started.elapsed()
    }

    /// Jobs that run or wait.
    pub(crate) fn jobs(&self) -> usize {
        self.shared.jobs.load(Relaxed)
    }

    /// Is the engine well, where it may take `patience` for a step?
    pub(crate) fn health(&self, patience: Duration) -> Health {
        if self.shared.dead.load(Relaxed) {
            return Health::Dead;
        }
        let since =
            self.shared.started.elapsed().saturating_sub(Duration::from_millis(self.shared.progress.load(Relaxed)));
        if self.jobs() > 0 && since > patience { Health::Stalled(since) } else { Health::Well }
    }
}

impl Shared {
    /// A step has ended, or there is nothing to do.
    fn progressed(&self) {
        self.progress.store(self.started.elapsed().as_millis() as u64, Relaxed);
    }

    fn publish(&self, service: &Service) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = service.stats();
    }
}

/// What a request is told when the engine's thread has ended.
pub(crate) fn stopped() -> ApiError {
    ApiError::unavailable("the engine has stopped; see the server's log")
}

/// A job that the engine has not answered yet.
pub(crate) struct Submitted {
    ticket: Ticket,
    accepted: oneshot::Receiver<ApiResult<()>>,
}

impl Submitted {
    /// The job, once the engine has accepted it.
    pub(crate) async fn accepted(self) -> ApiResult<Ticket> {
        self.accepted.await.map_err(|_| stopped())??;
        Ok(self.ticket)
    }
}

/// A job that was submitted. Dropping it cancels those of its answers that have not ended.
pub(crate) struct Ticket {
    worker: Worker,
    id: u64,
    /// Choices that have not ended.
    running: Vec<usize>,
    cut: Arc<OnceLock<ApiError>>,
}

impl Ticket {
    /// Answer `choice` has ended; the engine does not know yet unless it said so itself.
    pub(crate) fn ended(&mut self, choice: usize, engine_knows: bool) {
        if let Some(at) = self.running.iter().position(|c| *c == choice) {
            self.running.swap_remove(at);
            if !engine_knows {
                let _ = self.worker.commands.send(Command::Cancel { job: self.id, choice: Some(choice) });
            }
        }
    }

    /// Why the engine cut the job, if it did.
    pub(crate) fn why_cut(&self) -> Option<ApiError> {
        self.cut.get().cloned()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.worker.shared.jobs.fetch_sub(1, Relaxed);
        if !self.running.is_empty() {
            let _ = self.worker.commands.send(Command::Cancel { job: self.id, choice: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use ridge_cpu::{Cpu, CpuOptions};
    use ridge_engine::EngineOptions;
    use ridge_engine::service::{Policy, ServiceOptions};
    use ridge_models::{BuildOptions, ModelFiles, WeightSource};
    use ridge_runtime::Session;

    use super::*;

    fn worker(most: usize) -> (Worker, thread::JoinHandle<()>) {
        let files = ModelFiles::open(None).unwrap();
        let config = files.config().unwrap();
        let source = WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint().unwrap()).unwrap()));
        let mut model = config.build(&BuildOptions::default()).unwrap();
        model.graph = source.retype(&model.graph, None).unwrap();
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let mut session = Session::new(Arc::new(cpu));
        source.load(&mut session, &model.graph, |_| ()).unwrap();
        let engine = EngineOptions { context: 256, sequences: 2, chunk: 64, blocks: None };
        let options = ServiceOptions { engine, queue: 64, policy: Policy::FirstCome, prefix_cache: false };
        let service = Service::new(session, &model, options).unwrap();
        Worker::start(service, None, most, Arc::default()).unwrap()
    }

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    fn long() -> Request {
        Request::new(vec![1, 2, 3], 250)
    }

    #[test]
    fn a_panic_is_told_to_all_that_wait() {
        run(async {
            let (worker, thread) = worker(8);
            let (events, mut received) = mpsc::channel(MOST_EVENTS);
            let ticket = worker.submit(long(), 0, events).unwrap().accepted().await.unwrap();
            assert!(matches!(received.recv().await, Some(Event::Token { .. })));
            worker.commands.send(Command::Panic).unwrap();
            while received.recv().await.is_some() {}
            thread.join().unwrap();
            assert_eq!(worker.health(Duration::from_secs(60)), Health::Dead);
            assert_eq!(ticket.why_cut(), None);
            let (events, _received) = mpsc::channel(1);
            let refused = match worker.submit(long(), 0, events) {
                Ok(submitted) => submitted.accepted().await.err(),
                Err(error) => Some(error),
            };
            assert_eq!(refused.map(|e| e.status.as_u16()), Some(503));
        });
    }

    #[test]
    fn a_client_that_takes_nothing_is_cut_and_told_why() {
        run(async {
            let (worker, _) = worker(8);
            let (events, mut received) = mpsc::channel(4);
            let ticket = worker.submit(long(), 0, events).unwrap().accepted().await.unwrap();
            while worker.jobs() > 0 && ticket.why_cut().is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let mut kept = 0;
            while received.recv().await.is_some() {
                kept += 1;
            }
            assert_eq!(kept, 4);
            assert!(ticket.why_cut().is_some_and(|e| e.message.contains("too slowly")));
        });
    }

    #[test]
    fn work_without_progress_is_no_health() {
        run(async {
            let (worker, _) = worker(1);
            assert_eq!(worker.health(Duration::ZERO), Health::Well);
            let (events, _received) = mpsc::channel(MOST_EVENTS);
            let ticket = worker.submit(long(), 0, events.clone()).unwrap();
            // Some time has passed since the last step, however little.
            std::thread::sleep(Duration::from_millis(2));
            worker.shared.progress.store(0, Relaxed);
            assert!(matches!(worker.health(Duration::ZERO), Health::Stalled(_)));
            assert_eq!(worker.submit(long(), 0, events).err().map(|e| e.status.as_u16()), Some(429));
            drop(ticket);
            assert_eq!(worker.jobs(), 0);
        });
    }
}
