//! The columns of the row tables on the device: the data of a sequence that each contains.

use std::ops::Range;

use ridge_models::{RowTables, block_table_name};

use crate::blocks::BlockId;
use crate::cache::WindowTable;
use crate::error::Result;
use crate::rows::{Column, Rows};
use crate::sampling::{COLUMNS, MAX_BIASES, MAX_BREAKERS, ReadSetting, Sampling, SettingValue};

/// The columns that the engine fills.
pub(crate) struct Columns {
    /// Of the sampler, with how each follows from what was asked.
    settings: Vec<(Column, ReadSetting)>,
    stream: Column,
    prompt: Column,
    blocks: Column,
    bias_ids: Column,
    bias_values: Column,
    breakers: Column,
    /// The block tables of windows, in order.
    windows: Vec<Column>,
}

impl Columns {
    /// # Errors
    /// When the tables lack one of them, or have one that nobody fills.
    pub(crate) fn new(rows: &Rows, tables: &RowTables, windows: &[usize]) -> Result<Self> {
        const LISTS: [&str; 4] = ["block_table", "bias_ids", "bias_values", "dry_breakers"];
        let others = ["sequence", "prompt_lengths", ridge_models::LENGTH, ridge_models::LAST_TOKEN];
        let windows: Vec<String> = windows.iter().map(|window| block_table_name(Some(*window))).collect();
        let of_windows = || windows.iter().map(String::as_str);
        let filled = || COLUMNS.iter().map(|(name, _)| *name).chain(others).chain(LISTS).chain(of_windows());
        let columns = tables.tables.iter().flat_map(|table| &table.columns);
        if let Some(name) = columns.into_iter().find(|name| !filled().any(|filled| filled == *name)) {
            let why =
                format!("the engine does not provide it; it provides {}", filled().collect::<Vec<_>>().join(", "));
            let error = ridge_runtime::RuntimeError::Argument { kind: "input", name: name.clone(), why };
            return Err(error.into());
        }
        let settings = COLUMNS.iter().map(|(name, setting)| Ok((rows.column(name)?, *setting)));
        Ok(Self {
            settings: settings.collect::<Result<_>>()?,
            stream: rows.column("sequence")?,
            prompt: rows.column("prompt_lengths")?,
            blocks: rows.column(LISTS[0])?,
            bias_ids: rows.column(LISTS[1])?,
            bias_values: rows.column(LISTS[2])?,
            breakers: rows.column(LISTS[3])?,
            windows: of_windows().map(|name| rows.column(name)).collect::<Result<_>>()?,
        })
    }

    /// Sets what was asked of the sampler for the sequence of `row`.
    pub(crate) fn set_sampling(&self, rows: &mut Rows, row: usize, sampling: &Sampling) {
        for (column, setting) in &self.settings {
            match setting(sampling) {
                SettingValue::Float(value) => rows.set_float(row, *column, value),
                SettingValue::Int(value) => rows.set_int(row, *column, value),
            }
        }
        for nth in 0..MAX_BIASES {
            let bias = sampling.logit_bias.get(nth);
            rows.set_nth(row, self.bias_ids, nth, bias.map_or(-1, |(id, _)| i64::from(*id)));
            rows.set_float_nth(row, self.bias_values, nth, bias.map_or(0.0, |(_, value)| *value));
        }
        for nth in 0..MAX_BREAKERS {
            let breaker = sampling.dry_breakers.get(nth);
            rows.set_nth(row, self.breakers, nth, breaker.map_or(-1, |id| i64::from(*id)));
        }
    }

    /// Sets which of the sequences of its seed that of `row` is.
    pub(crate) fn set_stream(&self, rows: &mut Rows, row: usize, stream: u64) {
        rows.set_int(row, self.stream, stream.cast_signed());
    }

    /// Sets how many tokens the sequence of `row` has before its answer.
    pub(crate) fn set_prompt(&self, rows: &mut Rows, row: usize, prompt: usize) {
        rows.set_int(row, self.prompt, i64::try_from(prompt).unwrap_or(i64::MAX).min(i64::from(i32::MAX)));
    }

    /// Sets the blocks of the sequence of `row` in the pool of window `nth` that it holds from place `from` on.
    pub(crate) fn set_window(&self, rows: &mut Rows, row: usize, nth: usize, from: usize, table: &WindowTable) {
        for place in from.max(table.first())..table.end() {
            if let Some(block) = table.get(place) {
                rows.set_nth(row, self.windows[nth], place, i64::from(block.0));
            }
        }
    }

    /// Sets the blocks of the sequence of `row` from number `from` on. Columns behind them keep what they had, which may be blocks
    /// that are another's by now: a step that goes beyond the blocks of its row must have them [cleared](Self::clear_blocks).
    pub(crate) fn set_blocks(&self, rows: &mut Rows, row: usize, from: usize, blocks: &[BlockId]) {
        for (nth, block) in blocks.iter().enumerate() {
            rows.set_nth(row, self.blocks, from + nth, i64::from(block.0));
        }
    }

    /// Takes the blocks with these numbers from the sequence of `row`: what is written there is lost.
    pub(crate) fn clear_blocks(&self, rows: &mut Rows, row: usize, numbers: Range<usize>) {
        numbers.for_each(|nth| rows.set_nth(row, self.blocks, nth, -1));
    }
}
