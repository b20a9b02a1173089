//! Every key with its help.

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// Text, such as a path or one of several names.
    Text,
    /// A number.
    Number,
    /// `true` or `false`.
    Flag,
    /// Texts, separated by commas in a flag.
    Texts,
    /// Numbers, separated by commas in a flag.
    Numbers,
    /// Tables, in the file only.
    Tables,
}

/// A key of the configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// `section.name`, which is also its flag.
    pub path: &'static str,
    /// What its value is.
    pub kind: KeyKind,
    /// What it does.
    pub help: &'static str,
}

impl Key {
    /// Its section.
    pub fn section(&self) -> &'static str {
        self.path.split_once('.').map_or("", |(section, _)| section)
    }

    /// Its name within the section.
    pub fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }
}

const fn key(path: &'static str, kind: KeyKind, help: &'static str) -> Key {
    Key { path, kind, help }
}

use KeyKind::{Flag, Number, Numbers, Tables, Text, Texts};

/// Every key.
pub const KEYS: &[Key] = &[
    key("model.config", Text, "config.json, or its folder, of a model to train from scratch"),
    key("model.from", Text, "Folder with weights to continue from"),
    key("model.initialization", Text, "Initial weights: gpt2 or llama [default: by the family]"),
    key("model.initialization_std", Number, "Standard deviation of initial matrices [default: 0.02]"),
    key("model.dropout", Number, "Dropout of the embedding and of each residual branch [default: 0]"),
    key("model.attention_dropout", Number, "Dropout of attention weights [default: 0]"),
    key(
        "model.mup_base_width",
        Number,
        "Width that rates and initial weights are for, scaled by muP, 0 for none [default: 0]",
    ),
    key("data.train", Texts, "Training data: text, JSONL, token shards, or folders of these"),
    key("data.weights", Numbers, "Share of each of data.train [default: by tokens]"),
    key("data.validation", Texts, "Validation data [default: the end of the training data]"),
    key("data.validation_fraction", Number, "Share of the training data set aside for validation [default: 0.1]"),
    key("data.vocabulary", Text, "characters, bytes, or a tokenizer.json [default: that of model.from, or bytes]"),
    key("data.text_field", Text, "Field of a JSONL line, or column of a table, that holds the text [default: text]"),
    key("data.sequence_length", Number, "Tokens of a sequence [default: 256]"),
    key("data.packing", Text, "stream, or documents: no attention across documents [default: stream]"),
    key("train.steps", Number, "Number of steps [default: 1000]"),
    key("train.batch_size", Number, "Sequences of a micro-batch [default: 8]"),
    key("train.accumulation", Number, "Micro-batches of a step [default: 1]"),
    key(
        "train.precision",
        Text,
        "f32, bf16 or f16 with f32 master weights, bf16_stochastic or bf16_kahan [default: f32]",
    ),
    key("train.fp8", Text, "Products of layers in fp8: none, or scaled by tensor, delayed or blocks [default: none]"),
    key("train.fp8_gradients", Text, "Codes of cotangents in fp8: e5m2 or e4m3, blocks have e4m3 [default: e5m2]"),
    key("train.fp8_history", Number, "Steps whose largest magnitudes delayed scaling goes by [default: 1024]"),
    key("train.recomputation", Text, "Activations computed again: none, selective or full [default: none]"),
    key("train.offload", Text, "Kept in host memory: none, activations, optimizer or all [default: none]"),
    key("train.memory", Text, "Memory to fit into, such as 40GiB: what costs least is recomputed or offloaded"),
    key("train.seed", Number, "Seed of initial weights, dropout and the order of data [default: 1]"),
    key("train.clip", Number, "Largest global norm of the gradient, 0 for none [default: 1]"),
    key("train.z_loss", Number, "Factor of the z-loss, which keeps logits small, 0 for none [default: 0]"),
    key("train.guard", Text, "On NaN or a spike: skip, rollback or stop [default: skip]"),
    key("train.spike", Number, "Standard deviations above the mean loss that are a spike, 0 for none [default: 0]"),
    key("train.patience", Number, "Steps in a row that the guard may refuse [default: 10]"),
    key("experts.routing", Text, "Routing to experts: top_k (drops none), capacity or expert_choice [default: top_k]"),
    key(
        "experts.capacity_factor",
        Number,
        "Tokens of an expert over its equal share, for capacity and expert_choice [default: 1.25]",
    ),
    key("experts.router_aux_loss_coef", Number, "Factor of the loss that balances experts, 0 for none [default: 0]"),
    key("experts.router_z_loss_coef", Number, "Factor of the z-loss of routers, 0 for none [default: 0]"),
    key(
        "experts.bias_update_speed",
        Number,
        "Change of router biases in a step towards equal load, 0 for none [default: 0]",
    ),
    key("experts.collapse", Number, "Evenness of experts (0 to 1) at or below which to warn, 0 never [default: 0.5]"),
    key("optimizer.name", Text, "adamw, adamw8bit, sgd, adafactor, lion or muon [default: adamw]"),
    key("optimizer.learning_rate", Number, "Peak learning rate [default: 3e-4]"),
    key("optimizer.final_learning_rate", Number, "Learning rate at the end [default: 0]"),
    key("optimizer.schedule", Text, "constant, linear, cosine, wsd or inverse_sqrt [default: cosine]"),
    key("optimizer.warmup", Number, "Steps of linear warm-up [default: 0]"),
    key("optimizer.decay", Number, "Steps of the decay of wsd [default: a fifth of all]"),
    key("optimizer.beta1", Number, "Decay of the first moment [default: 0.9]"),
    key("optimizer.beta2", Number, "Decay of the second moment [default: 0.95]"),
    key("optimizer.epsilon", Number, "Added to the root of the second moment [default: 1e-8]"),
    key("optimizer.weight_decay", Number, "Decoupled weight decay of matrices [default: 0.1]"),
    key("optimizer.momentum", Number, "Momentum of sgd and muon [default: 0.9]"),
    key("optimizer.nesterov", Flag, "Nesterov momentum of sgd and muon [default: false]"),
    key("optimizer.ema", Number, "Decay of a running mean of the weights, 0 for none [default: 0]"),
    key("optimizer.groups", Tables, "Settings of weights by name"),
    key("validation.every", Number, "Steps between validation losses, 0 for none [default: 250]"),
    key("validation.batches", Number, "Micro-batches of a validation loss [default: 20]"),
    key("sample.every", Number, "Steps between samples of text, 0 for none [default: 0]"),
    key("sample.tokens", Number, "Tokens of a sample [default: 100]"),
    key("sample.prompt", Text, "Text that a sample begins with [default: a line break]"),
    key("sample.temperature", Number, "Temperature of a sample [default: 0.8]"),
    key("checkpoint.folder", Text, "Folder of the run [default: run]"),
    key("checkpoint.every", Number, "Steps between checkpoints, 0 for the last only [default: 500]"),
    key("checkpoint.keep", Number, "Most recent checkpoints to keep [default: 2]"),
    key("checkpoint.keep_every", Number, "Keep checkpoints at multiples of this step, 0 for none [default: 0]"),
    key("checkpoint.keep_best", Flag, "Keep the checkpoint with the lowest validation loss [default: true]"),
    key("checkpoint.resume", Text, "auto, never, or the folder of a checkpoint [default: never]"),
    key("checkpoint.export", Flag, "Export the model at the end, in the Hugging Face layout [default: true]"),
    key("log.every", Number, "Steps between reports [default: 10]"),
    key("log.jsonl", Flag, "Write events as JSON lines [default: true]"),
    key("log.tensorboard", Flag, "Write events for TensorBoard [default: false]"),
    key("log.mlflow", Text, "Folder of an MLflow file store, or http(s)://... of a tracking server, to log the run to"),
    key(
        "log.wandb",
        Text,
        "Weights & Biases project of the run; without WANDB_API_KEY it is written offline for `wandb sync`",
    ),
    key("log.page", Text, "Address of a live web page of the run, such as 127.0.0.1:7070"),
];
