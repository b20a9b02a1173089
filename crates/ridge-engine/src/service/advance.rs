//! Applies the outcome of a step to a sequence, token by token, until the sequence ends.

use std::time::Duration;

use super::grammar::Advanced;
use super::masks::{Masks, TaskGrammar};
use super::request::{Event, Happened, Usage};
use super::stats::Stats;
use super::task::Task;
use crate::engine::{Next, Outcome};
use crate::error::EngineError;
use crate::generate::Finish;
use crate::sampling::Logprobs;

/// A request that is not over.
pub(super) struct Ticket {
    pub(super) usage: Usage,
    /// Answers that are not complete.
    pub(super) open: usize,
    /// Answers that wait for the prompt to be in the cache.
    pub(super) followers: Vec<Task>,
}

/// How an answer ended.
pub(super) enum End {
    Finished(Finish, Option<u32>),
    Failed(String),
    Stuck(String),
}

/// What an outcome changes.
pub(super) struct Advance<'a> {
    pub(super) context: usize,
    pub(super) vocab: usize,
    pub(super) ticket: &'a mut Ticket,
    pub(super) stats: &'a mut Stats,
    pub(super) masks: &'a mut Masks,
    pub(super) now: Duration,
    pub(super) events: &'a mut Vec<Event>,
}

impl Advance<'_> {
    /// Takes over what a step of `count` tokens behind `from` brought a task. How does it end, if it does?
    pub(super) fn task(&mut self, task: &mut Task, outcome: Outcome, (from, count): (usize, usize)) -> Option<End> {
        let prompt = task.request.prompt.len();
        self.stats.prompt_tokens += prompt.saturating_sub(from).min(count) as u64;
        if let Some((started, cached)) = task.started.filter(|_| task.choice == 0) {
            self.ticket.usage.queued = started - task.arrived;
            self.ticket.usage.cached_tokens = cached;
        }
        task.take_scores(from, outcome.scores);
        task.flying -= usize::from(outcome.next != Next::NotAsked);
        let next = match outcome.next {
            Next::NotAsked => return None,
            Next::NotFinite(position) => return Some(End::Failed(EngineError::NotFinite { position }.to_string())),
            Next::Token(token) => token,
        };
        let id = task.id;
        if let Some(scores) = task.scores.take() {
            self.events.push(Event { id, what: Happened::Prompt(scores) });
        }
        if task.request.max_tokens == 0 {
            return Some(End::Finished(Finish::Length, None));
        }
        if let Some(draft) = task.draft.as_mut().filter(|_| !task.candidates.is_empty()) {
            draft.accepted(outcome.accepted, task.candidates.len());
            self.stats.candidates += task.candidates.len() as u64;
            self.stats.accepted += outcome.accepted as u64;
        }
        for nth in 0..outcome.accepted {
            let end = self.say(task, task.candidates[nth], None);
            if end.is_some() {
                return end;
            }
        }
        self.say(task, next, outcome.logprobs)
    }

    /// Adds a token to an answer. How does it end, if it does?
    fn say(&mut self, task: &mut Task, next: u32, logprobs: Option<Logprobs>) -> Option<End> {
        let (id, request) = (task.id, &task.request);
        let answered = task.answered();
        if answered >= request.min_tokens && request.stop_tokens.contains(&next) {
            return Some(End::Finished(Finish::Stop, Some(next)));
        }
        if let TaskGrammar::Here(grammar) = &task.grammar
            && grammar.is_end(next)
        {
            return Some(End::Finished(Finish::Stop, Some(next)));
        }
        task.tokens.push(next);
        task.latest = Some(self.now);
        self.stats.generated_tokens += 1;
        self.ticket.usage.completion_tokens += 1;
        let what = Happened::Token { choice: task.choice, token: next, logprobs };
        self.events.push(Event { id, what });
        match std::mem::replace(&mut task.grammar, TaskGrammar::None) {
            TaskGrammar::Here(grammar) if self.masks.takes(&grammar) => {
                task.grammar = self.masks.send((task.id, task.choice), grammar, Some(next), self.now);
                None
            }
            TaskGrammar::Here(mut grammar) => {
                let outcome = grammar.advance(Some(next));
                task.grammar = TaskGrammar::Here(grammar);
                apply_advance(task, outcome, self.vocab, self.context)
            }
            none => {
                task.grammar = none;
                full(task, self.context)
            }
        }
    }
}

/// Takes over what the grammar of an answer makes of its last token. How does the answer end, if it does?
pub(super) fn apply_advance(
    task: &mut Task,
    outcome: Result<Advanced, String>,
    vocab: usize,
    context: usize,
) -> Option<End> {
    match outcome {
        Ok(Advanced { complete: true, .. }) => Some(End::Finished(Finish::Stop, None)),
        // What may follow does not matter at the end.
        outcome => full(task, context).or_else(|| match outcome {
            Ok(Advanced { forbidden, .. }) => {
                task.forbid(forbidden, vocab);
                None
            }
            Err(why) => Some(End::Stuck(why)),
        }),
    }
}

/// How an answer ends that has as many tokens as it may, or as fit.
fn full(task: &Task, context: usize) -> Option<End> {
    let finish = if task.answered() >= task.request.max_tokens {
        Finish::Length
    } else if task.tokens.len() >= context {
        Finish::Context
    } else {
        return None;
    };
    Some(End::Finished(finish, None))
}
