//! Recurrences without a part of low rank whose chunks are computed all at once: `kernels/recurrence_parallel.cu`.

use super::{Extents, LEAST};
use crate::kernel::{CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, grid, input, numbers, output};

pub(in crate::prims) const RECURRENCE_PARALLEL: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../../kernels/lines.cuh"),
    include_str!("../../../kernels/compensated.cuh"),
    include_str!("../../../kernels/recurrence_parallel.cu")
))
.with_tiles()
.early_launch();

/// Tokens of a chunk, as the kernel has them.
const CHUNK: usize = 64;

/// Threads of the launch that passes states from chunk to chunk.
const PASS_THREADS: usize = 128;

/// How a launch divides its work, as the kernel's definitions have it.
#[derive(Clone, Copy)]
struct Division {
    warps: usize,
    /// Columns of the state to a block.
    columns: usize,
}

impl Division {
    fn threads(self) -> u32 {
        32 * self.warps as u32
    }

    /// Bytes of `rows` rows of `columns` elements in parts, as they lie in shared memory.
    fn in_parts(rows: usize, columns: usize) -> usize {
        3 * rows * (columns + 8) * size_of::<u16>()
    }

    /// Keys that a block takes at once.
    fn slice(self) -> usize {
        8 * self.warps
    }

    /// Bytes of shared memory of the launch that computes states.
    fn shared_for_states(self) -> usize {
        Self::in_parts(CHUNK, self.columns) + Self::in_parts(self.slice(), CHUNK)
    }

    /// Bytes of shared memory of the launch that computes outputs.
    fn shared_for_outputs(self, by_key: bool) -> usize {
        let of_blocks = 4 * self.slice() * 20 * size_of::<f32>();
        let values = Self::in_parts(CHUNK.max(self.slice()), self.columns);
        of_blocks + Self::in_parts(self.slice(), CHUNK) + values.max(if by_key { 3 * of_blocks } else { 0 })
    }
}

impl Extents {
    /// The launches that take rows of at least [`LEAST`] tokens with all chunks at once, the bytes of their scratch, and the most
    /// bytes of shared memory that one takes.
    pub(super) fn all_chunks(&self, by_key: bool) -> Result<(Vec<DeviceAction>, usize, u32), String> {
        let columns = if by_key && self.value > 64 { 128 } else { 64 };
        let [for_states, for_outputs] = [if by_key { 8 } else { 4 }, 8].map(|warps| Division { warps, columns });
        let wide = self.value.is_multiple_of(4);
        let decays = if by_key { self.key } else { 1 };
        let (of_lines, lines) = self.of_lines();
        let source = |entry, division: Division| {
            let sizes = [self.key, decays, division.warps, division.columns].map(|n| n.to_string());
            let names = ["KEY", "DECAYS", "WARPS", "COLUMNS"];
            let mut defines: Vec<_> = names.into_iter().zip(sizes.iter().map(|size| &**size)).collect();
            defines.extend([("WIDE", if wide { "1" } else { "0" }), of_lines]);
            CudaSource::new(entry, &defines, &RECURRENCE_PARALLEL)
        };
        // Chunks are numbered such that those of rows do not meet: by chunks and a number for each row, or by the fewest tokens of a row.
        let (by_rows, by_tokens) = (self.tokens / CHUNK + self.rows, self.tokens / LEAST + 1);
        let (unit, extra) = if by_rows <= by_tokens { (CHUNK, 1) } else { (LEAST, 0) };
        let chunks = by_rows.min(by_tokens);
        let table = self.lines.unwrap_or(0);
        let extents = [self.tokens, self.rows, self.groups, self.heads, self.value, table, unit, extra, chunks];
        let args = |inputs: &[usize], behind: &[LaunchArg]| -> Vec<LaunchArg> {
            inputs.iter().copied().map(input).chain(behind.iter().cloned()).chain([numbers(&extents)]).collect()
        };
        let scratch = LaunchArg::Pointer(OperandSlot::Scratch, 0);
        let [q, k, v, decay, before, starts, ..] = self.inputs();
        let blocks = [chunks * self.heads * self.value.div_ceil(columns), 1, 1];
        let shared = [for_states.shared_for_states(), for_outputs.shared_for_outputs(by_key)].map(|bytes| bytes as u32);
        let state = self.heads * self.key * self.value;
        let pieces = self.rows * state / if wide { 4 } else { 1 };
        let launches = [
            grid(
                source("recurrence_states", for_states),
                blocks,
                for_states.threads(),
                args(&[k, v, decay, starts], std::slice::from_ref(&scratch)),
            )?
            .with_shared(shared[0]),
            grid(
                source("recurrence_pass", for_states),
                [pieces.div_ceil(PASS_THREADS), 1, 1],
                PASS_THREADS as u32,
                args(&[before, starts], &[lines, scratch.clone(), output(1)]),
            )?,
            grid(
                source("recurrence_outputs", for_outputs),
                blocks,
                for_outputs.threads(),
                args(&[q, k, v, decay, starts], &[scratch, output(0)]),
            )?
            .with_shared(shared[1]),
        ];
        let actions = launches.into_iter().flat_map(|launch| launch.actions).collect();
        let bytes = chunks * (state + self.heads * decays) * size_of::<f32>();
        Ok((actions, bytes, shared[0].max(shared[1])))
    }
}
