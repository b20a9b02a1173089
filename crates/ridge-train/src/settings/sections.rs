//! The sections of a configuration.

use std::fmt;
use std::path::PathBuf;

use super::experts::ExpertsSettings;
use ridge_graph::DType;
use ridge_graph::format::CodeType;
use ridge_graph::ops::Fp8Scaling;
use ridge_hw::units::Bytes;
use serde::{Deserialize, Serialize};

/// Every setting of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// What is trained.
    pub model: ModelSettings,
    /// What it is trained on.
    pub data: DataSettings,
    /// Steps and numbers.
    pub train: TrainSettings,
    /// Routing to experts.
    pub experts: ExpertsSettings,
    /// The update.
    pub optimizer: OptimizerSettings,
    /// Losses on data that is not trained on.
    pub validation: ValidationSettings,
    /// Text that the model writes on the way.
    pub sample: SampleSettings,
    /// What is kept on disk.
    pub checkpoint: CheckpointSettings,
    /// Event logs.
    pub log: LogSettings,
}

/// Declares a section with its defaults.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty = $default:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

section! {
    /// What is trained: `config` from scratch, or `from` on.
    ModelSettings {
        /// A `config.json`, or the folder that holds one.
        #[serde(skip_serializing_if = "Option::is_none")]
        config: Option<PathBuf> = None,
        /// A folder with weights to go on from.
        #[serde(skip_serializing_if = "Option::is_none")]
        from: Option<PathBuf> = None,
        /// How weights begin; by the family if not given.
        #[serde(skip_serializing_if = "Option::is_none")]
        initialization: Option<Initialization> = None,
        /// Standard deviation of initial matrices.
        initialization_std: f64 = 0.02,
        /// Probability that an element is dropped behind the embedding and each half of a layer.
        dropout: f64 = 0.0,
        /// Probability that a share of attention's softmax is dropped.
        attention_dropout: f64 = 0.0,
        /// The width whose initialisation and learning rates are carried over to this model's by muP; 0 for none.
        mup_base_width: usize = 0,
    }
}

section! {
    /// What is trained on.
    DataSettings {
        /// Texts, JSONL files, token shards or folders of these.
        train: Vec<PathBuf> = Vec::new(),
        /// The share of each of `train` in what is trained on; by their tokens if empty.
        weights: Vec<f64> = Vec::new(),
        /// What losses are measured on.
        validation: Vec<PathBuf> = Vec::new(),
        /// The share at the end of `train` that is set aside, if `validation` is empty.
        validation_fraction: f64 = 0.1,
        /// `characters`, `bytes`, or a `tokenizer.json` or folder that holds one.
        #[serde(skip_serializing_if = "Option::is_none")]
        vocabulary: Option<String> = None,
        /// The field of a JSONL line that holds the text.
        text_field: String = "text".into(),
        /// Tokens of a sequence.
        sequence_length: usize = 256,
        /// Whether tokens see across the documents of a sequence.
        packing: Packing = Packing::Stream,
    }
}

section! {
    /// Steps and numbers.
    TrainSettings {
        /// Steps of the run.
        steps: u64 = 1000,
        /// Sequences of a micro-batch.
        batch_size: usize = 8,
        /// Micro-batches of a step.
        accumulation: usize = 1,
        /// Numbers of weights and activations.
        precision: Precision = Precision::F32,
        /// How values are scaled that linears of layers multiply in 8 bits.
        fp8: Fp8 = Fp8::None,
        /// The 8-bit floats of cotangents.
        fp8_gradients: Fp8Gradients = Fp8Gradients::E5M2,
        /// Steps whose largest magnitudes delayed scaling goes by.
        fp8_history: usize = 1024,
        /// What the backward pass computes again, at least.
        recomputation: Recomputation = Recomputation::None,
        /// What is kept in memory of the host, at least.
        offload: Offload = Offload::None,
        /// Bytes of the device that a run may use; recomputation and offloading are raised so that it does in the least time.
        #[serde(with = "memory_text", skip_serializing_if = "Option::is_none")]
        memory: Option<Bytes> = None,
        /// Seed of initial weights, dropout and the order of data.
        seed: u64 = 1,
        /// The largest norm of the gradient; 0 does not clip.
        clip: f64 = 1.0,
        /// Factor of the squared logarithm of each token's sum of exponentials, which is added to the loss; 0 for none.
        z_loss: f64 = 0.0,
        /// What is done with a step whose loss or gradient is no number, or spikes.
        guard: Guard = Guard::Skip,
        /// A loss this many standard deviations above its running mean is a spike; 0 does not look for any.
        spike: f64 = 0.0,
        /// Steps in a row that the guard may refuse.
        patience: u64 = 10,
    }
}

section! {
    /// The update.
    OptimizerSettings {
        /// Which.
        name: OptimizerName = OptimizerName::AdamW,
        /// The largest learning rate.
        learning_rate: f64 = 3e-4,
        /// The learning rate at the end, where the schedule falls.
        final_learning_rate: f64 = 0.0,
        /// How the learning rate goes.
        schedule: ScheduleName = ScheduleName::Cosine,
        /// Steps over which it rises from 0.
        warmup: u64 = 0,
        /// Steps of the fall at the end, for `wsd`; a fifth of all if 0.
        decay: u64 = 0,
        /// Decay of the first moment.
        beta1: f64 = 0.9,
        /// Decay of the second moment.
        beta2: f64 = 0.95,
        /// Added to the root of the second moment.
        epsilon: f64 = 1e-8,
        /// Decay of matrices, times the learning rate. Norms, biases and other vectors do not decay.
        weight_decay: f64 = 0.1,
        /// Momentum of `sgd` and `muon`.
        momentum: f64 = 0.9,
        /// Nesterov's momentum, for `sgd` and `muon`.
        nesterov: bool = false,
        /// Decay of the running mean of the weights; 0 keeps none.
        ema: f64 = 0.0,
        /// Settings of their own for weights by name.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        groups: Vec<GroupSettings> = Vec::new(),
    }
}

/// Settings of the weights whose names match a pattern. The first group that matches is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSettings {
    /// A name, in which `*` stands for any characters.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Factor of the learning rate; 0 leaves the weights as they are.
    #[serde(default = "one")]
    pub learning_rate_scale: f64,
    /// Weight decay, in place of the one of all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

fn one() -> f64 {
    1.0
}

section! {
    /// Losses on data that is not trained on.
    ValidationSettings {
        /// Steps between two measurements; 0 measures none.
        every: u64 = 250,
        /// Micro-batches of one measurement.
        batches: usize = 20,
    }
}

section! {
    /// Text that the model writes on the way.
    SampleSettings {
        /// Steps between two samples; 0 writes none.
        every: u64 = 0,
        /// Tokens of a sample.
        tokens: usize = 100,
        /// What it begins with.
        prompt: String = "\n".into(),
        /// Temperature of sampling.
        temperature: f64 = 0.8,
    }
}

section! {
    /// What is kept on disk.
    CheckpointSettings {
        /// The folder of the run: checkpoints, logs, the exported model.
        folder: PathBuf = PathBuf::from("run"),
        /// Steps between two checkpoints; 0 keeps the last one only.
        every: u64 = 500,
        /// The most recent checkpoints that stay.
        keep: usize = 2,
        /// Checkpoints at multiples of this step stay for good; 0 keeps none so.
        keep_every: u64 = 0,
        /// Whether the one with the lowest validation loss stays too.
        keep_best: bool = true,
        /// `auto`, `never`, or the folder of a checkpoint.
        resume: String = "never".into(),
        /// Whether the model is exported at the end, in the layout of Hugging Face.
        export: bool = true,
    }
}

section! {
    /// Event logs.
    LogSettings {
        /// Steps between two reports.
        every: u64 = 10,
        /// Whether events are written as JSON lines.
        jsonl: bool = true,
        /// Whether they are written for TensorBoard.
        tensorboard: bool = false,
        /// The folder of a file store of MLflow, or the `http(s)://` address of a tracking server, that the run is written to.
        #[serde(skip_serializing_if = "Option::is_none")]
        mlflow: Option<PathBuf> = None,
        /// The project of Weights & Biases that the run is of, written to the folder of the run, and sent if there is a key.
        #[serde(skip_serializing_if = "Option::is_none")]
        wandb: Option<String> = None,
        /// The address, `host:port`, of a live page of the run, which whoever observes the run serves.
        #[serde(skip_serializing_if = "Option::is_none")]
        page: Option<String> = None,
    }
}

/// How weights begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Initialization {
    /// Normal; projections into the residual stream divided by the root of twice the layers (Radford et al. 2019, section
    /// 2.3).
    Gpt2,
    /// Normal; projections into the residual stream of layer `i`, counted from 1, divided by the root of `2 i`, and the
    /// output projection of standard deviation `hidden^-0.5`.
    Llama,
}

/// Whether tokens see across the documents of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// All tokens of a sequence are one text.
    Stream,
    /// Tokens see those of their own document, and positions count from its beginning within the sequence.
    Documents,
}

/// Numbers of weights and activations. Moments of optimisers are f32, or codes of 8 bits with f32 scales, in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// Forward and backward in bf16, from copies of f32 masters.
    Bf16,
    /// Forward and backward in f16, from copies of f32 masters, of a loss that is scaled by what its gradient can bear.
    F16,
    /// bf16 without masters: weights are rounded stochastically.
    Bf16Stochastic,
    /// bf16 without masters: what rounding takes from a weight is kept in bf16 and added to its next update (Kahan 1965;
    /// Zamirai et al. 2020, "Revisiting BFloat16 Training", section 4).
    Bf16Kahan,
}

impl Precision {
    /// The dtype of activations and of the weights that forward and backward read.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 | Self::Bf16Stochastic | Self::Bf16Kahan => DType::BF16,
        }
    }

    /// Are the weights that forward and backward read copies of f32 masters?
    pub fn has_masters(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16)
    }
}

/// Products of linears in 8-bit floats, by how their operands are scaled; see [`Fp8Scaling`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fp8 {
    /// In the precision of the run.
    None,
    /// One scale of x, weight and cotangent.
    Tensor,
    /// The same, by largest magnitudes of earlier steps.
    Delayed,
    /// A scale for 128 elements of a row and 128 x 128 of a weight.
    Blocks,
}

impl Fp8 {
    /// The scaling, if products are in 8 bits.
    pub fn scaling(self) -> Option<Fp8Scaling> {
        match self {
            Self::None => None,
            Self::Tensor => Some(Fp8Scaling::Tensor),
            Self::Delayed => Some(Fp8Scaling::Delayed),
            Self::Blocks => Some(Fp8Scaling::Blocks),
        }
    }
}

/// 8-bit floats of cotangents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fp8Gradients {
    /// The wider range.
    E5M2,
    /// The finer steps.
    E4M3,
}

impl TrainSettings {
    /// The codes of cotangents.
    pub fn gradient_codes(&self) -> CodeType {
        match (self.fp8, self.fp8_gradients) {
            (Fp8::Blocks, _) | (_, Fp8Gradients::E4M3) => CodeType::F8E4M3,
            _ => CodeType::F8E5M2,
        }
    }
}

/// An amount of memory as its text, such as `40GiB`.
mod memory_text {
    use ridge_hw::units::Bytes;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(bytes: &Option<Bytes>, to: S) -> Result<S::Ok, S::Error> {
        match bytes {
            // In bytes: other units are rounded.
            Some(bytes) => to.serialize_str(&format!("{}B", bytes.0)),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Bytes>, D::Error> {
        String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
    }
}

/// Which activations the backward pass computes again rather than keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recomputation {
    /// Those that cost next to nothing.
    None,
    /// Those of norms and elementwise ops too; results of products, experts and attention are kept.
    Selective,
    /// All within a layer: of each, only its input is kept.
    Full,
}

impl Recomputation {
    /// All of them, from what keeps most.
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];
}

impl fmt::Display for Recomputation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        })
    }
}

/// What a GPU's run keeps in memory of the host, which costs time where it is not moved beside computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Nothing.
    None,
    /// What layers keep for the backward pass, from the layer behind theirs until shortly before it is used.
    Activations,
    /// What the update alone uses: moments, masters, running means.
    Optimizer,
    /// Both.
    All,
}

impl Offload {
    /// All of them, from what keeps most on the device.
    pub const ALL: [Self; 4] = [Self::None, Self::Activations, Self::Optimizer, Self::All];

    /// Are activations?
    pub fn has_activations(self) -> bool {
        matches!(self, Self::Activations | Self::All)
    }

    /// Does it move all that `other` moves?
    pub fn includes(self, other: Self) -> bool {
        let has = |of: fn(Self) -> bool| of(self) || !of(other);
        has(Self::has_activations) && has(Self::has_optimizer)
    }

    /// Is the state of the optimiser?
    pub fn has_optimizer(self) -> bool {
        matches!(self, Self::Optimizer | Self::All)
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Activations => "activations",
            Self::Optimizer => "optimizer",
            Self::All => "all",
        })
    }
}

/// What is done with a step whose loss or gradient is no number, or spikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Guard {
    /// It changes no weights, and the run goes on with the next.
    Skip,
    /// The run goes back to the last checkpoint, and on with the data behind the step.
    Rollback,
    /// The run ends.
    Stop,
}

/// The optimisers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Loshchilov and Hutter 2019.
    AdamW,
    /// AdamW with moments of 8 bits (Dettmers et al. 2022).
    #[serde(rename = "adamw8bit")]
    AdamW8Bit,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// Shazeer and Stern 2018.
    Adafactor,
    /// Chen et al. 2023.
    Lion,
    /// Jordan et al. 2024 for the matrices of layers, AdamW for all else.
    Muon,
}

/// How the learning rate goes behind the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleName {
    /// Stays.
    Constant,
    /// Falls along a line to the final one.
    Linear,
    /// Falls along half a cosine to the final one (Loshchilov and Hutter 2017).
    Cosine,
    /// Stays, and falls along a line at the end (warm-up, stable, decay).
    Wsd,
    /// As the inverse of the root of the step (Vaswani et al. 2017).
    #[serde(rename = "inverse_sqrt")]
    InverseSqrt,
}
