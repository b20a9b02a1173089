//! Causal convolutions of a few taps: `kernels/causal_conv1d.cu`.

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, each, input, name, numbers, output};

pub(super) const CAUSAL: KernelText<'_> =
    KernelText::new(include_str!("../../kernels/causal_conv1d.cu")).early_launch();

/// Taps at most: a thread has the inputs of all in registers.
const MAX_TAPS: usize = 32;

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let pattern = "causal_conv1d(x, w, state, ids, starts)";
    let short = |body: &ridge_graph::Function| {
        body.args[1].ty.shape.last().as_const().is_some_and(|taps| (2..=MAX_TAPS).contains(&taps))
    };
    vec![CudaKernelEntry::new("causal_conv1d", pattern, short, make)]
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let (x, w, state) = (&spec.inputs[0], &spec.inputs[1], &spec.inputs[2]);
    let defines = [("D", name(x.dtype)), ("W", name(w.dtype)), ("TAPS", &*w.shape[1].to_string())];
    let args = (0..5).map(input).chain([output(0), output(1)]);
    let args = args.chain([numbers(&[x.shape[0], x.shape[1], state.shape[0]])]).collect();
    Ok(each(CudaSource::new("causal_conv1d", &defines, &CAUSAL), x.len() + state.len(), args))
}
