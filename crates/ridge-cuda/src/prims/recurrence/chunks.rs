//! Recurrences without a part of low rank in chunks, all at once: `kernels/recurrence_parallel.cu`.

use super::extents::{Extents, LEAST};
use crate::kernel::{CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, flag, grid, input, numbers, output};

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
pub(super) struct Chunked<'a> {
    pub(super) all: &'a Extents,
    pub(super) decays: usize,
    /// Columns of the state to a block.
    pub(super) columns: usize,
    /// Numbers of chunks. Those of a row begin at its first token divided by `unit`, and `extra` for each row before it.
    pub(super) chunks: usize,
    unit: usize,
    extra: usize,
    /// Rows of fewer tokens are left out.
    pub(super) least: usize,
}

/// What a recurrence in chunks reads and writes, and whether its tokens run backwards, as those of its cotangents do.
pub(super) struct ChunkOperands {
    pub(super) q: LaunchArg,
    pub(super) k: LaunchArg,
    pub(super) v: LaunchArg,
    pub(super) weight: LaunchArg,
    pub(super) decay: LaunchArg,
    pub(super) before: LaunchArg,
    pub(super) starts: LaunchArg,
    pub(super) lines: LaunchArg,
    /// Where states of chunks are: [`Chunked::bytes`] of scratch. With a part of low rank, where products of keys are.
    pub(super) states: LaunchArg,
    pub(super) y: LaunchArg,
    pub(super) after: LaunchArg,
    pub(super) mirrored: bool,
}

impl Extents {
    /// The launches that take rows of at least [`LEAST`] tokens in chunks, all at once, the bytes of their scratch, and the most bytes of
    /// shared memory that one takes.
    pub(super) fn at_once(&self, decays: usize) -> Result<(Vec<DeviceAction>, usize, u32), String> {
        let chunked = Chunked::new(self, decays);
        let operands = self.operands();
        let (states, of_states) = chunked.states(&operands)?;
        let (outputs, of_outputs) = chunked.outputs(&operands)?;
        Ok(([states, outputs].concat(), chunked.bytes(), of_states.max(of_outputs)))
    }

    /// The operands of the recurrence itself.
    pub(super) fn operands(&self) -> ChunkOperands {
        let [q, k, v, decay, before, starts, weight, _] = self.inputs().map(input);
        ChunkOperands {
            q,
            k,
            v,
            weight,
            decay,
            before,
            starts,
            lines: self.of_lines().1,
            states: LaunchArg::Pointer(OperandSlot::Scratch, 0),
            y: output(0),
            after: output(1),
            mirrored: false,
        }
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

impl<'a> Chunked<'a> {
    pub(super) fn new(all: &'a Extents, decays: usize) -> Self {
        let columns = if decays > 1 && all.value > 64 { 128 } else { 64 };
        let [unit, extra, chunks] = all.numbering();
        Self { all, decays, columns, chunks, unit, extra, least: LEAST }
    }

    /// Bytes of the states of all chunks, and of what remains of them over each.
    pub(super) fn bytes(&self) -> usize {
        self.chunks * self.all.heads * (self.all.key * self.all.value + self.decays) * size_of::<f32>()
    }

    /// A launch of `entry` of `text` over so many blocks of threads, with these arguments before its numbers.
    pub(super) fn launch(
        &self,
        (entry, text): (&str, &KernelText<'_>),
        [blocks, threads]: [usize; 2],
        [warps, columns]: [usize; 2],
        (mirrored, shared): (bool, usize),
        args: &[&LaunchArg],
    ) -> Result<Vec<DeviceAction>, String> {
        let all = self.all;
        let sizes = [all.key, self.decays, self.least, warps, columns].map(|n| n.to_string());
        let names = ["KEY", "DECAYS", "LEAST", "WARPS", "COLUMNS"];
        let mut defines: Vec<_> = names.into_iter().zip(sizes.iter().map(|size| &**size)).collect();
        let flags = [("WIDE", all.value.is_multiple_of(WIDE)), ("GATED", all.gated), ("MIRRORED", mirrored)];
        defines.extend(flags.map(|(name, is)| (name, flag(is))));
        defines.push(all.of_lines().0);
        let source = CudaSource::new(entry, &defines, text);
        let table = all.lines.unwrap_or(0);
        let extents =
            [all.tokens, all.rows, all.groups, all.heads, all.value, table, self.unit, self.extra, self.chunks];
        let args = args.iter().map(|arg| (*arg).clone()).chain([numbers(&extents)]).collect();
        Ok(grid(source, [blocks, 1, 1], threads as u32, args)?.with_shared(shared as u32).actions)
    }

    fn division(&self, warps: usize) -> Division {
        let (value_parts, y_parts) = if self.all.gated { (1, 2) } else { (3, 3) };
        Division { warps, columns: self.columns, by_key: self.decays > 1, value_parts, y_parts }
    }

    /// Blocks that take each chunk of each head.
    fn tiles(&self) -> usize {
        self.chunks * self.all.heads * self.all.value.div_ceil(self.columns)
    }

    /// The launches that compute the states before all chunks, and the bytes of shared memory that they take.
    pub(super) fn states(&self, of: &ChunkOperands) -> Result<(Vec<DeviceAction>, u32), String> {
        let all = self.all;
        let division = self.division(if self.decays > 1 { 8 } else { 4 });
        let (shared, divided) = (division.shared_for_states(), [division.warps, self.columns]);
        let wide = if all.value.is_multiple_of(WIDE) { WIDE } else { 1 };
        let pieces = all.rows * all.heads * all.key * all.value / wide;
        let sums = self.launch(
            ("recurrence_states", &RECURRENCE_PARALLEL),
            [self.tiles(), division.threads()],
            divided,
            (of.mirrored, shared),
            &[&of.k, &of.v, &of.weight, &of.decay, &of.starts, &of.states],
        )?;
        let pass = self.launch(
            ("recurrence_pass", &RECURRENCE_PARALLEL),
            [pieces.div_ceil(PASS_THREADS), PASS_THREADS],
            divided,
            (of.mirrored, 0),
            &[&of.before, &of.starts, &of.lines, &of.states, &of.after],
        )?;
        Ok(([sums, pass].concat(), shared as u32))
    }

    /// The launch that computes y of all chunks from the states before them, and the bytes of shared memory that it takes.
    pub(super) fn outputs(&self, of: &ChunkOperands) -> Result<(Vec<DeviceAction>, u32), String> {
        let division = self.division(8);
        let shared = division.shared_for_outputs();
        let actions = self.launch(
            ("recurrence_outputs", &RECURRENCE_PARALLEL),
            [self.tiles(), division.threads()],
            [division.warps, self.columns],
            (of.mirrored, shared),
            &[&of.q, &of.k, &of.v, &of.weight, &of.decay, &of.starts, &of.states, &of.y],
        )?;
        Ok((actions, shared as u32))
    }
}
