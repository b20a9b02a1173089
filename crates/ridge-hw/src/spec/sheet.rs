//! The file format of a specification sheet, and its checks.
//!
//! Keys name their units. A figure is `{ value = 3.35e12, source = "datasheet" }`, where the source is a key of the
//! sheet's `[sources]` table.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::device::DeviceSpec;
use super::precision::Precision;
use crate::error::HwError;
use crate::figure::Figure;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sheet {
    name: String,
    vendor: String,
    #[serde(default)]
    aliases: Vec<String>,
    compute_capability: Option<String>,
    memory_bytes: SheetFigure<u64>,
    memory_bytes_per_second: SheetFigure<f64>,
    vector_f32_flops_per_second: Option<SheetFigure<f64>>,
    compute_units: Option<SheetFigure<u64>>,
    l1_bytes_per_unit: Option<SheetFigure<u64>>,
    l2_bytes: Option<SheetFigure<u64>>,
    interconnect_bytes_per_second: Option<SheetFigure<f64>>,
    host_link_bytes_per_second: Option<SheetFigure<f64>>,
    dense_flops_per_second: BTreeMap<Precision, SheetFigure<f64>>,
    sources: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SheetFigure<T> {
    value: T,
    source: String,
}

/// What is needed to turn an entry into a figure, or to say why not.
struct FigureReader<'a> {
    file: &'a str,
    sources: &'a BTreeMap<String, String>,
}

impl FigureReader<'_> {
    fn float<T>(&self, key: &str, entry: &SheetFigure<f64>, unit: fn(f64) -> T) -> Result<Figure<T>, HwError> {
        self.figure(key, entry.value, &entry.source, unit(entry.value))
    }

    fn integer<T>(&self, key: &str, entry: &SheetFigure<u64>, unit: fn(u64) -> T) -> Result<Figure<T>, HwError> {
        self.figure(key, entry.value as f64, &entry.source, unit(entry.value))
    }

    fn figure<T>(&self, key: &str, number: f64, cited: &str, value: T) -> Result<Figure<T>, HwError> {
        let file = || self.file.to_owned();
        if !(number.is_finite() && number > 0.0) {
            return Err(HwError::SheetValue { file: file(), key: key.to_owned(), value: number });
        }
        let source = self.sources.get(cited).ok_or_else(|| HwError::SheetSource {
            file: file(),
            key: key.to_owned(),
            cited: cited.to_owned(),
            listed: self.sources.keys().cloned().collect(),
        })?;
        Ok(Figure::specified(value, source))
    }
}

pub(super) fn parse(file: &str, text: &str) -> Result<DeviceSpec, HwError> {
    let sheet: Sheet = toml::from_str(text)
        .map_err(|error| HwError::Sheet { file: file.to_owned(), reason: error.to_string().trim_end().to_owned() })?;
    let read = FigureReader { file, sources: &sheet.sources };
    let optional_bytes = |key: &str, entry: &Option<SheetFigure<u64>>| {
        entry.as_ref().map(|entry| read.integer(key, entry, Bytes)).transpose()
    };
    let dense_rates = sheet.dense_flops_per_second.iter().map(|(&precision, entry)| {
        let key = format!("dense_flops_per_second.{precision}");
        Ok((precision, read.float(&key, entry, FlopsPerSecond)?))
    });
    Ok(DeviceSpec {
        memory: read.integer("memory_bytes", &sheet.memory_bytes, Bytes)?,
        memory_bandwidth: read.float("memory_bytes_per_second", &sheet.memory_bytes_per_second, BytesPerSecond)?,
        dense_rates: dense_rates.collect::<Result<_, HwError>>()?,
        vector_f32: (sheet.vector_f32_flops_per_second.as_ref())
            .map(|entry| read.float("vector_f32_flops_per_second", entry, FlopsPerSecond))
            .transpose()?,
        compute_units: (sheet.compute_units.as_ref())
            .map(|entry| read.integer("compute_units", entry, |units| units))
            .transpose()?,
        l1_per_unit: optional_bytes("l1_bytes_per_unit", &sheet.l1_bytes_per_unit)?,
        l2: optional_bytes("l2_bytes", &sheet.l2_bytes)?,
        interconnect: (sheet.interconnect_bytes_per_second.as_ref())
            .map(|entry| read.float("interconnect_bytes_per_second", entry, BytesPerSecond))
            .transpose()?,
        host_link: (sheet.host_link_bytes_per_second.as_ref())
            .map(|entry| read.float("host_link_bytes_per_second", entry, BytesPerSecond))
            .transpose()?,
        name: sheet.name,
        vendor: sheet.vendor,
        aliases: sheet.aliases,
        compute_capability: sheet.compute_capability,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::Provenance;

    const SHEET: &str = r#"
        name = "X1"
        vendor = "Acme"
        memory_bytes = { value = 1_000, source = "datasheet" }
        memory_bytes_per_second = { value = 2e3, source = "datasheet" }
        [dense_flops_per_second]
        bf16 = { value = 4e6, source = "datasheet" }
        [sources]
        datasheet = "Acme X1 data sheet"
    "#;

    fn message(text: &str) -> String {
        parse("x1.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn a_figure_carries_the_document_it_cites() {
        let device = parse("x1.toml", SHEET).unwrap();
        assert_eq!(device.memory, Figure::specified(Bytes(1000), "Acme X1 data sheet"));
        assert_eq!(device.memory_bandwidth.provenance, Provenance::Specified);
        assert_eq!(device.dense_rates[&Precision::Bf16].value, FlopsPerSecond(4e6));
        assert_eq!(device.l2, None);
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_it() {
        let text = message(&SHEET.replace("vendor =", "colour = \"red\"\nvendor ="));
        assert!(text.starts_with("x1.toml: ") && text.contains("colour"), "{text}");
    }

    #[test]
    fn an_unknown_precision_is_an_error_that_names_it() {
        let text = message(&SHEET.replace("bf16", "bf17"));
        assert!(text.contains("bf17"), "{text}");
    }

    #[test]
    fn a_rate_of_zero_is_an_error() {
        let text = message(&SHEET.replace("4e6", "0.0"));
        assert!(text.starts_with("x1.toml: dense_flops_per_second.bf16 = 0; "), "{text}");
    }

    #[test]
    fn an_unlisted_source_is_an_error() {
        let text = message(&SHEET.replace("2e3, source = \"datasheet\"", "2e3, source = \"rumour\""));
        assert!(text.contains("memory_bytes_per_second cites the source \"rumour\""), "{text}");
    }
}
