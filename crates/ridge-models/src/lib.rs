//! Model families as graphs, and the reading of published checkpoints.
//!
//! A published model is a folder. [`ModelFiles`] opens one (or the small model that is compiled in) and hands out its
//! parts, each of which can be read without the others:
//!
//! | file | read by | gives |
//! |---|---|---|
//! | `config.json`, `generation_config.json` | [`families`], [`config`] | [`ModelConfig`]: every size and switch of the model |
//! | `*.safetensors`, `model.safetensors.index.json` | [`checkpoint`] | [`Checkpoint`]: named tensors, mapped, not copied |
//! | `tokenizer.json`, `tokenizer_config.json` | [`tokenizer`] | [`Tokenizer`], [`StreamDecoder`] |
//! | `*.gguf`, which is all of these in one | [`gguf`] | [`Gguf`], and from it each of them |
//! | `tokenizer_config.json`, `chat_template.jinja` and others | [`template`] | [`ChatTemplates`]: messages to text |
//!
//! All of these files come from strangers. Whatever they hold, reading them gives a value or a [`ModelError`] that
//! names the file, the thing in it, what was expected and the way out; it never panics and never guesses.

pub mod checkpoint;
pub mod config;
pub mod embedded;
mod error;
pub mod families;
mod files;
pub mod gguf;
mod json;
mod loss;
mod model;
pub mod parallel;
mod pooling;
pub mod source;
pub mod summary;
pub mod template;
pub mod tokenizer;
mod weights;

pub use checkpoint::{Checkpoint, TensorView};
pub use config::{DecoderConfig, GenerationConfig, RopeConfig, RopeScaling};
pub use embedded::EmbeddedModel;
pub use error::{ModelError, Result, TensorMismatch};
pub use families::{
    BertConfig, FamilyKind, LlamaConfig, ModelConfig, PlannedConfig, family_kind, llama, model_type,
    planned_model_types,
};
pub use gguf::Gguf;
pub use loss::{with_loss, with_scores};
pub use model::{
    BuildOptions, Encoder, HISTORY, Model, StateGroup, StepInputs, attention_symbols, finish_decoder, paged_kv, symbols,
};
pub use pooling::{Pooling, SentenceConfig, with_pooling};
pub use source::ModelFiles;
pub use summary::Summary;
pub use template::{ChatInput, ChatTemplate, ChatTemplates};
pub use tokenizer::{StreamDecoder, Tokenizer};
pub use weights::{WeightSource, parameters, weight_bytes};
