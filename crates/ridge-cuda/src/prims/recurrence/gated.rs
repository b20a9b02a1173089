//! Recurrences of operands in bf16 over lines of a table. Rows of many tokens are for `kernels/recurrence_gated.cu` where keys decay alike, and
//! for `kernels/recurrence_parallel.cu` where each decays by itself; the others are for `kernels/recurrence.cu`.

use super::chunks::CHUNK;
use super::extents::{Extents, LEAST, SHARED_OF_ALL, THREADS};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, flag, grid, input,
    numbers, output,
};

pub(in crate::prims) const RECURRENCE_GATED: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../../kernels/lines.cuh"),
    include_str!("../../../kernels/chunk_numbers.cuh"),
    include_str!("../../../kernels/recurrence_gated.cuh"),
    include_str!("../../../kernels/recurrence_gated.cu")
))
.with_tiles()
.early_launch();

/// Keys of a head at most: those of a chunk are in shared memory.
const MAX_KEY: usize = 256;

/// Keys, and values, that are copied at once.
const WIDE: usize = 8;

/// Columns of the state to a block that goes from chunk to chunk, and to one that computes outputs, as the kernels have them.
const TILE: usize = 16;
const OUTPUT_COLUMNS: usize = 64;

/// Bytes of a chunk and head: its sums of decays and what follows from them, and the solution of its triangular system.
const FACTORS_BYTES: usize = CHUNK * 5 * size_of::<f32>();
const SYSTEM_BYTES: usize = 10 * 3 * 512;

/// Bytes of shared memory that `gated_states` declares with the delta rule.
const DECLARED_BYTES: usize = 12 << 10;

/// Are heads of so many keys and values taken?
pub(crate) fn takes_gated(key: usize, value: usize) -> bool {
    key > 0 && key <= MAX_KEY && key.is_multiple_of(WIDE) && value > 0 && value.is_multiple_of(WIDE)
}

/// The recurrence of bf16 `q`, `k` and `v` with a weight for each head of a token, by the delta rule or not; by that, keys of a head decay alike.
pub(crate) fn gated(spec: &CudaKernelSpec<'_>, delta: bool) -> Result<CudaKernel, String> {
    let [q, _, v, _, decay, table, lines, _] = &spec.inputs[..] else { return Err("takes eight inputs".into()) };
    let all = Extents {
        tokens: q.shape[0],
        rows: lines.shape[0],
        groups: q.shape[1],
        heads: v.shape[1],
        key: q.shape[2],
        value: v.shape[2],
        low_rank: delta,
        lines: Some(table.shape[0]),
        gated: true,
    };
    let decays = decay.shape[2];
    if all.heads == 0 {
        return Ok(CudaKernel::default());
    }
    // Where all rows have a token or more, one may have enough of them.
    if all.rows == 0 || all.tokens + 1 < all.rows + LEAST {
        return Ok(all.token_by_token(decays, i32::MAX as usize));
    }
    let (mut actions, scratch, shared) = if decays > 1 { all.at_once(decays)? } else { in_chunks(&all)? };
    actions.extend(all.token_by_token(decays, LEAST).actions);
    if shared > SHARED_OF_ALL {
        let otherwise = all.token_by_token(decays, i32::MAX as usize).actions;
        actions = vec![DeviceAction::ByArch { arch: "sm_90a", actions, otherwise }];
    }
    Ok(CudaKernel { actions, scratch })
}

/// The launches that take rows of at least [`LEAST`] tokens in chunks, the bytes of their scratch, and the most bytes of shared memory
/// that one takes.
fn in_chunks(all: &Extents) -> Result<(Vec<DeviceAction>, usize, u32), String> {
    let delta = all.low_rank;
    let key = all.key.to_string();
    let defines = [("KEY", &*key), ("DELTA", flag(delta)), ("LINES", "1")];
    let [unit, extra, chunks] = all.numbering();
    let extents = [all.tokens, all.rows, all.groups, all.heads, all.value, all.lines.unwrap_or(0), unit, extra, chunks];
    let (depth, tiles, of_heads) = (all.key.next_multiple_of(64), all.value.div_ceil(TILE), chunks * all.heads);
    let with_delta = |n: usize| if delta { n } else { 0 };
    // What is between the launches: factors, systems, states and updates.
    let sizes = [
        of_heads * FACTORS_BYTES,
        with_delta(of_heads * SYSTEM_BYTES),
        of_heads * tiles * depth * TILE * size_of::<f32>(),
        with_delta(of_heads * tiles * CHUNK * TILE * size_of::<f32>()),
    ];
    let mut scratch = 0;
    let [factors, systems, states, updates] = sizes.map(|bytes| {
        let at = scratch;
        scratch += bytes;
        LaunchArg::Pointer(OperandSlot::Scratch, at)
    });
    // As the kernels lay out shared memory.
    let keys = CHUNK * depth * size_of::<u16>();
    let values = |columns: usize| CHUNK * columns * size_of::<u16>();
    let system = CHUNK * (CHUNK + 4) * size_of::<f32>();
    let for_systems = with_delta(system + system.max(keys));
    let stage = keys + values(TILE) + 2 * CHUNK * size_of::<f32>() + with_delta(SYSTEM_BYTES);
    let for_states = 2 * stage + with_delta(THREADS as usize / 32 * CHUNK * TILE * size_of::<f32>());
    let for_outputs =
        2 * keys + OUTPUT_COLUMNS * depth * size_of::<u16>() + values(OUTPUT_COLUMNS) * if delta { 2 } else { 1 };
    let launch = |entry: &str, [blocks, threads, shared]: [usize; 3], args: Vec<LaunchArg>| {
        let args = args.into_iter().chain([numbers(&extents)]).collect();
        let source = CudaSource::new(entry, &defines, &RECURRENCE_GATED);
        Ok::<_, String>(grid(source, [blocks, 1, 1], threads as u32, args)?.with_shared(shared as u32).actions)
    };
    let [q, k, v, weight, decay, table, lines, starts] = [0, 1, 2, 3, 4, 5, 6, 7].map(input);
    let of_systems = vec![k.clone(), weight, decay, starts.clone(), factors.clone(), systems.clone()];
    let of_states = [&k, &v, &table, &starts, &lines, &factors, &systems, &states, &updates, &output(1)];
    let of_outputs =
        vec![q, k.clone(), v.clone(), starts.clone(), factors.clone(), states.clone(), updates.clone(), output(0)];
    let (for_rows, for_columns) = (all.rows * all.heads * tiles, of_heads * all.value.div_ceil(OUTPUT_COLUMNS));
    let threads = THREADS as usize;
    let actions = [
        launch("gated_systems", [of_heads, threads, for_systems], of_systems)?,
        launch("gated_states", [for_rows, threads, for_states], of_states.map(Clone::clone).to_vec())?,
        launch("gated_outputs", [for_columns, threads, for_outputs], of_outputs)?,
    ];
    let most = for_systems.max(for_states + with_delta(DECLARED_BYTES)).max(for_outputs);
    Ok((actions.concat(), scratch, most as u32))
}
