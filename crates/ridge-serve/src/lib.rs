//! The HTTP server: OpenAI's API over the engine.
//!
//! `page` is what a browser shows at `/`.

pub mod page;
