//! Where the values of a bucket are in device memory, and how much of it the bucket takes.

use std::ops::Range;

use ridge_runtime::{MemoryBytes, MemoryOwner, Plan, SLOTS, Staged};

use crate::cublaslt;
use crate::kernel::{CudaKernel, DeviceAction, ZERO_BYTES};

/// Alignment of values within a block of inputs, outputs or constants, in bytes.
pub(super) const ALIGN: usize = 256;

/// Where values of one kind are in one block.
pub(super) struct BlockLayout {
    /// The offset of each value, in bytes.
    pub(super) offsets: Vec<usize>,
    /// The size of each value, in bytes.
    pub(super) sizes: Vec<usize>,
    /// Bytes of the block.
    pub(super) total: usize,
}

impl BlockLayout {
    fn new(sizes: &[usize]) -> Self {
        let mut total = 0usize;
        let place = |size: &usize| {
            let at = total;
            total = (total + size).next_multiple_of(ALIGN);
            at
        };
        Self { offsets: sizes.iter().map(place).collect(), sizes: sizes.to_vec(), total }
    }

    /// The bytes of the block that hold what was staged, neighbours joined.
    pub(super) fn staged<'a>(&'a self, staged: &'a [Staged]) -> impl Iterator<Item = Range<usize>> + 'a {
        let mut rest =
            staged.iter().map(|s| (s.input, self.offsets[s.input]..self.offsets[s.input] + s.bytes)).peekable();
        std::iter::from_fn(move || {
            let (mut last, mut range) = rest.next()?;
            while let Some((input, next)) = rest.peek()
                // All of `last` was staged: only padding is between the two.
                && *input == last + 1 && range.end == self.offsets[last] + self.sizes[last]
            {
                (last, range.end) = (*input, next.end);
                rest.next();
            }
            Some(range)
        })
    }
}

/// The device memory of one bucket, besides weights and states.
pub(super) struct BucketLayout {
    /// Bytes of the workspace that all buckets of a device share: values of the plan, and scratch memory of the kernels.
    pub(super) arena: usize,
    /// Where the scratch memory begins in the workspace.
    pub(super) scratch_offset: usize,
    /// Where that of the lane of communication begins.
    pub(super) side_scratch_offset: usize,
    pub(super) inputs: BlockLayout,
    pub(super) outputs: BlockLayout,
    /// Bytes of the block of constants.
    pub(super) constants: usize,
    /// Where [`OperandSlot::Zeros`](crate::kernel::OperandSlot::Zeros) begin in it.
    pub(super) zeros_offset: usize,
    /// Bytes of the host that values are offloaded to, which all buckets of a device share.
    pub(super) host_arena: usize,
    /// Bytes of cuBLASLt's workspace, which all buckets of a device share; 0 where no kernel can use it.
    pub(super) library: usize,
}

impl BucketLayout {
    /// The layout of a bucket of `plan`, whose launches run `kernels`.
    pub(super) fn new(plan: &Plan, kernels: &[CudaKernel]) -> Self {
        let scratch = |communicates: bool| {
            let of_lane = plan.launches.iter().filter(|launch| launch.communicates == communicates);
            of_lane.map(|launch| kernels[launch.kernel].scratch).max().unwrap_or(0)
        };
        let scratch_offset = plan.arena_bytes.next_multiple_of(ALIGN);
        let side_scratch_offset = (scratch_offset + scratch(false)).next_multiple_of(ALIGN);
        let constants = plan.launches.iter().flat_map(|launch| &kernels[launch.kernel].actions);
        let constants = constants.fold(0, |end: usize, action| match action {
            DeviceAction::Constant { bytes, .. } => end.next_multiple_of(ALIGN) + bytes.len(),
            _ => end,
        });
        let zeros_offset = constants.next_multiple_of(ALIGN);
        let products = kernels.iter().flat_map(|k| &k.actions).any(may_be_product);
        Self {
            arena: side_scratch_offset + scratch(true),
            scratch_offset,
            side_scratch_offset,
            host_arena: plan.host_bytes,
            inputs: BlockLayout::new(&plan.input_bytes),
            outputs: BlockLayout::new(&plan.output_bytes),
            constants: zeros_offset + ZERO_BYTES,
            zeros_offset,
            library: if products { cublaslt::WORKSPACE } else { 0 },
        }
    }

    /// What the bucket has of its own.
    pub(super) fn own_memory(&self) -> MemoryBytes {
        MemoryBytes::default()
            .with(MemoryOwner::Inputs, self.inputs.total)
            .with(MemoryOwner::Outputs, self.outputs.total)
            .with(MemoryOwner::Constants, self.constants)
            .with(MemoryOwner::HostStaging, SLOTS * (self.inputs.total + self.outputs.total))
    }

    /// All of it.
    pub(super) fn memory(&self) -> MemoryBytes {
        let shared = self.own_memory().with(MemoryOwner::Workspace, self.arena);
        shared.with(MemoryOwner::HostWorkspace, self.host_arena).with(MemoryOwner::Library, self.library)
    }
}

/// May cuBLASLt run the action?
fn may_be_product(action: &DeviceAction) -> bool {
    match action {
        DeviceAction::Product { .. } => true,
        DeviceAction::Autotuned { candidates, .. } => candidates.iter().flat_map(|c| &c.actions).any(may_be_product),
        DeviceAction::ByArch { actions, otherwise, .. } => actions.iter().chain(otherwise).any(may_be_product),
        DeviceAction::Launch { .. }
        | DeviceAction::Copy { .. }
        | DeviceAction::Constant { .. }
        | DeviceAction::Collective(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use ridge_graph::{Bindings, Builder, DType, Type};
    use ridge_runtime::{lower, plan};

    use super::*;
    use crate::compile;
    use crate::kernels::CudaKernelRegistry;

    #[test]
    fn neighbours_that_were_staged_are_copied_as_one() {
        let layout = BlockLayout::new(&[100, 256, 4, 1000]);
        let ranges = |staged: &[(usize, usize)]| {
            let staged: Vec<Staged> =
                staged.iter().map(|(input, bytes)| Staged { input: *input, bytes: *bytes }).collect();
            layout.staged(&staged).collect::<Vec<_>>()
        };
        assert_eq!(ranges(&[(0, 100), (1, 256), (2, 4), (3, 1000)]), vec![0..1768]);
        assert_eq!(ranges(&[(0, 100), (2, 4), (3, 1000)]), [0..100, 512..1768]);
        // Behind a part, the rest of the input must stay.
        assert_eq!(ranges(&[(0, 100), (1, 8), (2, 4), (3, 0)]), [0..264, 512..768]);
        assert_eq!(ranges(&[]), []);
    }

    #[test]
    fn every_allocation_of_a_bucket_is_counted() {
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::BF16, [100, 64])).expect("fresh");
        let w = g.weight("w", Type::tensor(DType::BF16, [48, 64])).expect("fresh");
        let gain = g.weight("gain", Type::tensor(DType::BF16, [64])).expect("fresh");
        let h = g.rms_norm(x, gain, 1e-5).expect("types");
        let pair = [g.linear(h, w).expect("types"), g.linear(h, w).expect("types")];
        let y = g.add(pair[0], pair[1]).expect("types");
        let sorted = g.sort(y, 1, true, 7).expect("types");
        let outputs = vec![("y".into(), y), ("values".into(), sorted.0), ("indices".into(), sorted.1)];
        let graph = g.finish(outputs).expect("finishes");
        let registry = CudaKernelRegistry::builtin();
        let lowered = lower(&graph, &["y", "values", "indices"], &registry.claims()).expect("lowers");
        let plan = plan(&lowered, &Bindings::new()).expect("plans");
        let kernels =
            compile::kernels(&registry, &lowered, &plan, &Bindings::new(), &HashMap::new()).expect("are supported");
        let layout = BucketLayout::new(&plan, &kernels);
        let scratch = kernels.iter().map(|k| k.scratch).max().unwrap_or(0);
        assert!(scratch > 0, "the sort takes scratch memory");
        assert!(layout.arena >= plan.arena_bytes + scratch);
        assert_eq!(layout.inputs.total, 100 * 64 * 2);
        let sizes = [100 * 48 * 2, 100 * 7 * 2, 100 * 7 * 4].map(|n: usize| n.next_multiple_of(ALIGN));
        assert_eq!(layout.outputs.total, sizes.iter().sum::<usize>());
        assert_eq!(layout.library, cublaslt::WORKSPACE, "many rows of bf16 may go to cuBLASLt");
        let parts = [layout.arena, layout.inputs.total, layout.outputs.total, layout.constants, layout.library];
        assert_eq!(layout.memory().on_device(), parts.iter().sum::<usize>());
    }
}
