//! The HTTP server: OpenAI's API over the engine.
//!
//! `page` is what a browser shows at `/`.

mod error;
pub mod page;
mod reasoning;
mod tools;
mod wire;

pub use error::ServeError;
