//! Reductions, scans and the index of the largest element along an axis: `kernels/along.cu`.

use ridge_graph::Combine;

use crate::fused::combine;
use crate::iteration_space::around;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, blocks, each, input, name, numbers, output};

pub(super) const ALONG: KernelText<'_> = KernelText::new(include_str!("../../kernels/along.cu"));

pub(super) fn reduce(spec: &CudaKernelSpec<'_>, op: Combine, axis: usize) -> CudaKernel {
    let (outer, extent, inner) = around(&spec.inputs[0].shape, axis);
    let defines = [("REDUCE", "1"), ("D", name(spec.inputs[0].dtype)), ("OP", combine(op))];
    let args = vec![input(0), output(0), numbers(&[outer, extent, inner])];
    each(CudaSource::new("reduce", &defines, &ALONG), outer * inner, args)
}

pub(super) fn scan(spec: &CudaKernelSpec<'_>, op: Combine, axis: usize) -> CudaKernel {
    let (outer, extent, inner) = around(&spec.inputs[0].shape, axis);
    let defines = [("SCAN", "1"), ("D", name(spec.inputs[0].dtype)), ("OP", combine(op))];
    let args = vec![input(0), output(0), numbers(&[outer, extent, inner])];
    blocks(CudaSource::new("scan", &defines, &ALONG), outer * inner, 256, args)
}

pub(super) fn argmax(spec: &CudaKernelSpec<'_>, axis: usize) -> CudaKernel {
    let x = &spec.inputs[0];
    let (outer, extent, inner) = around(&x.shape, axis);
    let source = CudaSource::new("argmax", &[("ARGMAX", "1"), ("D", name(x.dtype))], &ALONG);
    blocks(source, outer * inner, 256, vec![input(0), output(0), numbers(&[outer, extent, inner])])
}
