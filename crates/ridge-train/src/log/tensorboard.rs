//! Event files of TensorBoard: records (length, its checksum, data, its checksum) of protocol buffers of the message
//! `tensorflow.Event`.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use super::jsonl::seconds;
use super::protobuf::{bytes, crc32c, double, float, integer};
use crate::error::{Result, io_error};

/// A file of events.
pub struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// A new file in `folder`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|cause| io_error(folder, "make the folder", &cause))?;
        let name = format!("events.out.tfevents.{:.0}.ridge.{}", seconds(), std::process::id());
        let path = folder.join(name);
        let file = File::create(&path).map_err(|cause| io_error(&path, "make the log", &cause))?;
        let mut events = Self { path, file };
        let mut event = double(1, seconds());
        event.extend(bytes(3, b"brain.Event:2"));
        events.record(&event)?;
        Ok(events)
    }

    /// Adds a number of this name.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn scalar(&mut self, step: u64, tag: &str, value: f64) -> Result<()> {
        // Summary.Value: tag = 1, simple_value = 2; Summary: value = 1; Event: wall_time = 1, step = 2, summary = 5.
        let scalar = [bytes(1, tag.as_bytes()), float(2, value as f32)].concat();
        let event = [double(1, seconds()), integer(2, step), bytes(5, &bytes(1, &scalar))];
        self.record(&event.concat())
    }

    fn record(&mut self, data: &[u8]) -> Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked(data).to_le_bytes());
        self.file.write_all(&record).map_err(|cause| io_error(&self.path, "write the log", &cause))
    }
}

/// The checksum of a record's part.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_is_a_record_with_its_tag_step_and_value() {
        let dir = tempfile::tempdir().expect("is made");
        let mut file = EventFile::create(dir.path()).expect("is made");
        file.scalar(300, "loss", 1.5).expect("writes");
        let bytes = std::fs::read(&file.path).expect("reads");
        let mut at = 0;
        let mut records = Vec::new();
        while at < bytes.len() {
            let length = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight")) as usize;
            records.push(&bytes[at + 12..at + 12 + length]);
            at += 16 + length;
        }
        assert_eq!(records.len(), 2);
        assert!(records[0].ends_with(b"brain.Event:2"));
        // Behind the time: step 300 and the summary.
        let wanted = [&[0x10, 0xac, 0x02, 0x2a, 0x0d, 0x0a, 0x0b, 0x0a, 0x04][..], b"loss", &[0x15, 0, 0, 0xc0, 0x3f]];
        assert_eq!(records[1][9..], wanted.concat());
    }
}
