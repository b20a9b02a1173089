//! Model families as graphs, and the reading of published models.
//!
//! A published model is a folder. [`ModelFiles`] opens one (or the small model that is compiled in) and gives its parts,
//! each of which can be read without the others:
//!
//! | file | read by | gives |
//! |---|---|---|
//! | `config.json`, `generation_config.json` | [`families`], [`config`] | [`ModelConfig`]: every size and switch of the model |
//! | `*.safetensors`, `model.safetensors.index.json` | `ridge_files` | `Checkpoint`: named tensors, mapped, not copied |
//! | `tokenizer.json`, `tokenizer_config.json` | `ridge_text` | `Tokenizer`, `StreamDecoder` |
//! | `tokenizer_config.json`, `chat_template.jinja` and others | `ridge_text` | `ChatTemplates`: messages to text |
//! | `*.gguf`, which is all of these in one | [`gguf`] | each of them |
//!
//! All of these files come from strangers. Reading them gives a value or a [`ModelError`] that
//! names the file, the item in it, what was expected and what to do; it never panics and never guesses.

pub mod config;
mod cut;
mod dense;
pub mod embedded;
mod embedding;
mod error;
pub mod families;
mod fixed;
pub mod gguf;
mod loss;
mod model;
mod module;
pub mod parallel;
mod pooling;
mod rows;
mod sampled;
mod sentence;
mod shares;
pub mod source;
pub mod summary;
mod training;
mod weights;

pub use config::{DecoderConfig, GenerationConfig, RopeConfig, RopeScaling};
pub use dense::{DenseActivation, DenseLayer};
pub use embedded::EmbeddedModel;
pub use error::{ModelError, Result};
pub use families::{
    EncoderConfig, FamilyKind, LlamaConfig, ModelConfig, Network, NetworkConfig, PlannedConfig, VitConfig, family_kind,
    llama, model_type,
};
pub use fixed::{FixedState, STATE_LINES, decaying_sum, fixed_lines, has_fixed_state, read_fixed, write_fixed};
pub use loss::{with_loss, with_scores};
pub use model::{
    BuildOptions, DRAFTS, Encoder, FOLLOWERS, HISTORY, ImageClassifier, LAST_HIDDEN, Model, StepInputs,
    attended_windows, attention_symbols, block_table, block_table_name, blocks_symbol, paged_kv, symbols, windows,
    with_blocks, with_reached,
};
pub use module::{Module, StateGroup};
pub use pooling::{Pooling, with_pooling};
pub use rows::{
    LAST_TOKEN, LENGTH, OFFSETS, PARENTS, ROWS, RowTable, RowTables, RowWidths, Sampled, row_changes, with_draft_rows,
    with_rows,
};
pub use sampled::finish_decoder;
pub use sentence::{SentenceConfig, WordScore};
pub use shares::Shares;
pub use source::ModelFiles;
pub use summary::{PredictionSummary, Summary};
pub use training::{PublishedTensor, WeightRole, training_bindings};
pub use weights::WeightSource;
