//! What cannot be planned, with the nearest thing that can.

use ridge_hw::error::HwError;
use ridge_hw::units::Bytes;
use ridge_models::ModelError;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A degree, size or setting that has no meaning with the others.
    #[error("{what} = {value} {problem}; {remedy}")]
    Setting {
        /// What was set.
        what: String,
        /// To which value.
        value: String,
        /// Why that cannot be.
        problem: String,
        /// The nearest that can.
        remedy: String,
    },
    /// What a rank holds besides sequences is more than its device has.
    #[error("tp = {tp} is too small: a rank needs {needed} of {has}; {remedy}")]
    Room {
        /// Tensor parallel ranks.
        tp: usize,
        /// Weights, workspace and margin of a rank.
        needed: Bytes,
        /// Memory of the device.
        has: Bytes,
        /// What would have room.
        remedy: String,
    },
    /// The configuration of the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// How the model's weights are stored.
    #[error("{0}; with --weights FORMAT the model is planned in another format")]
    Storage(Box<ModelError>),
    /// A mistake of ours.
    #[error("the model's graph cannot be read: {0}; please report it with the config.json")]
    Graph(String),
    /// A trace that cannot be read, or that tells nothing.
    #[error("the trace: {problem}; {remedy}")]
    Trace {
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// A device or rate that no sheet has.
    #[error(transparent)]
    Hardware(#[from] HwError),
}

impl PlanError {
    pub(crate) fn setting(
        what: &str,
        value: impl ToString,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Setting {
            what: what.to_owned(),
            value: value.to_string(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}
