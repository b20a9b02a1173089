//! Published weights: safetensors files, mapped into memory, with their headers checked before a byte is used.
//!
//! `header.rs` reads one file's header, `shards.rs` finds which files make up a checkpoint, and `open.rs` opens them as
//! a [`Checkpoint`] (`tensors.rs`). `from_gguf.rs` makes one of a GGUF file. `divide.rs` divides published tensors into
//! the `parts.rs` that a caller lists and `stack.rs` puts several together, `published.rs` is the inverse of both, and
//! `rearrange.rs` moves elements. `scaled.rs` puts codes and their scales together, and `mxfp4.rs` and `int4.rs` make blocks
//! of both by `repack.rs`.

mod divide;
mod from_gguf;
mod header;
mod int4;
mod mxfp4;
mod open;
mod parts;
mod pattern;
mod published;
mod rearrange;
mod repack;
mod scaled;
mod shards;
mod stack;
mod tensors;

pub use from_gguf::Gathered;
pub use int4::Int4Scheme;
pub use parts::{Part, Rows, Stack};
pub use pattern::matches;
pub use published::Published;
pub use rearrange::{Change, deinterleaved};
pub use repack::Int4Layout;
pub use tensors::{Checkpoint, TensorBytes, TensorView};
