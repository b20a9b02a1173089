//! Storage formats of parameters and of values that a graph quantises. A format is not a dtype: the value keeps its logical
//! shape and dtype, and the format says which component tensors hold it and how they decode, as primitives.
//!
//! Read `format/layout.rs` for what a format is and `format/decoding.rs` for how it decodes, then `format/block.rs` for what
//! the block formats of GGUF files share; each family of them has a file, and `format/builtin.rs` lists them. `format/scaled.rs` has formats of codes with scales,
//! which activations have too.

mod block;
mod builtin;
mod decoding;
mod eight;
mod fit;
mod five;
mod four;
mod k;
mod layout;
mod scaled;
mod table;

pub use block::{BlockBytes, BlockFormat, BlockValue};
pub use builtin::all;
pub use decoding::{Decoding, DecodingOp, DecodingStep, DecodingValue};
pub use eight::{Q8_0, SignedBytes};
pub use five::{Q5_0, Q5_1};
pub use four::{Q4_0, Q4_1};
pub use k::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub use layout::{Format, FormatComponent, FormatRef};
pub use scaled::{BLOCK, CodeType, ScaleLayout, ScaledFormat};
pub use table::{E2M1, Iq4Nl, Iq4Xs, Mxfp4, UNEVEN};
