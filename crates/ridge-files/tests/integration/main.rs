//! The tests of the files of models.

mod checkpoint;
mod common;
mod gguf;
mod gguf_parts;
mod importance;
mod parts;
