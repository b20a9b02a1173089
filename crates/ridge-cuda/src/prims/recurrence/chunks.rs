//! Recurrences without a part of low rank in chunks, all at once: `kernels/recurrence_parallel.cu`.

use super::extents::{Extents, LEAST};
use crate::kernel::{CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, grid, input, numbers, output};

pub(in crate::prims) const RECURRENCE_PARALLEL: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../../kernels/lines.cuh"),
    include_str!("../../../kernels/compensated.cuh"),
    include_str!("../../../kernels/chunk_numbers.cuh"),
    include_str!("../../../kernels/recurrence_blocks.cuh"),
    include_str!("../../../kernels/recurrence_parallel.cu")
))
.with_tiles()
.early_launch();

/// Tokens of a chunk, as the kernels have them.
pub(super) const CHUNK: usize = 64;

/// Threads of the launch that passes states from chunk to chunk, and values of a thread there.
const PASS_THREADS: usize = 128;
const WIDE: usize = 4;

/// How a launch divides its work, as the kernels' definitions have it.
#[derive(Clone, Copy)]
struct Division {
    warps: usize,
    /// Columns of the state to a block.
    columns: usize,
    /// Does each key decay by itself?
    by_key: bool,
    /// Parts of bf16 of values, and of what only becomes y.
    value_parts: usize,
    y_parts: usize,
}

/// Parts of keys that are added to the state.
const KEY_PARTS: usize = 3;

/// Bytes of `rows` rows of `columns` elements in `parts` parts, as they lie in shared memory.
fn in_parts(parts: usize, rows: usize, columns: usize) -> usize {
    parts * rows * (columns + 8) * size_of::<u16>()
}

impl Division {
    fn threads(self) -> usize {
        32 * self.warps
    }

    /// Keys that a block takes at once.
    fn slice(self) -> usize {
        8 * self.warps
    }

    /// Bytes of shared memory of `recurrence_states`.
    fn shared_for_states(self) -> usize {
        in_parts(self.value_parts, CHUNK, self.columns) + in_parts(KEY_PARTS, self.slice(), CHUNK)
    }

    /// Bytes of shared memory of `recurrence_outputs`.
    fn shared_for_outputs(self) -> usize {
        let of_blocks = 4 * self.slice() * 20 * size_of::<f32>();
        let values =
            in_parts(self.value_parts, CHUNK, self.columns).max(in_parts(self.y_parts, self.slice(), self.columns));
        of_blocks
            + in_parts(self.y_parts, self.slice(), CHUNK)
            + values.max(if self.by_key { 3 * of_blocks } else { 0 })
    }
}

/// The launches of a recurrence in chunks.
struct Chunked<'a> {
    all: &'a Extents,
    decays: usize,
    columns: usize,
    /// Numbers of chunks. Those of a row begin at its first token divided by `unit`, and `extra` for each row before it.
    chunks: usize,
    unit: usize,
    extra: usize,
}

impl Extents {
    /// The launches that take rows of at least [`LEAST`] tokens in chunks, all at once, the bytes of their scratch, and the most bytes of
    /// shared memory that one takes.
    pub(super) fn at_once(&self, decays: usize) -> Result<(Vec<DeviceAction>, usize, u32), String> {
        let columns = if decays > 1 && self.value > 64 { 128 } else { 64 };
        let [unit, extra, chunks] = self.numbering();
        Chunked { all: self, decays, columns, chunks, unit, extra }.launches()
    }

    /// How chunks of [`CHUNK`] tokens are numbered: the tokens by which a row's first token is divided, numbers for each row before it, and
    /// how many numbers there are.
    pub(super) fn numbering(&self) -> [usize; 3] {
        // Numbers of rows' chunks must not meet: by chunks and a number for each row, or by the fewest tokens of a row.
        let (by_rows, by_tokens) = (self.tokens / CHUNK + self.rows, self.tokens / LEAST + 1);
        let (unit, extra) = if by_rows <= by_tokens { (CHUNK, 1) } else { (LEAST, 0) };
        [unit, extra, by_rows.min(by_tokens)]
    }
}

impl Chunked<'_> {
    /// A launch of `entry` over so many blocks of threads, with these arguments before its numbers.
    fn launch(
        &self,
        entry: &str,
        [blocks, threads]: [usize; 2],
        division: Division,
        shared: usize,
        args: &[&LaunchArg],
    ) -> Result<Vec<DeviceAction>, String> {
        let all = self.all;
        let sizes = [all.key, self.decays, division.warps, division.columns].map(|n| n.to_string());
        let names = ["KEY", "DECAYS", "WARPS", "COLUMNS"];
        let mut defines: Vec<_> = names.into_iter().zip(sizes.iter().map(|size| &**size)).collect();
        let wide = if all.value.is_multiple_of(WIDE) { "1" } else { "0" };
        defines.extend([("WIDE", wide), ("GATED", if all.gated { "1" } else { "0" }), all.of_lines().0]);
        let source = CudaSource::new(entry, &defines, &RECURRENCE_PARALLEL);
        let table = all.lines.unwrap_or(0);
        let extents =
            [all.tokens, all.rows, all.groups, all.heads, all.value, table, self.unit, self.extra, self.chunks];
        let args = args.iter().map(|arg| (*arg).clone()).chain([numbers(&extents)]).collect();
        Ok(grid(source, [blocks, 1, 1], threads as u32, args)?.with_shared(shared as u32).actions)
    }

    fn launches(&self) -> Result<(Vec<DeviceAction>, usize, u32), String> {
        let all = self.all;
        let by_key = self.decays > 1;
        let (value_parts, y_parts) = if all.gated { (1, 2) } else { (3, 3) };
        let division = |warps| Division { warps, columns: self.columns, by_key, value_parts, y_parts };
        let (of_states, of_outputs) = (division(if by_key { 8 } else { 4 }), division(8));
        let shared = [of_states.shared_for_states(), of_outputs.shared_for_outputs()];
        let scratch = LaunchArg::Pointer(OperandSlot::Scratch, 0);
        let [q, k, v, decay, before, starts, weight, _] = all.inputs().map(input);
        let (_, lines) = all.of_lines();
        let tiles = self.chunks * all.heads * all.value.div_ceil(self.columns);
        let wide = if all.value.is_multiple_of(WIDE) { WIDE } else { 1 };
        let pieces = all.rows * all.heads * all.key * all.value / wide;
        let launches = [
            self.launch(
                "recurrence_states",
                [tiles, of_states.threads()],
                of_states,
                shared[0],
                &[&k, &v, &weight, &decay, &starts, &scratch],
            )?,
            self.launch(
                "recurrence_pass",
                [pieces.div_ceil(PASS_THREADS), PASS_THREADS],
                of_states,
                0,
                &[&before, &starts, &lines, &scratch, &output(1)],
            )?,
            self.launch(
                "recurrence_outputs",
                [tiles, of_outputs.threads()],
                of_outputs,
                shared[1],
                &[&q, &k, &v, &weight, &decay, &starts, &scratch, &output(0)],
            )?,
        ];
        let bytes = self.chunks * all.heads * (all.key * all.value + self.decays) * size_of::<f32>();
        Ok((launches.concat(), bytes, shared[0].max(shared[1]) as u32))
    }
}
