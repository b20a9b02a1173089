//! Text on its way to and from a model: tokenizers, chat templates and incremental decoding.
//!
//! | file | read by | gives |
//! |---|---|---|
//! | `tokenizer.json`, `tokenizer_config.json` | [`tokenizer`] | [`Tokenizer`], [`StreamDecoder`] |
//! | `tokenizer_config.json`, `chat_template.jinja` and others | [`template`] | [`ChatTemplates`]: messages to text |
//! | the vocabulary of a GGUF file | [`gguf`] | `tokenizer.json` and `tokenizer_config.json`, and the inverse |
//!
//! All of these files come from strangers. Reading them gives a value or a [`TextError`] that names the file, the item in
//! it, what was expected and what to do; it never panics.

mod error;
pub mod gguf;
pub mod template;
pub mod tokenizer;

pub use error::{Result, TextError};
pub use template::{ChatInput, ChatTemplate, ChatTemplates};
pub use tokenizer::{StreamDecoder, Tokenizer};
