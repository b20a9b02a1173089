//! The token loop: sequences, cache blocks, sampling and stopping.
//!
//! The engine has no clock, device or thread of its own: it gets a session with a model's weights and turns requests into steps. A
//! step is a list of `(sequence, tokens)`, so prompt chunks and single decode tokens are handled uniformly. Read `engine` first.
//! `service` schedules many requests over it; `generate` runs one. `programs` has the compiled programs of steps, `rows` keeps the
//! tables on the device up to date, `columns` defines them, `inputs` fills the inputs of steps, `extents` selects a step's bucket,
//! and `lattice` lists the buckets that serve all steps. `blocks` allocates cache blocks, `cache` those of groups with a window, and
//! `states` fixed-size states. `sampling` has the sampling settings, and `text` converts tokens to text up to a stop string.
//! `scoring` computes log-probabilities of given texts, which `evaluate` turns into perplexity and multiple choice; `embed` and
//! `classify` compute embeddings and class probabilities. `costs` estimates a step's cost.

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
pub use embed::{EmbedOptions, Embedder, TextTokens, similarities};
pub use engine::{
    Engine, EngineOptions, Next, Outcome, Row, SAMPLED, SNAPSHOTS, STEPS_IN_FLIGHT, SequenceId, Start, state_lines,
};
pub use error::{EngineError, Result};
pub use generate::{Finish, Generated, Request, Speculation};
pub use programs::{
    MAX_BUCKETS, MAX_CANDIDATES, MAX_STAGING_BYTES, MIN_BUCKETS, Made, declare, drafting, drafts_of, row_widths,
    served, verifying,
};
pub use rows::CHANGES;
pub use sampling::{Logprobs, MAX_BIASES, MAX_BREAKERS, MAX_LOGPROBS, Sampling};
pub use text::TextStream;
