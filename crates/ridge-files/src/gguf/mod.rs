//! GGUF: one file with a model's metadata and weights. What its keys and names mean is for the caller to know.
//!
//! `read.rs` reads a file's header, with values (`value.rs`) and types of tensors (`storage.rs`); `container.rs` has the open
//! file, `split.rs` opens it with the other parts of its model, and `write.rs` makes a file. `importance.rs` reads
//! importance matrices, which weigh the errors of quantisation.

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
