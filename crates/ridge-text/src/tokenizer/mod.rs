//! Text to token ids and back.
//!
//! `codec.rs` has the [`Tokenizer`]; `guard.rs` stands between it and the `tokenizers` crate, which trusts its input;
//! `special.rs` reads `tokenizer_config.json`; `stream.rs` decodes ids one at a time.

mod codec;
mod guard;
mod special;
mod stream;

pub use codec::Tokenizer;
pub use stream::StreamDecoder;
