//! Text to token ids and back.
//!
//! `codec.rs` has the [`Tokenizer`]; `guard.rs` stands between it and the `tokenizers` crate, which trusts its input;
//! `longest.rs` has a model that the crate lacks; `special.rs` reads `tokenizer_config.json`; `stream.rs` decodes ids one at a time.

mod codec;
mod guard;
mod longest;
mod special;
mod stream;

pub use codec::Tokenizer;
pub use stream::StreamDecoder;
