//! `config.json`: the keys of a published model's configuration that more than one family has.
//!
//! One rule holds for every family: **what the file says and Ridge does not do is an error**, never ignored. A family
//! (see [`families`](crate::families)) reads each key it understands through `Fields`, lists the keys that cannot
//! change the forward pass, and whatever is then left over is reported with its value. So a checkpoint either means here
//! what it meant to its authors, or is refused.
//!
//! Read `fields.rs` for the helper, then `rope.rs` and `decoder.rs` for what decoders share.

mod common;
mod compressed_tensors;
mod decoder;
mod fields;
mod generation;
mod images;
mod int4;
mod multimodal;
mod published_codes;
mod rope;

pub(crate) use common::{NotConverted, read as read_common};
pub(crate) use decoder::{
    DECODER_KEYS, DecoderKeys, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, layer_windows, sliding_window,
};
pub(crate) use fields::{Fields, REMEDY};
pub(crate) use multimodal::language_model;
pub(crate) use rope::{MAX_POSITIONS, ROPE_KEYS, RopeKeys, read as read_rope, read_two as read_two_ropes};

pub use decoder::DecoderConfig;
pub use generation::GenerationConfig;
pub use images::image_preprocessing;
pub use rope::{RopeConfig, RopeScaling};
