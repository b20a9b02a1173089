//! What parsers of containers share: where texts go, and what errors say.

use std::path::Path;

use crate::error::{Result, TrainError};

/// What a parser works for.
pub(super) struct Reading<'a> {
    pub(super) path: &'a Path,
    pub(super) field: &'a str,
    pub(super) each: &'a mut dyn FnMut(&str) -> Result<()>,
}

impl Reading<'_> {
    /// The file is damaged or no such container.
    pub(super) fn broken(&self, problem: impl Into<String>) -> TrainError {
        TrainError::path(self.path, problem, "download or write the file again")
    }

    /// The file is whole, and does not have what is asked for.
    pub(super) fn lacks(&self, problem: impl Into<String>) -> TrainError {
        TrainError::path(self.path, problem, "name the field that holds the text: --text-field, or data.text_field")
    }

    /// Gives a text if it is not empty; `place` names it in errors.
    pub(super) fn give(&mut self, text: &[u8], place: impl Fn() -> String) -> Result<()> {
        match std::str::from_utf8(text) {
            Ok("") => Ok(()),
            Ok(text) => (self.each)(text),
            Err(error) => {
                let problem = format!("{} is not UTF-8 at its byte {}", place(), error.valid_up_to());
                Err(TrainError::path(self.path, problem, "leave it out, or save it as UTF-8"))
            }
        }
    }
}

/// `length` bytes at `at`, if they are there.
pub(super) fn part(bytes: &[u8], at: usize, length: usize) -> Option<&[u8]> {
    bytes.get(at..at.checked_add(length)?)
}
