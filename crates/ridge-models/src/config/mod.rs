//! `config.json`: what a published model says about itself.
//!
//! One rule holds for every family: **what the file says and Ridge does not do is an error**, never ignored. A family
//! reads each key it understands through `Fields`, lists the keys that cannot change the forward pass, and
//! whatever is then left over is reported with its value. So a checkpoint either means here what it meant to its
//! authors, or is refused.
//!
//! Read `fields.rs` for the helper, `rope.rs` for what families share, `llama.rs` for a family.

mod common;
mod fields;
mod generation;
mod llama;
mod rope;

pub(crate) use fields::{Field, Fields};

pub use generation::GenerationConfig;
pub use llama::LlamaConfig;
pub use rope::RopeScaling;
