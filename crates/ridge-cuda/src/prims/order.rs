//! Sorting and the index of the largest.

use super::ALONG;
use crate::kernel::{Arg, Kernel, Slot, Source, Spec, blocks, input, name, numbers, output};
use crate::space::around;

const SORT: &str = include_str!("../../kernels/sort.cu");

/// Lines that are sorted at once, each in scratch memory of its own.
const MOST_LINES: usize = 256;

pub(super) fn argmax(spec: &Spec<'_>, axis: usize) -> Kernel {
    let x = &spec.inputs[0];
    let (outer, extent, inner) = around(&x.shape, axis);
    let source = Source::new("argmax", &[("ARGMAX", "1"), ("D", name(x.dtype))], ALONG);
    blocks(source, outer * inner, 256, vec![input(0), output(0), numbers(&[outer, extent, inner])])
}

pub(super) fn sort(spec: &Spec<'_>, axis: usize, descending: bool) -> Result<Kernel, String> {
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
    let lines = (outer * inner).min(MOST_LINES);
    let defines = [("D", name(x.dtype)), ("DESCENDING", if descending { "true" } else { "false" })];
    let scratch = Arg::Pointer(Slot::Scratch, 0);
    let args = vec![input(0), output(0), output(1), scratch, numbers(&[outer, extent, inner, keep, size])];
    let threads = (size / 2).clamp(32, 1024) as u32;
    let mut kernel = blocks(Source::new("sort", &defines, SORT), lines, threads, args);
    kernel.scratch = lines * size * 4;
    Ok(kernel)
}
