//! What several tests use.

use std::path::{Path, PathBuf};

/// The folder of fixtures; a bundle of tests brings its own.
pub(crate) fn fixtures() -> PathBuf {
    std::env::var_os("RIDGE_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures"), PathBuf::from)
}
