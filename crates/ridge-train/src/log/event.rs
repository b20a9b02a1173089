//! What happens in a run.

use serde::Serialize;

use crate::experts::LayerUse;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TrainEvent {
    /// The run begins or goes on.
    Started {
        /// Steps made before.
        step: u64,
        /// Elements of the weights that are trained.
        parameters: u64,
        /// Tokens of the training data.
        tokens: u64,
    },
    /// Steps were made, up to this one.
    Step(StepReport),
    /// How evenly experts were used up to this step, since the last such event.
    Experts {
        /// Steps made.
        step: u64,
        /// Of each layer with experts.
        layers: Vec<LayerUse>,
    },
    /// The tokens of a layer go to few of its experts: what each that is left out could learn is lost, and most of the layer's
    /// weights are of no use.
    ExpertCollapse {
        /// Steps made.
        step: u64,
        /// The use that says so.
        used: LayerUse,
    },
    /// A step's update was refused.
    Refused {
        /// The step.
        step: u64,
        /// Why.
        why: String,
    },
    /// The run went back to a checkpoint.
    RolledBack {
        /// The step of the checkpoint.
        step: u64,
    },
    /// A loss on data that is not trained on.
    Validation {
        /// Steps made before.
        step: u64,
        /// The mean loss over its targets.
        loss: f64,
        /// Whether it is the lowest so far.
        best: bool,
    },
    /// Text that the model wrote.
    Sample {
        /// Steps made before.
        step: u64,
        /// The text, with its prompt.
        text: String,
    },
    /// A checkpoint was begun.
    Checkpoint {
        /// Its step.
        step: u64,
    },
    /// Something that one should know.
    Note {
        /// What.
        text: String,
    },
    /// The model was exported.
    Exported {
        /// To this folder.
        folder: String,
    },
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnded {
    /// All steps were made.
    Finished,
    /// It was asked to stop.
    Stopped,
    /// By an error.
    Failed,
}

/// Steps since the last report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Steps made.
    pub step: u64,
    /// Of so many.
    pub steps: u64,
    /// The loss of the last one.
    pub loss: f64,
    /// The norm of its gradient, before clipping.
    pub gradient_norm: f64,
    /// Its learning rate.
    pub learning_rate: f64,
    /// Tokens a second since the last report.
    pub tokens_per_second: f64,
    /// FLOPs of the steps over the device's peak, where that is known.
    pub mfu: Option<f64>,
    /// Bytes that the device has allocated.
    pub memory_bytes: u64,
    /// Passes over the data.
    pub epoch: f64,
    /// Seconds until the last step.
    pub seconds_left: f64,
}
