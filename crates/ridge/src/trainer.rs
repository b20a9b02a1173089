//! Training: a run that is placed on a device.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ridge_hw::units::Bytes;
use ridge_runtime::{MemoryOwner, MemorySnapshot, ProgramCache};
use ridge_train::log::TrainEvent;
use ridge_train::settings::{Settings, read_settings};
use ridge_train::{OpPrecisions, Prepared, RecomputeLevel, RunEnd, StoredKind, TrainError};

use crate::error::{Error, Result};
use crate::placement::{OpenDevice, Placement};

/// A run that trains a model, and where it is to run.
///
/// ```
/// use std::sync::atomic::AtomicBool;
///
/// use ridge::train::Trainer;
///
/// # let dir = std::env::temp_dir().join(format!("ridge-doc-train-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// # let config = r#"{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
/// #     "num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;
/// # std::fs::write(dir.join("config.json"), config)?;
/// # std::fs::write(dir.join("text.txt"), "to be or not to be, ".repeat(20))?;
/// let mut trainer = Trainer::new();
/// let settings = trainer.settings();
/// settings.model.config = Some(dir.join("config.json"));
/// settings.data.train = vec![dir.join("text.txt")];
/// settings.data.sequence_length = 16;
/// settings.train.steps = 2;
/// settings.checkpoint.folder = dir.join("run");
/// let mut losses = Vec::new();
/// trainer.run(&AtomicBool::new(false), |event| {
///     if let ridge::train::TrainEvent::Step(report) = event {
///         losses.push(report.loss);
///     }
/// })?;
/// assert!(losses.iter().all(|loss| loss.is_finite()));
/// let mut model = ridge::Model::open(dir.join("run/model"))?.on(ridge::Device::Cpu).scorer()?;
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Trainer {
    settings: Settings,
    placement: Placement,
}

/// What a run would allocate, and in which precision it would compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainPlan {
    /// Elements of the weights that are trained.
    pub parameters: u64,
    /// Weights, masters, states of the optimiser and gradients.
    pub states: Bytes,
    /// Activations and all else that steps need.
    pub workspace: Bytes,
    /// As `states` and `workspace`, in memory of the host.
    pub offloaded: [Bytes; 2],
    /// What the forward and backward pass of a micro-batch has in memory, value by value.
    pub snapshot: MemorySnapshot,
    /// What the backward pass computes again.
    pub recomputed: RecomputeLevel,
    /// Bytes that this process may allocate on the device, if known.
    pub available: Option<Bytes>,
    /// What is kept between the programs of a step, by kind and dtype.
    pub stored: Vec<StoredKind>,
    /// In which precision each program of a step computes.
    pub precisions: Vec<(&'static str, OpPrecisions)>,
}

impl Trainer {
    /// A run with the usual settings on the CPU.
    pub fn new() -> Self {
        Self::default()
    }

    /// A run with the settings of a configuration file, with each of `flags`, a `section.key` and its value, set in
    /// addition.
    ///
    /// # Errors
    /// When the file cannot be read, a key is unknown, or a value makes no sense.
    pub fn from_file(file: Option<&Path>, flags: &[(String, String)]) -> Result<Self> {
        let text = match file {
            Some(file) => ridge_files::read_text(file, "read the settings of the run")?,
            None => String::new(),
        };
        let name = file.map_or_else(|| "the command line".to_owned(), |file| file.display().to_string());
        Ok(Self { settings: read_settings(&name, &text, flags)?, placement: Placement::default() })
    }

    /// The settings, to be changed.
    pub fn settings(&mut self) -> &mut Settings {
        &mut self.settings
    }

    /// Where it is to run.
    #[must_use]
    pub fn on(mut self, placement: impl Into<Placement>) -> Self {
        self.placement = placement.into();
        self
    }

    /// What it would allocate and compute, without doing so. Reads the data.
    ///
    /// # Errors
    /// When data, model or device cannot be used.
    pub fn plan(&self) -> Result<TrainPlan> {
        let stop = AtomicBool::new(false);
        let mut prepared = Prepared::new(self.settings.clone(), &stop)?;
        let device = OpenDevice::open(&self.placement)?;
        prepared.step.fit(&device.backend, &stop)?;
        let programs = ProgramCache::new(device.backend);
        let memory = prepared.step.memory(&programs)?;
        let states = [MemoryOwner::States, MemoryOwner::HostStates].map(|owner| memory.get(owner));
        let bytes = |bytes: usize| Bytes(bytes as u64);
        Ok(TrainPlan {
            parameters: prepared.step.parameters(),
            states: bytes(states[0]),
            workspace: bytes(memory.on_device() - states[0]),
            offloaded: [bytes(states[1]), bytes(memory.get(MemoryOwner::HostWorkspace))],
            snapshot: prepared.step.snapshot(&programs)?,
            recomputed: prepared.step.recompute,
            available: device.available,
            stored: prepared.step.stored()?,
            precisions: prepared.step.precisions()?,
        })
    }

    /// Trains until all steps are made or `stop` is set, when it saves and returns; before the first step it returns without having
    /// written anything. `observe` learns what happens.
    ///
    /// # Errors
    /// When data, model, device or a checkpoint cannot be used, the run does not fit into memory, or the loss diverges. Complete
    /// checkpoints stay.
    pub fn run(&self, stop: &AtomicBool, mut observe: impl FnMut(&TrainEvent)) -> Result<RunEnd> {
        let device = OpenDevice::open(&self.placement)?;
        let (backend, free) = (Arc::clone(&device.backend), || device.free_memory());
        Ok(ridge_train::train(self.settings.clone(), backend, &free, stop, &mut observe)?)
    }
}

impl From<TrainError> for Error {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}
