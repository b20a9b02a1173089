//! Many users, one engine: requests come in, steps go out, tokens come back.
//!
//! A [`Service`] is driven by its owner, who has the clock and the thread: [`submit`](Service::submit) and
//! [`cancel`](Service::cancel) at any time, and [`step`](Service::step) as long as [`is_idle`](Service::is_idle) says
//! no. Times are [`Duration`]s since a moment of the owner's choice.

mod options;
mod request;

use std::collections::VecDeque;
use std::time::Duration;

use ridge_models::Model;
use ridge_runtime::Session;

pub use options::{Policy, ServiceOptions};
pub use request::{Constraint, Event, Happened, Refused, Request, RequestId, Targets, Usage};

use crate::engine::{Engine, SequenceId};
use crate::error::{EngineError, Result};
use crate::generate::Finish;

/// How long after arrival a request without targets is due.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What a step ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// `(tokens in the cache, tokens of the step)` of each sequence, as [`StepCost::at`](crate::costs::StepCost::at)
    /// takes them. Empty where nothing ran.
    pub work: Vec<(usize, usize)>,
}

/// A service's state and what it has done since its start, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that run.
    pub running: usize,
    /// Requests that wait, those that were preempted among them.
    pub waiting: usize,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Blocks that running sequences own.
    pub blocks_used: usize,
    /// Blocks that nobody owns and that hold a prefix.
    pub blocks_cached: usize,
    /// Steps that ran.
    pub steps: u64,
    /// Steps that failed as a whole.
    pub failed_steps: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub generated_tokens: u64,
    /// Tokens of prompts that were looked up in the cache.
    pub prefix_queries: u64,
    /// Tokens of prompts that were found there.
    pub prefix_hits: u64,
    /// Sequences that gave their blocks to others, to be computed again.
    pub preemptions: u64,
}

/// What a block of the cache is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockUse {
    /// Nothing.
    Free,
    /// A prefix that nobody uses now.
    Cached,
    /// This many sequences.
    Used(usize),
}

struct Live {
    id: RequestId,
    request: Request,
    sequence: Option<SequenceId>,
    fed: usize,
    answer: Vec<u32>,
    usage: Usage,
}

/// An engine with its queue and scheduler.
pub struct Service {
    engine: Engine,
    options: ServiceOptions,
    live: VecDeque<Live>,
    submitted: u64,
    stats: Stats,
    blocks: usize,
    ran: Ran,
}

impl Service {
    /// A service of `model`, whose weights `session` has. Allocates the cache.
    ///
    /// # Errors
    /// As for [`Engine::new`].
    pub fn new(session: Session, model: &Model, options: ServiceOptions) -> Result<Self> {
        let engine = Engine::new(session, model, options.engine)?;
        let blocks = engine.free_blocks();
        Ok(Self {
            engine,
            options,
            live: VecDeque::new(),
            submitted: 0,
            stats: Stats::default(),
            blocks,
            ran: Ran::default(),
        })
    }

    /// Takes a request that arrives `now`.
    ///
    /// # Errors
    /// [`Refused::Invalid`] says why it can never run, [`Refused::Busy`] that too many wait.
    pub fn submit(&mut self, request: Request, now: Duration) -> Result<RequestId, Refused> {
        let _ = now;
        if request.n != 1 || request.constraint.is_some() || request.prompt_logprobs {
            return Err(Refused::Invalid(EngineError::Setting {
                name: "request",
                value: format!("n = {}", request.n),
                why: "only one free answer without prompt log-probabilities is served so far".into(),
            }));
        }
        let waiting = self.live.iter().filter(|l| l.sequence.is_none()).count();
        if waiting >= self.options.queue {
            return Err(Refused::Busy { waiting, limit: self.options.queue });
        }
        self.engine.check(&crate::generate::Request {
            prompt: request.prompt.clone(),
            sampling: request.sampling.clone(),
            max_tokens: request.max_tokens,
            stop_tokens: Vec::new(),
        })?;
        let id = RequestId(self.submitted);
        self.submitted += 1;
        let usage = Usage { prompt_tokens: request.prompt.len(), ..Usage::default() };
        self.live.push_back(Live { id, request, sequence: None, fed: 0, answer: Vec::new(), usage });
        Ok(id)
    }

    /// Ends a request, running or not, and frees what it has. No event of it follows. Nothing where it is over.
    pub fn cancel(&mut self, id: RequestId) {
        if let Some(at) = self.live.iter().position(|l| l.id == id)
            && let Some(live) = self.live.remove(at)
            && let Some(sequence) = live.sequence
        {
            self.engine.end(sequence);
        }
    }

    /// Ends one answer of a request, as a stop string does: it has [`Finish::Stop`], and the others go on. Nothing where
    /// it has ended.
    pub fn stop(&mut self, id: RequestId, choice: usize, events: &mut Vec<Event>) {
        if choice == 0
            && let Some(live) = self.live.iter().find(|l| l.id == id)
        {
            let usage = live.usage;
            self.cancel(id);
            let ended = Happened::Ended { choice, finish: Finish::Stop, stop_token: None };
            events.extend([ended, Happened::Done(usage)].map(|what| Event { id, what }));
        }
    }

    /// Is there nothing to run?
    pub fn is_idle(&self) -> bool {
        self.live.is_empty()
    }

    /// Waits for the step that runs, starts the next one, and appends what the former brought to `events`; so the device
    /// works while the owner handles them. Failures of the device are events of the requests that they met.
    pub fn step(&mut self, now: Duration, events: &mut Vec<Event>) -> &Ran {
        let _ = now;
        self.ran.work.clear();
        let mut next = Vec::new();
        for at in (0..self.live.len()).rev() {
            let live = &mut self.live[at];
            if live.sequence.is_none() {
                live.sequence = self.engine.start(live.request.sampling.clone(), live.request.prompt.len());
            }
            let Some(sequence) = live.sequence else { continue };
            let whole: Vec<u32> = live.request.prompt.iter().chain(&live.answer).copied().collect();
            let chunk = &whole[live.fed..whole.len().min(live.fed + self.options.engine.chunk)];
            let last = live.fed + chunk.len() == whole.len();
            let id = live.id;
            self.ran.work.push((live.fed, chunk.len()));
            let outcome = self.engine.step(&[(sequence, chunk)], last, &mut next);
            self.stats.steps += 1;
            live.fed += chunk.len();
            let over = match outcome {
                Err(error) => Some(Happened::Failed(error.to_string())),
                Ok(()) if !last => None,
                Ok(()) => {
                    let token = next[0];
                    let stop = live.request.stop_tokens.contains(&token);
                    let finish = match live.answer.len() + 1 {
                        _ if stop => Some(Finish::Stop),
                        n if n >= live.request.max_tokens => Some(Finish::Length),
                        n if n + live.request.prompt.len() >= self.options.engine.context => Some(Finish::Context),
                        _ => None,
                    };
                    if !stop {
                        live.answer.push(token);
                        live.usage.completion_tokens += 1;
                        let logprobs = self.engine.logprobs(0).cloned();
                        events.push(Event { id, what: Happened::Token { choice: 0, token, logprobs } });
                    }
                    finish.map(|finish| {
                        let stop_token = stop.then_some(token);
                        events.push(Event { id, what: Happened::Ended { choice: 0, finish, stop_token } });
                        Happened::Done(live.usage)
                    })
                }
            };
            if let Some(what) = over {
                events.push(Event { id, what });
                self.cancel(id);
            }
        }
        &self.ran
    }

    /// State and counters.
    pub fn stats(&self) -> Stats {
        let running = self.live.iter().filter(|l| l.sequence.is_some()).count();
        Stats {
            running,
            waiting: self.live.len() - running,
            blocks: self.blocks,
            blocks_used: self.blocks - self.engine.free_blocks(),
            ..self.stats
        }
    }

    /// What each block of the cache is used for.
    pub fn blocks(&self) -> Vec<BlockUse> {
        let used = self.blocks - self.engine.free_blocks();
        (0..self.blocks).map(|i| if i < used { BlockUse::Used(1) } else { BlockUse::Free }).collect()
    }
}
