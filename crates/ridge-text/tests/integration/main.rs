//! The tests of tokenizers and chat templates.

mod common;
mod gguf_tokenizers;
mod gguf_vocabularies;
mod template;
mod tokenizer;
mod tokenizer_gpt2;
mod tokenizer_kinds;
