//! The token loop: sequences, cache blocks, sampling and stopping.
//!
//! The engine has no clock, device or thread of its own: it is given a session with a model's weights, and it turns
//! requests into steps. A step is a list of `(sequence, tokens)`, so a chunk of a prompt and one token of a running
//! answer are the same thing. Read `engine` first; `service` schedules many requests over it, `generate` runs one
//! answer. `programs` are what steps run, `rows` keeps the tables on the device as they should be, `columns` fills
//! them, `inputs` fills steps, `extents` says which bucket runs one, `lattice` which buckets serve all of them, `blocks` says which cache blocks a sequence
//! owns, `cache` which of groups with a window, `sampling` what may be asked of a sampler, `text` how tokens become text that stops where it should. `scoring` runs the
//! other way, how probable given texts are, which `evaluate` makes perplexities and choices of; `embed` makes vectors of
//! texts. `costs` is what a step costs.

mod blocks;
mod cache;
mod classify;
mod columns;
pub mod costs;
mod draft;
mod embed;
mod engine;
mod error;
pub mod evaluate;
mod extents;
mod generate;
mod inputs;
mod lattice;
mod programs;
mod rows;
mod sampling;
pub mod scoring;
pub mod service;
mod states;
mod text;

pub use blocks::{BlockId, Blocks, Prefix};
pub use cache::window_blocks;
pub use classify::Classifier;
pub use draft::Ngram;
pub use embed::{EmbedOptions, Embedder, similarities};
pub use engine::{Engine, EngineOptions, Next, Outcome, Row, SAMPLED, SNAPSHOTS, STEPS_IN_FLIGHT, SequenceId, Start};
pub use error::{EngineError, Result};
pub use generate::{Finish, Generated, Request};
pub use programs::{MAX_BUCKETS, MAX_CANDIDATES, MAX_STAGING_BYTES, MIN_BUCKETS, Made, declare, row_widths, served};
pub use rows::CHANGES;
pub use sampling::{Logprobs, MAX_BIASES, MAX_BREAKERS, MAX_LOGPROBS, Sampling};
pub use text::TextStream;
