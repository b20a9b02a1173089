//! What a GGUF file says of a model, and models as GGUF files.
//!
//! The contents of a file are expressed as Hugging Face's files, so that the rest of the crate reads one kind of model:
//! `config.rs` makes a `config.json` of the metadata, `pooling.rs` reads how texts become vectors, and `names.rs` gives
//! the tensors the names of the graph's weights. `convert.rs` writes a model in any layout as a file, with `metadata.rs`,
//! and `folder.rs` a file, or a folder of quantised weights, as a folder; `mix.rs` has the formats of llama.cpp's presets.

mod config;
mod convert;
mod folder;
mod metadata;
mod mix;
mod names;
mod pooling;

pub use config::config_json;
pub use convert::{Instead, Quantisation, Written, to_gguf};
pub use folder::to_folder;
pub use mix::Mix;
pub use names::checkpoint;
pub use pooling::pooling;
