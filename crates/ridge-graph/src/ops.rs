//! The composite ops, one file each. To add one: write its file (copy the shape of `rms_norm.rs`), add it to
//! [`registry`], and it is tested on every backend, dtype and mesh by existing.

mod rms_norm;

pub use rms_norm::RmsNorm;

use crate::dtype::DType;
use crate::error::Why;
use crate::sample::{Rng, Sample};
use crate::types::Type;

/// An op's name and its sample generator.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The op's name.
    pub name: &'static str,
    /// Valid random instances, edge cases included (extents 0 and 1, ragged, off any tile), whose float tensors have
    /// the given dtype. Some 2 MFLOP at most each.
    pub samples: fn(&mut Rng, DType) -> Vec<Sample>,
}

/// Every composite op.
pub fn registry() -> &'static [Entry] {
    &[Entry { name: "rms_norm", samples: rms_norm::samples }]
}

/// Requires a plain float tensor.
fn want_float(name: &str, ty: &Type) -> Result<(), Why> {
    if ty.dtype.is_float() && ty.is_plain() {
        Ok(())
    } else {
        Err(format!("{name} must be a plain float tensor, got {ty}"))
    }
}
