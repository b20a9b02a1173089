//! The loop of the engine's thread: commands, a step, its tokens, and again.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ridge_engine::{Engine, Request, SequenceId};
use tokio::sync::mpsc;

use super::{Command, Event, Job, Shared, Snapshot, Submit};
use crate::error::{ApiError, ApiResult};

/// One answer that runs or waits.
struct Run {
    job: u64,
    choice: usize,
    request: Arc<Job>,
    seed: u64,
    sequence: Option<SequenceId>,
    /// Tokens of the prompt in the cache.
    read: usize,
    /// Tokens given, and the last one, which is not in the cache yet.
    given: usize,
    last: u32,
    events: mpsc::Sender<Event>,
    cut: Arc<OnceLock<ApiError>>,
    came: Instant,
    last_at: Instant,
}

pub(super) struct Runner {
    engine: Engine,
    shared: Arc<Shared>,
    chunk: usize,
    total_blocks: usize,
    waiting: VecDeque<Run>,
    running: Vec<Run>,
    steps: u64,
    draining: bool,
    next: Vec<u32>,
}

impl Runner {
    pub(super) fn new(engine: Engine, shared: Arc<Shared>) -> Self {
        let (chunk, total_blocks) = (engine.options().chunk, engine.free_blocks());
        let (waiting, running, next) = (VecDeque::new(), Vec::new(), Vec::new());
        Self { engine, shared, chunk, total_blocks, waiting, running, steps: 0, draining: false, next }
    }

    /// Runs until it is to drain and has.
    pub(super) fn run(mut self, orders: &Receiver<Command>) {
        loop {
            let idle = self.waiting.is_empty() && self.running.is_empty();
            self.publish();
            if idle {
                if self.draining {
                    return;
                }
                let Ok(command) = orders.recv() else { return };
                self.obey(command);
            }
            loop {
                match orders.try_recv() {
                    Ok(command) => self.obey(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.admit();
            self.step();
            self.shared.progressed();
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(submit) => self.submit(*submit),
            Command::Cancel { job, choice } => {
                self.forget(|run| run.job == job && choice.is_none_or(|choice| choice == run.choice));
            }
            Command::Drain => self.draining = true,
        }
    }

    fn submit(&mut self, submit: Submit) {
        let Submit { job, id, came, events, cut, reply } = submit;
        let outcome = self.check(&job);
        let accepted = outcome.is_ok();
        // A client that has left needs no answers.
        if reply.send(outcome).is_err() || !accepted {
            return;
        }
        let request = Arc::new(job);
        for i in 0..request.n {
            self.waiting.push_back(Run {
                job: id,
                choice: request.first + i,
                seed: request.sampling.seed.wrapping_add(i as u64),
                request: Arc::clone(&request),
                sequence: None,
                read: 0,
                given: 0,
                last: 0,
                events: events.clone(),
                cut: Arc::clone(&cut),
                came,
                last_at: came,
            });
        }
    }

    fn check(&self, job: &Job) -> ApiResult<()> {
        if let Some((param, _)) = &job.form {
            return Err(ApiError::unsupported(param.as_str(), "answers of a form are not supported yet"));
        }
        if job.min_tokens > 0 {
            return Err(ApiError::unsupported("min_tokens", "is not supported yet"));
        }
        let request = Request {
            prompt: job.prompt.clone(),
            sampling: job.sampling.clone(),
            max_tokens: job.max_tokens,
            stop_tokens: Vec::new(),
        };
        Ok(self.engine.check(&request)?)
    }

    fn forget(&mut self, which: impl Fn(&Run) -> bool) {
        let engine = &mut self.engine;
        self.waiting.retain(|run| !which(run));
        self.running.retain(|run| {
            let gone = which(run);
            if gone && let Some(sequence) = run.sequence {
                engine.end(sequence);
            }
            !gone
        });
    }

    fn admit(&mut self) {
        while let Some(mut run) = self.next_waiting() {
            let sampling = ridge_engine::Sampling { seed: run.seed, ..run.request.sampling.clone() };
            let Some(sequence) = self.engine.start(sampling, run.request.prompt.len()) else {
                self.waiting.push_front(run);
                return;
            };
            run.sequence = Some(sequence);
            self.shared.metrics.queue.observe(run.came.elapsed().as_secs_f64());
            self.shared.metrics.prompt_tokens.add(run.request.prompt.len() as u64);
            self.running.push(run);
        }
    }

    /// The next answer: by priority, then of the holder of a key that has the fewest, then by when it came.
    fn next_waiting(&mut self) -> Option<Run> {
        let order = |run: &Run| {
            let same = |other: &&Run| other.request.holder == run.request.holder;
            (run.request.priority, self.running.iter().filter(same).count())
        };
        let (at, _) = self.waiting.iter().enumerate().min_by_key(|(_, run)| order(run))?;
        self.waiting.remove(at)
    }

    fn step(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let began = Instant::now();
        let mut room = self.chunk;
        let mut stands = Vec::with_capacity(self.running.len());
        let mut work: Vec<(SequenceId, &[u32])> = Vec::with_capacity(self.running.len());
        for (i, run) in self.running.iter().enumerate() {
            let Some(sequence) = run.sequence else { continue };
            let prompt = &run.request.prompt;
            if run.read < prompt.len() {
                let take = room.min(prompt.len() - run.read);
                if take > 0 {
                    room -= take;
                    work.push((sequence, &prompt[run.read..run.read + take]));
                    stands.push((i, take));
                }
            } else {
                work.push((sequence, std::slice::from_ref(&run.last)));
                stands.push((i, 0));
            }
        }
        let tokens: usize = work.iter().map(|(_, t)| t.len()).sum();
        let outcome = self.engine.step(&work, true, &mut self.next);
        self.steps += 1;
        self.shared.metrics.step.observe(began.elapsed().as_secs_f64());
        self.shared.metrics.step_tokens.observe(tokens as f64);
        if let Err(error) = outcome {
            let error = ApiError::internal(error.to_string());
            tracing::error!(error = error.message, "a step failed");
            for (i, _) in &stands {
                let run = &self.running[*i];
                let _ = run.events.try_send(Event::Failed(error.clone()));
                self.shared.metrics.finished("error");
            }
            let failed: Vec<u64> = stands.iter().map(|(i, _)| self.running[*i].job).collect();
            self.forget(|run| failed.contains(&run.job));
            return;
        }
        let mut over = Vec::new();
        for (row, (i, read)) in stands.iter().enumerate() {
            let run = &mut self.running[*i];
            run.read += read;
            if run.read < run.request.prompt.len() {
                continue;
            }
            if !Self::token(run, self.next[row], self.engine.logprobs(row).cloned(), &self.shared) {
                over.push((run.job, run.choice));
            }
        }
        if !over.is_empty() {
            self.forget(|run| over.contains(&(run.job, run.choice)));
        }
    }

    /// Gives a token to its client. False if the answer has ended.
    fn token(run: &mut Run, id: u32, logprobs: Option<ridge_engine::Logprobs>, shared: &Shared) -> bool {
        let metrics = &shared.metrics;
        let now = Instant::now();
        let since = now.duration_since(run.last_at).as_secs_f64();
        if run.given == 0 { &metrics.time_to_first_token } else { &metrics.inter_token }.observe(since);
        run.last_at = now;
        let choice = run.choice;
        let by = run.request.stop_tokens.contains(&id).then_some(id);
        let stop = by.is_some() || run.request.eos.contains(&id);
        let mut events = Vec::with_capacity(2);
        if !stop {
            run.last = id;
            run.given += 1;
            metrics.generation_tokens.add(1);
            events.push(Event::Token { choice, id, logprobs });
        }
        let reason = match (stop, run.given == run.request.max_tokens) {
            (true, _) => Some("stop"),
            (false, true) => Some("length"),
            _ => None,
        };
        if let Some(reason) = reason {
            metrics.finished(reason);
            metrics.end_to_end.observe(run.came.elapsed().as_secs_f64());
            metrics.request_prompt_tokens.observe(run.request.prompt.len() as f64);
            metrics.request_generation_tokens.observe(run.given as f64);
            events.push(Event::End { choice, reason, by });
        }
        for event in events {
            if run.events.try_send(event).is_err() {
                metrics.finished("abort");
                let slow = "the client reads too slowly: more tokens wait for it than this server keeps";
                let _ = run.cut.set(ApiError::unavailable(slow));
                return false;
            }
        }
        reason.is_none()
    }

    fn publish(&self) {
        let (blocks_free, blocks_total) = (self.engine.free_blocks(), self.total_blocks);
        let (running, waiting, steps) = (self.running.len(), self.waiting.len(), self.steps);
        self.shared.publish(Snapshot { running, waiting, blocks_free, blocks_total, steps });
    }
}
