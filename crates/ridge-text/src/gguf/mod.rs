//! The vocabulary of a GGUF file as a `tokenizer.json` and a `tokenizer_config.json` (`read.rs`), and the inverse
//! (`write.rs`). `pretokenizers.rs` has the ways to split a text before byte-pair encoding.

mod pretokenizers;
mod read;
mod world;
mod write;

pub use read::{end_tokens, tokenizer_json};
pub use write::{TokenizerSource, write_tokenizer};
