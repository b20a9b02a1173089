//! Positions and slots of a step's tokens.
//!
//! Floor: a launch; a few integers a token.

use std::ops::Range;

use ridge_graph::ops;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("token_layout", "token_layout(seq_ids, query_start, lengths, block_table)", |_| true, make)]
}

struct TokenLayout {
    block_size: i32,
    tokens: usize,
    sequences: usize,
    /// Columns of the block table.
    blocks: usize,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<ops::TokenLayout>().ok_or("no token_layout in the group")?;
    let block_size = i32::try_from(op.block_size).map_err(|_| format!("blocks of {} tokens", op.block_size))?;
    let table = &spec.inputs[3];
    let (sequences, blocks) = (table.shape[0], table.shape[1]);
    Ok(Box::new(TokenLayout { block_size, tokens: spec.inputs[0].len(), sequences, blocks }))
}

impl CpuKernel for TokenLayout {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        5.0
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, _scratch: &mut Scratch) {
        let [ids, starts, lengths, table] = [0, 1, 2, 3].map(|i| io.input::<i32>(i));
        // SAFETY: these tokens are ours alone.
        let (positions, slots) =
            unsafe { (io.output::<i32>(0).part(tokens.clone()), io.output::<i32>(1).part(tokens.clone())) };
        for ((token, position), slot) in tokens.zip(positions).zip(slots) {
            (*position, *slot) = (0, -1);
            let Ok(seq) = usize::try_from(ids[token]) else { continue };
            if seq >= self.sequences {
                continue;
            }
            *position = lengths[seq].wrapping_add(token as i32).wrapping_sub(starts[seq]);
            let nth = usize::try_from(*position / self.block_size).unwrap_or(usize::MAX);
            let block = if nth < self.blocks { table[seq * self.blocks + nth] } else { -1 };
            if block >= 0 {
                *slot = block.wrapping_mul(self.block_size).wrapping_add(*position % self.block_size);
            }
        }
    }
}
