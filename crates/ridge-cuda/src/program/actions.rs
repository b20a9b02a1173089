//! The actions of a bucket in order, with the alternatives chosen that this device has.

use std::ops::Range;
use std::sync::Arc;

use ridge_runtime::{Place, Plan, PlannedLaunch, Region, Result};

use super::layout::ALIGN;
use crate::args;
use crate::communicator::Communicator;
use crate::cublaslt::CublasProduct;
use crate::device::{CudaDevice, LoadedKernel};
use crate::kernel::{CollectiveAction, CudaKernel, DeviceAction, LaunchArg, OperandSlot, SlotOffset, ZERO_BYTES};

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
    /// A product by cuBLASLt of x, w, perhaps a summand, the result, and perhaps a bias, pre-activations, and the scales of x and w.
    Product {
        product: CublasProduct,
        operands: Box<[SlotOffset; 8]>,
    },
    Copy {
        from: OperandSlot,
        to: OperandSlot,
        to_offset: usize,
        bytes: usize,
    },
    Collective {
        communicator: Arc<Communicator>,
        action: CollectiveAction,
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
    /// What is copied from the block of constants, and [`OperandSlot::Zeros`] behind it.
    pub(super) constants: Vec<u8>,
}

impl BoundActions {
    /// The actions of `plan`, whose launches run `kernels`. Loads the kernels, and autotunes where there are alternatives.
    pub(super) fn new(device: &CudaDevice, plan: &Plan, kernels: &[CudaKernel]) -> Result<Self> {
        let (mut bound, mut words, mut max_args): (Vec<BoundAction>, _, _) = (Vec::new(), 0, 0);
        let mut constants: Vec<u8> = Vec::new();
        let mut order = LaunchOrder::default();
        let mut waited = 0;
        for (index, launch) in plan.launches.iter().enumerate() {
            if index == plan.cut {
                // A segment begins as a step does.
                order = LaunchOrder::default();
            }
            if launch.after > waited {
                waited = launch.after;
                order.wait_for_another_lane();
            }
            let mut actions: Vec<&DeviceAction> = kernels[launch.kernel].actions.iter().rev().collect();
            while let Some(action) = actions.pop() {
                let work = match action {
                    DeviceAction::Product { shape, x, w, r, bias, aux, y, scales, otherwise } => {
                        match device.product(*shape)? {
                            Some(product) => {
                                let [xs, ws] = scales.unwrap_or([*x, *w]);
                                let [r, bias, aux] = [r, bias, aux].map(|at| at.unwrap_or(*y));
                                let operands = Box::new([*x, *w, r, *y, bias, aux, xs, ws]);
                                BoundWork::Product { product, operands }
                            }
                            None => {
                                actions.extend(otherwise.iter().rev());
                                continue;
                            }
                        }
                    }
                    DeviceAction::Autotuned { key, operands, candidates } => {
                        let choice = device.fastest(key, operands, candidates)?;
                        actions.extend(candidates[choice].actions.iter().rev());
                        continue;
                    }
                    DeviceAction::ByArch { arch, actions: there, otherwise } => {
                        let chosen = if device.arch() == *arch { there } else { otherwise };
                        actions.extend(chosen.iter().rev());
                        continue;
                    }
                    DeviceAction::Launch { source, grid, threads, shared, args, prefetched } => {
                        let first = words;
                        words += args.iter().map(args::words).sum::<usize>();
                        max_args = max_args.max(args.len());
                        let kernel = device.kernel(source)?;
                        kernel.reserve(*shared)?;
                        let (grid, threads, shared) = (device.grid(source, *grid), *threads, *shared);
                        let early = device.overlaps() && source.early_launch && order.allows_early(launch, prefetched);
                        BoundWork::Launch { kernel, grid, threads, shared, early, first, args: args.clone() }
                    }
                    DeviceAction::Copy { from, to, to_offset, bytes } => {
                        BoundWork::Copy { from: *from, to: *to, to_offset: *to_offset, bytes: *bytes }
                    }
                    DeviceAction::Collective(action) => {
                        let communicator = device.communicator(&action.axis)?;
                        BoundWork::Collective { communicator, action: action.clone() }
                    }
                    DeviceAction::Constant { bytes, to } => {
                        let at = constants.len().next_multiple_of(ALIGN);
                        constants.resize(at, 0);
                        constants.extend_from_slice(bytes);
                        BoundWork::Constant { at, to: *to, bytes: bytes.len() }
                    }
                };
                order.follow(launch, &plan.kernels[launch.kernel].output_bytes, &work);
                bound.push(BoundAction { launch: index, work });
            }
        }
        constants.resize(constants.len().next_multiple_of(ALIGN) + ZERO_BYTES, 0);
        Ok(Self { actions: bound, words, max_args, constants })
    }
}

/// Which launches of a step may begin before the one ahead of them has ended.
///
/// An early launch waits for its predecessor before it reads or writes anything but what it prefetches. Its predecessor
/// may be early too, so when it prefetches, all launches back to the last one that was not early may still run: it may
/// prefetch what none of these writes. The first launch of a step is not early, so whatever earlier steps wrote, of this
/// program or another, is complete.
///
/// A value of the workspace keeps its place until the last launch that reads it, and whatever takes the place then waits for
/// that one. So the first launch that prefetches a value made in the step is not early, and those behind it may be.
#[derive(Default)]
struct LaunchOrder {
    /// Is the last action a kernel's launch, which alone can let others begin?
    behind_launch: bool,
    /// What was written since the last action that began after all others had ended, and by it.
    unsettled: Vec<Written>,
}

/// Memory that a launch writes: bytes of the workspace, or all of another block.
struct Written {
    region: Region,
    bytes: Range<usize>,
}

impl Written {
    fn new(place: &Place, bytes: usize) -> Self {
        let end = place.offset + bytes;
        Self {
            region: place.region,
            bytes: if place.region == Region::Arena { place.offset..end } else { 0..usize::MAX },
        }
    }

    /// Is a value at `place` this one, a part of it, or a view?
    fn has(&self, place: &Place) -> bool {
        self.region == place.region && self.bytes.contains(&place.offset)
    }
}

impl LaunchOrder {
    /// May the next action begin early, as a launch that prefetches these operands?
    fn allows_early(&self, launch: &PlannedLaunch, prefetched: &[OperandSlot]) -> bool {
        self.behind_launch
            && prefetched.iter().all(|slot| match slot {
                OperandSlot::Input(i) => {
                    let place = &launch.inputs[*i];
                    let kept = match place.region {
                        Region::Weight(_) | Region::State(_) | Region::Input(_) | Region::Arena => true,
                        Region::Host | Region::Output(_) => false,
                    };
                    kept && !self.unsettled.iter().any(|written| written.has(place))
                }
                OperandSlot::Output(_) | OperandSlot::Scratch | OperandSlot::Zeros => false,
            })
    }

    /// Takes an action of `launch` into account.
    fn follow(&mut self, launch: &PlannedLaunch, bytes: &[usize], work: &BoundWork) {
        let (is_launch, early) = match work {
            BoundWork::Launch { early, .. } => (true, *early),
            BoundWork::Product { .. }
            | BoundWork::Copy { .. }
            | BoundWork::Constant { .. }
            | BoundWork::Collective { .. } => (false, false),
        };
        self.record(launch, bytes, is_launch && !launch.communicates, early);
    }

    /// The next action waits for what runs beside those before it.
    fn wait_for_another_lane(&mut self) {
        self.behind_launch = false;
    }

    fn record(&mut self, launch: &PlannedLaunch, bytes: &[usize], is_launch: bool, early: bool) {
        if !early {
            self.unsettled.clear();
        }
        self.behind_launch = is_launch;
        self.unsettled.extend(launch.outputs.iter().zip(bytes).map(|(place, bytes)| Written::new(place, *bytes)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of each output.
    const BYTES: usize = 64;

    fn launch(inputs: &[Region], outputs: &[Region]) -> PlannedLaunch {
        let places = |regions: &[Region]| regions.iter().map(|region| Place { region: *region, offset: 0 }).collect();
        at_places(places(inputs), places(outputs))
    }

    fn at_places(inputs: Vec<Place>, outputs: Vec<Place>) -> PlannedLaunch {
        PlannedLaunch { kernel: 0, inputs, outputs, path: Vec::new(), communicates: false, after: 0 }
    }

    /// A launch that reads `prefetched` and writes `written`, begun early where that is allowed: was it?
    fn add(order: &mut LaunchOrder, prefetched: &[Region], written: &[Region]) -> bool {
        follow(order, &launch(prefetched, written))
    }

    /// The same of a launch that prefetches all of its inputs.
    fn follow(order: &mut LaunchOrder, launch: &PlannedLaunch) -> bool {
        let slots: Vec<OperandSlot> = (0..launch.inputs.len()).map(OperandSlot::Input).collect();
        let early = order.allows_early(launch, &slots);
        order.record(launch, &vec![BYTES; launch.outputs.len()], true, early);
        early
    }

    const WEIGHT: Region = Region::Weight(0);
    const STATE: Region = Region::State(1);
    const ARENA: Region = Region::Arena;

    #[test]
    fn only_operands_of_the_device_that_are_complete_are_prefetched() {
        let regions = [WEIGHT, Region::Input(3), Region::Host, STATE, Region::Output(0), ARENA];
        let launch = launch(&regions, &[]);
        let order = LaunchOrder { behind_launch: true, unsettled: Vec::new() };
        let may = |slots: &[usize]| {
            order.allows_early(&launch, &slots.iter().map(|i| OperandSlot::Input(*i)).collect::<Vec<_>>())
        };
        assert!(may(&[]) && may(&[0]) && may(&[0, 1]) && may(&[3]) && may(&[5]));
        assert!(!may(&[0, 2]) && !may(&[4]));
        assert!(!order.allows_early(&launch, &[OperandSlot::Scratch]));
        assert!(!order.allows_early(&launch, &[OperandSlot::Output(0)]));
    }

    #[test]
    fn the_first_launch_of_a_step_waits_for_all_earlier_steps() {
        let mut order = LaunchOrder::default();
        assert!(!add(&mut order, &[WEIGHT], &[ARENA]));
        assert!(add(&mut order, &[WEIGHT], &[ARENA]));
    }

    #[test]
    fn launches_behind_a_copy_or_a_library_call_are_not_early() {
        let mut order = LaunchOrder::default();
        add(&mut order, &[], &[ARENA]);
        order.record(&launch(&[], &[ARENA]), &[BYTES], false, false);
        assert!(!add(&mut order, &[WEIGHT], &[ARENA]));
    }

    #[test]
    fn a_barrier_stands_between_an_update_and_the_next_prefetch_however_long_the_chain() {
        let mut order = LaunchOrder::default();
        add(&mut order, &[], &[ARENA]);
        assert!(add(&mut order, &[STATE], &[ARENA]), "nobody has written it yet");
        assert!(add(&mut order, &[WEIGHT], &[STATE]), "updates it after it has waited");
        for _ in 0..3 {
            assert!(add(&mut order, &[WEIGHT], &[ARENA]), "prefetches another parameter");
        }
        assert!(!add(&mut order, &[STATE], &[ARENA]), "the update may still run");
        assert!(add(&mut order, &[STATE], &[ARENA]), "it is complete behind the barrier");
    }

    #[test]
    fn values_of_the_step_are_prefetched_once_a_launch_has_waited_for_them() {
        let at = |offset| Place { region: ARENA, offset };
        let mut order = LaunchOrder::default();
        assert!(!follow(&mut order, &at_places(vec![], vec![at(0)])));
        assert!(follow(&mut order, &at_places(vec![], vec![at(2 * BYTES)])));
        assert!(follow(&mut order, &at_places(vec![at(BYTES)], vec![at(3 * BYTES)])), "of neither");
        assert!(!follow(&mut order, &at_places(vec![at(0), at(2 * BYTES + 4)], vec![at(4 * BYTES)])), "of both");
        assert!(
            follow(&mut order, &at_places(vec![at(0), at(2 * BYTES + 4)], vec![at(5 * BYTES)])),
            "they are complete"
        );
        assert!(!follow(&mut order, &at_places(vec![at(4 * BYTES)], vec![])), "made by the launch that waited");
    }

    #[test]
    fn what_the_barrier_itself_writes_is_not_settled_by_it() {
        let mut order = LaunchOrder::default();
        assert!(!add(&mut order, &[], &[STATE]));
        assert!(!add(&mut order, &[STATE], &[ARENA]));
    }
}
