//! The endpoints. `router` lists them and their middleware; `submit` passes prompts to the engine for `completions` and
//! `chat`; `embeddings`, `tokens` and `status` are the others.

mod caller;
mod chat;
mod completions;
mod embeddings;
mod rerank;
mod router;
mod status;
mod submit;
mod tokens;

pub(crate) use router::router;
