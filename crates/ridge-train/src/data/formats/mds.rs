//! MDS shards (<https://docs.mosaicml.com/projects/streaming>): the number of samples, where each begins and the last ends,
//! what columns there are as JSON, then the samples. A sample has the sizes of its columns of variable size, then all columns
//! one behind the other. Words are u32 in little endian.

use serde::Deserialize;

use super::reading::{Reading, part};
use crate::data::source::Source;
use crate::error::Result;

/// What a shard says of its columns.
#[derive(Deserialize)]
struct Columns {
    column_names: Vec<String>,
    column_encodings: Vec<String>,
    /// Bytes, of those that have one size.
    column_sizes: Vec<Option<usize>>,
}

const WORD: usize = 4;

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let word = part(bytes, at, WORD)?;
    usize::try_from(u32::from_le_bytes(word.try_into().ok()?)).ok()
}

pub(super) fn read(source: &Source, mut reading: Reading<'_>) -> Result<()> {
    let bytes = source.whole().map_err(|why| reading.broken(format!("it cannot be read: {why}")))?;
    let bytes = &bytes[..];
    let ends_early = |reading: &Reading<'_>| reading.broken("it is not an MDS shard: it ends before its samples");
    let samples = word(bytes, 0).ok_or_else(|| ends_early(&reading))?;
    let behind = samples.checked_add(2).and_then(|words| words.checked_mul(WORD));
    let behind = behind.filter(|at| *at <= bytes.len()).ok_or_else(|| ends_early(&reading))?;
    let offset = |i: usize| word(bytes, WORD * (1 + i)).unwrap_or_default();
    let json = bytes.get(behind..offset(0)).ok_or_else(|| ends_early(&reading))?;
    let columns: Columns = serde_json::from_slice(json)
        .map_err(|error| reading.broken(format!("it is not an MDS shard: its description of columns: {error}")))?;
    let Columns { column_names: names, column_encodings: encodings, column_sizes: sizes } = columns;
    if encodings.len() != names.len() || sizes.len() != names.len() {
        return Err(reading.broken("its lists of columns differ in length"));
    }
    let Some(wanted) = names.iter().position(|name| *name == reading.field) else {
        return Err(reading.lacks(format!("there is no column {}; it has {}", reading.field, names.join(", "))));
    };
    if encodings[wanted] != "str" {
        let problem = format!("the column {} has the encoding {}, and str is wanted", reading.field, encodings[wanted]);
        return Err(reading.lacks(problem));
    }
    for i in 0..samples {
        let text = bytes.get(offset(i)..offset(i + 1)).and_then(|sample| column(sample, &sizes, wanted));
        let text = text.ok_or_else(|| reading.broken(format!("sample {i} ends before its columns")))?;
        reading.give(text, || format!("sample {i}"))?;
    }
    Ok(())
}

/// Column `wanted` of a sample.
fn column<'a>(sample: &'a [u8], sizes: &[Option<usize>], wanted: usize) -> Option<&'a [u8]> {
    let mut at = sizes.iter().filter(|size| size.is_none()).count() * WORD;
    let mut variable = 0;
    for (i, size) in sizes.iter().enumerate().take(wanted + 1) {
        let length = match size {
            Some(size) => *size,
            None => {
                variable += 1;
                word(sample, (variable - 1) * WORD)?
            }
        };
        if i == wanted {
            return part(sample, at, length);
        }
        at = at.checked_add(length)?;
    }
    None
}
