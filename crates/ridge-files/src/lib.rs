//! Model files: safetensors, GGUF, sharded checkpoints and memory-mapped files. This crate has no knowledge of models.
//!
//! Read `checkpoint` first (named tensors of a folder of safetensors files), then `gguf` (one file with metadata and tensors). `hub`
//! finds models that were downloaded from the Hugging Face Hub. `mapped` maps files into memory, `replace` replaces a file
//! atomically, `json` and `text_file` read small files.
//!
//! All of these files are untrusted. Reading them returns a value or a [`FilesError`] that names the file, the item in it, what was
//! expected and what to do. It never panics, and memory stays within a small multiple of the headers.

mod bytes;
pub mod checkpoint;
mod error;
pub mod gguf;
pub mod hub;
pub mod json;
mod mapped;
mod replace;
mod text_file;

pub use checkpoint::{Checkpoint, TensorView};
pub use error::{FilesError, Result, TensorMismatch};
pub use gguf::Gguf;
pub use mapped::MappedFile;
pub use replace::replace_file;
pub use text_file::read_text;
