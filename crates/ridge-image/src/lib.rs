//! Image files to the numbers that a network takes: PNG and JPEG are decoded ([`Image::decode`]), turned as their EXIF
//! orientation says, resized as Pillow does, scaled and normalised ([`Preprocessing`]).
//!
//! Files come from strangers. Reading them gives an image or an [`ImageError`] that names the file and says what to do; it
//! never panics, and allocates no more than [`MAX_PIXELS`] need.

mod decode;
mod error;
mod orientation;
mod preprocessing;

pub use decode::{Image, MAX_PIXELS};
pub use error::{ImageError, Result};
pub use preprocessing::{Preprocessing, Resampling};
