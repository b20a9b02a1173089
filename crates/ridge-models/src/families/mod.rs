//! The families of models. A family is one file, which says all that Ridge knows of it: how its `config.json` is read, its
//! graph from the blocks of `blocks.rs`, its published tensors, and, as one value that `registry.rs` lists, its names,
//! the placements of its tensors and what GGUF calls them. It knows nothing of devices, meshes or formats.
//!
//! Read `definition.rs` for what a family registers, `decoder.rs` for what decoders have in common, `llama.rs` for a family,
//! then whichever differs in what you are after: `gemma.rs` has local layers and caps, `gemma3n.rs` layers that share values and caches, `zamba2.rs` layers that share weights, `olmo2.rs` norms after each half
//! of a layer, `gpt_neox.rs` both halves side by side, `phi3.rs` fused tensors, `bloom.rs` ALiBi, `smollm3.rs` layers that do not
//! rotate, `mixtral.rs` experts, `gpt_oss.rs` sinks, `deepseek.rs` latent attention,
//! `linear_attention.rs`, `rwkv4.rs`, `rwkv6.rs`, `rwkv7.rs` and `mamba2.rs` recurrent layers, whose mixers are in `recurrent.rs`, `qwen3_next.rs` the
//! gated delta rule, `bert.rs` is an encoder, `modernbert.rs` and `long_bert.rs` have some with windows, `vit.rs` a classifier of images, and
//! `deepseek_v32.rs` attends to tokens that an indexer selects (`indexer.rs`). `drafts.rs` builds the graph by which a prediction module (`prediction.rs`) drafts. `planned.rs` has graphs for plans. `tensors.rs` has the names that families share.

mod arrange;
mod bamba;
mod bert;
mod block_sparse;
mod blocks;
mod bloom;
mod cohere;
mod decoder;
mod decoder_layer;
mod deepseek;
mod deepseek_v32;
mod definition;
mod drafts;
mod encoder;
mod exaone4;
mod experts;
mod falcon;
mod falcon_h1;
mod gemma;
mod gemma3n;
mod gemma4;
mod gemma4_gguf;
mod gguf_mapping;
mod glm4;
mod glm4_moe;
mod glm_moe_dsa;
mod global_token;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod granite_moe;
mod hyena;
mod image_classifier;
mod indexer;
mod jamba;
mod latent_attention;
mod layer_states;
mod lfm2;
mod linear_attention;
mod llama;
mod llama4;
mod long_bert;
mod mamba;
mod mamba2;
mod minimax_m2;
mod mistral;
mod mixtral;
mod modernbert;
mod mpt;
mod nemotron_h;
mod network;
mod nomic_bert;
mod olmo2;
mod olmoe;
mod per_layer;
mod phi3;
mod planned;
mod planned_config;
mod prediction;
mod qwen;
mod qwen3_moe;
mod qwen3_next;
mod recurrent;
mod registry;
mod rwkv;
mod rwkv4;
mod rwkv6;
mod rwkv7;
mod smollm3;
mod stablelm;
mod starcoder2;
mod tensors;
mod text_classifier;
mod vit;
mod zamba2;

pub(crate) use definition::FamilyDefinition;
pub(crate) use gguf_mapping::{
    GgufEntry, GgufLayout, GgufMapping, GgufMetadata, GgufTensorName, LAYERS_KEY, MixRules, ROTATED_KEY, WINDOW_KEY,
};
pub(crate) use registry::{by_gguf, families};
pub(crate) use tensors::TensorName;

pub use bamba::BambaConfig;
pub use bloom::BloomConfig;
pub use cohere::CohereConfig;
pub use deepseek::DeepseekConfig;
pub use definition::{FamilyKind, ModelConfig};
pub use encoder::EncoderConfig;
pub use exaone4::Exaone4Config;
pub use experts::ExpertsConfig;
pub use falcon::FalconConfig;
pub use falcon_h1::{FalconH1Config, FalconH1Factors};
pub use gemma::GemmaConfig;
pub use gemma3n::Gemma3nConfig;
pub use gemma4::Gemma4Config;
pub use glm4::Glm4Config;
pub use glm4_moe::Glm4MoeConfig;
pub use gpt_neox::GptNeoxConfig;
pub use gpt_oss::GptOssConfig;
pub use gpt2::Gpt2Config;
pub use granite::{GraniteConfig, GraniteFactors};
pub use granite_hybrid::GraniteHybridConfig;
pub use granite_moe::GraniteMoeConfig;
pub use hyena::HyenaConfig;
pub use image_classifier::VitConfig;
pub use indexer::IndexerConfig;
pub use jamba::JambaConfig;
pub use latent_attention::LatentAttentionConfig;
pub use lfm2::Lfm2Config;
pub use linear_attention::{FeatureMap, LinearAttentionConfig, LinearMixer};
pub use llama::{LlamaConfig, llama};
pub use llama4::{Llama4Config, Temperature};
pub use mamba::{MambaConfig, MambaMixer, SelectionNorms};
pub use mamba2::Mamba2Config;
pub use minimax_m2::MiniMaxM2Config;
pub use mistral::MistralConfig;
pub use mixtral::MixtralConfig;
pub use mpt::MptConfig;
pub use nemotron_h::NemotronHConfig;
pub use network::{Network, NetworkConfig};
pub use olmo2::Olmo2Config;
pub use olmoe::OlmoeConfig;
pub use per_layer::{PerLayerInputs, SharedKeys};
pub use phi3::Phi3Config;
pub use planned_config::{Channel, LatentConfig, LayerKind, Mixer, PlannedConfig};
pub use qwen::QwenConfig;
pub use qwen3_moe::Qwen3MoeConfig;
pub use qwen3_next::{DeltaMixer, Qwen3NextConfig};
pub use recurrent::Mamba2Mixer;
pub use registry::{family_kind, model_type};
pub use rwkv4::Rwkv4Config;
pub use rwkv6::Rwkv6Config;
pub use rwkv7::Rwkv7Config;
pub use smollm3::SmolLm3Config;
pub use stablelm::StableLmConfig;
pub use starcoder2::Starcoder2Config;
pub use tensors::Cut;
pub use text_classifier::TextClassifier;
pub use zamba2::Zamba2Config;
