//! Decides which tokens the next step runs.
//!
//! A step is `{sequence: tokens}` within a token budget. Running sequences come first, in the order of the policy: a decoding
//! sequence always gets its single token, and prompts share the remaining budget. When blocks run out, the last sequence in order
//! is preempted for the first: it waits again and is recomputed, except for a prefix that is still cached then. (A cached prefix
//! costs nothing to restore, and recomputing the rest costs less than swapping it through the host.) The remaining budget, rows and
//! blocks go to waiting requests, in order; the first of them is never overtaken.

use ahash::AHashMap;
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use super::options::{DEFAULT_DEADLINE, Policy};
use super::request::RequestId;
use super::task::Task;
use crate::engine::{Engine, Start};

/// Tasks in their order, and what a tenant has had.
pub(super) struct Scheduler {
    policy: Policy,
    /// Tokens of a step at most: at least one for each sequence.
    budget: usize,
    /// Lines of a step at most: one for each sequence and each candidate.
    lines: usize,
    /// Sequences at a time.
    pub(super) rows: usize,
    /// Tokens of a sequence at most.
    context: usize,
    pub(super) running: Vec<Task>,
    /// The next one last.
    pub(super) waiting: Vec<Task>,
    served: AHashMap<Arc<str>, Served>,
    /// Places in `running` of the next step's tasks, and how many tokens each has in it.
    pub(super) plan: Vec<(usize, usize)>,
    /// Of each that runs, the tokens that the next step can compute.
    runnable: Vec<usize>,
    /// Has there been a task with candidates?
    drafts: bool,
    pub(super) preemptions: u64,
    /// Tokens that were looked for in the cache when a task started, and those found.
    pub(super) looked_up: (u64, u64),
}

#[derive(Default)]
struct Served {
    tokens: u64,
    tasks: usize,
}

impl Scheduler {
    /// With at most so many tokens and lines of a step, and sequences at a time, each of at most `context` tokens.
    pub(super) fn new(policy: Policy, [budget, lines, rows]: [usize; 3], context: usize) -> Self {
        let rows = rows.min(lines);
        Self {
            policy,
            budget,
            lines,
            rows,
            context,
            running: Vec::with_capacity(rows),
            waiting: Vec::new(),
            served: AHashMap::new(),
            plan: Vec::with_capacity(rows),
            runnable: Vec::with_capacity(rows),
            drafts: false,
            preemptions: 0,
            looked_up: (0, 0),
        }
    }

    /// Takes a new task. A tenant who had none starts with as much as the one served least, so that nobody saves up.
    pub(super) fn add(&mut self, task: Task) {
        let least = self.served.values().filter(|s| s.tasks > 0).map(|s| s.tokens).min();
        let served = self.served.entry(Arc::clone(&task.request.tenant)).or_default();
        if let (0, Some(least)) = (served.tasks, least) {
            served.tokens = served.tokens.max(least);
        }
        served.tasks += 1;
        self.drafts |= task.draft.is_some();
        self.waiting.push(task);
    }

    /// Takes out the tasks that `over` names, and frees their blocks.
    pub(super) fn remove(&mut self, engine: &mut Engine, over: impl Fn(&Task) -> bool) {
        for tasks in [&mut self.running, &mut self.waiting] {
            tasks.retain(|task| {
                let over = over(task);
                if over {
                    task.sequence.into_iter().for_each(|id| engine.end(id));
                    if let Some(served) = self.served.get_mut(&task.request.tenant) {
                        served.tasks -= 1;
                    }
                }
                !over
            });
        }
        if self.running.is_empty() && self.waiting.is_empty() {
            self.served.clear();
        }
    }

    /// Smaller comes first; no two tasks are equal.
    fn order(policy: Policy, served: &AHashMap<Arc<str>, Served>, task: &Task) -> (i128, RequestId, usize) {
        let first = match policy {
            Policy::FirstCome => 0,
            Policy::Priority => i128::from(task.request.priority),
            Policy::Deadline => {
                let targets = task.request.targets;
                let (from, within) = task.latest.map_or((task.arrived, targets.ttft), |last| (last, targets.tpot));
                (from + within.unwrap_or(DEFAULT_DEADLINE)).as_nanos() as i128
            }
            Policy::Fair => served.get(&task.request.tenant).map_or(0, |s| i128::from(s.tokens)),
        };
        (first, task.id, task.choice)
    }

    /// Plans the next step and reserves its blocks.
    pub(super) fn compose(&mut self, engine: &mut Engine, now: Duration) {
        self.plan.clear();
        if self.drafts {
            // Those of a step in flight are needed until it is complete.
            self.running.iter_mut().filter(|task| task.flying == 0).for_each(|task| task.candidates.clear());
        }
        let (policy, served) = (self.policy, &self.served);
        if !self.running.is_sorted_by_key(|task| Self::order(policy, served, task)) {
            self.running.sort_by_key(|task| Self::order(policy, served, task));
        }
        let mut budget = self.budget;
        let preempted = self.schedule_running(engine, &mut budget);
        if !preempted && budget > 0 && self.running.len() < self.rows && !self.waiting.is_empty() {
            let (policy, served) = (self.policy, &self.served);
            self.waiting.sort_by_key(|task| Reverse(Self::order(policy, served, task)));
            self.admit(engine, &mut budget, now);
        }
        if self.drafts {
            self.propose(engine, budget);
        }
        for (at, count) in self.plan.iter().filter(|_| policy == Policy::Fair) {
            if let Some(served) = self.served.get_mut(&self.running[*at].request.tenant) {
                served.tokens += *count as u64;
            }
        }
    }

    /// Gives what is left of the budget and the lines to candidates of the answers that have some, as far as there are blocks for
    /// them.
    fn propose(&mut self, engine: &mut Engine, budget: usize) {
        let mut budget = budget.min(self.lines - self.plan.len());
        for (at, count) in &self.plan {
            let task = &mut self.running[*at];
            let last = task.draft.is_some() && *count == task.missing(engine) && task.flying == 0;
            let Some(id) = task.sequence.filter(|id| last && engine.takes_candidates(*id, *count)) else {
                continue;
            };
            let proposed = task.propose(engine.drafts(id), budget, self.context);
            if proposed > 0 && !engine.grow(id, count + proposed) {
                task.candidates.clear();
            }
            budget -= task.candidates.len();
        }
    }

    /// Plans tokens of those that run. Had one to give its blocks away?
    fn schedule_running(&mut self, engine: &mut Engine, budget: &mut usize) -> bool {
        let context = self.context;
        let mut all = std::mem::take(&mut self.runnable);
        all.clear();
        all.extend(self.running.iter().map(|task| task.runnable(engine, context)));
        let single = |tasks: &[usize]| tasks.iter().filter(|runnable| **runnable == 1).count();
        let mut preempted = false;
        // One token each of those behind `at` that lack one.
        let mut owed = single(&all);
        let mut at = 0;
        'tasks: while at < self.running.len() {
            let runnable = all[at];
            owed -= usize::from(runnable == 1);
            let most = runnable.min(*budget - owed);
            let count = self.running[at].cut(engine, most);
            while let Some(id) = self.running[at].sequence.filter(|id| count > 0 && !engine.grow(*id, count)) {
                let last = self.running.pop().expect("at least the one at `at`");
                preempted = true;
                self.preempt(engine, last);
                if self.running.len() == at {
                    break 'tasks;
                }
                debug_assert!(engine.length(id).is_some());
                owed = single(&all[at + 1..self.running.len()]);
            }
            if count > 0 {
                self.plan.push((at, count));
                *budget -= count;
            }
            at += 1;
        }
        self.runnable = all;
        preempted
    }

    fn preempt(&mut self, engine: &mut Engine, mut task: Task) {
        task.sequence.take().into_iter().for_each(|id| engine.end(id));
        task.flying = 0;
        task.candidates.clear();
        self.preemptions += 1;
        self.waiting.push(task);
    }

    /// Starts those that wait, in order, while there is room.
    fn admit(&mut self, engine: &mut Engine, budget: &mut usize, now: Duration) {
        while let Some(task) = self.waiting.last().filter(|_| *budget > 0 && self.running.len() < self.rows) {
            // A whole prompt, and a block for each that runs to continue: what starts should not have to stop.
            let prompt = task.request.prompt.len();
            let needed = engine.blocks_to_start((task.root, task.sharable()), prompt, task.tokens.len());
            if !self.running.is_empty() && needed + self.running.len() > engine.free_blocks() {
                break;
            }
            let start = Start {
                sampling: &task.request.sampling,
                prompt,
                stream: task.choice as u64,
                shared: Some((task.root, task.sharable())),
            };
            let Some(id) = engine.start_sharing(start) else { break };
            let Some(mut task) = self.waiting.pop() else { break };
            task.sequence = Some(id);
            let found = engine.length(id).unwrap_or(0);
            task.started.get_or_insert((now, found));
            self.looked_up.0 += task.sharable().len() as u64;
            self.looked_up.1 += found as u64;
            let count = task.cut(engine, task.runnable(engine, self.context).min(*budget));
            self.running.push(task);
            if count > 0 && engine.grow(id, count) {
                *budget -= count;
                self.plan.push((self.running.len() - 1, count));
            }
        }
    }
}
