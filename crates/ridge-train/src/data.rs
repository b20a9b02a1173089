//! From files to batches: `source` has the bytes of files here and on servers, `documents` reads texts, of `formats` that hold many of them too, `vocabulary` makes tokens of them, `tokens` holds tokens in memory or in
//! mapped files, `order` says which sequence comes next, `batches` cuts sequences and fills steps with them. `prepare`
//! makes token shards of texts, filtered by `filters` and `blocklist`, without texts of evaluations by `held_out` and duplicates by `duplicates`, tokenised by `pieces`.

pub mod batches;
pub mod blocklist;
pub mod documents;
pub mod duplicates;
pub mod filters;
pub mod formats;
pub mod held_out;
pub mod order;
mod pieces;
pub mod prepare;
pub mod source;
pub mod tokens;
pub mod vocabulary;
mod words;

pub use batches::{Batch, Batches, Corpus, DataPosition};
pub use tokens::Tokens;
pub use vocabulary::Vocabulary;
