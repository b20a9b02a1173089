//! A pipeline before it runs: its stages, where they lie, and what each pass takes.

use serde::Serialize;

use super::schedule::Schedule;
use crate::error::PlanError;

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
const MAX_PASSES: usize = 4_000_000;

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
        let stages = vec![device.scaled(1.0 / chunks.max(1) as f64); devices.saturating_mul(chunks).min(MAX_PASSES)];
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
                return Err(PlanError::setting(what, value, "must be at least 1", "set it to 1 or more"));
            }
        }
        let passes = p.saturating_mul(v).saturating_mul(m).saturating_mul(3);
        if passes > MAX_PASSES {
            let remedy = format!("at most {} with these devices and chunks", MAX_PASSES / (3 * p * v).max(1));
            return Err(PlanError::setting(
                "micro-batches",
                m,
                format!("gives {passes} passes, more than can be simulated"),
                remedy,
            ));
        }
        let s = self.schedule;
        match s {
            Schedule::Interleaved if v < 2 => {
                return Err(PlanError::setting("chunks", v, "does not interleave", "choose 2 or more, or 1f1b"));
            }
            Schedule::Interleaved if !m.is_multiple_of(p) => {
                let nearest = (m as f64 / p as f64).round().max(1.0) as usize * p;
                let why = format!("is not a multiple of the {p} devices, which interleaving requires");
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
                let why = format!("does not apply to {s}, which has one stage per device");
                return Err(PlanError::setting("chunks", v, why, "choose 1, or interleaved"));
            }
            Schedule::ZeroBubbleV if v != 2 => {
                return Err(PlanError::setting("chunks", v, "is not valid for a V schedule", "choose 2"));
            }
            _ => {}
        }
        if self.stages.len() != p * v {
            let why = format!("are not {p} devices x {v} chunks");
            return Err(PlanError::setting("stages", self.stages.len(), why, format!("give {}", p * v)));
        }
        let times = self.stages.iter().flat_map(|s| [s.forward, s.input, s.weight, s.activations]);
        if let Some(bad) = times.chain([self.message, self.paired]).find(|t| !(t.is_finite() && *t >= 0.0)) {
            return Err(PlanError::setting("time", bad, "is not a time", "give a number of at least 0"));
        }
        Ok(())
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
            PassKind::Forward => (s.forward, self.behind(pass.stage)),
            PassKind::Backward => (s.input + s.weight, self.before(pass.stage)),
            PassKind::Input => (s.input, self.before(pass.stage)),
            PassKind::Weight => (s.weight, None),
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
pub enum PassKind {
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
    pub kind: PassKind,
    /// The micro-batch; those of the second direction of DualPipe are counted behind the others.
    pub micro: usize,
    /// The stage; those of the second direction of DualPipe are counted behind the others.
    pub stage: usize,
}
