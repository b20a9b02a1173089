//! Zero-bubble schedules: no fixed order, but a rule that each free device follows, event by event. Several rules are
//! tried and the shortest step is kept, as the schedulers of the papers do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::in_order::PassOutputs;
use super::schedule::Schedule;
use super::stages::{Pass, PassKind, Pipeline};
use super::timeline::PassEvent;

/// What a free device prefers, of what is ready and fits in memory; gradients of weights fill what is left.
#[derive(Clone, Copy)]
enum ZeroBubbleChoice {
    /// The forward pass of the first chunk.
    Enter,
    /// The forward pass of the last chunk.
    Return,
    /// The gradient of inputs of the last chunk.
    Input,
    /// The gradient of inputs of the first chunk.
    Leave,
}

use ZeroBubbleChoice::{Enter, Input, Leave, Return};

/// Which come first depends on the times of passes: with equal ones it is the first of these.
const RULES: [[ZeroBubbleChoice; 4]; 4] = [
    [Enter, Leave, Return, Input],
    [Leave, Enter, Return, Input],
    [Input, Leave, Return, Enter],
    [Enter, Return, Input, Leave],
];

/// A time in a heap.
#[derive(Clone, Copy, PartialEq)]
struct EventTime(f64);

impl Eq for EventTime {}

impl Ord for EventTime {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for EventTime {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The shortest of what the rules make.
pub(super) fn best(pipeline: &Pipeline) -> Vec<PassEvent> {
    let length = |events: &Vec<PassEvent>| events.iter().map(|e| e.end).fold(0.0, f64::max);
    let all = RULES.iter().map(|rule| ZeroBubbleRun::new(pipeline, *rule).run());
    all.min_by(|a, b| length(a).total_cmp(&length(b))).unwrap_or_default()
}

struct ZeroBubbleRun<'a> {
    pipeline: &'a Pipeline,
    rule: [ZeroBubbleChoice; 4],
    done: PassOutputs,
    /// Passes begun, by stage.
    forward: Vec<usize>,
    input: Vec<usize>,
    weight: Vec<usize>,
    /// Forward passes of a device whose weight gradients have not ended.
    alive: Vec<usize>,
    free: Vec<f64>,
}

impl<'a> ZeroBubbleRun<'a> {
    fn new(pipeline: &'a Pipeline, rule: [ZeroBubbleChoice; 4]) -> Self {
        let (n, p) = (pipeline.stages.len(), pipeline.devices);
        Self {
            pipeline,
            rule,
            done: PassOutputs::new(pipeline),
            forward: vec![0; n],
            input: vec![0; n],
            weight: vec![0; n],
            alive: vec![0; p],
            free: vec![0.0; p],
        }
    }

    fn run(mut self) -> Vec<PassEvent> {
        let total = 3 * self.pipeline.micro_batches * self.pipeline.stages.len();
        let mut events: Vec<PassEvent> = Vec::with_capacity(total);
        let mut times = BinaryHeap::from([Reverse(EventTime(0.0))]);
        while let Some(Reverse(EventTime(now))) = times.pop() {
            while times.peek().is_some_and(|t| t.0.0 == now) {
                times.pop();
            }
            for d in 0..self.pipeline.devices {
                // Passes of no time make way for others at the same time.
                while self.free[d] <= now {
                    let Some(pass) = self.choose(d, now) else { break };
                    let end = now + self.pipeline.seconds(pass);
                    self.begin(pass, end);
                    self.free[d] = end;
                    events.push(PassEvent { device: d, pass, start: now, end });
                    times.push(Reverse(EventTime(end)));
                    if self.pipeline.message > 0.0 && !self.pipeline.blocking {
                        times.push(Reverse(EventTime(end + self.pipeline.message)));
                    }
                }
            }
        }
        events
    }

    fn begin(&mut self, pass: Pass, end: f64) {
        self.done.set(pass, end);
        let d = self.pipeline.device(pass.stage);
        match pass.kind {
            PassKind::Forward => {
                self.forward[pass.stage] += 1;
                self.alive[d] += 1;
            }
            PassKind::Input | PassKind::Backward => self.input[pass.stage] += 1,
            PassKind::Weight => {
                self.weight[pass.stage] += 1;
                self.alive[d] -= 1;
            }
        }
    }

    /// The next pass of its kind at a stage, if what it reads is there.
    fn next(&self, kind: PassKind, stage: usize, now: f64) -> Option<Pass> {
        let (micro, most) = match kind {
            PassKind::Forward => (self.forward[stage], self.pipeline.micro_batches),
            PassKind::Input | PassKind::Backward => (self.input[stage], self.forward[stage]),
            PassKind::Weight => (self.weight[stage], self.input[stage]),
        };
        let pass = Pass { kind, micro, stage };
        (micro < most && self.done.ready(self.pipeline, pass) <= now).then_some(pass)
    }

    fn choose(&self, d: usize, now: f64) -> Option<Pass> {
        let p = self.pipeline.devices;
        let v_shaped = self.pipeline.schedule == Schedule::ZeroBubbleV;
        let (first, last) = if v_shaped { (d, 2 * p - 1 - d) } else { (d, d) };
        for want in self.rule {
            let found = match want {
                Enter if v_shaped => {
                    // One place stays free for a forward pass that returns.
                    let under_way = self.forward[first] - self.forward[last];
                    let room = self.alive[d] + 1 < 2 * p && under_way < 2 * (p - d) - 1;
                    self.next(PassKind::Forward, first, now).filter(|_| room)
                }
                Enter => {
                    let room = self.alive[d] < p && self.forward[first] - self.input[first] < p - d;
                    self.next(PassKind::Forward, first, now).filter(|_| room)
                }
                Return if v_shaped => self.next(PassKind::Forward, last, now).filter(|_| self.alive[d] < 2 * p),
                Input => self.next(PassKind::Input, last, now),
                Leave if v_shaped => self.next(PassKind::Input, first, now),
                Return | Leave => None,
            };
            if found.is_some() {
                return found;
            }
        }
        let oldest = if self.weight[first] < self.weight[last] { [first, last] } else { [last, first] };
        oldest.into_iter().find_map(|stage| self.next(PassKind::Weight, stage, now))
    }
}
