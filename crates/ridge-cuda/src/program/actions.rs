//! The actions of a bucket in order, with the alternatives chosen that this device has.

use std::sync::Arc;

use ridge_runtime::{Plan, PlannedLaunch, Region, Result};

use super::layout::ALIGN;
use crate::args;
use crate::cublaslt::CublasProduct;
use crate::device::{CudaDevice, LoadedKernel};
use crate::kernel::{CudaKernel, DeviceAction, LaunchArg, OperandSlot, SlotOffset};

/// What a launch does.
pub(super) enum BoundWork {
    /// A kernel, with `params` of its arguments from `first` on in the words of a bucket, each so many words long.
    Launch {
        kernel: Arc<LoadedKernel>,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        /// May it begin before the launch ahead of it has ended?
        early: bool,
        first: usize,
        args: Vec<LaunchArg>,
    },
    /// A product by cuBLASLt of x, w, perhaps a summand, the result, and perhaps the scales of x and w.
    Product {
        product: CublasProduct,
        operands: Box<[SlotOffset; 6]>,
    },
    Copy {
        from: OperandSlot,
        to: OperandSlot,
        to_offset: usize,
        bytes: usize,
    },
    /// A copy from the block of constants.
    Constant {
        at: usize,
        to: OperandSlot,
        bytes: usize,
    },
}

/// One action of one launch of the plan.
pub(super) struct BoundAction {
    pub(super) launch: usize,
    pub(super) work: BoundWork,
}

/// The actions of a plan, and what they need.
pub(super) struct BoundActions {
    pub(super) actions: Vec<BoundAction>,
    /// Words of all launches' arguments.
    pub(super) words: usize,
    /// Maximum number of arguments of a launch.
    pub(super) max_args: usize,
    /// What is copied from the block of constants.
    pub(super) constants: Vec<u8>,
}

impl BoundActions {
    /// The actions of `plan`, whose launches run `kernels`. Loads the kernels, and autotunes where there are alternatives.
    pub(super) fn new(device: &CudaDevice, plan: &Plan, kernels: &[CudaKernel]) -> Result<Self> {
        let (mut bound, mut words, mut max_args): (Vec<BoundAction>, _, _) = (Vec::new(), 0, 0);
        let mut constants: Vec<u8> = Vec::new();
        for (index, launch) in plan.launches.iter().enumerate() {
            let mut actions: Vec<&DeviceAction> = kernels[launch.kernel].actions.iter().rev().collect();
            while let Some(action) = actions.pop() {
                let work = match action {
                    DeviceAction::Product { shape, x, w, r, y, scales, otherwise } => match device.product(*shape) {
                        Some(product) => {
                            let [xs, ws] = scales.unwrap_or([*x, *w]);
                            let operands = Box::new([*x, *w, r.unwrap_or(*y), *y, xs, ws]);
                            BoundWork::Product { product, operands }
                        }
                        None => {
                            actions.extend(otherwise.iter().rev());
                            continue;
                        }
                    },
                    DeviceAction::Autotuned { key, operands, candidates } => {
                        let choice = device.fastest(key, operands, candidates);
                        actions.extend(candidates[choice].actions.iter().rev());
                        continue;
                    }
                    DeviceAction::Launch { source, grid, threads, shared, args, prefetched } => {
                        let first = words;
                        words += args.iter().map(args::words).sum::<usize>();
                        max_args = max_args.max(args.len());
                        let kernel = device.kernel(source)?;
                        kernel.reserve(*shared)?;
                        let (grid, threads, shared) = (device.grid(source, *grid), *threads, *shared);
                        let behind = matches!(bound.last(), Some(BoundAction { work: BoundWork::Launch { .. }, .. }));
                        let early =
                            behind && device.overlaps() && source.early_launch && may_prefetch(launch, prefetched);
                        BoundWork::Launch { kernel, grid, threads, shared, early, first, args: args.clone() }
                    }
                    DeviceAction::Copy { from, to, to_offset, bytes } => {
                        BoundWork::Copy { from: *from, to: *to, to_offset: *to_offset, bytes: *bytes }
                    }
                    DeviceAction::Constant { bytes, to } => {
                        let at = constants.len().next_multiple_of(ALIGN);
                        constants.resize(at, 0);
                        constants.extend_from_slice(bytes);
                        BoundWork::Constant { at, to: *to, bytes: bytes.len() }
                    }
                };
                bound.push(BoundAction { launch: index, work });
            }
        }
        Ok(Self { actions: bound, words, max_args, constants })
    }
}

/// Are these operands complete before the step's first launch? Launches that overlap write all others.
fn may_prefetch(launch: &PlannedLaunch, prefetched: &[OperandSlot]) -> bool {
    prefetched.iter().all(|slot| match slot {
        OperandSlot::Input(i) => matches!(launch.inputs[*i].region, Region::Weight(_) | Region::Input(_)),
        OperandSlot::Output(_) | OperandSlot::Scratch => false,
    })
}

#[cfg(test)]
mod tests {
    use ridge_runtime::Place;

    use super::*;

    #[test]
    fn only_operands_that_no_launch_writes_are_prefetched() {
        let regions = [Region::Weight(0), Region::Input(3), Region::Arena, Region::State(1), Region::Output(0)];
        let inputs = regions.map(|region| Place { region, offset: 0 }).to_vec();
        let launch = PlannedLaunch { kernel: 0, inputs, outputs: Vec::new(), path: Vec::new() };
        let may =
            |slots: &[usize]| may_prefetch(&launch, &slots.iter().map(|i| OperandSlot::Input(*i)).collect::<Vec<_>>());
        assert!(may(&[]) && may(&[0]) && may(&[0, 1]));
        assert!(!may(&[0, 2]) && !may(&[3]) && !may(&[4]));
        assert!(!may_prefetch(&launch, &[OperandSlot::Scratch]));
    }
}
