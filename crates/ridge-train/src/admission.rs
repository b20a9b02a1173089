//! The memory that a run allocates, compared with what there is before any weight is made, so that the message comes from
//! here rather than from the system.

use std::sync::atomic::AtomicBool;

use ridge_hw::units::Bytes;
use ridge_runtime::{MemoryBytes, MemoryOwner, ProgramCache};

use crate::error::{Result, TrainError};
use crate::prepared_step::{KeptState, PreparedStep};
use crate::settings::{Offload, OptimizerName, Recomputation, Settings};
use crate::shortage::MemoryShortage;
use crate::stop::check_stop;

/// Memory that this process may still allocate, without swapping. Where it is not known nothing is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeMemory {
    /// The device is a CPU: what is offloaded is in the same memory.
    Shared(Option<Bytes>),
    /// The device has memory of its own.
    Separate {
        /// That of the device.
        device: Option<Bytes>,
        /// That of the host.
        host: Option<Bytes>,
    },
}

impl PreparedStep {
    /// Compares what a run allocates, [`PreparedStep::memory`], with what is `free`, and gives what one should know about the rest.
    /// Compiles the programs of the run; nothing large is allocated.
    ///
    /// There is no margin: the few MiB that each thread of a CPU works in, one weight at a time while weights are made, the
    /// engine of samples and the copy of a checkpoint while it is written are not counted. Nor is swap space: a run that would begin
    /// by swapping is refused. Where a copy of a checkpoint will not fit, a note says so.
    ///
    /// # Errors
    /// [`TrainError::Memory`] when it does not fit, [`TrainError::Stopped`] when `stop` is set meanwhile, and when a program cannot
    /// be compiled.
    pub fn admit(&self, programs: &ProgramCache, free: FreeMemory, stop: &AtomicBool) -> Result<Vec<String>> {
        for stage in &self.schedule.stages {
            check_stop(stop)?;
            programs.get(&stage.graph, &stage.outputs)?;
        }
        check_stop(stop)?;
        let is_shared = matches!(free, FreeMemory::Shared(_));
        let [device, host] = needed(&self.memory(programs)?, free);
        if let Some(available) = device.lacks() {
            let remedy = device_remedy(&self.settings, available, device.states > available, is_shared);
            return Err(device.shortage(available, remedy));
        }
        if let Some(available) = host.lacks() {
            return Err(host.shortage(available, host_remedy(&self.settings)));
        }
        let left = if is_shared { device.left() } else { host.left() };
        Ok(left.and_then(|left| self.checkpoint_note(left)).into_iter().collect())
    }

    /// Says so where the run leaves too little memory of the host for the copy of weights and states that is made before
    /// they are written to disk: behind the last step at the latest.
    fn checkpoint_note(&self, left: Bytes) -> Option<String> {
        let bytes = |kept: &KeptState| {
            let elements = kept.ty.shape.as_const().map_or(0, |shape| shape.iter().product::<usize>());
            (elements * kept.ty.dtype.size_bytes()) as u64
        };
        let copy = Bytes(self.kept_states().iter().map(bytes).sum());
        (copy > left).then(|| {
            format!(
                "warning: while a checkpoint is written, {copy} of weights and states are copied to host memory, of which this \
                 run leaves {left}; the system may end the run then"
            )
        })
    }
}

/// What is needed of one memory, and what there is of it.
#[derive(Clone, Copy)]
struct Need {
    of: &'static str,
    states: Bytes,
    activations: Bytes,
    available: Option<Bytes>,
}

impl Need {
    fn new(of: &'static str, states: usize, all: usize, available: Option<Bytes>) -> Self {
        Self { of, states: Bytes(states as u64), activations: Bytes(all.saturating_sub(states) as u64), available }
    }

    fn all(self) -> u64 {
        self.states.0.saturating_add(self.activations.0)
    }

    /// What there is, if that is not enough.
    fn lacks(self) -> Option<Bytes> {
        self.available.filter(|available| self.all() > available.0)
    }

    /// What remains of it.
    fn left(self) -> Option<Bytes> {
        self.available.map(|available| Bytes(available.0.saturating_sub(self.all())))
    }

    fn shortage(self, available: Bytes, remedy: String) -> TrainError {
        let Self { of, states, activations, .. } = self;
        TrainError::Memory(Box::new(MemoryShortage { of, states, activations, available, remedy }))
    }
}

/// What is needed of the device and of the host.
fn needed(memory: &MemoryBytes, free: FreeMemory) -> [Need; 2] {
    let [states, offloaded] = [MemoryOwner::States, MemoryOwner::HostStates].map(|owner| memory.get(owner));
    let [on_device, on_host] = [memory.on_device(), memory.on_host()];
    match free {
        FreeMemory::Shared(available) => [
            Need::new("memory", states.saturating_add(offloaded), on_device.saturating_add(on_host), available),
            Need::new("memory", 0, 0, None),
        ],
        FreeMemory::Separate { device, host } => {
            [Need::new("device memory", states, on_device, device), Need::new("host memory", offloaded, on_host, host)]
        }
    }
}

/// What makes the device's share smaller, the keys that cost least first. On a CPU, offloading moves nothing.
fn device_remedy(settings: &Settings, available: Bytes, states_alone: bool, is_shared: bool) -> String {
    let train = &settings.train;
    let mut keys = Vec::new();
    if states_alone {
        if !is_shared && !train.offload.has_optimizer() {
            keys.push("set train.offload = \"optimizer\"".to_owned());
        }
        if matches!(settings.optimizer.name, OptimizerName::AdamW | OptimizerName::Muon) {
            keys.push("set optimizer.name = \"adamw8bit\"".to_owned());
        }
        keys.push("train a smaller model".to_owned());
        let nothing = "train.recomputation, train.batch_size and data.sequence_length change activations alone";
        return format!("{} ({nothing})", keys.join(", or "));
    }
    // Budgets are read in whole units.
    let budget =
        if available.0 >> 30 > 9 { format!("{}GiB", available.0 >> 30) } else { format!("{}MiB", available.0 >> 20) };
    match train.memory {
        None => keys.push(format!("set train.memory = \"{budget}\", which fits a step into that by itself")),
        Some(set) => keys.push(format!("lower train.memory = \"{set}\" to \"{budget}\"")),
    }
    if train.recomputation != Recomputation::Full {
        keys.push("set train.recomputation = \"full\"".to_owned());
    }
    if !is_shared && train.offload != Offload::All {
        keys.push("set train.offload = \"all\"".to_owned());
    }
    if matches!(settings.optimizer.name, OptimizerName::AdamW | OptimizerName::Muon) {
        keys.push("set optimizer.name = \"adamw8bit\"".to_owned());
    }
    keys.push("lower train.batch_size or data.sequence_length".to_owned());
    keys.join(", or ")
}

/// What makes the host's share smaller.
fn host_remedy(settings: &Settings) -> String {
    let less = match settings.train.offload {
        Offload::All => "\"optimizer\", \"activations\" or \"none\"",
        _ => "\"none\"",
    };
    format!(
        "offload less with train.offload = {less}, or set optimizer.name = \"adamw8bit\", or lower train.batch_size or \
         data.sequence_length"
    )
}
