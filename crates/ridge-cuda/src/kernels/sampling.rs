//! Sampling: `kernels/sample.cu`.

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, grid, input, name, numbers, output};

pub(super) const SAMPLE: KernelText<'_> = KernelText::new(include_str!("../../kernels/sample.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![CudaKernelEntry::new(
        "sample_token",
        "sample_token(logits, temperature, top_k, top_p, min_p, typical_p, seed, sequence, position)", // Sums of weights must fit their integers.
        |body| body.args[0].ty.shape.last().as_const().is_some_and(|vocab| vocab < 1 << 22),
        make,
    )]
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let logits = &spec.inputs[0];
    let args = (0..9).map(input).chain([output(0), numbers(&[logits.shape[1]])]).collect();
    grid(CudaSource::new("sample_token", &[("D", name(logits.dtype))], &SAMPLE), [logits.shape[0], 1, 1], 1024, args)
}
