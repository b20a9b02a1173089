//! Events as lines of JSON.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::event::TrainEvent;
use crate::error::{Result, io_error};

/// A file with an event a line, which grows.
pub struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Goes on with the file, or makes it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let mut log =
            Self { path: path.to_owned(), file: file.map_err(|cause| io_error(path, "open the log", &cause))? };
        // A run that was killed may have left a part of a line.
        let whole = |text: Vec<u8>| text.last().is_none_or(|last| *last == b'\n');
        if path.is_file() && !std::fs::read(path).map_or(true, whole) {
            log.append("\n")?;
        }
        Ok(log)
    }

    /// Adds an event with the time, in seconds since 1970.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, event: &TrainEvent) -> Result<()> {
        self.append(&format!("{}\n", event.json()))
    }

    fn append(&mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(|cause| io_error(&self.path, "write the log", &cause))
    }
}

impl TrainEvent {
    /// The event as a JSON object, with the `time` in seconds since 1970.
    pub fn json(&self) -> String {
        let mut value = serde_json::to_value(self).unwrap_or(Value::Null);
        if let Value::Object(fields) = &mut value {
            fields.insert("time".to_owned(), seconds().into());
        }
        value.to_string()
    }
}

/// Seconds since 1970.
pub(super) fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

pub(super) fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1e3) as u64
}
