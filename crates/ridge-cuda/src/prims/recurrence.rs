//! Linear recurrences: `kernels/recurrence.cu`.

use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, blocks, input, numbers, output};

pub(super) const RECURRENCE: KernelText<'_> = KernelText::new(include_str!("../../kernels/recurrence.cu"));

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
