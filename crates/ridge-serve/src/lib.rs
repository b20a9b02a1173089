//! The HTTP server: OpenAI's API over the engine.
//!
//! `server` accepts connections and shuts down; `api` has the endpoints, `wire` parses and validates their requests. Prompts
//! are rendered and tokenised on a separate pool (`app`) and sent to the one thread that owns the engine (`worker`, or
//! `embedding` for encoders). `choice` converts the returned tokens to text, with `reasoning` and `tools`. `answers` merges the
//! choices of one request, `sse` streams them. `pairs` renders the prompts of rerankers. `keys`, `connection`, `metrics` and `logs` are as named; `page` is the web page
//! at `/`, `run_page` that of a training run.

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
mod pairs;
mod reasoning;
mod run_page;
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
pub use pairs::{render_pair, renders_instructions, renders_pairs};
pub use run_page::RunPage;
pub use server::{ReservedAddress, serve};
pub use tools::tool_call_parsers;
pub use worker::Floor;
