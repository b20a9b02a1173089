//! Linear recurrences and their gradients: `kernels/recurrence.cu` and `kernels/recurrence_gradient.cu`.

use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, blocks, input, numbers, output,
};

pub(super) const RECURRENCE: KernelText<'_> = KernelText::new(include_str!("../../kernels/recurrence.cu"));
pub(super) const RECURRENCE_GRADIENT: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/recurrence_gradient.cu"));

/// Columns of the state and threads of a block, as the kernel has them.
const COLUMNS: usize = 32;
const THREADS: u32 = 128;

/// Keys of a head at most: a thread keeps a quarter of a column of the state in registers.
const MAX_KEY: usize = 512;

pub(super) fn recurrence(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let [q, _, v, decay, state, ..] = &spec.inputs[..] else { return Err("takes six inputs or eight".into()) };
    let (tokens, groups, key) = (q.shape[0], q.shape[1], q.shape[2]);
    let (rows, heads, value) = (state.shape[0], v.shape[1], v.shape[2]);
    if key > MAX_KEY {
        return Err(format!("has {key} keys a head, at most {MAX_KEY}"));
    }
    let low_rank = spec.inputs.len() == 8;
    if key * heads * value == 0 {
        return Ok(CudaKernel::default());
    }
    let [key_text, decays] = [key, decay.shape[2]].map(|n| n.to_string());
    let defines = [("KEY", &*key_text), ("DECAYS", &*decays), ("LOW_RANK", if low_rank { "1" } else { "0" })];
    // Without a part of low rank its operands are not read.
    let of_rank = if low_rank { [6, 7] } else { [0, 0] };
    let args = (0..6).chain(of_rank).map(input).chain([output(0), output(1)]);
    let args = args.chain([numbers(&[tokens, rows, groups, heads, value])]).collect();
    let pieces = rows * heads * value.div_ceil(COLUMNS) + 1;
    Ok(blocks(CudaSource::new("recurrence", &defines, &RECURRENCE), pieces, THREADS, args))
}

/// Keys of a head at most for its gradient: a thread keeps a quarter of a column of two states in registers.
const MAX_KEY_OF_GRADIENT: usize = 256;

/// Blocks at most, each of which has states in scratch.
const MAX_BLOCKS_WITH_STATES: usize = 264;

pub(super) fn recurrence_gradient(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let [q, _, v, decay, state, ..] = &spec.inputs[..] else { return Err("takes eight inputs or ten".into()) };
    let (tokens, groups, key) = (q.shape[0], q.shape[1], q.shape[2]);
    let (rows, heads, value) = (state.shape[0], v.shape[1], v.shape[2]);
    if key > MAX_KEY_OF_GRADIENT {
        return Err(format!("has {key} keys a head, at most {MAX_KEY_OF_GRADIENT} for its gradient"));
    }
    let low_rank = spec.inputs.len() == 10;
    if key * heads * value == 0 {
        return Ok(CudaKernel::default());
    }
    let [key_text, decays] = [key, decay.shape[2]].map(|n| n.to_string());
    let defines = [("KEY", &*key_text), ("DECAYS", &*decays), ("LOW_RANK", if low_rank { "1" } else { "0" })];
    // Without a part of low rank its operands are neither read nor written.
    let (of_rank, to_rank, dy) = if low_rank { ([6, 7], [5, 6], 8) } else { ([0, 0], [0, 0], 6) };
    let inputs = (0..6).chain(of_rank).chain([dy, dy + 1]).map(input);
    let stretch = (1..).find(|n| n * n >= tokens).unwrap_or(1).max(1);
    let grid = (rows * heads + 1).min(MAX_BLOCKS_WITH_STATES);
    let states = grid * 2 * stretch * key.div_ceil(4) * THREADS as usize * size_of::<f32>();
    let args = inputs.chain((0..5).chain(to_rank).map(output)).chain([LaunchArg::Pointer(OperandSlot::Scratch, 0)]);
    let args = args.chain([numbers(&[tokens, rows, groups, heads, value, stretch])]).collect();
    let source = CudaSource::new("recurrence_gradient", &defines, &RECURRENCE_GRADIENT);
    Ok(CudaKernel { scratch: states, ..blocks(source, grid, THREADS, args) })
}
