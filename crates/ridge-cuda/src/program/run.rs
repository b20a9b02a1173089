//! Buckets: launches with all their arguments, resolved when the bucket is bound, queued or captured for each step.

use std::ffi::c_void;
use std::fmt::Write as _;
use std::sync::Arc;

use ridge_graph::Graph;
use ridge_runtime::{LaunchTime, MemoryBytes, MemoryOwner, Place, Plan, Region, Result, Run, RuntimeError};

use super::actions::{BoundAction, BoundActions, BoundWork};
use super::layout::BucketLayout;
use crate::args;
use crate::cublaslt::GemmOperands;
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
    staged_inputs: PinnedMemory,
    staged_outputs: PinnedMemory,
    /// Recorded behind the last step submitted.
    done: CudaEvent,
    /// The workspace, leased while a step is in flight.
    arena: ArenaLease<DeviceMemory>,
    /// The arguments of all launches: addresses, with the workspace where it was when they were resolved, and numbers.
    words: Vec<u64>,
    /// The addresses of one launch's arguments, while it is queued.
    params: Vec<*mut c_void>,
    /// The step as one graph, after it has run once; dropped when addresses change.
    captured: Option<CapturedGraph>,
    ran: bool,
    failure: Option<String>,
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
        let mut run = Self {
            inputs: device.allocate(layout.inputs.total, MemoryOwner::Inputs)?,
            outputs: device.allocate(layout.outputs.total, MemoryOwner::Outputs)?,
            staged_inputs: device.pinned(layout.inputs.total)?,
            staged_outputs: device.pinned(layout.outputs.total)?,
            done: device.event()?,
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
            words: vec![0; words],
            params: Vec::with_capacity(max_args),
            captured: None,
            ran: false,
            failure: None,
        };
        // Grows the workspace now, so that a step does not.
        run.lease_arena()?;
        run.arena.release();
        Ok(run)
    }

    /// Leases the workspace for a step, and resolves addresses again where it has moved.
    fn lease_arena(&mut self) -> Result<()> {
        if self.device.lease_arena(&mut self.arena, self.layout.arena)? {
            self.resolve()?;
        }
        Ok(())
    }

    /// Waits for the step in flight, and gives the workspace back.
    fn finish(&mut self) -> Result<()> {
        let waited = self.done.wait();
        self.arena.release();
        waited
    }

    /// The block that a place is in, and where in it.
    fn block(&self, place: Place) -> (&DeviceMemory, usize) {
        let (memory, base): (&DeviceMemory, usize) = match place.region {
            Region::Arena => (self.arena.block().expect("leased while addresses are needed"), 0),
            Region::Weight(i) => (&self.weights[i as usize], 0),
            Region::State(i) => (&self.states[i as usize], 0),
            Region::Input(i) => (&self.inputs, self.layout.inputs.offsets[i as usize]),
            Region::Output(i) => (&self.outputs, self.layout.outputs.offsets[i as usize]),
        };
        (memory, base + place.offset)
    }

    /// The address of an operand of a launch.
    fn address(&self, launch: usize, slot: OperandSlot) -> Address {
        let launch = &self.plan.launches[launch];
        let place = match slot {
            OperandSlot::Input(i) => launch.inputs[i],
            OperandSlot::Output(i) => launch.outputs[i],
            OperandSlot::Scratch => Place { region: Region::Arena, offset: self.layout.scratch_offset },
        };
        let (memory, at) = self.block(place);
        assert!(at <= memory.bytes(), "{place:?} begins past its block of {} bytes", memory.bytes());
        memory.address() + at as u64
    }

    /// Writes the arguments of all launches, with addresses as they are now.
    fn resolve(&mut self) -> Result<()> {
        self.captured = None;
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

    /// Queues one step: launch by launch the first time, captured as one launch from then on.
    fn queue(&mut self) -> Result<()> {
        let device = Arc::clone(&self.device);
        let queue = device.queue()?;
        if self.options.poison || self.options.check_launches || !self.ran {
            self.queue_all(&queue, |_| Ok(()))?;
        } else {
            if self.captured.is_none() {
                self.captured = Some(device.capture(|| self.queue_all(&queue, |_| Ok(())))?);
            }
            // SAFETY: what was captured uses this bucket's memory, at the addresses of now.
            unsafe { queue.launch_captured(self.captured.as_ref().expect("captured above"))? };
        }
        self.ran = true;
        self.done.record()
    }

    /// Queues a step's copies and launches, and does `after` each of the latter.
    fn queue_all(&mut self, queue: &StreamQueue<'_>, mut after: impl FnMut(usize) -> Result<()>) -> Result<()> {
        if self.options.poison {
            queue.fill(self.arena.block().expect("leased for the step"), POISON, self.layout.arena)?;
            queue.fill(&self.outputs, POISON, self.layout.outputs.total)?;
        }
        // SAFETY: both are this bucket's, and `input` waits for the step before it hands the staging memory out.
        unsafe { queue.to_device(&self.inputs, &self.staged_inputs)? };
        for index in 0..self.actions.len() {
            let mut outcome = self.queue_one(queue, index);
            if outcome.is_ok() && self.options.check_launches {
                outcome = self.device.synchronize();
            }
            outcome.map_err(|error| failed(format!("{} failed: {error}", self.described(index))))?;
            after(index)?;
        }
        // SAFETY: both are this bucket's, and `output` waits for the step before it hands the staging memory out.
        unsafe { queue.to_host(&mut self.staged_outputs, &self.outputs)? };
        if self.options.poison {
            queue.fill(&self.inputs, POISON, self.layout.inputs.total)?;
        }
        Ok(())
    }

    /// Runs a step with a timed event behind each launch.
    fn queue_timed(&mut self) -> Result<Vec<LaunchTime>> {
        let device = Arc::clone(&self.device);
        let events = (0..=self.actions.len()).map(|_| device.timed_event()).collect::<Result<Vec<_>>>()?;
        let queue = device.queue()?;
        events[0].record()?;
        self.queue_all(&queue, |index| events[index + 1].record())?;
        self.done.record()?;
        self.done.wait()?;
        let mut times: Vec<LaunchTime> = Vec::with_capacity(self.plan.launches.len());
        for (launch, planned) in self.plan.launches.iter().enumerate() {
            let of = &self.plan.kernels[planned.kernel];
            let mut seconds = 0.0;
            for (index, _) in self.actions.iter().enumerate().filter(|(_, action)| action.launch == launch) {
                seconds += events[index + 1].since(&events[index])?;
            }
            times.push(LaunchTime { func: of.func, node: of.node, path: planned.path.clone(), seconds });
        }
        Ok(times)
    }

    fn queue_one(&mut self, queue: &StreamQueue<'_>, index: usize) -> Result<()> {
        let action = &self.actions[index];
        match &action.work {
            BoundWork::Launch { kernel, grid, threads, shared, early, first, args } => {
                args::point(args, &mut self.words[*first..], &mut self.params);
                // SAFETY: the arguments are what the kernel's text declares, in its order; operands are as large as the
                // plan says, and this bucket holds them until the step is done.
                unsafe { queue.launch(kernel, *grid, *threads, *shared, *early, &mut self.params) }
            }
            BoundWork::Product { product, operands } => {
                let (library, workspace) = self.device.products().expect("made by it");
                let [x, w, r, y, xs, ws] =
                    operands.map(|(slot, offset)| self.address(action.launch, slot) + offset as u64);
                let of = GemmOperands { x, w, r, y, scales: [xs, ws], workspace: workspace.address() };
                // SAFETY: operands are as large as the plan says and aligned as it aligns, and this bucket holds them
                // until the step is done; products of one stream take turns with the workspace.
                unsafe { product.queue(library, of, queue.stream()) }
            }
            BoundWork::Copy { from, to, to_offset, bytes } => {
                let to = self.address(action.launch, *to) + *to_offset as u64;
                // SAFETY: operands are as large as the plan says, and an output overlaps no input.
                unsafe { queue.copy(to, self.address(action.launch, *from), *bytes) }
            }
            BoundWork::Constant { at, to, bytes } => {
                let (to, from) = (self.address(action.launch, *to), self.constants.address() + *at as u64);
                // SAFETY: as above; the constants were uploaded to where they are copied from.
                unsafe { queue.copy(to, from, *bytes) }
            }
        }
    }

    /// The op of a step with its operands, and where in the model it is.
    fn described(&self, index: usize) -> String {
        let launch = &self.plan.launches[self.actions[index].launch];
        let of = &self.plan.kernels[launch.kernel];
        let function = self.graph.function(of.func);
        let node = &function.nodes[of.node];
        let typed = |types: Vec<ridge_graph::DType>, shapes: &[Vec<usize>]| -> String {
            let texts = types.iter().zip(shapes).map(|(t, s)| format!("{t}{s:?}"));
            texts.collect::<Vec<_>>().join(", ")
        };
        let inputs = typed(node.inputs.iter().map(|v| function.ty(*v).dtype).collect(), &of.inputs);
        let outputs = typed(node.outputs.iter().map(|t| t.dtype).collect(), &of.outputs);
        let mut text = format!("{}({inputs}) -> {outputs}", node.op_name());
        let at: Vec<&str> = launch.path.iter().map(|s| &**s).chain([&*node.scope]).filter(|s| !s.is_empty()).collect();
        if !at.is_empty() {
            let _ = write!(text, " at {}", at.join("."));
        }
        text
    }

    /// Remembers an error: after a fault the context of a GPU cannot be used any more.
    fn noted<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if let Some(why) = &self.failure {
            return Err(failed(format!("a step failed before: {why}")));
        }
        outcome.map_err(|error| {
            let mut why = error.to_string();
            if !self.options.check_launches {
                why += "; set RIDGE_CUDA_CHECK=1 to learn which kernel";
            }
            self.failure = Some(why.clone());
            match error {
                RuntimeError::Device { .. } => failed(why.trim_start_matches("cuda: ")),
                other => other,
            }
        })
    }
}

impl Run for CudaRun {
    fn input(&mut self, index: usize) -> &mut [u8] {
        // The next `submit` returns a failure.
        let waited = self.finish();
        let _ = self.noted(waited);
        let (at, bytes) = (self.layout.inputs.offsets[index], self.layout.inputs.sizes[index]);
        &mut self.staged_inputs.bytes_mut()[at..at + bytes]
    }

    fn submit(&mut self) -> Result<()> {
        let waited = self.finish();
        self.noted(waited)?;
        let leased = self.lease_arena();
        self.noted(leased)?;
        let queued = self.queue();
        self.noted(queued)
    }

    fn memory(&self) -> MemoryBytes {
        self.layout.own_memory()
    }

    fn timed(&mut self) -> Result<Vec<LaunchTime>> {
        let waited = self.finish();
        self.noted(waited)?;
        let leased = self.lease_arena();
        self.noted(leased)?;
        let times = self.queue_timed();
        self.arena.release();
        self.noted(times)
    }

    fn poll(&mut self) -> Result<bool> {
        let passed = self.done.passed();
        if matches!(passed, Ok(true)) {
            self.arena.release();
        }
        self.noted(passed)
    }

    fn wait(&mut self) -> Result<()> {
        let waited = self.finish();
        self.noted(waited)
    }

    fn output(&self, index: usize) -> &[u8] {
        // `poll` or `wait` has returned a failure.
        let _ = self.done.wait();
        let (at, bytes) = (self.layout.outputs.offsets[index], self.layout.outputs.sizes[index]);
        &self.staged_outputs.bytes()[at..at + bytes]
    }
}

impl Drop for CudaRun {
    fn drop(&mut self) {
        // What the step uses must outlive it; of a step that failed nothing runs any more.
        let _ = self.done.wait();
    }
}
