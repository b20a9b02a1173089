//! Sends many requests, as fast as they are answered or when their time comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::client::{Client, RequestFailure, ServerTarget, TimedResponse};
use super::error::LoadError;
use super::prompts::PromptGenerator;
use super::usage::{ServerUsage, watch};
use super::workload::{LoadWorkload, Pace, RequestShape};

/// Threads that send and read.
const THREADS: usize = 2;

/// A request that was sent, and its end. Times in seconds after the start of the run.
#[derive(Clone, Debug)]
pub struct RequestOutcome {
    /// Which of the workload's.
    pub index: usize,
    /// When it was sent.
    pub sent: f64,
    /// How much later that was than its time.
    pub late: Option<f64>,
    /// When it ended.
    pub ended: f64,
    /// The answer, or why there is none.
    pub answer: Result<TimedResponse, RequestFailure>,
}

/// All that was sent, in the order of its sending.
#[derive(Clone, Debug)]
pub struct LoadRun {
    /// What came of each request.
    pub outcomes: Vec<RequestOutcome>,
    /// Seconds from the first request's sending to the last one's end.
    pub seconds: f64,
    /// What it took of the server, if that tells.
    pub server: Option<ServerUsage>,
}

fn runtime() -> Result<Runtime, LoadError> {
    Ok(Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?)
}

/// Asks the server for a name of its model if none was given, and for one answer. Returns the client to continue.
///
/// # Errors
/// Says what the server answered instead.
pub fn preflight(mut client: Client, prompts: &PromptGenerator, shape: &RequestShape) -> Result<Client, LoadError> {
    let not_serving = |client: &Client, failure: RequestFailure| LoadError::NotServing {
        url: client.target.url(),
        kind: failure.kind,
        message: failure.message,
    };
    let runtime = runtime()?;
    if client.target.model.is_empty() {
        client.target.model =
            runtime.block_on(client.first_model()).map_err(|failure| not_serving(&client, failure))?;
    }
    let body = client.target.body(&prompts.make(u64::MAX, shape), shape.output_tokens);
    runtime.block_on(client.ask(body)).map_err(|failure| not_serving(&client, failure))?;
    // Connections belong to the runtime that they were made in.
    Ok(Client::new(client.target))
}

/// Sends `workload` and waits for every answer; `progress` is told how many have ended.
///
/// # Errors
/// When the system refuses threads.
pub fn drive(
    target: &ServerTarget,
    prompts: &Arc<PromptGenerator>,
    workload: &LoadWorkload,
    mut progress: impl FnMut(usize),
) -> Result<LoadRun, LoadError> {
    let sender = Arc::new(LoadSender {
        client: Client::new(target.clone()),
        prompts: Arc::clone(prompts),
        workload: workload.clone(),
        next: AtomicUsize::new(0),
        start: Instant::now(),
    });
    let runtime = runtime()?;
    let (tell, mut told) = unbounded_channel();
    let (over, until) = oneshot::channel();
    let watched = runtime.spawn(watch(Client::new(target.clone()), until));
    match workload.pace {
        Pace::Concurrent(most) => {
            for _ in 0..most.min(workload.requests) {
                runtime.spawn(Arc::clone(&sender).one_after_another(tell.clone()));
            }
        }
        Pace::AtTheirTimes => {
            runtime.spawn(Arc::clone(&sender).at_their_times(tell.clone()));
        }
    }
    drop(tell);
    let mut outcomes = Vec::with_capacity(workload.shapes.len());
    while let Some(outcome) = told.blocking_recv() {
        outcomes.push(outcome);
        progress(outcomes.len());
    }
    // Nobody listens any more if the watcher has given up.
    let _ = over.send(());
    let server = runtime.block_on(watched).ok().flatten();
    drop(runtime);
    outcomes.sort_by(|a: &RequestOutcome, b| a.sent.total_cmp(&b.sent));
    let first = outcomes.first().map_or(0.0, |o| o.sent);
    let last = outcomes.iter().map(|o| o.ended).fold(first, f64::max);
    Ok(LoadRun { outcomes, seconds: last - first, server })
}

struct LoadSender {
    client: Client,
    prompts: Arc<PromptGenerator>,
    workload: LoadWorkload,
    /// The next request of a closed loop.
    next: AtomicUsize,
    start: Instant,
}

impl LoadSender {
    fn body(&self, index: usize) -> axum::body::Bytes {
        let shape = self.workload.shape(index);
        let prompt = self.prompts.make(self.workload.first_number + index as u64, shape);
        self.client.target.body(&prompt, shape.output_tokens)
    }

    async fn send(&self, index: usize, body: axum::body::Bytes, due: Option<f64>) -> RequestOutcome {
        let sent = self.start.elapsed().as_secs_f64();
        let answer = self.client.ask(body).await;
        let ended = self.start.elapsed().as_secs_f64();
        RequestOutcome { index, sent, late: due.map(|due| sent - due), ended, answer }
    }

    fn over(&self) -> bool {
        self.workload.duration.is_some_and(|d| self.start.elapsed() >= d)
    }

    async fn one_after_another(self: Arc<Self>, tell: UnboundedSender<RequestOutcome>) {
        loop {
            let index = self.next.fetch_add(1, Relaxed);
            if index >= self.workload.requests || self.over() {
                return;
            }
            let outcome = self.send(index, self.body(index), None).await;
            let _ = tell.send(outcome);
        }
    }

    /// Never waits for an answer; makes each body before its time.
    async fn at_their_times(self: Arc<Self>, tell: UnboundedSender<RequestOutcome>) {
        for (index, shape) in self.workload.shapes.iter().enumerate() {
            let due = shape.at.unwrap_or(0.0);
            if self.workload.duration.is_some_and(|d| due >= d.as_secs_f64()) {
                return;
            }
            let body = self.body(index);
            tokio::time::sleep_until((self.start + Duration::from_secs_f64(due)).into()).await;
            let (sender, tell) = (Arc::clone(&self), tell.clone());
            tokio::spawn(async move {
                let outcome = sender.send(index, body, Some(due)).await;
                let _ = tell.send(outcome);
            });
        }
    }
}
