//! Continuous batching of many requests on one engine.
//!
//! A [`Service`] is driven by its owner, which provides the clock and the thread: [`submit`](Service::submit) and
//! [`cancel`](Service::cancel) at any time, and [`step`](Service::step) until [`is_idle`](Service::is_idle). Times are
//! [`Duration`]s since an origin of the owner's choice.
//!
//! `request` is the interface for users, `scheduler` decides which tokens a step runs, `task` is one running sequence.

mod advance;
mod ending;
mod grammar;
mod masks;
mod options;
mod request;
mod scheduler;
mod stats;
mod task;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use ridge_models::Model;
use ridge_runtime::Session;
use ridge_text::Tokenizer;

pub use grammar::{is_supported_pattern, schema_error};
pub use masks::Executor;
pub use options::{DEFAULT_DEADLINE, MAX_ANSWERS, Policy, ServiceOptions};
pub use request::{Constraint, Event, Happened, Refused, Request, RequestId, Targets, Usage};
pub use stats::{BlockUse, Stats};

use crate::blocks::{BlockId, Prefix};
use crate::draft::{Drafts, Ngram, SequenceDraft};
use crate::engine::{Engine, Outcome, Row, STEPS_IN_FLIGHT, SequenceId, recycled};
use crate::error::{EngineError, Result};
use crate::generate::Finish;
use crate::programs::MAX_CANDIDATES;
use advance::{Advance, End, Ticket, apply_advance};
use grammar::{Grammar, Grammars};
use masks::{Masks, TaskGrammar};
use scheduler::Scheduler;
use task::Task;

/// What a step ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// `(tokens in the cache, tokens of the step)` of each sequence, as [`StepCost::at`](crate::costs::StepCost::at)
    /// takes them. Empty where nothing ran.
    pub work: Vec<(usize, usize)>,
}

/// A step in flight.
#[derive(Default)]
struct Flight {
    rows: Vec<SequenceId>,
    work: Vec<(usize, usize)>,
}

/// An engine with its queue and scheduler.
pub struct Service {
    engine: Engine,
    options: ServiceOptions,
    grammars: Option<Grammars>,
    drafts: Option<Drafts>,
    masks: Masks,
    /// Tokens that end a text.
    ends: Vec<u32>,
    /// Tokens of a sequence at most: of the context, or of the cache if that is less.
    context: usize,
    scheduler: Scheduler,
    tickets: AHashMap<RequestId, Ticket>,
    submitted: u64,
    /// The steps in flight, the first submitted first.
    flights: VecDeque<Flight>,
    ran: Ran,
    outcomes: Vec<Outcome>,
    /// Room for the next step's rows.
    spare: Flight,
    /// By row of the tables: the place among those that run of the task that has it.
    places: Vec<usize>,
    /// Room for the rows of a step; empty between steps.
    rows: Vec<Row<'static>>,
    stats: Stats,
}

/// A grammar at its beginning, and the tokens that it forbids there.
type Begun = (Box<Grammar>, Vec<u32>);

impl Service {
    /// A service of `model`, whose weights `session` has. Allocates the cache. A model that was built with drafts
    /// proposes candidates as [`with_drafts`](Self::with_drafts) says.
    ///
    /// # Errors
    /// As for [`Engine::new`], and when a step has fewer tokens than sequences, or one where attention is told which tokens are of a
    /// prompt.
    pub fn new(session: Session, model: &Model, options: ServiceOptions) -> Result<Self> {
        let (chunk, sequences) = (options.engine.chunk, options.engine.sequences);
        if chunk < sequences {
            return Err(EngineError::Setting {
                name: "chunk",
                value: chunk.to_string(),
                why: format!("a step must have room for one token of each of {sequences} sequences"),
            });
        }
        let engine = Engine::new(session, model, options.engine)?;
        let lines = engine.most_lines();
        if lines == 0 {
            let why =
                "must be at least 2 with --deterministic, where a step of prompts has more tokens than lines".into();
            return Err(EngineError::Setting { name: "chunk", value: chunk.to_string(), why });
        }
        let context = options.engine.context.min(engine.blocks().count() * engine.block_size());
        Ok(Self {
            context,
            drafts: engine.predicts().then_some(Drafts::Module),
            engine,
            options,
            grammars: None,
            masks: Masks::new(),
            ends: model.eos_token_ids.clone(),
            scheduler: Scheduler::new(options.policy, [chunk, lines, sequences], context),
            tickets: AHashMap::new(),
            submitted: 0,
            flights: VecDeque::with_capacity(STEPS_IN_FLIGHT),
            ran: Ran::default(),
            outcomes: Vec::with_capacity(sequences),
            spare: Flight::default(),
            places: vec![0; sequences],
            rows: Vec::new(),
            stats: Stats::default(),
        })
    }

    /// This service with grammars over the tokens of `tokenizer`, the model's, for requests with a
    /// [`Constraint`].
    ///
    /// # Errors
    /// When it is not known which bytes its tokens are.
    pub fn with_grammars(mut self, tokenizer: &Tokenizer) -> Result<Self> {
        self.grammars = Some(Grammars::new(tokenizer, self.engine.vocab, &self.ends)?);
        Ok(self)
    }

    /// This service with masks of grammars that take long computed by `executor`, on threads of the owner's; between two
    /// steps otherwise.
    #[must_use]
    pub fn with_executor(mut self, executor: Executor) -> Self {
        self.masks.run_on(executor);
        self
    }

    /// This service with candidates for the next tokens of answers, of which those that the model itself chooses are taken:
    /// the same answers in fewer steps, where they repeat what was said. One step is in flight then.
    #[must_use]
    pub fn with_drafts(mut self, drafts: Ngram) -> Self {
        self.drafts = Some(Drafts::Ngram(drafts));
        self
    }

    /// This service with all that its steps need made beforehand: see [`Engine::make_ready`].
    ///
    /// # Errors
    /// As for [`Engine::make_ready`].
    pub fn made_ready(mut self) -> Result<Self> {
        let candidates = match self.drafts {
            None => 0,
            Some(Drafts::Ngram(ngram)) => ngram.candidates.min(MAX_CANDIDATES),
            Some(Drafts::Module) => self.engine.module_drafts(),
        };
        self.engine.make_ready(candidates)?;
        Ok(self)
    }

    /// Is there nothing to compute until a mask is known? The owner may wait a little before the next step.
    pub fn waits_for_masks(&self) -> bool {
        self.masks.away > 0 && self.flights.is_empty()
    }

    /// Takes a request that arrives `now`.
    ///
    /// # Errors
    /// [`Refused::Invalid`] says why it can never run, [`Refused::Busy`] that too many wait.
    pub fn submit(&mut self, request: Request, now: Duration) -> Result<RequestId, Refused> {
        self.engine.check_parts(&request.sampling, &request.prompt)?;
        let (prompt, context) = (request.prompt.len(), self.context);
        if prompt > context || (request.max_tokens > 0 && prompt == context) {
            return Err(EngineError::PromptTooLong { prompt, context }.into());
        }
        let invalid = |name, value: String, why: String| Refused::Invalid(EngineError::Setting { name, value, why });
        if !(1..=MAX_ANSWERS).contains(&request.n) {
            return Err(invalid("n", request.n.to_string(), format!("must be from 1 to {MAX_ANSWERS}")));
        }
        let (waiting, room) = (self.scheduler.waiting.len(), self.scheduler.rows - self.scheduler.running.len());
        let limit = self.options.queue;
        if waiting >= limit.saturating_add(room) {
            return Err(Refused::Busy { waiting, limit });
        }
        let mut grammars: Vec<Option<Begun>> = (0..request.n).map(|_| None).collect();
        if let Some(constraint) = &request.constraint {
            let missing = || constraint.refused("this service has no tokenizer for grammars".into());
            let known = self.grammars.as_ref().ok_or_else(missing)?;
            let (first, begin) = known.begin(constraint)?;
            grammars.fill_with(|| Some((Box::new(first.another()), begin.clone())));
        }
        let id = RequestId(self.submitted);
        self.submitted += 1;
        let root = if self.options.prefix_cache { Prefix::Root(request.salt) } else { Prefix::Alone(id.0) };
        let (n, request) = (request.n, Arc::new(request));
        let vocab = self.engine.vocab;
        let task = |(choice, grammar): (usize, Option<Begun>)| {
            let mut task = Task {
                id,
                choice,
                request: Arc::clone(&request),
                tokens: request.prompt.clone(),
                root,
                sequence: None,
                flying: 0,
                arrived: now,
                started: None,
                latest: None,
                scores: (choice == 0 && request.prompt_logprobs).then(Vec::new),
                forbidden: Vec::new(),
                grammar: TaskGrammar::None,
                draft: self.drafts.map(SequenceDraft::new),
                candidates: Vec::new(),
            };
            match grammar {
                Some((grammar, begin)) => {
                    task.forbid(begin, vocab);
                    task.grammar = TaskGrammar::Here(grammar);
                }
                None => task.forbid_early(vocab),
            }
            task
        };
        let usage = Usage { prompt_tokens: prompt, ..Usage::default() };
        let mut tasks = grammars.into_iter().enumerate().map(task);
        let first = tasks.next();
        let followers = tasks.collect();
        self.tickets.insert(id, Ticket { usage, open: n, followers });
        first.into_iter().for_each(|first| self.scheduler.add(first));
        Ok(id)
    }

    /// Ends a request, running or not, and frees what it has. No event of it follows. Nothing where it is over.
    pub fn cancel(&mut self, id: RequestId) {
        if self.tickets.remove(&id).is_some() {
            self.scheduler.remove(&mut self.engine, |task| task.id == id);
        }
    }

    /// Ends one answer of a request, as a stop string does: it has [`Finish::Stop`], and the others continue. Nothing where
    /// it has ended.
    pub fn stop(&mut self, id: RequestId, choice: usize, events: &mut Vec<Event>) {
        let all = || self.scheduler.running.iter().chain(&self.scheduler.waiting);
        if all().any(|task| (task.id, task.choice) == (id, choice)) {
            self.end(id, choice, End::Finished(Finish::Stop, None), events);
        }
    }

    /// Is there nothing to run, and no step whose outcome is to be taken?
    pub fn is_idle(&self) -> bool {
        self.tickets.is_empty() && self.flights.is_empty()
    }

    /// Queues a step behind the one that runs, waits for the latter, and appends what it brought to `events`; so the device
    /// works while the owner handles them. Tells what ran: nothing at first. Failures of the device are events of the
    /// requests that they met.
    pub fn step(&mut self, now: Duration, events: &mut Vec<Event>) -> &Ran {
        self.ran.work.clear();
        if self.masks.away > 0 {
            self.take_masks(now, events);
        }
        let in_flight = self.flights.len();
        // Candidates follow from tokens that are known: with some, a step waits for the one before, and all answers stand in it.
        let waits = self.drafts.is_some() && in_flight > 0;
        if waits {
            self.complete(now, events);
        }
        if self.flights.len() < STEPS_IN_FLIGHT {
            self.start(now, events);
        }
        if in_flight > 0 && !waits {
            self.complete(now, events);
        }
        &self.ran
    }

    /// Queues the next step, if there is something to run.
    fn start(&mut self, now: Duration, events: &mut Vec<Event>) {
        self.scheduler.compose(&mut self.engine, now);
        let mut flight = std::mem::take(&mut self.spare);
        let mut rows = recycled(std::mem::take(&mut self.rows));
        for (at, count) in &self.scheduler.plan {
            if let Some((from, row)) = self.scheduler.running[*at].row(&self.engine, *count) {
                flight.rows.push(row.id);
                flight.work.push((from, row.tokens.len()));
                rows.push(row);
            }
        }
        if rows.is_empty() {
            (self.spare, self.rows) = (flight, recycled(rows));
            return;
        }
        let submitted = self.engine.submit(&rows);
        let samples: Vec<bool> = rows.iter().map(|row| row.sample).collect();
        self.rows = recycled(rows);
        self.flights.push_back(flight);
        match submitted {
            Ok(()) => {
                for ((at, _), sample) in self.scheduler.plan.iter().zip(samples) {
                    self.scheduler.running[*at].flying += usize::from(sample);
                }
            }
            Err(error) if self.engine.in_flight() + 1 == self.flights.len() => {
                // It was not queued, and the others run on.
                let flight = self.flights.pop_back().unwrap_or_default();
                self.fail_rows(&flight, &error, events);
            }
            Err(error) => self.fail_flights(&error, events),
        }
    }

    /// Takes over the masks that were computed beside the steps, and ends the answers whose masks take too long.
    fn take_masks(&mut self, now: Duration, events: &mut Vec<Event>) {
        let (vocab, context) = (self.engine.vocab, self.context);
        let mut over = Vec::new();
        while let Some(done) = self.masks.take() {
            let all = self.scheduler.running.iter_mut().chain(&mut self.scheduler.waiting);
            let waits = |task: &&mut Task| (task.id, task.choice) == (done.id, done.choice) && task.grammar.is_away();
            // An answer that was cancelled needs no mask.
            let Some(task) = all.into_iter().find(waits) else { continue };
            task.grammar.come_back(done.grammar);
            over.extend(apply_advance(task, done.outcome, vocab, context).map(|end| (task.id, task.choice, end)));
        }
        for task in self.scheduler.running.iter_mut().chain(&mut self.scheduler.waiting) {
            if let TaskGrammar::Away(away) = &mut task.grammar {
                over.extend(away.is_late(now).map(|why| (task.id, task.choice, End::Stuck(why))));
            }
        }
        over.into_iter().for_each(|(id, choice, end)| self.end(id, choice, end, events));
    }

    /// Waits for the first step in flight, and takes over what it brings.
    fn complete(&mut self, now: Duration, events: &mut Vec<Event>) {
        if self.flights.is_empty() {
            return;
        }
        let mut outcomes = std::mem::take(&mut self.outcomes);
        match self.engine.complete(&mut outcomes) {
            Err(error) => self.fail_flights(&error, events),
            Ok(()) => {
                self.stats.steps += 1;
                let mut flight = self.flights.pop_front().unwrap_or_default();
                std::mem::swap(&mut self.ran.work, &mut flight.work);
                for (place, task) in self.scheduler.running.iter().enumerate() {
                    if let Some(id) = task.sequence {
                        self.places[id.row()] = place;
                    }
                }
                let (mut over, mut followers) = (Vec::new(), Vec::new());
                let mut outcomes = outcomes.drain(..).peekable();
                for (id, (from, count)) in flight.rows.drain(..).zip(&self.ran.work) {
                    let Some(outcome) = outcomes.next_if(|outcome| outcome.id == id) else { continue };
                    let task = self.scheduler.running.get_mut(self.places[id.row()]);
                    if let Some(task) = task.filter(|task| task.sequence == Some(id)) {
                        let ticket = ticket_of(&mut self.tickets, task.id);
                        // The prompt is in the cache now.
                        if from + count >= task.request.prompt.len() {
                            followers.append(&mut ticket.followers);
                        }
                        let mut advance = Advance {
                            context: self.context,
                            vocab: self.engine.vocab,
                            ticket,
                            stats: &mut self.stats,
                            masks: &mut self.masks,
                            now,
                            events,
                        };
                        if let Some(end) = advance.task(task, outcome, (*from, *count)) {
                            over.push((task.id, task.choice, end));
                        }
                    }
                }
                drop(outcomes);
                followers.into_iter().for_each(|follower| self.scheduler.add(follower));
                flight.work.clear();
                self.spare = flight;
                over.into_iter().for_each(|(id, choice, end)| self.end(id, choice, end, events));
                self.release(events);
            }
        }
        self.outcomes = outcomes;
    }

    /// Tells the step that is queued which tokens its rows may have, now that the tokens before are known.
    fn release(&mut self, events: &mut Vec<Event>) {
        if !self.engine.is_late() {
            return;
        }
        // A row whose mask takes longer is computed again when it is there.
        for task in self.scheduler.running.iter_mut().filter(|task| task.flying > 0 && task.grammar.is_away()) {
            task.flying = 0;
            if let Some(id) = task.sequence {
                self.engine.truncate(id, task.tokens.len() - 1);
            }
        }
        let masks: AHashMap<SequenceId, &[u32]> =
            (self.scheduler.running.iter()).filter_map(|task| Some((task.sequence?, &task.forbidden[..]))).collect();
        let released = self.engine.release(|id| masks.get(&id).copied().unwrap_or_default());
        if let Err(error) = released {
            self.fail_flights(&error, events);
        }
    }

    /// State and counters.
    pub fn stats(&self) -> Stats {
        let blocks = self.engine.blocks();
        let (prefix_queries, prefix_hits) = self.scheduler.looked_up;
        let (positions_owned, positions_unused) = self.engine.cache_positions();
        Stats {
            running: self.scheduler.running.len(),
            waiting: self.scheduler.waiting.len(),
            blocks: blocks.count(),
            blocks_used: blocks.count() - blocks.free(),
            blocks_cached: if self.options.prefix_cache { blocks.cached() } else { 0 },
            positions_owned,
            positions_unused,
            prefix_queries,
            prefix_hits,
            preemptions: self.scheduler.preemptions,
            made: self.engine.made(),
            ..self.stats
        }
    }

    /// Tokens of a cache block.
    pub fn block_size(&self) -> usize {
        self.engine.block_size()
    }

    /// What each block of the cache is used for.
    pub fn blocks(&self) -> Vec<BlockUse> {
        let blocks = self.engine.blocks();
        let of = |block| match blocks.owners(block) {
            0 if self.options.prefix_cache && blocks.is_named(block) => BlockUse::Cached,
            0 => BlockUse::Free,
            owners => BlockUse::Used(owners),
        };
        (0..blocks.count() as u32).map(BlockId).map(of).collect()
    }
}

fn ticket_of(tickets: &mut AHashMap<RequestId, Ticket>, id: RequestId) -> &mut Ticket {
    tickets.get_mut(&id).expect("a task that runs has a ticket")
}
