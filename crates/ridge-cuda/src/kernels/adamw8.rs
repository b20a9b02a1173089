//! A step of AdamW with moments of 8 bits: `kernels/adamw8.cu`.

use ridge_graph::ops::AdamW8;

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, blocks, input, numbers, output};

pub(super) const STEP: KernelText<'_> = KernelText::new(include_str!("../../kernels/adamw8.cu"));

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![CudaKernelEntry::new("adamw8", "adamw8(p, g, m, m_scale, v, v_scale, lr, step)", |_| true, make)]
}

/// Threads of a block, of which each warp takes a block of moments at a time.
const THREADS: u32 = 256;
/// Blocks of moments that a warp takes, which share the tables that a block of threads brings to shared memory.
const SHARE: usize = 4;

/// The bits of f32 values, for an initialiser.
fn words(of: [Vec<f64>; 2]) -> String {
    let words = of.iter().flatten().map(|value| format!("{:#x}u", (*value as f32).to_bits()));
    words.collect::<Vec<_>>().join(",")
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<AdamW8>().ok_or("no step in the group")?;
    let a = &op.adamw;
    let numeric = [("BETA1", a.beta1), ("BETA2", a.beta2), ("EPS", a.eps), ("DECAY", a.weight_decay)]
        .map(|(name, value)| (name, format!("{value:e}")));
    let tables = [("MAPS", AdamW8::map as fn(bool) -> Vec<f64>), ("TREES", AdamW8::border_tree)]
        .map(|(name, table)| (name, words([true, false].map(table))));
    let defines: Vec<(&str, &str)> =
        numeric.iter().chain(&tables).map(|(name, value)| (*name, value.as_str())).collect();
    let count = spec.inputs[0].len() / AdamW8::BLOCK;
    let args = (0..8).map(input).chain((0..5).map(output)).chain([numbers(&[count])]).collect();
    let source = CudaSource::new("adamw8", &defines, &STEP);
    Ok(blocks(source, count.div_ceil(THREADS as usize / 32 * SHARE), THREADS, args))
}
