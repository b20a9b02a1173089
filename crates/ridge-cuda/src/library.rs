//! Where NVIDIA's libraries are, as `ridge-hw` finds them, or what mends it.

use std::path::Path;

use ridge_hw::gpu::{Library, LibrarySearch, Nvidia};
use ridge_runtime::Result;

use crate::error::device;

/// The file of `library`.
///
/// # Errors
/// When there is none; says in how many folders it was sought and what mends it.
pub(crate) fn path(nvidia: &Nvidia, library: Library) -> Result<&Path> {
    match nvidia.library(library) {
        Some(LibrarySearch::Found { file, .. }) => Ok(&file.path),
        Some(LibrarySearch::Missing { searched, remedy, .. }) => {
            Err(device(format!("{library} is in none of {} folders: {remedy}", searched.len())))
        }
        None => Err(device(format!("{library} was not looked for"))),
    }
}
