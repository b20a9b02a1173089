//! WebDataset archives: tar files whose members are grouped into samples by their names up to the first dot of the last part
//! (<https://github.com/webdataset/webdataset>).

use std::io::Read as _;

use serde_json::Value;
use tar::Archive;

use super::reading::Reading;
use crate::data::source::Source;
use crate::error::Result;

/// A sample's members so far.
#[derive(Default)]
struct Sample {
    key: String,
    text: Option<Vec<u8>>,
    json: Option<Vec<u8>>,
}

pub(super) fn read(source: &Source, mut reading: Reading<'_>) -> Result<()> {
    let broken =
        |reading: &Reading<'_>, why: std::io::Error| reading.broken(format!("it cannot be read as tar: {why}"));
    let stored = source.reader().map_err(|why| broken(&reading, why))?;
    let mut archive = Archive::new(std::io::BufReader::new(stored));
    let mut sample = Sample::default();
    for member in archive.entries().map_err(|why| broken(&reading, why))? {
        let mut member = member.map_err(|why| broken(&reading, why))?;
        if !member.header().entry_type().is_file() {
            continue;
        }
        let name = String::from_utf8_lossy(&member.path_bytes()).into_owned();
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", &name));
        let (stem, extension) = file.split_once('.').unwrap_or((file, ""));
        let key = if folder.is_empty() { stem.to_owned() } else { format!("{folder}/{stem}") };
        if sample.key != key {
            finish(std::mem::take(&mut sample), &mut reading)?;
            sample.key = key;
        }
        let place = match extension {
            "txt" => &mut sample.text,
            "json" => &mut sample.json,
            _ => continue,
        };
        let mut data = Vec::new();
        member.read_to_end(&mut data).map_err(|why| broken(&reading, why))?;
        if data.len() as u64 != member.size() {
            return Err(reading.broken(format!("it ends within the member {name}")));
        }
        *place = Some(data);
    }
    finish(sample, &mut reading)
}

fn finish(sample: Sample, reading: &mut Reading<'_>) -> Result<()> {
    let Sample { key, text, json } = sample;
    if let Some(text) = text {
        return reading.give(&text, || format!("{key}.txt"));
    }
    let Some(json) = json else { return Ok(()) };
    let value: Value =
        serde_json::from_slice(&json).map_err(|error| reading.broken(format!("{key}.json is not JSON: {error}")))?;
    match value.get(reading.field) {
        Some(Value::String(text)) => reading.give(text.as_bytes(), || format!("{key}.json")),
        Some(_) => Err(reading.lacks(format!("{key}.json: the field {} is not a text", reading.field))),
        None => Err(reading.lacks(format!("{key}.json: there is no field {}", reading.field))),
    }
}
