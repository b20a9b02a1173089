//! Linear recurrences and their gradients: `kernels/recurrence.cu` for few tokens of a row; for more `kernels/recurrence_parallel.cu`, and
//! `kernels/recurrence_chunks.cu` with a part of low rank; `kernels/recurrence_gated.cu` for operands in bf16 whose keys decay alike. Gradients
//! are of `kernels/recurrence_gradient_keys.cu`, with `kernels/recurrence_gradient_rank.cu` where a part has low rank and keys decay alike, and of
//! `kernels/recurrence_gradient.cu` for few tokens of a row and else.

mod chunks;
mod extents;
mod gated;
mod gradient;
mod gradient_rank;

use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, flag, grid, input, numbers, output,
};

use chunks::ChunkOperands;
#[cfg(test)]
pub(super) use chunks::RECURRENCE_PARALLEL;
pub(crate) use extents::LEAST;
pub(super) use extents::RECURRENCE;
use extents::{COLUMNS, Extents, SHARED_OF_ALL, THREADS};
#[cfg(test)]
pub(super) use gated::RECURRENCE_GATED;
pub(crate) use gated::{gated, takes_gated};
pub(super) use gradient::recurrence_gradient;
#[cfg(test)]
pub(super) use gradient::{RECURRENCE_GRADIENT, RECURRENCE_GRADIENT_KEYS};
#[cfg(test)]
pub(super) use gradient_rank::RECURRENCE_GRADIENT_RANK;

pub(super) const RECURRENCE_CHUNKS: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/lines.cuh"),
    include_str!("../../kernels/recurrence_chunks.cu")
))
.with_tiles()
.early_launch();

/// Keys of a head at most: a thread keeps a quarter of a column of the state in registers.
pub(crate) const MAX_KEY: usize = 512;

/// Keys of a head at most where it has one value: a thread has a quarter of those of some tokens in registers.
const MAX_KEY_OF_CHANNELS: usize = 64;

/// Keys of a head at most for chunks with a part of low rank: their state and the keys of a chunk are in shared memory.
const MAX_KEY_OF_CHUNKS: usize = 256;

/// Tokens of a chunk, and matrices of a chunk that do not depend on the state, as `kernels/recurrence_chunks.cu` has them.
const CHUNK: usize = 32;
const MATRICES: usize = 4;

impl Extents {
    /// The launch for heads of one value whose keys decay by themselves.
    fn by_channels(&self) -> Result<CudaKernel, String> {
        let key = self.key.to_string();
        let least = i32::MAX.to_string();
        let (of_lines, lines) = self.of_lines();
        let defines = [("KEY", &*key), ("DECAYS", &*key), ("LOW_RANK", "0"), ("LEAST", &*least), of_lines];
        let source = CudaSource::new("recurrence_channels", &defines, &RECURRENCE);
        let args = self.inputs().into_iter().take(6).map(input).chain([lines, output(0), output(1)]);
        let count = self.lines.unwrap_or(0);
        let args = args.chain([numbers(&[self.tokens, self.rows, self.groups, self.heads, count])]).collect();
        grid(source, [self.rows * self.heads.div_ceil(COLUMNS) + 1, 1, 1], THREADS, args)
    }

    /// With a part of low rank and keys that decay alike: the launches that take rows of at least [`LEAST`] tokens in chunks, those of a
    /// head in turn, the bytes of their scratch, and the most bytes of shared memory that one takes. With
    /// `updates` y is what `erase` reads of the state before each token instead.
    fn in_turn(
        &self,
        of: &ChunkOperands,
        [erase, write]: [&LaunchArg; 2],
        updates: bool,
    ) -> Result<(Vec<DeviceAction>, usize, u32), String> {
        let depth = self.key.next_power_of_two().max(32);
        let key = self.key.to_string();
        let wide = flag(self.value.is_multiple_of(4));
        let updates = flag(updates);
        let defines = [("KEY", &*key), ("WIDE", wide), ("UPDATES", updates), self.of_lines().0];
        let source = |entry| CudaSource::new(entry, &defines, &RECURRENCE_CHUNKS);
        // As the kernels lay out shared memory, in floats.
        let [by_row, by_column, of_values, of_scores] = [depth + 8, depth + 4, COLUMNS + 4, CHUNK + 8];
        let for_scores = 4 * by_row + 3 * of_scores;
        let for_chunks = 2 * (by_row + by_column) + 3 * of_values + MATRICES * of_scores + 2;
        let bytes = |floats: usize| (floats * size_of::<f32>()) as u32;
        let chunks = self.tokens / LEAST + 1;
        let scores_args = [&of.q, &of.k, &of.decay, &of.starts, erase, write, &of.states].map(Clone::clone);
        let scores_args = scores_args.into_iter().chain([self.numbers()]).collect();
        let args = [&of.q, &of.k, &of.v, &of.decay, &of.before, &of.starts, erase, write, &of.states, &of.lines];
        let args = args.into_iter().chain([&of.y, &of.after]).cloned().chain([self.numbers()]).collect();
        let pieces = self.rows * self.heads * self.value.div_ceil(COLUMNS);
        let launches = [
            (
                grid(source("recurrence_scores"), [chunks * self.heads, 1, 1], THREADS, scores_args)?,
                bytes(CHUNK * for_scores),
            ),
            (
                grid(source("recurrence_chunks"), [pieces, 1, 1], THREADS, args)?,
                bytes(depth * of_values + CHUNK * for_chunks),
            ),
        ];
        let shared = launches.iter().map(|(_, shared)| *shared).max().unwrap_or(0);
        let actions = launches.into_iter().flat_map(|(kernel, shared)| kernel.with_shared(shared).actions);
        let of_chunk = MATRICES * CHUNK * CHUNK + 2 * CHUNK;
        Ok((actions.collect(), chunks * self.heads * of_chunk * size_of::<f32>(), shared))
    }
}

pub(super) fn recurrence(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let [_, _, _, _, state, ..] = &spec.inputs[..] else { return Err("takes six inputs or eight".into()) };
    make(spec, state.shape[0], None, spec.inputs.len() == 8)
}

/// The recurrence whose states are lines of a table.
pub(crate) fn over_lines(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let [_, _, _, _, table, lines, ..] = &spec.inputs[..] else { return Err("takes seven inputs or nine".into()) };
    make(spec, lines.shape[0], Some(table.shape[0]), spec.inputs.len() == 9)
}

fn make(spec: &CudaKernelSpec<'_>, rows: usize, lines: Option<usize>, low_rank: bool) -> Result<CudaKernel, String> {
    let [q, _, v, decay, ..] = &spec.inputs[..] else { return Err("takes six inputs or more".into()) };
    let (tokens, groups, key) = (q.shape[0], q.shape[1], q.shape[2]);
    let (heads, value) = (v.shape[1], v.shape[2]);
    if key > MAX_KEY {
        return Err(format!("has {key} keys a head, at most {MAX_KEY}"));
    }
    if key * heads * value == 0 {
        return Ok(CudaKernel::default());
    }
    let all = Extents { tokens, rows, groups, heads, key, value, low_rank, lines, gated: false };
    if value == 1 && decay.shape[2] == key && !all.low_rank && key <= MAX_KEY_OF_CHANNELS {
        return all.by_channels();
    }
    // Where all rows have a token or more, one may have enough of them.
    let long = rows > 0 && tokens + 1 >= rows + LEAST;
    let decays = decay.shape[2];
    let chunks = long && (!low_rank || decays == 1 && key <= MAX_KEY_OF_CHUNKS);
    if !chunks {
        return Ok(all.token_by_token(decays, i32::MAX as usize));
    }
    let (mut actions, scratch, shared) = if low_rank {
        let [.., erase, write] = all.inputs().map(input);
        all.in_turn(&all.operands(), [&erase, &write], false)?
    } else {
        all.at_once(decays)?
    };
    actions.extend(all.token_by_token(decays, LEAST).actions);
    if shared > SHARED_OF_ALL {
        let otherwise = all.token_by_token(decays, i32::MAX as usize).actions;
        actions = vec![DeviceAction::ByArch { arch: "sm_90a", actions, otherwise }];
    }
    Ok(CudaKernel { actions, scratch })
}
