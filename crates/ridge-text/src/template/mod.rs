//! Chat templates: messages to the text that a model was trained on.
//!
//! A template is a program in the language of jinja2 that transformers runs in a sandbox. Here an interpreter of our own
//! (`jinja/`) runs it, which gives transformers' text or an error, never another text, and stays within [`Limits`], since
//! templates come from strangers. `data.rs` has the values that go in, `chat.rs` prepares them as transformers does,
//! `compiled.rs` renders one template, `set.rs` finds the templates among a model's files.

mod chat;
mod compiled;
mod data;
mod jinja;
mod limits;
mod set;

pub use chat::ChatInput;
pub use compiled::{ChatTemplate, RenderedChat};
pub use data::Data;
pub use jinja::Clock;
pub use limits::Limits;
pub use set::ChatTemplates;
