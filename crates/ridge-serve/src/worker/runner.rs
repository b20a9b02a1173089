//! The loop of the engine's thread: commands, a step, its events, and again.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ridge_engine::service::{self, Happened, Refused, RequestId, Service};
use ridge_engine::{Finish, Logprobs};
use tokio::sync::mpsc;

use super::live::{AnswerSeen, StepSeen};
use super::protocol::{EngineCommand, Floor, JobEvent, JobSubmission};
use super::shared::SharedEngineState;
use crate::error::ApiError;

/// A request that the service has.
struct RunningJob {
    job: u64,
    first: usize,
    events: mpsc::Sender<JobEvent>,
    cut: Arc<OnceLock<ApiError>>,
    came: Instant,
    prompt_tokens: usize,
    max_tokens: usize,
    answers: Vec<AnswerTiming>,
    began: bool,
}

/// When tokens of an answer came.
#[derive(Clone, Copy)]
struct AnswerTiming {
    tokens: usize,
    first: Instant,
    last: Instant,
}

/// A floor so many times the time of its step is no floor. It is counted and not shown.
const EXCEEDED: f64 = 1.05;

/// The floor of a step is told at most so often: working it out takes as long as a small step.
const FLOOR_EVERY: Duration = Duration::from_millis(50);

/// How often it is looked whether masks have come, where there is nothing else to do.
const MASKS_EVERY: Duration = Duration::from_micros(200);

pub(super) struct Runner {
    service: Service,
    shared: Arc<SharedEngineState>,
    floor: Option<Floor>,
    floor_computed: Instant,
    /// When the step that runs was started.
    started: Instant,
    entries: HashMap<RequestId, RunningJob>,
    /// The requests of jobs.
    ids: HashMap<u64, RequestId>,
    events: Vec<service::Event>,
    draining: bool,
}

impl Runner {
    pub(super) fn new(service: Service, floor: Option<Floor>, shared: Arc<SharedEngineState>) -> Self {
        let (entries, ids, events) = (HashMap::new(), HashMap::new(), Vec::new());
        Self {
            service,
            shared,
            floor,
            floor_computed: Instant::now(),
            started: Instant::now(),
            entries,
            ids,
            events,
            draining: false,
        }
    }

    /// Runs until it is to drain and has.
    pub(super) fn run(mut self, orders: &Receiver<EngineCommand>) {
        loop {
            if self.service.is_idle() {
                if self.draining {
                    return;
                }
                let Ok(command) = orders.recv() else { return };
                self.execute(command);
            } else if self.service.waits_for_masks()
                && let Ok(command) = orders.recv_timeout(MASKS_EVERY)
            {
                self.execute(command);
            }
            loop {
                match orders.try_recv() {
                    Ok(command) => self.execute(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            if !self.service.is_idle() {
                self.step();
            }
            // Before anyone is told, so that who was told finds it so.
            self.shared.publish(&self.service);
            self.deliver();
            self.shared.progressed();
        }
    }

    fn now(&self) -> Duration {
        self.shared.started.elapsed()
    }

    fn execute(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Submit(submit) => self.submit(*submit),
            EngineCommand::Cancel { job, choice } => self.cancel(job, choice),
            EngineCommand::Look(reply) => {
                let _ = reply.send(self.service.blocks());
            }
            EngineCommand::Drain => self.draining = true,
            #[cfg(test)]
            EngineCommand::Panic => panic!("a test wants it"),
        }
    }

    fn submit(&mut self, submit: JobSubmission) {
        let JobSubmission { job, id, first, came, events, cut, reply } = submit;
        let (n, prompt_tokens, max_tokens) = (job.n, job.prompt.len(), job.max_tokens);
        let outcome = self.service.submit(job, came.saturating_duration_since(self.shared.started));
        let request = match outcome {
            Ok(request) => request,
            Err(refused) => {
                let _ = reply.send(Err(refusal(refused)));
                return;
            }
        };
        // A client that has left needs no answers.
        if reply.send(Ok(())).is_err() {
            self.service.cancel(request);
            return;
        }
        let answers = vec![AnswerTiming { tokens: 0, first: came, last: came }; n];
        let entry = RunningJob { job: id, first, events, cut, came, prompt_tokens, max_tokens, answers, began: false };
        self.entries.insert(request, entry);
        self.ids.insert(id, request);
    }

    fn cancel(&mut self, job: u64, choice: Option<usize>) {
        let Some(request) = self.ids.get(&job).copied() else { return };
        match choice {
            Some(choice) => {
                let first = self.entries.get(&request).map_or(0, |entry| entry.first);
                self.service.stop(request, choice - first, &mut self.events);
            }
            None => {
                self.service.cancel(request);
                self.shared.metrics.finished("abort");
                self.forget(request);
            }
        }
    }

    fn forget(&mut self, request: RequestId) {
        if let Some(entry) = self.entries.remove(&request) {
            self.ids.remove(&entry.job);
        }
    }

    fn step(&mut self) {
        let now = self.now();
        let ran = self.service.step(now, &mut self.events);
        // The step that has ended was started by the last call, and the next one by this.
        let ended = Instant::now();
        let took = ended - std::mem::replace(&mut self.started, ended);
        if ran.work.is_empty() {
            return;
        }
        let tokens: usize = ran.work.iter().map(|(_, tokens)| tokens).sum();
        let metrics = &self.shared.metrics;
        metrics.step.observe(took.as_secs_f64());
        metrics.step_tokens.observe(tokens as f64);
        let mut floor = None;
        if let Some(of) = self.floor.as_mut().filter(|_| ended.duration_since(self.floor_computed) >= FLOOR_EVERY) {
            self.floor_computed = ended;
            floor = of(&ran.work);
            // The machine's rates were measured too low.
            if floor.is_some_and(|floor| floor.as_secs_f64() > EXCEEDED * took.as_secs_f64()) {
                metrics.step_floor_exceeded.add(1);
                floor = None;
            }
            if let Some(floor) = floor {
                metrics.step_roofline.observe(floor.as_secs_f64() / took.as_secs_f64().max(1e-9));
            }
        }
        let seen = StepSeen { at: now, took, floor, sequences: ran.work.len(), tokens };
        self.shared.live.step(seen);
    }

    /// Hands the events out.
    fn deliver(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        for service::Event { id, what } in events.drain(..) {
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            let over = matches!(what, Happened::Done(_) | Happened::Failed(_) | Happened::Stuck(_));
            let delivered = deliver(entry, what, &self.shared);
            if !delivered {
                let slow = "the client reads too slowly: its buffer of unread tokens is full";
                let _ = entry.cut.set(ApiError::unavailable(slow));
                self.shared.metrics.finished("abort");
                self.service.cancel(id);
            }
            if over || !delivered {
                self.forget(id);
            }
        }
        self.events = events;
    }
}

/// Tells a client what happened. False if it does not take it.
fn deliver(entry: &mut RunningJob, what: Happened, shared: &SharedEngineState) -> bool {
    let metrics = &shared.metrics;
    let event = match what {
        Happened::Prompt(logprobs) => JobEvent::Prompt { first: entry.first, n: entry.answers.len(), logprobs },
        Happened::Token { choice, token, logprobs } => {
            token_came(entry, choice, shared);
            token_event(entry.first + choice, token, logprobs)
        }
        Happened::Ended { choice, finish, stop_token } => {
            let reason = reason(finish);
            metrics.finished(reason);
            let answer = entry.answers[choice];
            metrics.end_to_end.observe(entry.came.elapsed().as_secs_f64());
            metrics.request_generation_tokens.observe(answer.tokens as f64);
            let tpot = (answer.tokens > 1).then(|| (answer.last - answer.first) / (answer.tokens as u32 - 1));
            tpot.into_iter().for_each(|tpot| metrics.time_per_token.observe(tpot.as_secs_f64()));
            let (at, ttft) = (shared.started.elapsed(), answer.first - entry.came);
            shared.live.answer(AnswerSeen { at, ttft, tpot, tokens: answer.tokens });
            JobEvent::End { choice: entry.first + choice, reason, by: stop_token }
        }
        Happened::Done(usage) => {
            metrics.queue.observe(usage.queued.as_secs_f64());
            metrics.request_prompt_tokens.observe(entry.prompt_tokens as f64);
            metrics.request_answers.observe(entry.answers.len() as f64);
            metrics.request_max_tokens.observe(entry.max_tokens as f64);
            let longest = entry.answers.iter().map(|answer| answer.tokens).max().unwrap_or(0);
            metrics.request_longest_answer.observe(longest as f64);
            // Of answers that have tokens.
            let answers = || entry.answers.iter().filter(|answer| answer.tokens > 0);
            if let (Some(first), Some(last)) = (answers().map(|a| a.first).min(), answers().map(|a| a.last).max()) {
                let began = entry.came + usage.queued;
                metrics.prefill.observe(first.saturating_duration_since(began).as_secs_f64());
                metrics.decode.observe((last - first).as_secs_f64());
                metrics.inference.observe(last.saturating_duration_since(began).as_secs_f64());
            }
            JobEvent::Cached(usage.cached_tokens)
        }
        Happened::Failed(why) => {
            metrics.finished("error");
            tracing::error!(why, "a sequence failed");
            JobEvent::Failed(ApiError::internal(why))
        }
        Happened::Stuck(why) => {
            metrics.finished("error");
            JobEvent::Failed(ApiError::param("constraint", format!("cannot be evaluated further: {why}")))
        }
    };
    // A client that has left is about to be cancelled, and takes nothing: that is no slowness.
    !matches!(entry.events.try_send(event), Err(mpsc::error::TrySendError::Full(_)))
}

fn token_came(entry: &mut RunningJob, choice: usize, shared: &SharedEngineState) {
    let metrics = &shared.metrics;
    let now = Instant::now();
    let answer = &mut entry.answers[choice];
    let since = now.duration_since(answer.last).as_secs_f64();
    if answer.tokens == 0 {
        metrics.time_to_first_token.observe(since);
        answer.first = now;
    } else {
        metrics.inter_token.observe(since);
    }
    answer.last = now;
    answer.tokens += 1;
    metrics.generation_tokens.add(1);
    if !std::mem::replace(&mut entry.began, true) {
        metrics.prompt_tokens.add(entry.prompt_tokens as u64);
    }
}

fn token_event(choice: usize, id: u32, logprobs: Option<Logprobs>) -> JobEvent {
    JobEvent::Token { choice, id, logprobs }
}

fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length | Finish::Context => "length",
        Finish::Cancelled => "abort",
    }
}

fn refusal(refused: Refused) -> ApiError {
    match refused {
        Refused::Invalid(error) => error.into(),
        busy => ApiError::overloaded(busy.to_string()),
    }
}
