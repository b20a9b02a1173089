//! Reading small text files.

use std::path::Path;

use crate::error::{FilesError, Result};

/// Longest text file read, in bytes. The largest published tokenizers take some 40 MB.
const MAX_TEXT_BYTES: u64 = 1 << 30;

/// Reads a UTF-8 text file of at most 1 GiB. `action` continues "cannot" in errors.
///
/// # Errors
///
/// [`FilesError::Io`] if the file cannot be read, [`FilesError::Path`] if it is not a regular file, too large or not UTF-8.
pub fn read_text(path: &Path, action: &'static str) -> Result<String> {
    let fail = |cause| FilesError::Io { path: path.to_owned(), action, cause };
    let metadata = std::fs::metadata(path).map_err(fail)?;
    if !metadata.is_file() || metadata.len() > MAX_TEXT_BYTES {
        return Err(FilesError::Path {
            path: path.to_owned(),
            problem: format!("it is not a regular file of at most {MAX_TEXT_BYTES} bytes"),
            remedy: "download it again".to_owned(),
        });
    }
    let bytes = std::fs::read(path).map_err(fail)?;
    String::from_utf8(bytes).map_err(|error| FilesError::Path {
        path: path.to_owned(),
        problem: format!("it is not UTF-8 text at byte {}", error.utf8_error().valid_up_to()),
        remedy: "download it again, or save it as UTF-8".to_owned(),
    })
}
