//! What a checkpoint holds besides tensors.

use serde::{Deserialize, Serialize};

use crate::data::DataPosition;
use crate::guard::{LossScale, LossStatistics};

/// The file of all tensors.
pub const STATE_FILE: &str = "state.safetensors";
/// The file of all else.
pub const INFO_FILE: &str = "checkpoint.json";
/// The format that is written and read.
pub(super) const FORMAT: &str = "ridge-checkpoint-1";

/// What a checkpoint holds besides tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// `ridge-checkpoint-1`.
    pub format: String,
    /// Steps that were made.
    pub step: u64,
    /// Updates that were made: steps less those that were refused.
    pub updates: u64,
    /// How far the data was read.
    pub position: DataPosition,
    /// A number of the data.
    pub data_fingerprint: u64,
    /// The `config.json` of the model.
    pub model: serde_json::Value,
    /// The optimiser's name.
    pub optimizer: String,
    /// The seed, from which with `step` all random numbers come.
    pub seed: u64,
    /// Losses so far.
    pub losses: LossStatistics,
    /// What the loss is multiplied by in f16.
    #[serde(default)]
    pub loss_scale: LossScale,
    /// The lowest validation loss so far.
    pub best_validation: Option<f64>,
    /// SHA-256 of the file of tensors, in hexadecimal.
    pub sha256: String,
}

impl CheckpointInfo {
    /// The format that is written.
    pub fn format() -> String {
        FORMAT.to_owned()
    }
}
