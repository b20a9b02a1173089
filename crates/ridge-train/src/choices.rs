//! What a step may recompute and offload so that it fits, with the memory of each choice.

use std::sync::Arc;

use ridge_models::ModelConfig;
use ridge_runtime::{Backend, MemoryBytes, MemoryOwner, ProgramCache};

use crate::error::Result;
use crate::prepared_step::PreparedStep;
use crate::settings::{Offload, Recomputation, Settings};

/// A choice, with what it costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepChoice {
    /// What the backward pass computes again.
    pub recomputation: Recomputation,
    /// What is kept in memory of the host.
    pub offload: Offload,
    /// What a run allocates: [`PreparedStep::memory`].
    pub memory: MemoryBytes,
    /// Micro-batches of a step.
    pub parts: usize,
    /// Bytes that leave the device in the forward pass of a micro-batch and come back in its backward pass.
    pub moved: u64,
}

impl StepChoice {
    /// Seconds of a step that transfers add to it where the forward pass of a micro-batch takes `forward` seconds, and the link
    /// to the host moves `bytes_per_second` in each direction: of activations what exceeds the computation that they are moved
    /// beside, and states once in each direction at the same time.
    pub fn exposed_seconds(&self, forward: f64, bytes_per_second: f64) -> f64 {
        let states = self.memory.get(MemoryOwner::HostStates) as u64;
        exposed_seconds(self.moved, self.parts, states, forward, bytes_per_second)
    }
}

/// Seconds of a step that transfers add to it, where the forward pass of each of its `parts` takes `forward` seconds, the backward
/// pass twice as long, and the link to the host moves `bytes_per_second` in each direction: of `moved` bytes of activations
/// what exceeds the computation that they are moved beside, and `states` bytes once in each direction at the same time.
pub(crate) fn exposed_seconds(moved: u64, parts: usize, states: u64, forward: f64, bytes_per_second: f64) -> f64 {
    let one_way = moved as f64 / bytes_per_second;
    let activations = (one_way - forward).max(0.0) + (one_way - 2.0 * forward).max(0.0);
    parts as f64 * activations + states as f64 / bytes_per_second
}

/// Every choice for a step of `config` by `settings`, whose own recomputation and offloading do not count, on `backend`: those
/// that keep more on the device first, of equals those that compute less again.
///
/// # Errors
/// When a setting does not fit the model, or a program cannot be compiled.
pub fn step_choices(settings: &Settings, config: &ModelConfig, backend: &Arc<dyn Backend>) -> Result<Vec<StepChoice>> {
    let programs = ProgramCache::new(Arc::clone(backend));
    let mut choices = Vec::new();
    for offload in Offload::ALL {
        for recomputation in Recomputation::ALL {
            let mut settings = settings.clone();
            (settings.train.offload, settings.train.recomputation) = (offload, recomputation);
            let parts = settings.train.accumulation;
            let step = PreparedStep::new(settings, config.clone())?;
            let moved: usize = step.snapshot(&programs)?.host_values.iter().map(|value| value.bytes).sum();
            let memory = step.memory(&programs)?;
            choices.push(StepChoice { recomputation, offload, memory, parts, moved: moved as u64 });
        }
    }
    Ok(choices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_cost_what_is_not_hidden() {
        let memory = MemoryBytes::default().with(MemoryOwner::HostStates, 300);
        let (recomputation, offload) = (Recomputation::None, Offload::All);
        let choice = StepChoice { recomputation, offload, memory, parts: 2, moved: 100 };
        // 10 s one way, of which the passes hide all, or 4 + 8 of 20, of each of two parts; and 30 s of states.
        assert!((choice.exposed_seconds(20.0, 10.0) - 30.0).abs() < 1e-12);
        assert!((choice.exposed_seconds(4.0, 10.0) - (30.0 + 2.0 * 8.0)).abs() < 1e-12);
    }
}
