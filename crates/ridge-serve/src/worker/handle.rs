//! The handle of the engine's thread: start, submission of jobs, health.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock, PoisonError, mpsc as std_mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ridge_engine::service::{BlockUse, Request, Service, Stats};
use tokio::sync::{mpsc, oneshot};

use super::masks;
use super::protocol::{EngineCommand, Floor, JobEvent, JobSubmission};
use super::runner::Runner;
use super::shared::SharedEngineState;
use crate::error::{ApiError, ApiResult};
use crate::metrics::Metrics;

/// The handle of the engine's thread. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Worker {
    commands: std_mpsc::Sender<EngineCommand>,
    pub(crate) shared: Arc<SharedEngineState>,
    /// Maximum number of jobs, waiting ones included.
    max_jobs: usize,
}

/// The engine's health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EngineHealth {
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
        max_jobs: usize,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<(Self, thread::JoinHandle<()>)> {
        let service = service.with_executor(masks::executor()?);
        let (commands, orders) = std_mpsc::channel();
        let shared = Arc::new(SharedEngineState::new(metrics));
        // Before anybody can ask.
        shared.publish(&service);
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("engine".to_owned()).spawn(move || {
            // A panic unwinds through the runner, which drops every channel.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                Runner::new(service, floor, Arc::clone(&of_thread)).run(&orders);
            }));
            of_thread.dead.store(true, Relaxed);
            drop(orders);
            if outcome.is_err() {
                tracing::error!("the engine's thread has panicked; all requests will fail: restart the server");
            }
        })?;
        Ok((Self { commands, shared, max_jobs }, thread))
    }

    /// Hands a job to the engine, which accepts or refuses it between two steps.
    /// Its answers are choices `first` and so on of `events`.
    pub(crate) fn submit(&self, job: Request, first: usize, events: mpsc::Sender<JobEvent>) -> ApiResult<SubmittedJob> {
        if let Err(jobs) = self.shared.activity.enter(self.shared.started.elapsed(), self.max_jobs) {
            let message = format!("{jobs} requests are running or waiting, which is this server's limit; retry later");
            return Err(ApiError::overloaded(message));
        }
        let id = self.shared.next.fetch_add(1, Relaxed);
        let cut = Arc::new(OnceLock::new());
        // From here on, dropping the ticket undoes what is done.
        let running = (first..first + job.n).collect();
        let ticket = JobTicket { worker: self.clone(), id, running, cut: Arc::clone(&cut) };
        let (reply, accepted) = oneshot::channel();
        let submit = JobSubmission { job, id, first, came: Instant::now(), events, cut, reply };
        self.commands.send(EngineCommand::Submit(Box::new(submit))).map_err(|_| stopped())?;
        Ok(SubmittedJob { ticket, accepted })
    }

    /// Tells the thread to end when all jobs have.
    pub(crate) fn drain(&self) {
        let _ = self.commands.send(EngineCommand::Drain);
    }

    /// As the engine was after its last step.
    pub(crate) fn stats(&self) -> Stats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each block of the cache is used for, if the engine finds the time to say so soon.
    pub(crate) async fn blocks(&self) -> Option<Vec<BlockUse>> {
        const SOON: Duration = Duration::from_millis(500);
        let (reply, blocks) = oneshot::channel();
        self.commands.send(EngineCommand::Look(reply)).ok()?;
        tokio::time::timeout(SOON, blocks).await.ok()?.ok()
    }

    /// Since the server's start.
    pub(crate) fn uptime(&self) -> Duration {
        self.shared.started.elapsed()
    }

    /// Is the engine well, where it may take `patience` for a step?
    pub(crate) fn health(&self, patience: Duration) -> EngineHealth {
        if self.shared.dead.load(Relaxed) {
            return EngineHealth::Dead;
        }
        match self.shared.activity.waiting_for(|| self.shared.started.elapsed()) {
            Some(time) if time > patience => EngineHealth::Stalled(time),
            _ => EngineHealth::Well,
        }
    }
}

/// What a request is told when the engine's thread has ended.
pub(crate) fn stopped() -> ApiError {
    ApiError::unavailable("the engine has stopped; see the server's log")
}

/// A job that the engine has not answered yet.
pub(crate) struct SubmittedJob {
    ticket: JobTicket,
    accepted: oneshot::Receiver<ApiResult<()>>,
}

impl SubmittedJob {
    /// The job, once the engine has accepted it.
    pub(crate) async fn accepted(self) -> ApiResult<JobTicket> {
        self.accepted.await.map_err(|_| stopped())??;
        Ok(self.ticket)
    }
}

/// A job that was submitted. Dropping it cancels those of its answers that have not ended.
pub(crate) struct JobTicket {
    worker: Worker,
    id: u64,
    /// Choices that have not ended.
    running: Vec<usize>,
    cut: Arc<OnceLock<ApiError>>,
}

impl JobTicket {
    /// Answer `choice` has ended; the engine does not know yet unless it said so itself.
    pub(crate) fn ended(&mut self, choice: usize, engine_knows: bool) {
        if let Some(at) = self.running.iter().position(|c| *c == choice) {
            self.running.swap_remove(at);
            if !engine_knows {
                let _ = self.worker.commands.send(EngineCommand::Cancel { job: self.id, choice: Some(choice) });
            }
        }
    }

    /// Why the engine cut the job, if it did.
    pub(crate) fn why_cut(&self) -> Option<ApiError> {
        self.cut.get().cloned()
    }
}

impl Drop for JobTicket {
    fn drop(&mut self) {
        self.worker.shared.activity.leave();
        if !self.running.is_empty() {
            let _ = self.worker.commands.send(EngineCommand::Cancel { job: self.id, choice: None });
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
    use crate::worker::MAX_PENDING_EVENTS;

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
            let (events, mut received) = mpsc::channel(MAX_PENDING_EVENTS);
            let ticket = worker.submit(long(), 0, events).unwrap().accepted().await.unwrap();
            assert!(matches!(received.recv().await, Some(JobEvent::Token { .. })));
            worker.commands.send(EngineCommand::Panic).unwrap();
            while received.recv().await.is_some() {}
            thread.join().unwrap();
            assert_eq!(worker.health(Duration::from_secs(60)), EngineHealth::Dead);
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
            while worker.shared.activity.jobs() > 0 && ticket.why_cut().is_none() {
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
            assert_eq!(worker.health(Duration::ZERO), EngineHealth::Well);
            let (events, _received) = mpsc::channel(MAX_PENDING_EVENTS);
            let ticket = worker.submit(long(), 0, events.clone()).unwrap();
            // Some time has passed since the last step, however little.
            std::thread::sleep(Duration::from_millis(2));
            worker.shared.activity.forget_progress();
            assert!(matches!(worker.health(Duration::ZERO), EngineHealth::Stalled(_)));
            assert_eq!(worker.submit(long(), 0, events).err().map(|e| e.status.as_u16()), Some(429));
            drop(ticket);
            assert_eq!(worker.shared.activity.jobs(), 0);
        });
    }
}
