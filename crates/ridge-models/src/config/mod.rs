//! `config.json`: what a published model says about itself.
//!
//! One rule holds for every family: **what the file says and Ridge does not do is an error**, never ignored. A family
//! reads each key it understands through `Fields`, lists the keys that cannot change the forward pass, and
//! whatever is then left over is reported with its value. So a checkpoint either means here what it meant to its
//! authors, or is refused.
//!
//! Read `fields.rs` for the helper, `decoder.rs` and `rope.rs` for what families share, `llama.rs` for a family,
//! `model.rs` for how one is chosen.

mod bert;
mod common;
mod decoder;
mod falcon;
mod fields;
mod gemma;
mod generation;
mod gpt;
mod llama;
mod mistral;
mod model;
mod olmo2;
mod phi3;
mod planned;
mod qwen;
mod rope;

pub(crate) use fields::Fields;

pub use bert::BertConfig;
pub use decoder::DecoderConfig;
pub use falcon::FalconConfig;
pub use gemma::GemmaConfig;
pub use generation::GenerationConfig;
pub use gpt::{Gpt2Config, GptNeoxConfig};
pub use llama::LlamaConfig;
pub use mistral::MistralConfig;
pub use model::ModelConfig;
pub use olmo2::Olmo2Config;
pub use phi3::Phi3Config;
pub use planned::{Channel, ExpertsConfig, LatentConfig, LayerKind, MambaConfig, Mixer, PlannedConfig};
pub use qwen::QwenConfig;
pub use rope::{RopeConfig, RopeScaling};
