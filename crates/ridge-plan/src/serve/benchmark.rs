//! What a load generator sees: clients in a closed loop, each of which asks again when its answer has ended.
//!
//! All clients begin at once, so first tokens of the first round wait for the prompts before them; later requests come as
//! answers end. The loop is played step by step: a step takes one token of each answer and, up to its limit, tokens of the
//! prompts that wait, and takes as long as its rooflines say. Between two events steps are alike and taken together, so a
//! benchmark of thousands of requests takes milliseconds. What a serving program adds is data (`software.toml`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use serde::Serialize;

use super::point::{ServerStep, StepTokens, seconds};
use super::{ServeLayout, Software, Traffic};
use crate::efficiency::Machine;
use crate::reading::Reading;

/// Clients and how the server was set up for them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClosedLoop {
    /// Longest prompt and answer, and clients of each replica of attention.
    pub traffic: Traffic,
    /// Lengths are drawn evenly from this share of the longest up.
    pub shortest: f64,
    /// Requests of a client.
    pub rounds: usize,
    /// Maximum tokens per step.
    pub step_tokens: usize,
    /// Cache capacity of an attention replica, in tokens.
    pub cache_tokens: f64,
    /// What prompts wait for.
    pub hold: Option<PromptHold>,
}

/// Prompts wait for others, so that fewer steps are disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PromptHold {
    /// Steps after which they wait no longer.
    pub steps: usize,
    /// StepTokens of prompts that are enough; `None` waits until each replica of attention has a prompt.
    pub tokens: Option<usize>,
}

/// What the clients saw on average.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClientLatency {
    /// Seconds to the first token.
    pub ttft: f64,
    /// Seconds for each token behind it.
    pub tpot: f64,
    /// Output tokens a second of the replica.
    pub tokens_per_second: f64,
}

/// Plays `load` against one replica of `reading` on `m`, laid out as `l`.
pub fn benchmark(
    reading: &Reading,
    m: &Machine,
    l: &ServeLayout,
    load: &ClosedLoop,
    software: &Software,
) -> ClientLatency {
    let mut play = BenchmarkSimulation::new(reading, m, l, load, software);
    play.run();
    let n = play.answered as f64;
    ClientLatency { ttft: play.first / n, tpot: play.between / n, tokens_per_second: play.produced / play.now }
}

/// A request that waits.
#[derive(Clone, Copy, Debug)]
struct WaitingRequest {
    asked: f64,
    /// Tokens still to compute, and computed tokens.
    prompt: usize,
    done: usize,
    answer: usize,
    /// When its first token came and how many it has, of one that was taken back.
    first: Option<f64>,
    before: usize,
}

/// A request that gets its answer.
#[derive(Clone, Copy, Debug)]
struct Answering {
    begun: u64,
    prompt: usize,
    answer: usize,
    first: f64,
    /// Tokens generated before it was preempted.
    before: usize,
}

/// One replica of attention.
#[derive(Debug, Default)]
struct ReplicaQueue {
    waiting: VecDeque<WaitingRequest>,
    /// Those that answer, newest last, by an id that `ends` names.
    answering: Vec<Option<Answering>>,
    free: Vec<usize>,
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    /// How many answer.
    count: usize,
    /// Tokens in the cache, and reserved tokens.
    cached: f64,
    promised: f64,
}

struct BenchmarkSimulation<'a> {
    reading: &'a Reading,
    machine: &'a Machine,
    layout: &'a ServeLayout,
    load: &'a ClosedLoop,
    software: &'a Software,
    ranks: Vec<ReplicaQueue>,
    /// Requests on their way: when they come, to which rank.
    coming: BinaryHeap<Reverse<(u64, usize)>>,
    now: f64,
    /// When the last step began: the next was made up then, while the device worked.
    made_up: f64,
    step: u64,
    /// Requests that were made, and are to be made.
    made: usize,
    total: usize,
    held: usize,
    answered: usize,
    first: f64,
    between: f64,
    produced: f64,
    /// Tokens that a step gives an answer on average.
    rate: f64,
    /// Seconds of a step of answers alone: by their number, at no context and for each token of it.
    known: Vec<Option<(f64, f64)>>,
}

/// Nanoseconds, so that times can be ordered.
fn ticks(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// Evenly spread numbers of `[0, 1)`: multiples of the golden ratio and of the square root of 2.
fn spread(i: usize, by: f64) -> f64 {
    ((i + 1) as f64 * by).fract()
}

impl<'a> BenchmarkSimulation<'a> {
    fn new(
        reading: &'a Reading,
        m: &'a Machine,
        l: &'a ServeLayout,
        load: &'a ClosedLoop,
        software: &'a Software,
    ) -> Self {
        let clients = load.traffic.batch * l.attention_dp;
        Self {
            reading,
            machine: m,
            layout: l,
            load,
            software,
            ranks: (0..l.attention_dp).map(|_| ReplicaQueue::default()).collect(),
            coming: (0..clients).map(|i| Reverse((0, i % l.attention_dp))).collect(),
            now: 0.0,
            made_up: 0.0,
            step: 0,
            made: clients,
            total: clients * load.rounds,
            held: 0,
            answered: 0,
            first: 0.0,
            between: 0.0,
            produced: 0.0,
            rate: l.tokens_per_step(),
            known: vec![None; load.traffic.batch + 2],
        }
    }

    /// Steps of an answer of `tokens` tokens behind its first.
    fn steps(&self, tokens: usize) -> u64 {
        (tokens as f64 / self.rate).ceil() as u64
    }

    /// Seconds of a step with what the program adds.
    fn seconds(&self, step: &ServerStep) -> f64 {
        seconds(self.reading, self.machine, self.layout, step) + self.software.step_ms * 1e-3
    }

    fn lengths(&self, i: usize) -> (usize, usize) {
        let of = |longest: usize, at: f64| {
            let least = self.load.shortest;
            ((longest as f64 * (least + (1.0 - least) * at)).round() as usize).max(1)
        };
        (
            of(self.load.traffic.prompt, spread(i, 0.618_033_988_75)),
            of(self.load.traffic.answer, spread(i, 0.414_213_562_37)),
        )
    }

    fn run(&mut self) {
        let mut arrived = 0;
        while self.answered < self.total {
            let idle = self.ranks.iter().all(|r| r.count == 0);
            let until = ticks(if idle { self.now } else { self.made_up });
            while let Some(Reverse((at, rank))) = self.coming.peek().copied().filter(|r| r.0.0 <= until) {
                self.coming.pop();
                let (prompt, answer) = self.lengths(arrived);
                arrived += 1;
                let request =
                    WaitingRequest { asked: at as f64 * 1e-9, prompt, done: 0, answer, first: None, before: 0 };
                self.ranks[rank].waiting.push_back(request);
            }
            if self.ranks.iter().all(|r| r.count == 0 && r.waiting.is_empty()) {
                // All requests are on their way.
                let Some(Reverse((at, _))) = self.coming.peek() else { return };
                self.now = *at as f64 * 1e-9 + 1e-9;
                continue;
            }
            if self.takes_prompts() { self.mixed_step() } else { self.answers() }
        }
    }

    fn room(&self, rank: &ReplicaQueue, r: &WaitingRequest) -> bool {
        let wanted = r.prompt + r.done + if self.software.reserves { r.answer } else { 0 };
        let used = if self.software.reserves { rank.promised } else { rank.cached };
        rank.count == 0 || used + wanted as f64 <= self.load.cache_tokens
    }

    /// Does a prompt begin in this step?
    fn takes_prompts(&mut self) -> bool {
        let ready = |r: &ReplicaQueue| r.waiting.front().is_some_and(|w| w.done > 0 || self.room(r, w));
        let some = self.ranks.iter().filter(|r| ready(r)).count();
        if some == 0 {
            return false;
        }
        let Some(hold) = self.load.hold else { return true };
        let busy = self.ranks.iter().any(|r| r.count > 0);
        let enough = match hold.tokens {
            Some(tokens) => self.ranks.iter().any(|r| r.waiting.iter().map(|w| w.prompt).sum::<usize>() >= tokens),
            None => some == self.ranks.len(),
        };
        let begun = self.ranks.iter().any(|r| r.waiting.front().is_some_and(|w| w.done > 0));
        if begun || enough || !busy || self.held >= hold.steps {
            self.held = 0;
            return true;
        }
        false
    }

    /// One step with prompts.
    fn mixed_step(&mut self) {
        let mut busiest = ServerStep::default();
        let mut all = 0.0;
        let mut taken: Vec<Vec<WaitingRequest>> = vec![Vec::new(); self.ranks.len()];
        for (at, taken) in taken.iter_mut().enumerate() {
            let mut budget = self.load.step_tokens.saturating_sub(self.ranks[at].count);
            let mean = self.ranks[at].cached / self.ranks[at].count.max(1) as f64;
            let answers = StepTokens::answers(self.ranks[at].count as f64, mean);
            let mut step = ServerStep { answers, ..ServerStep::default() };
            while budget > 0
                && let Some(mut w) = self.ranks[at].waiting.front().copied()
                && (w.done > 0 || self.room(&self.ranks[at], &w))
            {
                let now = w.prompt.min(budget);
                step.prompts = step.prompts.and_prompt(now as f64, w.done as f64);
                if w.done == 0 {
                    self.ranks[at].promised += (w.prompt + w.answer) as f64;
                }
                (w.prompt, w.done, budget) = (w.prompt - now, w.done + now, budget - now);
                if w.prompt > 0 {
                    self.ranks[at].waiting[0] = w;
                } else {
                    step.ends += 1.0;
                    self.ranks[at].waiting.pop_front();
                    taken.push(w);
                    self.ranks[at].cached += w.done as f64;
                }
            }
            all += step.prompts.tokens + step.answers.tokens;
            let weight = |s: &ServerStep| s.prompts.tokens + s.answers.tokens;
            if weight(&step) >= weight(&busiest) {
                busiest = step;
            }
        }
        busiest.all = all;
        self.made_up = self.now;
        self.now += self.seconds(&busiest);
        self.step += 1;
        for rank in &mut self.ranks {
            rank.cached += rank.count as f64 * self.rate;
        }
        self.end_answers();
        for (at, taken) in taken.into_iter().enumerate() {
            for w in taken {
                self.begin(at, w);
            }
        }
        self.take_back();
    }

    fn begin(&mut self, at: usize, w: WaitingRequest) {
        let first = w.first.unwrap_or_else(|| {
            self.first += self.now - w.asked + self.software.request_ms * 1e-3;
            self.now
        });
        // A first token came with the prompt, unless the request had been taken back.
        let of = Answering { begun: self.step, prompt: w.done, answer: w.answer, first, before: w.before };
        let end = self.step + self.steps(w.answer.max(1) - 1);
        let rank = &mut self.ranks[at];
        let id = rank.free.pop().unwrap_or_else(|| {
            rank.answering.push(None);
            rank.answering.len() - 1
        });
        rank.answering[id] = Some(of);
        rank.ends.push(Reverse((end, id)));
        rank.count += 1;
        if w.answer <= 1 {
            self.end_answers();
        }
    }

    /// Answers that end with the step just done: their clients ask again.
    fn end_answers(&mut self) {
        for at in 0..self.ranks.len() {
            while let Some(Reverse((end, id))) = self.ranks[at].ends.peek().copied().filter(|e| e.0.0 <= self.step) {
                self.ranks[at].ends.pop();
                let Some(a) = self.ranks[at].answering[id].take() else { continue };
                let rank = &mut self.ranks[at];
                rank.free.push(id);
                rank.count -= 1;
                rank.cached -= a.prompt as f64 + (end - a.begun) as f64 * self.rate;
                rank.promised -= (a.prompt + a.answer) as f64;
                self.answered += 1;
                let tokens = a.answer + a.before;
                self.produced += tokens as f64;
                self.between += (self.now - a.first) / (tokens.max(2) - 1) as f64;
                if self.made < self.total {
                    self.made += 1;
                    self.coming.push(Reverse((ticks(self.now), at)));
                }
            }
        }
    }

    /// Takes the newest back while there is no room for the next tokens.
    fn take_back(&mut self) {
        for rank in &mut self.ranks {
            while rank.count > 1 && rank.cached > self.load.cache_tokens {
                let newest = rank.answering.iter().enumerate().filter_map(|(i, a)| a.map(|a| (a.begun, i))).max();
                let Some((_, id)) = newest else { break };
                let Some(a) = rank.answering[id].take() else { break };
                let steps = (self.step - a.begun) as f64;
                let had = ((steps * self.rate) as usize).min(a.answer.saturating_sub(1));
                rank.ends.retain(|e| e.0.1 != id);
                rank.free.push(id);
                rank.count -= 1;
                rank.cached -= a.prompt as f64 + steps * self.rate;
                rank.promised -= (a.prompt + a.answer) as f64;
                let prompt = a.prompt + had;
                let answer = (a.answer - had).max(1);
                rank.waiting.push_front(WaitingRequest {
                    asked: 0.0,
                    prompt,
                    done: 0,
                    answer,
                    first: Some(a.first),
                    before: a.before + had,
                });
            }
        }
    }

    /// Steps of answers alone, up to the next event.
    fn answers(&mut self) {
        let most = self.ranks.iter().max_by(|a, b| a.cached.total_cmp(&b.cached)).expect("there is one rank");
        let (count, mean) = (most.count.max(1), most.cached / most.count.max(1) as f64);
        let all: usize = self.ranks.iter().map(|r| r.count).sum();
        let (still, token) = match self.known.get(count).copied().flatten() {
            Some(k) if self.ranks.len() == 1 => k,
            _ => {
                let at = |context: f64| {
                    let answers = StepTokens::answers(count as f64, context);
                    self.seconds(&ServerStep { answers, all: all as f64, ..ServerStep::default() })
                };
                let far = (self.load.traffic.prompt + self.load.traffic.answer) as f64;
                let (near, far_seconds) = (at(1.0), at(far));
                let k = (near, (far_seconds - near) / far);
                if let Some(place) = self.known.get_mut(count) {
                    *place = Some(k);
                }
                k
            }
        };
        let end = self.ranks.iter().filter_map(|r| r.ends.peek()).map(|e| e.0.0).min().unwrap_or(self.step + 1);
        let mut steps = end.saturating_sub(self.step).max(1);
        let (each, token) = (still + token * mean, token * self.rate);
        if let Some(Reverse((at, _))) = self.coming.peek() {
            let until = (*at as f64 * 1e-9 - self.now) / each;
            steps = steps.min(until.max(0.0) as u64 + 2);
        }
        let waits = self.ranks.iter().any(|r| !r.waiting.is_empty());
        if waits && let Some(hold) = self.load.hold {
            steps = steps.min((hold.steps.saturating_sub(self.held)).max(1) as u64);
        }
        if !self.software.reserves {
            for r in self.ranks.iter().filter(|r| r.count > 1) {
                let left = (self.load.cache_tokens - r.cached).max(0.0) / (r.count as f64 * self.rate);
                steps = steps.min(left as u64 + 1);
            }
        }
        let n = steps as f64;
        self.now += n * (each + token * (n - 1.0) / 2.0);
        self.made_up = self.now - each - token * (n - 1.0);
        self.step += steps;
        // Waiting for a prompt on each replica counts from the last that was taken in, waiting for tokens from the first.
        if waits || self.load.hold.is_some_and(|h| h.tokens.is_none()) {
            self.held += steps as usize;
        }
        for rank in &mut self.ranks {
            rank.cached += n * rank.count as f64 * self.rate;
        }
        self.end_answers();
        self.take_back();
    }
}

#[cfg(test)]
mod tests;
