//! Reading small text files.

use std::path::Path;

use crate::error::{ModelError, Result};

/// Longest text file read, in bytes. The largest published tokenizers take some 40 MB.
const MOST_TEXT_BYTES: u64 = 1 << 30;

/// Reads a text file of bounded size. `action` continues "cannot" in errors.
pub(crate) fn read_text(path: &Path, action: &'static str) -> Result<String> {
    let fail = |cause| ModelError::Io { path: path.to_owned(), action, cause };
    let metadata = std::fs::metadata(path).map_err(fail)?;
    if !metadata.is_file() || metadata.len() > MOST_TEXT_BYTES {
        return Err(ModelError::Files {
            path: path.to_owned(),
            problem: format!("it is not a regular file of at most {MOST_TEXT_BYTES} bytes"),
            remedy: "download it again".to_owned(),
        });
    }
    let bytes = std::fs::read(path).map_err(fail)?;
    String::from_utf8(bytes).map_err(|error| ModelError::Files {
        path: path.to_owned(),
        problem: format!("it is not UTF-8 text at byte {}", error.utf8_error().valid_up_to()),
        remedy: "download it again, or save it as UTF-8".to_owned(),
    })
}
