//! Buckets: launches with all their arguments, resolved when the bucket is bound, queued or captured for each step.

mod queue;

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use ridge_graph::{Graph, Role};
use ridge_runtime::{
    LaunchTime, MemoryBytes, MemoryOwner, Place, Plan, Region, Result, Run, RuntimeError, SLOTS, Staged,
};

use super::actions::{BoundAction, BoundActions, BoundWork};
use super::lanes::{Lanes, StepRanks};
use super::layout::BucketLayout;
use crate::args;
use crate::device::{ArenaLease, CapturedGraph, CudaDevice, CudaEvent, DeviceMemory, PinnedMemory, StreamQueue};
use crate::driver::Address;
use crate::error::device as failed;
use crate::kernel::{CudaKernel, OperandSlot};
use crate::options::CudaOptions;

/// Fills memory whose content a kernel must not rely on: NaN in every float dtype.
const POISON: u8 = 0xff;

/// A bucket: launches with all their arguments, and the memory of their operands.
pub(super) struct CudaRun {
    device: Arc<CudaDevice>,
    graph: Arc<Graph>,
    options: CudaOptions,
    plan: Plan,
    actions: Vec<BoundAction>,
    layout: BucketLayout,
    weights: Vec<Arc<DeviceMemory>>,
    states: Vec<Arc<DeviceMemory>>,
    constants: DeviceMemory,
    inputs: DeviceMemory,
    outputs: DeviceMemory,
    slots: [RunSlot; SLOTS],
    /// Of each step input: is it late?
    late: Vec<bool>,
    /// The workspace, which the step that is submitted takes from here.
    arena: ArenaLease<DeviceMemory>,
    /// Where the workspace was when the arguments were resolved, and its size.
    workspace: (Address, usize),
    /// As `arena` and `workspace`, of memory of the host that values are offloaded to.
    host_arena: ArenaLease<DeviceMemory>,
    host_workspace: (Address, usize),
    /// Has one of them moved since the arguments were resolved?
    stale: bool,
    /// The arguments of all launches: addresses, with the workspace where it was when they were resolved, and numbers.
    words: Vec<u64>,
    /// The addresses of one launch's arguments, while it is queued.
    params: Vec<*mut c_void>,
    /// The segments.
    segments: [Segment; 2],
    lanes: Lanes,
    ranks: StepRanks,
    failure: Option<String>,
}

/// Launches that are queued at a time: those before the first that reads a late input, and the rest.
struct Segment {
    /// Its actions.
    actions: Range<usize>,
    /// It as one graph, after it has run once; dropped when addresses change.
    captured: Option<CapturedGraph>,
    ran: bool,
}

/// A slot of the ring.
struct RunSlot {
    staged_inputs: PinnedMemory,
    staged_outputs: PinnedMemory,
    /// Recorded behind what was queued last of the step.
    done: CudaEvent,
    /// The workspace while the step is in flight.
    arena: Option<Arc<DeviceMemory>>,
    host_arena: Option<Arc<DeviceMemory>>,
    /// The step's number on the device.
    number: u64,
    /// Does the step wait for its late inputs?
    held: bool,
}

impl RunSlot {
    /// Gives back what its step has leased.
    fn give_back(&mut self) {
        (self.arena, self.host_arena) = (None, None);
    }
}

// SAFETY: `params` is used by `submit` alone, and its pointers are not read after that.
unsafe impl Send for CudaRun {}

impl CudaRun {
    /// Binds a bucket of `plan`, whose launches run `kernels`.
    ///
    /// # Errors
    /// When memory runs out, or the GPU failed.
    pub(super) fn new(
        device: Arc<CudaDevice>,
        graph: Arc<Graph>,
        options: CudaOptions,
        plan: Plan,
        kernels: &[CudaKernel],
        weights: Vec<Arc<DeviceMemory>>,
        states: Vec<Arc<DeviceMemory>>,
    ) -> Result<Self> {
        let BoundActions { actions, words, max_args, constants } = BoundActions::new(&device, &plan, kernels)?;
        let layout = BucketLayout::new(&plan, kernels);
        assert_eq!(constants.len(), layout.constants, "the layout counts the constants");
        let constant_block = device.allocate(layout.constants, MemoryOwner::Constants)?;
        device.upload(&constant_block, 0, &constants)?;
        let slot = || -> Result<RunSlot> {
            Ok(RunSlot {
                staged_inputs: device.pinned(layout.inputs.total)?,
                staged_outputs: device.pinned(layout.outputs.total)?,
                done: device.event()?,
                arena: None,
                host_arena: None,
                number: 0,
                held: false,
            })
        };
        let slots = [slot()?, slot()?];
        let cut = actions.iter().position(|action| action.launch >= plan.cut).unwrap_or(actions.len());
        let segment = |actions| Segment { actions, captured: None, ran: false };
        let segments = [segment(0..cut), segment(cut..actions.len())];
        let (lanes, ranks) = (Lanes::new(&device, &plan)?, StepRanks::of(&actions));
        let late = graph.args(Role::StepInput).map(|arg| arg.late).collect();
        let mut run = Self {
            inputs: device.allocate(layout.inputs.total, MemoryOwner::Inputs)?,
            outputs: device.allocate(layout.outputs.total, MemoryOwner::Outputs)?,
            slots,
            late,
            device,
            graph,
            options,
            plan,
            actions,
            layout,
            weights,
            states,
            constants: constant_block,
            arena: ArenaLease::default(),
            workspace: (0, 0),
            host_arena: ArenaLease::default(),
            host_workspace: (0, 0),
            stale: false,
            words: vec![0; words],
            params: Vec::with_capacity(max_args),
            segments,
            lanes,
            ranks,
            failure: None,
        };
        // Grows the workspace now, so that a step does not.
        run.lease_arena()?;
        run.arena.release();
        run.host_arena.release();
        run.device.queue()?.fill(&run.inputs, 0, run.layout.inputs.total)?;
        Ok(run)
    }

    /// Leases the workspace for a step, and what it offloads to, and resolves addresses again where one has moved.
    fn lease_arena(&mut self) -> Result<()> {
        let place = |lease: &ArenaLease<DeviceMemory>| {
            let block = lease.block().expect("just leased");
            (block.address(), block.bytes())
        };
        if self.device.lease_arena(&mut self.arena, self.layout.arena)? {
            (self.workspace, self.stale) = (place(&self.arena), true);
        }
        if self.plan.host_bytes > 0 && self.device.lease_host_arena(&mut self.host_arena, self.plan.host_bytes)? {
            (self.host_workspace, self.stale) = (place(&self.host_arena), true);
        }
        if self.stale {
            self.resolve()?;
            self.stale = false;
        }
        Ok(())
    }

    /// Waits for the step of `slot`, and gives the workspace back.
    fn finish(&mut self, slot: usize) -> Result<()> {
        let slot = &mut self.slots[slot];
        let waited = slot.done.wait();
        if !slot.held {
            slot.give_back();
        }
        waited.and_then(|()| self.ranks.check())
    }

    /// Where a place is, and how many bytes its block has from there on.
    fn at(&self, place: Place) -> (Address, usize) {
        let of = |memory: &DeviceMemory, base: usize| (memory.address(), memory.bytes(), base);
        let (address, bytes, base) = match place.region {
            Region::Arena => (self.workspace.0, self.workspace.1, 0),
            Region::Host => (self.host_workspace.0, self.host_workspace.1, 0),
            Region::Weight(i) => of(&self.weights[i as usize], 0),
            Region::State(i) => of(&self.states[i as usize], 0),
            Region::Input(i) => of(&self.inputs, self.layout.inputs.offsets[i as usize]),
            Region::Output(i) => of(&self.outputs, self.layout.outputs.offsets[i as usize]),
        };
        let offset = base + place.offset;
        assert!(offset <= bytes, "{place:?} begins past its block of {bytes} bytes");
        (address + offset as u64, bytes - offset)
    }

    /// The address of an operand of a launch.
    fn address(&self, launch: usize, slot: OperandSlot) -> Address {
        let launch = &self.plan.launches[launch];
        let place = match slot {
            OperandSlot::Zeros => return self.constants.address() + self.layout.zeros_offset as u64,
            OperandSlot::Input(i) => launch.inputs[i],
            OperandSlot::Output(i) => launch.outputs[i],
            OperandSlot::Scratch if launch.communicates => {
                Place { region: Region::Arena, offset: self.layout.side_scratch_offset }
            }
            OperandSlot::Scratch => Place { region: Region::Arena, offset: self.layout.scratch_offset },
        };
        self.at(place).0
    }

    /// Writes the arguments of all launches, with addresses as they are now.
    fn resolve(&mut self) -> Result<()> {
        self.segments.iter_mut().for_each(|segment| segment.captured = None);
        let mut words = std::mem::take(&mut self.words);
        for action in &self.actions {
            let BoundWork::Launch { first, args, .. } = &action.work else { continue };
            let outcome =
                args::write(&self.device, args, &mut words[*first..], &|slot| self.address(action.launch, slot));
            if outcome.is_err() {
                self.words = words;
                return outcome;
            }
        }
        self.words = words;
        Ok(())
    }

    /// Queues one segment of the step in `slot`: launch by launch the first time, captured as one launch from then on.
    /// Copies of what was staged come before it, and copies of outputs behind the last one; they are not captured, since
    /// they depend on the slot.
    fn queue(&mut self, slot: usize, segment: usize, staged: &[Staged]) -> Result<()> {
        let device = Arc::clone(&self.device);
        let queue = device.queue()?;
        if segment == 0 {
            self.poison(&queue, slot)?;
        }
        self.queue_inputs(&queue, slot, staged)?;
        let actions = self.segments[segment].actions.clone();
        if self.options.poison || self.options.check_launches || !self.segments[segment].ran {
            self.queue_all(actions, |_, _| Ok(()))?;
        } else if !actions.is_empty() {
            if self.segments[segment].captured.is_none() {
                let captured = device.capture(|| self.queue_all(actions, |_, _| Ok(())))?;
                self.segments[segment].captured = Some(captured);
            }
            // SAFETY: what was captured uses this bucket's memory, at the addresses of now.
            unsafe { queue.launch_captured(self.segments[segment].captured.as_ref().expect("captured above"))? };
        }
        self.segments[segment].ran = true;
        if segment == 1 {
            self.queue_outputs(&queue, slot)?;
        }
        Ok(())
    }

    /// Fills what the launches of a step must not rely on.
    fn poison(&self, queue: &StreamQueue<'_>, slot: usize) -> Result<()> {
        if self.options.poison {
            queue.fill(self.slots[slot].arena.as_ref().expect("leased for the step"), POISON, self.layout.arena)?;
            if let Some(host) = &self.slots[slot].host_arena {
                queue.fill(host, POISON, self.layout.host_arena)?;
            }
            queue.fill(&self.outputs, POISON, self.layout.outputs.total)?;
        }
        Ok(())
    }

    fn queue_inputs(&self, queue: &StreamQueue<'_>, slot: usize, staged: &[Staged]) -> Result<()> {
        let fill = self.options.poison.then_some(POISON);
        for bytes in self.layout.inputs.staged(staged) {
            // SAFETY: both are this bucket's, and `input` gives out no staging memory that is being copied.
            unsafe { queue.to_device(&self.inputs, &self.slots[slot].staged_inputs, bytes, fill)? };
        }
        Ok(())
    }

    fn queue_outputs(&mut self, queue: &StreamQueue<'_>, slot: usize) -> Result<()> {
        // SAFETY: both are this bucket's, and `output` waits for the step before it hands the staging memory out.
        unsafe { queue.to_host(&mut self.slots[slot].staged_outputs, &self.outputs) }
    }

    /// Submits a step: both segments of it, or the first where it is `held`.
    fn queue_step(&mut self, slot: usize, staged: &[Staged], held: bool) -> Result<()> {
        self.ranks.agree()?;
        self.lease_arena()?;
        (self.slots[slot].arena, self.slots[slot].host_arena) = (self.arena.take(), self.host_arena.take());
        self.queue(slot, 0, staged)?;
        if !held {
            self.queue(slot, 1, &[])?;
        }
        self.slots[slot].done.record()
    }

    /// Remembers an error: after a fault the context of a GPU cannot be used any more, so that every step behind the first
    /// that failed fails too, and names it.
    fn noted<T>(&mut self, slot: usize, outcome: Result<T>) -> Result<T> {
        if let Some(why) = &self.failure {
            return Err(failed(format!("a step failed before: {why}")));
        }
        outcome.map_err(|error| {
            if !matches!(error, RuntimeError::Device { .. }) {
                return error;
            }
            let number = self.slots[slot].number;
            let why = self.device.order.failed_before(number).unwrap_or_else(|| {
                let mut why = error.to_string();
                if !self.options.check_launches && self.ranks.check().is_ok() {
                    why += "; set RIDGE_CUDA_CHECK=1 to learn which kernel";
                }
                self.device.order.failed(number, &why);
                why
            });
            self.ranks.fail(&why);
            self.failure = Some(why.clone());
            failed(why.trim_start_matches("cuda: "))
        })
    }

    /// Waits for the step of `slot`.
    fn finished(&mut self, slot: usize) -> Result<()> {
        let waited = self.finish(slot);
        self.noted(slot, waited)
    }

    /// Has `queue` queue a step of `slot` in its turn.
    fn in_turn<T>(&mut self, slot: usize, held: bool, queue: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.slots[slot].held {
            return Err(failed("the step in the slot waits for its late inputs"));
        }
        self.finished(slot)?;
        let device = Arc::clone(&self.device);
        let mut result = None;
        let submitted = device.order.submit(held, |number| {
            self.slots[slot].number = number;
            result = Some(queue(self)?);
            Ok(())
        });
        self.noted(slot, submitted)?;
        self.slots[slot].held = held;
        Ok(result.expect("queued"))
    }
}

impl Run for CudaRun {
    fn steps_to_learn(&self) -> usize {
        // The first is queued launch by launch, the second is captured.
        2
    }

    fn input(&mut self, slot: usize, index: usize) -> &mut [u8] {
        // The first segment of a step that is held copies no late inputs.
        if !(self.slots[slot].held && self.late[index]) {
            // The next `submit` returns a failure.
            let _ = self.finished(slot);
        }
        let (at, bytes) = (self.layout.inputs.offsets[index], self.layout.inputs.sizes[index]);
        self.slots[slot].staged_inputs.part_mut(at..at + bytes)
    }

    fn submit(&mut self, slot: usize, staged: &[Staged], held: bool) -> Result<()> {
        let held = held && self.late.contains(&true);
        assert!(!held || staged.iter().all(|staged| !self.late[staged.input]), "late inputs of a held step");
        self.in_turn(slot, held, |run| run.queue_step(slot, staged, held))
    }

    fn release(&mut self, slot: usize, staged: &[Staged]) -> Result<()> {
        if !std::mem::take(&mut self.slots[slot].held) {
            return Ok(());
        }
        let device = Arc::clone(&self.device);
        let queued = device.order.release(self.slots[slot].number, || {
            self.queue(slot, 1, staged)?;
            self.slots[slot].done.record()
        });
        self.noted(slot, queued)
    }

    fn memory(&self) -> MemoryBytes {
        self.layout.own_memory()
    }

    fn timed(&mut self, slot: usize, staged: &[Staged]) -> Result<Vec<LaunchTime>> {
        let times = self.in_turn(slot, false, |run| run.queue_timed(slot, staged))?;
        self.slots[slot].give_back();
        Ok(times)
    }

    fn poll(&mut self, slot: usize) -> Result<bool> {
        if self.slots[slot].held {
            return Ok(false);
        }
        let mut passed = self.slots[slot].done.passed();
        if matches!(passed, Ok(true)) {
            self.slots[slot].give_back();
            passed = self.ranks.check().map(|()| true);
        }
        self.noted(slot, passed)
    }

    fn wait(&mut self, slot: usize) -> Result<()> {
        if self.slots[slot].held {
            return Err(failed("the step waits for its late inputs"));
        }
        self.finished(slot)
    }

    fn output(&self, slot: usize, index: usize) -> &[u8] {
        let slot = &self.slots[slot];
        // `poll` or `wait` has returned a failure.
        let _ = slot.done.wait();
        let (at, bytes) = (self.layout.outputs.offsets[index], self.layout.outputs.sizes[index]);
        &slot.staged_outputs.bytes()[at..at + bytes]
    }
}

impl Drop for CudaRun {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            if std::mem::take(&mut slot.held) {
                // The rest of the step is given up.
                let _ = self.device.order.release(slot.number, || Ok(()));
            }
            // What the step uses must outlive it; of a step that failed nothing runs any more.
            let _ = slot.done.wait();
        }
    }
}
