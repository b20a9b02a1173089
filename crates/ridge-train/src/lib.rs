//! Training: data, optimisers, schedules, checkpoints and the loop, on any backend.
//!
//! Read `settings` first (what a run may be told), then `prepare` (from settings to data and configuration), `prepared_step` (from these to graphs), `step` (a training step as a
//! schedule of three programs), `trainer` (weights on a device, single steps, losses, samples) and `run` (the loop).
//! `optimizer` says what an update does to each weight, `rate` the learning rate of each step, `initial` the weights at the
//! beginning, `loading` brings them to a device, `recompute` what the backward pass computes again, `choices` what a step may recompute and offload, `fit` chooses so that it fits into a budget, `admission` compares it with the memory that there is, `experts` what is asked of routing and how evenly it used them, `guard` which updates are refused. `data` makes batches of files, `checkpoint` keeps runs on disk, `export`
//! writes models, `log` tells what happens.

mod address;
mod admission;
pub mod checkpoint;
mod choices;
pub mod data;
mod error;
mod experts;
mod export;
mod fit;
mod fp8;
mod guard;
mod initial;
mod loading;
pub mod log;
mod mup;
mod optimizer;
mod prepare;
mod prepared_step;
mod rate;
mod recompute;
mod run;
mod same_run;
pub mod settings;
mod shortage;
pub mod step;
mod stop;
mod trainer;

pub use admission::FreeMemory;
pub use choices::{StepChoice, step_choices};
pub use error::{Result, TrainError};
pub use experts::{ExpertLoads, LayerUse};
pub use export::export;
pub use guard::{LossScale, LossStatistics, Refusal};
pub use initial::{InitialWeight, usual_initialization};
pub use mup::WidthScaling;
pub use optimizer::{UpdateOp, UpdateState, WeightUpdate, weight_updates};
pub use prepare::Prepared;
pub use prepared_step::{KeptState, OpPrecisions, PreparedStep, StoredKind};
pub use rate::learning_rate;
pub use recompute::RecomputeLevel;
pub use run::{RunEnd, train};
pub use shortage::MemoryShortage;
pub use trainer::{RunProgress, StepResult, Trainer, checkpoints_of};
