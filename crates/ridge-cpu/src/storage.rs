//! What a buffer of this backend consists of.

use std::sync::Arc;

use ridge_runtime::{Buffer, Result, RuntimeError};

use crate::memory::AlignedMemory;
use crate::weight::{BoundWeight, StoredWeight};

/// What a [`ridge_runtime::Buffer`] of this backend holds.
pub(crate) enum CpuStorage {
    /// Memory of our own: a state, or a weight in a format that is not repacked.
    Own(Arc<AlignedMemory>),
    /// A weight that is plain or may be repacked. Never written.
    Weight(StoredWeight),
}

/// The storage of a buffer that this backend made.
///
/// # Errors
/// When another backend made it.
pub(crate) fn storage(buffer: &Buffer) -> Result<&Arc<CpuStorage>> {
    buffer
        .inner::<Arc<CpuStorage>>()
        .ok_or_else(|| RuntimeError::Device { backend: "cpu", why: "the buffer belongs to another device".into() })
}

/// A weight in panels if its rows are to be so, of `inner` elements.
pub(crate) fn hold(buffer: &Buffer, inner: Option<usize>) -> Result<BoundWeight> {
    match (&**storage(buffer)?, inner) {
        (CpuStorage::Weight(weight), Some(inner)) => weight.panels(inner),
        (CpuStorage::Weight(weight), _) => weight.rows(),
        (CpuStorage::Own(memory), _) => Ok(BoundWeight::Rows(Arc::clone(memory))),
    }
}
