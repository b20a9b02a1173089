//! The host's mirror of the row tables on the device; only changes are sent.

use ridge_graph::Bindings;
use ridge_models::{LENGTH, RowTables, row_changes, symbols};
use ridge_runtime::{Bucket, RuntimeError, Session};

use crate::error::Result;

/// Changes of a table that are sent at a time.
pub const CHANGES: usize = 1024;

/// A column of the tables, found by name once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    table: usize,
    at: usize,
}

/// One table as the device has it once all that was submitted is done.
struct Mirror {
    width: usize,
    bias: i64,
    bytes: usize,
    /// The bits of each element; none where it is not known.
    known: Vec<Option<u64>>,
    /// What is to be sent: places and bits. The last of a place counts.
    changes: Vec<(u32, u64)>,
    /// Indices of the count, places and values among the inputs of the bucket.
    inputs: [usize; 3],
}

/// The tables of rows, with what is to be sent of them.
pub(crate) struct Rows {
    tables: RowTables,
    mirrors: Vec<Mirror>,
    bucket: Bucket,
    length: Column,
    /// Was something sent that nobody has waited for?
    sending: bool,
    /// Bytes that were sent in all.
    pub(crate) sent: u64,
}

impl Rows {
    /// Tables of `rows` rows, whose states `session` has allocated.
    ///
    /// # Errors
    /// When the device cannot run the changes of rows, or memory runs out.
    pub(crate) fn new(session: &Session, tables: &RowTables, rows: usize) -> Result<Self> {
        let graph = row_changes(tables).map_err(RuntimeError::from)?;
        let bindings = Bindings::new().with(symbols::ROWS, rows).with(symbols::CHANGES, CHANGES);
        let bucket = session.compile(&graph, &[])?.bucket(&bindings)?;
        let mut mirrors = Vec::with_capacity(tables.tables.len());
        for table in &tables.tables {
            let mut inputs = [0; 3];
            for (index, name) in inputs.iter_mut().zip(table.inputs()) {
                *index = bucket.input_index(&name)?.ok_or_else(|| RuntimeError::Argument {
                    kind: "input",
                    name: name.clone(),
                    why: "is not an input of the row-update program".into(),
                })?;
            }
            mirrors.push(Mirror {
                width: table.width,
                bias: table.bias,
                bytes: table.dtype.size_bytes(),
                // States are zeroed when they are allocated.
                known: vec![Some(0); rows * table.width],
                changes: Vec::with_capacity(CHANGES),
                inputs,
            });
        }
        let length = Self::find(tables, LENGTH)?;
        Ok(Self { tables: tables.clone(), mirrors, bucket, length, sending: false, sent: 0 })
    }

    fn find(tables: &RowTables, name: &str) -> Result<Column> {
        let (table, at) = tables.column(name).ok_or_else(|| RuntimeError::Argument {
            kind: "column",
            name: name.to_owned(),
            why: "is not a row of the model's graph".into(),
        })?;
        Ok(Column { table, at })
    }

    /// The column called `name`.
    ///
    /// # Errors
    /// When the tables have none.
    pub(crate) fn column(&self, name: &str) -> Result<Column> {
        Self::find(&self.tables, name)
    }

    /// Sets an element of a row; `offset` counts on from the column.
    fn set(&mut self, row: usize, Column { table, at }: Column, offset: usize, bits: u64) {
        let mirror = &mut self.mirrors[table];
        let place = row * mirror.width + at + offset;
        if mirror.known[place] != Some(bits) {
            mirror.known[place] = Some(bits);
            mirror.changes.push((place as u32, bits));
        }
    }

    /// Sets a column of integers.
    pub(crate) fn set_int(&mut self, row: usize, column: Column, value: i64) {
        let biased = value + self.mirrors[column.table].bias;
        self.set(row, column, 0, biased.cast_unsigned());
    }

    /// Sets one of the columns behind `column`.
    pub(crate) fn set_nth(&mut self, row: usize, column: Column, nth: usize, value: i64) {
        let biased = value + self.mirrors[column.table].bias;
        self.set(row, column, nth, biased.cast_unsigned());
    }

    /// Sets one of the columns of f32 behind `column`.
    pub(crate) fn set_float_nth(&mut self, row: usize, column: Column, nth: usize, value: f32) {
        self.set(row, column, nth, u64::from(value.to_bits()));
    }

    /// Sets a column of f32.
    pub(crate) fn set_float(&mut self, row: usize, column: Column, value: f32) {
        self.set(row, column, 0, u64::from(value.to_bits()));
    }

    /// Sets how many tokens of the row are in the cache.
    pub(crate) fn set_length(&mut self, row: usize, length: usize) {
        self.set_int(row, self.length, length as i64);
    }

    /// Takes over that a step moves the length of a row: to `None` while it is not known how many candidates are accepted.
    pub(crate) fn moved(&mut self, row: usize, length: Option<usize>) {
        let Column { table, at } = self.length;
        let mirror = &mut self.mirrors[table];
        mirror.known[row * mirror.width + at] = length.map(|length| length as u64);
    }

    /// Takes over that nobody knows what the device has, since a step failed: everything is sent again when it is set.
    pub(crate) fn forget(&mut self) {
        for mirror in &mut self.mirrors {
            mirror.known.fill(None);
            mirror.changes.clear();
        }
    }

    /// Waits for what was sent.
    ///
    /// # Errors
    /// When the device failed. Nothing is known of the tables then.
    pub(crate) fn wait(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.sending) {
            return Ok(());
        }
        let waited = self.bucket.wait();
        if waited.is_err() {
            self.forget();
        }
        Ok(waited?)
    }

    /// Queues what has changed since the last call.
    ///
    /// # Errors
    /// When the device failed. Nothing is known of the tables then.
    pub(crate) fn send(&mut self) -> Result<()> {
        while self.mirrors.iter().any(|mirror| !mirror.changes.is_empty()) {
            let sent = self.send_some();
            if sent.is_err() {
                self.forget();
                return sent;
            }
        }
        Ok(())
    }

    fn send_some(&mut self) -> Result<()> {
        // It was queued before the step that runs, so it is complete or about to be.
        self.wait()?;
        for mirror in &mut self.mirrors {
            let [count, places, values] = mirror.inputs;
            let (kept, bytes) = (mirror.changes.len().min(CHANGES), mirror.bytes);
            self.bucket.input(count).copy_from_slice(&(kept as i32).to_le_bytes());
            for ((place, _), to) in mirror.changes[..kept].iter().zip(self.bucket.input(places).as_chunks_mut().0) {
                *to = (*place as i32).to_le_bytes();
            }
            for ((_, bits), to) in mirror.changes[..kept].iter().zip(self.bucket.input(values).chunks_exact_mut(bytes))
            {
                to.copy_from_slice(&bits.to_le_bytes()[..bytes]);
            }
            mirror.changes.drain(..kept);
            self.sent += (4 + kept * (4 + bytes)) as u64;
        }
        self.bucket.submit()?;
        self.sending = true;
        Ok(())
    }
}
