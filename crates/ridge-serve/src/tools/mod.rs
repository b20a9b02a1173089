//! Calls of tools in what a model writes, found while it writes.
//!
//! Each family was trained on a notation of its own ([`ToolCallStyle`]). A call is told once it is whole, so that clients
//! never get one that is cut or no JSON: what only looked like a call is given back as text. Only the arguments of answers
//! that a grammar holds to be calls are passed on as they come.

mod call;
mod json;
mod notation;
mod parser;
mod style;

pub(crate) use call::{Callable, ToolOutputPart};
pub(crate) use parser::ToolCallParser;
pub(crate) use style::ToolCallStyle;
pub use style::tool_call_parsers;
