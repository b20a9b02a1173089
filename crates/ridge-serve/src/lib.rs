//! The HTTP server: OpenAI's API over the engine.
//!
//! `server` listens and ends; `api` has the endpoints, which read what `wire` checks. A request's prompt is rendered and
//! tokenised away from all else (`app`), goes to the one thread that owns the engine (`worker`, or `embedding` for
//! encoders), and comes back as tokens, which `choice` makes text, `reasoning` and `tools` of. `answers` merges those of
//! one request, `sse` streams them. `keys`, `connection`, `metrics` and `logs` are what each is called, `page` is what a
//! browser shows at `/`.

mod answers;
mod api;
mod app;
mod choice;
mod connection;
mod embedding;
mod error;
mod json_types;
mod keys;
pub mod load;
mod logs;
mod metrics;
pub mod page;
mod reasoning;
mod server;
mod sse;
mod sync;
mod tools;
mod wire;
mod worker;

pub use app::{Runs, ServeOptions, ServedModel};
pub use error::ServeError;
pub use keys::{KEY_VARIABLE, Keys};
pub use logs::{LogFormat, start_log};
pub use server::{ReservedAddress, serve};
pub use tools::tool_call_parsers;
pub use worker::Floor;
