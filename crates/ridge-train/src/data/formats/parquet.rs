//! Parquet tables, by the `parquet` crate: one column of strings, a part at a time.

use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader as _, SerializedFileReader};

use super::reading::Reading;
use crate::data::source::Source;
use crate::error::{Result, TrainError, io_error};

/// Rows that are decoded at a time.
const ROWS: usize = 1024;

pub(super) fn read(source: &Source, mut reading: Reading<'_>) -> Result<()> {
    let broken = |reading: &Reading<'_>, error: &ParquetError| match error {
        ParquetError::General(why) if why.contains("feature") || why.contains("Disabled") => {
            let remedy = "write the file again with the codec snappy, gzip, lz4_raw, zstd or none";
            TrainError::path(reading.path, format!("it cannot be decoded: {why}"), remedy)
        }
        error => reading.broken(format!("it cannot be read as Parquet: {error}")),
    };
    let parts = source.parts().map_err(|cause| io_error(reading.path, "read the table", &cause))?;
    let file = SerializedFileReader::new(parts.clone()).map_err(|error| broken(&reading, &error))?;
    let schema = file.metadata().file_metadata().schema_descr();
    let Some(column) = schema.columns().iter().position(|column| column.path().string() == reading.field) else {
        let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
        return Err(reading.lacks(format!("there is no column {}; it has {}", reading.field, names.join(", "))));
    };
    let descriptor = schema.column(column);
    if descriptor.physical_type() != Type::BYTE_ARRAY || descriptor.max_rep_level() != 0 {
        return Err(reading.lacks(format!("the column {} does not hold one string for each row", reading.field)));
    }
    let optional = descriptor.max_def_level() > 0;
    let mut row = 0;
    for group in 0..file.num_row_groups() {
        let (start, length) = file.metadata().row_group(group).column(column).byte_range();
        parts.expect_until(start.saturating_add(length));
        let opened = file.get_row_group(group).and_then(|group| group.get_column_reader(column));
        let ColumnReader::ByteArrayColumnReader(mut texts) = opened.map_err(|error| broken(&reading, &error))? else {
            return Err(reading.broken(format!("row group {group} holds another type than the schema says")));
        };
        loop {
            let (mut present, mut values): (Vec<i16>, Vec<ByteArray>) = (Vec::new(), Vec::new());
            let read = texts.read_records(ROWS, optional.then_some(&mut present), None, &mut values);
            let (rows, ..) = read.map_err(|error| broken(&reading, &error))?;
            if rows == 0 {
                break;
            }
            for text in &values {
                reading.give(text.data(), || format!("a text of the rows {row} to {}", row + rows - 1))?;
            }
            row += rows;
        }
    }
    Ok(())
}
