//! A step of AdamW in place: `kernels/adamw.cu`.

use ridge_graph::ops::AdamWUpdate;

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, blocks, input, name, numbers, output};

pub(super) const UPDATE: KernelText<'_> = KernelText::new(include_str!("../../kernels/adamw.cu"));

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("adamw_update", "adamw_update(p, m, v, g, lr, step, scale)", |_| true, make),
        CudaKernelEntry::new("adamw_update_copy", "adamw_update(p, m, v, g, lr, step, scale, copy)", |_| true, make),
    ]
}

/// Threads of a block, and elements that a thread takes at a time.
const THREADS: u32 = 256;
const PART: usize = 4;

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<AdamWUpdate>().ok_or("no update in the group")?;
    let a = &op.adamw;
    let numeric = [("BETA1", a.beta1), ("BETA2", a.beta2), ("EPS", a.eps), ("DECAY", a.weight_decay)]
        .map(|(name, value)| (name, format!("{value:e}")));
    // Without a copy its pointer stands for nothing.
    let (copied, copy) = if op.copy { ("1", 3) } else { ("0", 0) };
    let mut defines = vec![("G", name(spec.inputs[3].dtype)), ("COPY", copied), ("C", name(spec.outputs[copy].dtype))];
    defines.extend(numeric.iter().map(|(name, value)| (*name, value.as_str())));
    let elements = spec.inputs[0].len();
    let args = vec![
        output(0),
        output(1),
        output(2),
        input(3),
        input(4),
        input(5),
        input(6),
        output(copy),
        numbers(&[elements]),
    ];
    let source = CudaSource::new("adamw_update", &defines, &UPDATE);
    Ok(blocks(source, elements.div_ceil(THREADS as usize * PART), THREADS, args))
}
