//! A run of Weights & Biases as its client writes one without a network (`WANDB_MODE=offline`): a folder
//! `offline-run-DATE-ID` with a file of records, which `wandb sync` uploads. The file is a log of LevelDB (its document
//! `log_format.md`, with CRC-32 in place of CRC-32C) of messages `wandb_internal.Record`.

use std::fs::{File, create_dir_all};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::event::RunEnded;
use super::jsonl::seconds;
use super::protobuf::{bytes, crc32, integer};
use crate::error::{Result, io_error};

/// Bytes of a block of the log, and of the header of a part of a record in it.
const BLOCK: usize = 32768;
const HEADER: usize = 7;

/// A run that is logged to.
pub struct WandbRun {
    path: PathBuf,
    file: File,
    /// Bytes that were written.
    written: usize,
    /// The number of the last record.
    records: u64,
    began: f64,
}

impl WandbRun {
    /// A new file of the run `id` of `project` in the folder `wandb` of `folder`, with `settings` by `section.key` as its
    /// configuration.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(folder: &Path, project: &str, id: &str, name: &str, settings: &[(String, Value)]) -> Result<Self> {
        let began = seconds();
        // A run that is started twice within a second has two folders.
        let named = |at: u64| folder.join("wandb").join(format!("offline-run-{}-{id}", date(at)));
        let folder = (began as u64..).map(named).find(|folder| !folder.exists()).unwrap_or_else(|| named(0));
        for part in ["files", "logs"] {
            let part = folder.join(part);
            create_dir_all(&part).map_err(|cause| io_error(&part, "make the folder", &cause))?;
        }
        let path = folder.join(format!("run-{id}.wandb"));
        let file = File::create(&path).map_err(|cause| io_error(&path, "make the log", &cause))?;
        let mut run = Self { path, file, written: 0, records: 0, began };
        // Its name, a number and the version 0.
        run.append(b":W&B\xe1\xbe\0")?;
        // VersionInfo: producer = 1, min_consumer = 2; HeaderRecord: version_info = 1.
        let version = [bytes(1, concat!("ridge ", env!("CARGO_PKG_VERSION")).as_bytes()), bytes(2, b"0.13.0")].concat();
        run.record(21, &bytes(1, &version))?;
        // ConfigItem: key = 1, value_json = 16; ConfigRecord: update = 1.
        let item = |(key, value): &(String, Value)| {
            bytes(1, &[bytes(1, key.as_bytes()), bytes(16, value.to_string().as_bytes())].concat())
        };
        let config: Vec<u8> = settings.iter().flat_map(item).collect();
        // Timestamp: seconds = 1, nanos = 2. RunRecord: run_id = 1, project = 3, config = 4, display_name = 8, start_time = 17.
        let start = [integer(1, began as u64), integer(2, (began.fract() * 1e9) as u64)].concat();
        let fields = [
            bytes(1, id.as_bytes()),
            bytes(3, project.as_bytes()),
            bytes(4, &config),
            bytes(8, name.as_bytes()),
            bytes(17, &start),
        ];
        run.record(17, &fields.concat())?;
        Ok(run)
    }

    /// The folder of the run, which `wandb sync` uploads.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// Adds numbers of a step.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn numbers(&mut self, step: u64, numbers: &[(String, f64)]) -> Result<()> {
        let now = seconds();
        let times = [("_step", step as f64), ("_runtime", now - self.began), ("_timestamp", now)];
        let times = times.into_iter().map(|(name, value)| (name.to_owned(), value));
        let all: Vec<(String, f64)> = numbers.iter().cloned().chain(times).collect();
        // HistoryItem and SummaryItem: nested_key = 2, value_json = 16; HistoryRecord: item = 1, step = 2; SummaryRecord:
        // update = 1.
        let item = |(name, value): &(String, f64)| {
            let json = if value.is_finite() { Value::from(*value) } else { Value::from(value.to_string()) };
            bytes(1, &[bytes(2, name.as_bytes()), bytes(16, json.to_string().as_bytes())].concat())
        };
        let items: Vec<u8> = all.iter().flat_map(item).collect();
        self.record(2, &[items.clone(), bytes(2, &integer(1, step))].concat())?;
        self.record(3, &items)
    }

    /// Notes how the run ended.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn close(&mut self, ended: RunEnded) -> Result<()> {
        // RunExitRecord: exit_code = 1, runtime = 2.
        let code = u64::from(ended == RunEnded::Failed);
        let runtime = (seconds() - self.began) as u64;
        self.record(18, &[integer(1, code), integer(2, runtime)].concat())
    }

    /// Adds a record whose message is field `field` of `Record`, cut into parts where blocks end.
    fn record(&mut self, field: u64, message: &[u8]) -> Result<()> {
        self.records += 1;
        let record = [integer(1, self.records), bytes(field, message)].concat();
        let mut rest = &record[..];
        let mut is_first = true;
        loop {
            let left = BLOCK - self.written % BLOCK;
            if left < HEADER {
                self.append(&[0; HEADER][..left])?;
                continue;
            }
            let (part, behind) = rest.split_at(rest.len().min(left - HEADER));
            // FULL, FIRST, MIDDLE and LAST.
            let kind = match (is_first, behind.is_empty()) {
                (true, true) => 1,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let checked = [&[kind], part].concat();
            let length = (part.len() as u16).to_le_bytes();
            self.append(&[&crc32(&checked).to_le_bytes()[..], &length, &checked].concat())?;
            if behind.is_empty() {
                return Ok(());
            }
            (rest, is_first) = (behind, false);
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len();
        self.file.write_all(bytes).map_err(|cause| io_error(&self.path, "write the log", &cause))
    }
}

/// Seconds since 1970 as `YYYYMMDD_HHMMSS`, in UTC (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms",
/// `civil_from_days`).
fn date(seconds: u64) -> String {
    let (days, time) = (seconds / 86400 + 719_468, seconds % 86400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months from March on.
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}_{:02}{:02}{:02}", time / 3600, time / 60 % 60, time % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "19700101_000000");
        assert_eq!(date(951_782_400), "20000229_000000");
        assert_eq!(date(1_795_613_009), "20261125_132329");
    }

    /// Records of any length can be read back, also where they end just ahead of a block's end.
    #[test]
    fn records_are_cut_at_the_ends_of_blocks() {
        let dir = tempfile::tempdir().expect("is made");
        let mut run = WandbRun::create(dir.path(), "p", "id", "name", &[]).expect("is made");
        let long: Vec<usize> = (0..40).map(|i| 32_700 + i).chain([3, 100_000]).collect();
        for length in &long {
            run.record(9, &vec![7; *length]).expect("writes");
        }
        let file = std::fs::read(&run.path).expect("reads");
        assert_eq!(&file[..7], b":W&B\xe1\xbe\0");
        let (mut at, mut record, mut lengths) = (7, Vec::<u8>::new(), Vec::new());
        while at < file.len() {
            let left = BLOCK - at % BLOCK;
            if left < HEADER {
                at += left;
                continue;
            }
            let length = usize::from(u16::from_le_bytes([file[at + 4], file[at + 5]]));
            let checked = &file[at + 6..at + HEADER + length];
            assert_eq!(crc32(checked).to_le_bytes(), file[at..at + 4]);
            assert!(HEADER + length <= left, "no part goes over the end of a block");
            record.extend(&checked[1..]);
            if matches!(checked[0], 1 | 4) {
                lengths.push(record.iter().rev().take_while(|byte| **byte == 7).count());
                record.clear();
            }
            at += HEADER + length;
        }
        assert_eq!(lengths[2..], long);
    }
}
