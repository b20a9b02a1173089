//! What a bucket does, launch by launch: kernels' actions with the ways chosen that this device has.

use std::sync::Arc;

use ridge_runtime::{Plan, Result};

use super::ALIGN;
use crate::args;
use crate::cublaslt::Product;
use crate::device::{Device, Loaded};
use crate::kernel::{Action, Arg, At, Kernel, Slot};

/// What a launch does.
pub(super) enum Work {
    /// A kernel, with `params` of its arguments from `first` on in the words of a bucket, each so many words long.
    Launch {
        kernel: Arc<Loaded>,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        /// May it begin before the launch ahead of it has ended?
        early: bool,
        first: usize,
        args: Vec<Arg>,
    },
    /// A product by cuBLASLt of x, w, perhaps a summand, and the result.
    Product {
        product: Product,
        operands: [At; 4],
    },
    Copy {
        from: Slot,
        to: Slot,
        to_offset: usize,
        bytes: usize,
    },
    /// A copy from the block of constants.
    Constant {
        at: usize,
        to: Slot,
        bytes: usize,
    },
}

/// One action of one launch of the plan.
pub(super) struct Step {
    pub(super) launch: usize,
    pub(super) work: Work,
}

/// The steps of a plan, and what they need.
pub(super) struct Steps {
    pub(super) steps: Vec<Step>,
    /// Words of all launches' arguments.
    pub(super) words: usize,
    /// Arguments of a launch at most.
    pub(super) most_args: usize,
    /// What is copied from the block of constants.
    pub(super) constants: Vec<u8>,
}

impl Steps {
    /// The steps of `plan`, whose launches run `kernels`. Loads them, and times what there are several ways for.
    pub(super) fn of(device: &Device, plan: &Plan, kernels: &[Kernel]) -> Result<Self> {
        let (mut steps, mut words, mut most_args) = (Vec::new(), 0, 0);
        let mut constants: Vec<u8> = Vec::new();
        for (index, launch) in plan.launches.iter().enumerate() {
            let mut actions: Vec<&Action> = kernels[launch.kernel].actions.iter().rev().collect();
            while let Some(action) = actions.pop() {
                let work = match action {
                    Action::Product { shape, x, w, r, y, otherwise } => match device.product(*shape) {
                        Some(product) => Work::Product { product, operands: [*x, *w, r.unwrap_or(*y), *y] },
                        None => {
                            actions.extend(otherwise.iter().rev());
                            continue;
                        }
                    },
                    Action::Fastest { key, operands, ways } => {
                        actions.extend(ways[device.fastest(key, operands, ways)].actions.iter().rev());
                        continue;
                    }
                    Action::Launch { source, grid, threads, shared, args } => {
                        let first = words;
                        words += args.iter().map(args::words).sum::<usize>();
                        most_args = most_args.max(args.len());
                        let kernel = device.kernel(source)?;
                        kernel.reserve(*shared)?;
                        let (grid, threads, shared) = (device.grid(source, *grid), *threads, *shared);
                        let behind = matches!(steps.last(), Some(Step { work: Work::Launch { .. }, .. }));
                        let early = behind && device.overlaps() && source.waits();
                        Work::Launch { kernel, grid, threads, shared, early, first, args: args.clone() }
                    }
                    Action::Copy { from, to, to_offset, bytes } => {
                        Work::Copy { from: *from, to: *to, to_offset: *to_offset, bytes: *bytes }
                    }
                    Action::Constant { bytes, to } => {
                        let at = constants.len().next_multiple_of(ALIGN);
                        constants.resize(at, 0);
                        constants.extend_from_slice(bytes);
                        Work::Constant { at, to: *to, bytes: bytes.len() }
                    }
                };
                steps.push(Step { launch: index, work });
            }
        }
        Ok(Self { steps, words, most_args, constants })
    }
}
