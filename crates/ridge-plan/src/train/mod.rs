//! Training: how a step is divided (`layout`), what a step takes (`step`), and what a run of many costs (`run`). What
//! a rank holds is in [`crate::ledger`].

mod layout;
mod run;
mod step;
mod workload;

pub use layout::{Layout, Recompute, Reject};
pub use run::{Checkpointing, TrainingRun, checkpointing, chinchilla};
pub use step::{StepTime, step_time};
pub use workload::{StateBytes, Workload};
