//! Input besides models: standard input and text files.

use std::io::Read as _;
use std::path::Path;

use ridge_hw::units::Bytes;

use crate::error::{Error, Result};

/// Maximum size of a prompt: larger than the longest contexts.
const MAX_PROMPT: Bytes = Bytes::from_mib(64);

/// Standard input, without a final newline.
pub(crate) fn stdin() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().take(MAX_PROMPT.0 + 1).read_to_end(&mut bytes).map_err(Error::Stdin)?;
    if bytes.len() as u64 > MAX_PROMPT.0 {
        return Err(Error::StdinTooLong { most: MAX_PROMPT });
    }
    let mut text = String::from_utf8(bytes).map_err(|e| Error::StdinNotText { at: e.utf8_error().valid_up_to() })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// A text file of at most the maximum size of a prompt.
pub(crate) fn file(path: &Path) -> Result<String> {
    String::from_utf8(bytes(path)?)
        .map_err(|e| Error::FileNotText { path: path.display().to_string(), at: e.utf8_error().valid_up_to() })
}

/// A file of at most the maximum size of a prompt.
pub(crate) fn bytes(path: &Path) -> Result<Vec<u8>> {
    let fail = |cause| Error::Read { path: path.display().to_string(), cause };
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(path).map_err(fail)?;
    opened.take(MAX_PROMPT.0 + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_PROMPT.0 {
        return Err(Error::FileTooLong { path: path.display().to_string(), most: MAX_PROMPT });
    }
    Ok(bytes)
}
