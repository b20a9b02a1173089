//! jinja2 as transformers sets it up: a sandbox without other templates, `trim_blocks`, `lstrip_blocks`, `break` and
//! `continue`, `{% generation %}`, and its own `tojson`, `raise_exception` and `strftime_now`.
//!
//! The claim is jinja2's text or an error, never another text. So values are Python's (`value.rs`), print as
//! Python prints them (`show.rs`, `escape.rs`), and what is not implemented is a fault when it is reached (`fault.rs`).
//! In the order of processing: `lexer.rs`, `parser.rs` and `expressions.rs` make the tree of `ast.rs`;
//! `symbols.rs` finds the scopes; `render.rs`, `exec.rs` and `eval.rs` walk it with the state of `renderer.rs`, within bounds on steps, memory and depth.

mod args;
mod ast;
mod builtins;
mod escape;
mod eval;
mod exec;
mod expressions;
mod fault;
mod filters;
mod format;
mod frame;
mod functions;
mod index;
mod json;
mod lexer;
mod methods;
mod ops;
mod parser;
mod render;
mod renderer;
mod show;
mod sort;
mod specials;
mod strftime;
mod symbols;
mod tests;
mod text;
mod value;

pub(crate) use ast::Template;
pub(crate) use fault::{Fault, FaultKind};
pub(crate) use parser::parse;
pub(crate) use render::render;
pub(crate) use renderer::Bounds;
pub use strftime::Clock;
pub(crate) use text::is_space;
pub(crate) use value::{Dict, Value};
