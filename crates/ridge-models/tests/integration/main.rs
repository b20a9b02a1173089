//! The tests of model families, their configurations and files.

mod chat_templates;
mod common;
mod config;
mod cuda;
mod encoders;
mod families;
mod family_configs;
mod fp8;
mod gguf;
mod gguf_families;
mod gguf_metadata;
mod gguf_parts;
mod int4;
mod llama_cost;
mod llama_gathered;
mod llama_logits;
mod llama_parallel;
mod llama_training;
mod long_texts;
mod memory;
#[path = "../common/mixed.rs"]
mod mixed;
mod mixed_precision;
mod mxfp4;
mod planned;
mod prediction;
#[path = "../../../ridge-cuda/tests/common/processes.rs"]
mod processes;
mod published;
mod sampling;
mod sentences;
mod source;
mod summary;
mod training_graph;
mod vit;
mod weights;
