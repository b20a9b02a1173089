//! The weighted average of RWKV-4: `kernels/wkv.cu`.

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, blocks, input, numbers, output};

pub(super) const WKV: KernelText<'_> = KernelText::new(include_str!("../../kernels/wkv.cu"));

/// Threads of a block, as the kernel has them: a channel each.
const THREADS: usize = 128;

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![CudaKernelEntry::new("wkv", "wkv(k, v, w, u, state, seq_ids, query_start)", |_| true, wkv)]
}

fn wkv(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let [k, _, _, _, state, ..] = &spec.inputs[..] else { return Err("takes seven inputs".into()) };
    let (tokens, channels, rows) = (k.shape[0], k.shape[1], state.shape[0]);
    if channels == 0 {
        return Ok(CudaKernel::default());
    }
    let args = [0, 1, 2, 3, 4, 6].map(input).into_iter().chain([output(0), output(1)]);
    let args = args.chain([numbers(&[tokens, rows, channels])]).collect();
    Ok(blocks(CudaSource::new("wkv", &[], &WKV), rows * channels.div_ceil(THREADS) + 1, THREADS as u32, args))
}
