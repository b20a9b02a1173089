//! Rows of the history, for those who ask what was said.

use crate::io::KernelIo;
use crate::kernel::OperandType;

/// The inputs of an op over the history: input `first` is the history, then come the block table and the lengths.
pub(super) struct HistoryRows {
    first: usize,
    block_size: usize,
    blocks: usize,
    table: usize,
}

impl HistoryRows {
    pub(super) fn new(inputs: &[OperandType], first: usize) -> Self {
        let (history, table) = (&inputs[first], &inputs[first + 1]);
        Self { first, block_size: history.last(), blocks: history.rows(), table: table.last() }
    }

    /// Tokens that a row can have.
    pub(super) fn most(&self) -> usize {
        self.table * self.block_size
    }

    /// The tokens of row `row`, in order, into `to`; gives how many. A block that is not there holds zeros.
    pub(super) fn read(&self, io: &KernelIo<'_>, row: usize, to: &mut [i32]) -> usize {
        let history = io.input::<i32>(self.first);
        let table = &io.input::<i32>(self.first + 1)[row * self.table..][..self.table];
        let length = usize::try_from(io.input::<i32>(self.first + 2)[row]).unwrap_or(0).min(self.most());
        for (to, block) in to[..length].chunks_mut(self.block_size.max(1)).zip(table) {
            match usize::try_from(*block) {
                Ok(block) if block < self.blocks => {
                    to.copy_from_slice(&history[block * self.block_size..][..to.len()]);
                }
                _ => to.fill(0),
            }
        }
        length
    }
}
