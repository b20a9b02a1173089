//! Sorting: `kernels/sort.cu`.

use crate::iteration_space::around;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, blocks, grid, input, name, numbers,
    output,
};

pub(super) const SORT: KernelText<'_> = KernelText::new(include_str!("../../kernels/sort.cu"));

/// Maximum number of lines that are sorted at once, each in scratch memory of its own.
const MAX_LINES: usize = 256;

/// Elements that are selected from a line at most, and from more than how many: fewer are sorted as fast.
const MAX_SELECTED: usize = 1024;
const LEAST_SELECTED_FROM: usize = 2048;

pub(super) fn sort(spec: &CudaKernelSpec<'_>, axis: usize, descending: bool) -> Result<CudaKernel, String> {
    let x = &spec.inputs[0];
    let (outer, extent, inner) = around(&x.shape, axis);
    let keep = spec.outputs[0].shape[axis];
    if keep > extent {
        return Err(format!("keeps {keep} of an extent of {extent}"));
    }
    if extent > i32::MAX as usize / 2 {
        return Err(format!("an extent of {extent} is beyond what its 32-bit indices number"));
    }
    let size = extent.next_power_of_two();
    let select = x.dtype.is_float() && keep > 0 && keep <= MAX_SELECTED && extent > LEAST_SELECTED_FROM;
    if select {
        let defines =
            [("SELECT", "1"), ("D", name(x.dtype)), ("DESCENDING", if descending { "true" } else { "false" })];
        let args = vec![input(0), output(0), output(1), numbers(&[outer, extent, inner, keep, size])];
        return grid(CudaSource::new("select_first", &defines, &SORT), [outer * inner, 1, 1], 1024, args);
    }
    let lines = (outer * inner).min(MAX_LINES);
    let defines = [("D", name(x.dtype)), ("DESCENDING", if descending { "true" } else { "false" })];
    let scratch = LaunchArg::Pointer(OperandSlot::Scratch, 0);
    let args = vec![input(0), output(0), output(1), scratch, numbers(&[outer, extent, inner, keep, size])];
    let threads = (size / 2).clamp(32, 1024) as u32;
    let mut kernel = blocks(CudaSource::new("sort", &defines, &SORT), lines, threads, args);
    kernel.scratch = lines * size * 4;
    Ok(kernel)
}
