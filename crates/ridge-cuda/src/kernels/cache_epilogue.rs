//! What `kernels/linear_rows.cu` takes of a paged cache, the first input, to which a group of linears writes keys and values.

use ridge_graph::ops::Rope;

use super::rope;
use crate::kernel::{CudaKernelSpec, LaunchArg, OperandSlot, input, name};

/// Where product `nth` goes: keys and values, the second and the third, to the cache, behind which the others are outputs.
pub(super) fn output_of(nth: usize) -> OperandSlot {
    OperandSlot::Output(usize::from(nth == 0))
}

/// Slots of the cache.
pub(super) fn slots(spec: &CudaKernelSpec<'_>) -> usize {
    let shape = &spec.inputs[0].shape;
    shape[0] * shape[3]
}

/// The definitions of the cache and of the rotation of keys.
pub(super) fn defines(spec: &CudaKernelSpec<'_>) -> Vec<(&'static str, String)> {
    let cache = &spec.inputs[0];
    let mut defines = vec![("CACHE", name(cache.dtype).to_owned())];
    defines.extend([("PAGE", cache.shape[3]), ("DIM", cache.shape[4])].map(|(name, n)| (name, n.to_string())));
    defines.extend(rope::rotation(spec.composite::<Rope>()));
    defines
}

/// Positions and slots, the last inputs. Without a rotation there are no positions, and none are read.
pub(super) fn args(spec: &CudaKernelSpec<'_>) -> [LaunchArg; 2] {
    let slots = spec.inputs.len() - 1;
    [input(slots - usize::from(spec.composite::<Rope>().is_some())), input(slots)]
}
