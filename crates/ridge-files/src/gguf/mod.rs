//! GGUF: one file with a model's metadata and weights. The caller interprets keys and names.
//!
//! `read.rs` reads a file's header, with values (`value.rs`) and tensor types (`storage.rs`); `container.rs` has the open file,
//! `split.rs` opens it with the other parts of its model, and `write.rs` writes a file. `importance.rs` reads importance matrices,
//! which weight quantisation errors.

mod container;
mod importance;
mod read;
mod split;
mod storage;
mod value;
mod write;

pub use container::Gguf;
pub use importance::ImportanceMatrix;
pub use read::GgufTensor;
pub use split::is_split_key;
pub use storage::TensorStorage;
pub use value::{GgufArray, GgufType, GgufValue};
pub use write::GgufWriter;
