//! Errors of this backend.

use ridge_runtime::RuntimeError;

/// What went wrong on the GPU or on the way to it.
pub(crate) fn device(why: impl Into<String>) -> RuntimeError {
    RuntimeError::Device { backend: "cuda", why: why.into() }
}
