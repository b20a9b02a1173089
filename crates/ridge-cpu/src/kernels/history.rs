//! Writes a step's tokens into the history, and reads rows of it for those who ask what was said.
//!
//! Floor: the tokens read once and written once.

use std::ops::Range;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, OperandType};
use crate::scratch::Scratch;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("history_write", "history_write(history, ids, slots)", |_| true, make)]
}

struct HistoryWrite {
    slots: usize,
    tokens: usize,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    Ok(Box::new(HistoryWrite { slots: spec.inputs[0].len(), tokens: spec.inputs[1].len() }))
}

impl CpuKernel for HistoryWrite {
    fn pieces(&self) -> usize {
        // One, so that equal slots are written in order.
        usize::from(self.tokens > 0)
    }

    fn nanos_per_piece(&self) -> f64 {
        self.tokens as f64
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {
        // SAFETY: the only piece.
        let history = unsafe { io.output::<i32>(0).part(0..self.slots) };
        for (id, slot) in io.input::<i32>(1).iter().zip(io.input::<i32>(2)).take(self.tokens) {
            if let Some(place) = usize::try_from(*slot).ok().and_then(|slot| history.get_mut(slot)) {
                *place = *id;
            }
        }
    }
}

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
