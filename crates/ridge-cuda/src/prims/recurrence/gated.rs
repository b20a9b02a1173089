//! Recurrences of operands in bf16 whose keys decay alike, over lines of a table: `kernels/recurrence_gated.cu` for rows of many tokens, and
//! `kernels/recurrence.cu` for the others.

use super::chunks::CHUNK;
use super::extents::{COLUMNS, Extents, LEAST, RECURRENCE, SHARED_OF_ALL, THREADS};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, blocks, grid, input,
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

/// The recurrence of bf16 `q`, `k` and `v` with a weight for each head of a token, by the delta rule or not.
pub(crate) fn gated(spec: &CudaKernelSpec<'_>, delta: bool) -> Result<CudaKernel, String> {
    let [q, _, v, _, _, table, lines, _] = &spec.inputs[..] else { return Err("takes eight inputs".into()) };
    let all = Extents {
        tokens: q.shape[0],
        rows: lines.shape[0],
        groups: q.shape[1],
        heads: v.shape[1],
        key: q.shape[2],
        value: v.shape[2],
        low_rank: delta,
        lines: Some(table.shape[0]),
    };
    if all.heads == 0 {
        return Ok(CudaKernel::default());
    }
    // Where all rows have a token or more, one may have enough of them.
    if all.rows == 0 || all.tokens + 1 < all.rows + LEAST {
        return Ok(few(&all, i32::MAX as usize));
    }
    let (mut actions, scratch, shared) = in_chunks(&all)?;
    actions.extend(few(&all, LEAST).actions);
    if shared > SHARED_OF_ALL as usize {
        let otherwise = few(&all, i32::MAX as usize).actions;
        actions = vec![DeviceAction::ByArch { arch: "sm_90a", actions, otherwise }];
    }
    Ok(CudaKernel { actions, scratch })
}

fn flag(is: bool) -> &'static str {
    if is { "1" } else { "0" }
}

/// The launch that takes the rows of fewer than `least` tokens, token by token.
fn few(all: &Extents, least: usize) -> CudaKernel {
    let [key, least] = [all.key, least].map(|n| n.to_string());
    let defines = [
        ("KEY", &*key),
        ("DECAYS", "1"),
        ("LOW_RANK", flag(all.low_rank)),
        ("LEAST", &*least),
        ("LINES", "1"),
        ("GATED", "1"),
        ("OPERAND", "BF16"),
    ];
    // `write` is not read.
    let args =
        [0, 1, 2, 4, 5, 7, 3, 3, 6].map(input).into_iter().chain([output(0), output(1), all.numbers()]).collect();
    let pieces = all.rows * all.heads * all.value.div_ceil(COLUMNS) + 1;
    blocks(CudaSource::new("recurrence", &defines, &RECURRENCE), pieces, THREADS, args)
}

/// The launches that take rows of at least [`LEAST`] tokens in chunks, the bytes of their scratch, and the most bytes of shared memory
/// that one takes.
fn in_chunks(all: &Extents) -> Result<(Vec<DeviceAction>, usize, usize), String> {
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
    Ok((actions.concat(), scratch, most))
}
