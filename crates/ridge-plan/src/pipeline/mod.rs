//! Pipeline schedules, event by event: who computes what when, how much of the time is lost, and what is kept alive.
//!
//! A [`Pipeline`] has stages (of equal or of different times), micro-batches and a [`Schedule`]. [`Pipeline::simulate`]
//! gives each pass its start and end; [`Timeline`] sums them up and draws them. [`bubble`] has the closed forms that a
//! search can afford, each held against the simulation by a test.

mod draw;
mod greedy;
mod orders;
mod run;
#[cfg(test)]
mod tests;

use std::fmt;

use serde::Serialize;

use crate::error::PlanError;

/// In which order a device takes its passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    GPipe,
    /// One forward, one backward after a warm-up (Narayanan et al. 2019, PipeDream-flush).
    OneFOneB,
    /// The same with several chunks of layers a device (Narayanan et al. 2021, section 2.2).
    Interleaved,
    /// Weight gradients fill the bubbles, at the memory of 1F1B (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
    /// ZB-H1).
    ZeroBubbleH1,
    /// Two chunks a device, placed as a V, and no bubble while passes take equal times (Qi et al. 2024, "Pipeline
    /// Parallelism with Controllable Memory", section 3; ZB-V).
    ZeroBubbleV,
    /// Micro-batches from both ends, forward and backward passes in pairs (DeepSeek-AI 2024, section 3.2.1).
    DualPipe,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::GPipe, Self::OneFOneB, Self::Interleaved, Self::ZeroBubbleH1, Self::ZeroBubbleV, Self::DualPipe];

    /// The name that is typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZeroBubbleH1 => "zb-h1",
            Self::ZeroBubbleV => "zb-v",
            Self::DualPipe => "dualpipe",
        }
    }

    /// What is known of it on paper, for `p` devices, `m` micro-batches, `v` chunks; F, B, W the forward pass, the
    /// gradient of inputs and that of weights of a device's layers.
    pub fn formula(self) -> &'static str {
        match self {
            Self::GPipe => "(m + p - 1) (F + B + W); bubble (p - 1) / (m + p - 1); m micro-batches alive",
            Self::OneFOneB => "(m + p - 1) (F + B + W); bubble (p - 1) / (m + p - 1); at most p alive",
            Self::Interleaved => "(m + (p - 1) / v) (F + B + W); bubble (p - 1) / (v m + p - 1); p + (p - 1) / v alive",
            Self::ZeroBubbleH1 => "m (F + B + W) + (p - 1) (F + B - W); at most p alive",
            Self::ZeroBubbleV => "m (F + B + W) + (p - 1) F / 2 if F = B = W: no device waits; at most p alive",
            Self::DualPipe => {
                "devices wait (p / 2 - 1) (FB + B + W - 3 W), FB a pair's time; p + 1 alive, weights twice"
            }
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The layers of one stage for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Stage {
    /// Seconds of the forward pass.
    pub forward: f64,
    /// Seconds of the gradient of the inputs.
    pub input: f64,
    /// Seconds of the gradient of the weights.
    pub weight: f64,
    /// Bytes that the forward pass keeps until the gradient of the weights is done.
    pub activations: f64,
}

impl Stage {
    fn scaled(self, by: f64) -> Self {
        let Self { forward, input, weight, activations } = self;
        Self { forward: forward * by, input: input * by, weight: weight * by, activations: activations * by }
    }
}

/// What to simulate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pipeline {
    /// The order of passes.
    pub schedule: Schedule,
    /// Devices.
    pub devices: usize,
    /// Chunks of layers of a device: 2 for ZB-V, any number for interleaving, else 1.
    pub chunks: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Seconds of a message between stages that lie on different devices.
    pub message: f64,
    /// Does the sender wait until its message has arrived? As Megatron-LM without overlap does.
    pub blocking: bool,
    /// The time of a forward and a backward pass that run as a pair (DualPipe), of their sum: 1 without any gain.
    pub paired: f64,
    /// Stages in the order of the model, `devices * chunks` of them.
    pub stages: Vec<Stage>,
}

/// Most passes that a simulation takes on.
const MOST_PASSES: usize = 4_000_000;

impl Pipeline {
    /// A pipeline whose devices all have the same layers, those of `device`, cut into `chunks`.
    ///
    /// # Errors
    /// [`PlanError::Setting`] where the schedule cannot run so, with the nearest that can.
    pub fn uniform(
        schedule: Schedule,
        devices: usize,
        chunks: usize,
        micro_batches: usize,
        device: Stage,
    ) -> Result<Self, PlanError> {
        let chunks = if schedule == Schedule::ZeroBubbleV { 2 } else { chunks };
        let stages = vec![device.scaled(1.0 / chunks.max(1) as f64); devices.saturating_mul(chunks).min(MOST_PASSES)];
        let pipeline =
            Self { schedule, devices, chunks, micro_batches, message: 0.0, blocking: false, paired: 1.0, stages };
        pipeline.check()?;
        Ok(pipeline)
    }

    /// Can it run?
    ///
    /// # Errors
    /// [`PlanError::Setting`] with the nearest that can.
    pub fn check(&self) -> Result<(), PlanError> {
        let (p, m, v) = (self.devices, self.micro_batches, self.chunks);
        for (what, value) in [("devices", p), ("micro-batches", m), ("chunks", v)] {
            if value == 0 {
                return Err(PlanError::setting(what, value, "leaves nothing to run", "the least is 1"));
            }
        }
        let passes = p.saturating_mul(v).saturating_mul(m).saturating_mul(3);
        if passes > MOST_PASSES {
            let remedy = format!("at most {} with these devices and chunks", MOST_PASSES / (3 * p * v).max(1));
            return Err(PlanError::setting("micro-batches", m, format!("makes {passes} passes"), remedy));
        }
        let s = self.schedule;
        match s {
            Schedule::Interleaved if v < 2 => {
                return Err(PlanError::setting("chunks", v, "does not interleave", "choose 2 or more, or 1f1b"));
            }
            Schedule::Interleaved if !m.is_multiple_of(p) => {
                let nearest = (m as f64 / p as f64).round().max(1.0) as usize * p;
                let why = format!("is no multiple of the {p} devices, as interleaving needs");
                return Err(PlanError::setting("micro-batches", m, why, format!("the nearest is {nearest}")));
            }
            Schedule::DualPipe if !p.is_multiple_of(2) => {
                let why = "is odd: micro-batches enter at both ends";
                return Err(PlanError::setting("devices", p, why, format!("the nearest is {}", p + 1)));
            }
            Schedule::DualPipe if m < 2 * p || !m.is_multiple_of(2) => {
                let nearest = m.next_multiple_of(2).max(2 * p);
                let why = format!("must be even and at least 2 x {p} for both directions");
                return Err(PlanError::setting("micro-batches", m, why, format!("the nearest is {nearest}")));
            }
            Schedule::GPipe | Schedule::OneFOneB | Schedule::ZeroBubbleH1 | Schedule::DualPipe if v > 1 => {
                let why = format!("has no meaning for {s}, which has one stage a device");
                return Err(PlanError::setting("chunks", v, why, "choose 1, or interleaved"));
            }
            Schedule::ZeroBubbleV if v != 2 => {
                return Err(PlanError::setting("chunks", v, "does not make a V", "choose 2"));
            }
            _ => {}
        }
        if self.stages.len() != p * v {
            let why = format!("are not {p} devices x {v} chunks");
            return Err(PlanError::setting("stages", self.stages.len(), why, format!("give {}", p * v)));
        }
        let times = self.stages.iter().flat_map(|s| [s.forward, s.input, s.weight, s.activations]);
        if let Some(bad) = times.chain([self.message, self.paired]).find(|t| !(t.is_finite() && *t >= 0.0)) {
            return Err(PlanError::setting("time", bad, "is no time", "give a number of 0 or more"));
        }
        Ok(())
    }

    /// Runs it.
    ///
    /// # Errors
    /// Those of [`Pipeline::check`].
    pub fn simulate(&self) -> Result<Timeline, PlanError> {
        self.check()?;
        let events = match self.schedule {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved | Schedule::DualPipe => {
                run::in_order(self, &orders::orders(self))
            }
            Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleV => greedy::best(self),
        };
        Ok(Timeline::new(self, events))
    }

    /// The device of a stage. Stages of the second direction of [`Schedule::DualPipe`] are numbered behind the others.
    pub(crate) fn device(&self, stage: usize) -> usize {
        let p = self.devices;
        match self.schedule {
            Schedule::ZeroBubbleV | Schedule::DualPipe if stage >= p => 2 * p - 1 - stage,
            _ => stage % p,
        }
    }

    /// Stages of both directions.
    pub(crate) fn lanes(&self) -> usize {
        if self.schedule == Schedule::DualPipe { 2 * self.devices } else { self.stages.len() }
    }

    /// Times and bytes of a stage of either direction.
    pub(crate) fn stage(&self, stage: usize) -> &Stage {
        &self.stages[stage % self.stages.len()]
    }

    /// The stage before, of the same direction.
    pub(crate) fn before(&self, stage: usize) -> Option<usize> {
        (stage % self.stages.len()).checked_sub(1).map(|_| stage - 1)
    }

    /// The stage behind, of the same direction.
    pub(crate) fn behind(&self, stage: usize) -> Option<usize> {
        (stage % self.stages.len() + 1 < self.stages.len()).then_some(stage + 1)
    }

    /// Seconds from one stage to another.
    pub(crate) fn between(&self, from: usize, to: usize) -> f64 {
        if self.device(from) == self.device(to) { 0.0 } else { self.message }
    }

    /// Seconds of a pass alone, with its message where the sender waits.
    pub(crate) fn seconds(&self, pass: Pass) -> f64 {
        let s = self.stage(pass.stage);
        let (compute, to) = match pass.kind {
            Kind::Forward => (s.forward, self.behind(pass.stage)),
            Kind::Backward => (s.input + s.weight, self.before(pass.stage)),
            Kind::Input => (s.input, self.before(pass.stage)),
            Kind::Weight => (s.weight, None),
        };
        compute + if self.blocking { to.map_or(0.0, |to| self.between(pass.stage, to)) } else { 0.0 }
    }

    /// Seconds that a message takes behind the end of its pass.
    pub(crate) fn delay(&self, from: usize, to: usize) -> f64 {
        if self.blocking { 0.0 } else { self.between(from, to) }
    }
}

/// What a pass computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The forward pass.
    Forward,
    /// Both gradients.
    Backward,
    /// The gradient of the inputs.
    Input,
    /// The gradient of the weights.
    Weight,
}

/// One pass of one micro-batch through one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pass {
    /// What is computed.
    pub kind: Kind,
    /// The micro-batch; those of the second direction of DualPipe are counted behind the others.
    pub micro: usize,
    /// The stage; those of the second direction of DualPipe are counted behind the others.
    pub stage: usize,
}

/// A pass with its times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Event {
    /// Where.
    pub device: usize,
    /// What.
    #[serde(flatten)]
    pub pass: Pass,
    /// Seconds from the beginning of the step.
    pub start: f64,
    /// Seconds from the beginning of the step.
    pub end: f64,
}

/// What a device did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceUse {
    /// Seconds of passes; of a pair, the time of both together.
    pub busy: f64,
    /// Seconds that it waited between its first pass and its last.
    pub waits: f64,
    /// Most bytes of activations alive.
    pub peak_bytes: f64,
    /// Most forward passes whose weight gradients were still to come.
    pub peak_alive: usize,
}

/// A step, simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// All passes, by device and start.
    pub events: Vec<Event>,
    /// Devices.
    pub devices: Vec<DeviceUse>,
    /// Seconds of the step.
    pub makespan: f64,
    /// Share of all devices' time in which nothing is computed.
    pub bubble: f64,
    /// The same between a device's first and last pass alone: what is lost where no barrier ends the step.
    pub waiting: f64,
}

impl Timeline {
    fn new(pipeline: &Pipeline, mut events: Vec<Event>) -> Self {
        events.sort_by(|a, b| a.device.cmp(&b.device).then(a.start.total_cmp(&b.start)));
        let makespan = events.iter().map(|e| e.end).fold(0.0, f64::max);
        let devices: Vec<DeviceUse> = (0..pipeline.devices)
            .map(|d| {
                let of: Vec<&Event> = events.iter().filter(|e| e.device == d).collect();
                device_use(pipeline, &of)
            })
            .collect();
        let busy: f64 = devices.iter().map(|d| d.busy).sum();
        let waits: f64 = devices.iter().map(|d| d.waits).sum();
        let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
        let bubble = share(makespan * devices.len() as f64 - busy, makespan * devices.len() as f64);
        Self { events, makespan, bubble, waiting: share(waits, busy + waits), devices }
    }
}

fn device_use(pipeline: &Pipeline, events: &[&Event]) -> DeviceUse {
    let (mut busy, mut until) = (0.0, 0.0f64);
    for e in events {
        // Both of a pair count once.
        busy += e.end - e.start.max(until).min(e.end);
        until = until.max(e.end);
    }
    let first = events.first().map_or(0.0, |e| e.start);
    let mut changes: Vec<(f64, isize, f64)> = Vec::new();
    for e in events {
        let bytes = pipeline.stage(e.pass.stage).activations;
        match e.pass.kind {
            Kind::Forward => changes.push((e.start, 1, bytes)),
            Kind::Backward | Kind::Weight => changes.push((e.end, -1, -bytes)),
            Kind::Input => {}
        }
    }
    // What ends makes room for what starts at once.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut alive, mut bytes, mut peak_alive, mut peak_bytes) = (0isize, 0.0f64, 0isize, 0.0f64);
    for (_, n, b) in changes {
        alive += n;
        bytes += b;
        peak_alive = peak_alive.max(alive);
        peak_bytes = peak_bytes.max(bytes);
    }
    // Sums of times are exact to rounding alone.
    let waits = until - first - busy;
    let waits = if waits > 1e-9 * until { waits } else { 0.0 };
    DeviceUse { busy, waits, peak_bytes, peak_alive: peak_alive.max(0) as usize }
}

/// Seconds that a step of 1F1B, interleaved over `chunks` where that is above 1, takes beyond the passes of its slowest
/// device: `(p - 1) / v` of a device's passes and their messages. `device` is the time of all passes of a micro-batch on
/// a device, `message` that of one message, which its sender waits for; every chunk sends one each way.
pub fn bubble(devices: usize, chunks: usize, micro_batches: usize, device: f64, message: f64) -> f64 {
    if devices <= 1 {
        return 0.0;
    }
    let (p, v, m) = (devices as f64, chunks as f64, micro_batches as f64);
    (p - 1.0) * (device / v + 2.0 * message) + m * v * 2.0 * message
}
