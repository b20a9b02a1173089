//! Programs and their buckets: launches with all their arguments, resolved when a bucket is bound.

mod steps;

use std::ffi::c_void;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ridge_graph::{Bindings, Graph};
use ridge_runtime::{Buffer, LaunchTime, Place, Plan, Program, Region, Result, Run, RuntimeError, plan};

use crate::args;
use crate::backend::{CudaOptions, memory};
use crate::compile;
use crate::cublaslt::Operands;
use crate::device::{Captured, Device, Event, Memory, Pinned, Queue};
use crate::driver::Address;
use crate::error::device as failed;
use crate::kernel::{Kernel, Slot, Source};
use steps::{Step, Steps, Work};

/// What no kernel may rely on: NaN in every float dtype.
const POISON: u8 = 0xff;

/// Alignment of values within the blocks of inputs and of outputs, in bytes.
const ALIGN: usize = 256;

pub(crate) struct CudaProgram {
    device: Arc<Device>,
    graph: Arc<Graph>,
    options: CudaOptions,
}

impl CudaProgram {
    pub(crate) fn new(device: Arc<Device>, graph: Arc<Graph>, options: CudaOptions) -> Self {
        Self { device, graph, options }
    }
}

impl Program for CudaProgram {
    fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>> {
        let plan = plan(&self.graph, bindings)?;
        let weights = hold("weight", weights, &plan.weight_bytes)?;
        let states = hold("state", states, &plan.state_bytes)?;
        // Steps write states in place: nothing else may be the same memory.
        for (i, state) in states.iter().enumerate() {
            if weights.iter().chain(&states[..i]).any(|other| Arc::ptr_eq(other, state)) {
                let why = "is also another state or a weight".into();
                return Err(RuntimeError::Argument { kind: "state", name: i.to_string(), why });
            }
        }
        let kernels = compile::kernels(&self.graph, &plan, bindings)?;
        load_all(&self.device, &compile::distinct(&kernels))?;
        let run = CudaRun::new(self, plan, &kernels, weights, states)?;
        Ok(Box::new(run))
    }

    fn workspace_bytes(&self, bindings: &Bindings) -> Result<usize> {
        let plan = plan(&self.graph, bindings)?;
        Ok(arena_bytes(&plan, &compile::kernels(&self.graph, &plan, bindings)?))
    }
}

/// The plan's workspace with the kernels' scratch memory behind it.
fn arena_bytes(plan: &Plan, kernels: &[Kernel]) -> usize {
    let scratch = kernels.iter().map(|k| k.scratch).max().unwrap_or(0);
    plan.arena_bytes.next_multiple_of(ALIGN) + scratch
}

fn hold(kind: &'static str, buffers: &[Buffer], wanted: &[usize]) -> Result<Vec<Arc<Memory>>> {
    if buffers.len() != wanted.len() || buffers.iter().zip(wanted).any(|(b, w)| b.bytes() < *w) {
        let given: Vec<usize> = buffers.iter().map(Buffer::bytes).collect();
        let why = format!("needs buffers of {wanted:?} bytes, given are {given:?}");
        return Err(RuntimeError::Argument { kind, name: "all".into(), why });
    }
    buffers.iter().map(|b| memory(b).cloned()).collect()
}

/// Compiles and loads what is not loaded yet, several at a time.
fn load_all(device: &Device, sources: &[Arc<Source>]) -> Result<()> {
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = device.kernel(source) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(sources.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Where values of one kind lie in one block.
struct Offsets {
    of: Vec<usize>,
    sizes: Vec<usize>,
    total: usize,
}

impl Offsets {
    fn new(sizes: &[usize]) -> Self {
        let mut total = 0usize;
        let place = |size: &usize| {
            let at = total;
            total = (total + size).next_multiple_of(ALIGN);
            at
        };
        Self { of: sizes.iter().map(place).collect(), sizes: sizes.to_vec(), total }
    }
}

/// A bucket.
struct CudaRun {
    device: Arc<Device>,
    graph: Arc<Graph>,
    options: CudaOptions,
    plan: Plan,
    steps: Vec<Step>,
    weights: Vec<Arc<Memory>>,
    states: Vec<Arc<Memory>>,
    constants: Memory,
    input_offsets: Offsets,
    output_offsets: Offsets,
    inputs: Memory,
    outputs: Memory,
    staged_inputs: Pinned,
    staged_outputs: Pinned,
    /// Behind the last step submitted.
    done: Event,
    arena: Arc<Memory>,
    arena_number: usize,
    arena_bytes: usize,
    scratch_at: usize,
    /// The arguments of all launches: addresses and numbers, as the workspace lies now.
    words: Vec<u64>,
    /// Room for the addresses of one launch's arguments.
    params: Vec<*mut c_void>,
    /// The step as one launch, from when it has run once; lost when addresses change.
    captured: Option<Captured>,
    ran: bool,
    failure: Option<String>,
}

// SAFETY: `params` is scratch room of `submit`, and holds nothing between calls.
unsafe impl Send for CudaRun {}

impl CudaRun {
    fn new(
        of: &CudaProgram,
        plan: Plan,
        kernels: &[Kernel],
        weights: Vec<Arc<Memory>>,
        states: Vec<Arc<Memory>>,
    ) -> Result<Self> {
        let device = &of.device;
        let Steps { steps, words, most_args, constants } = Steps::of(device, &plan, kernels)?;
        let held = device.allocate(constants.len(), "constants")?;
        device.upload(&held, 0, &constants)?;
        let (input_offsets, output_offsets) = (Offsets::new(&plan.input_bytes), Offsets::new(&plan.output_bytes));
        let arena_bytes = arena_bytes(&plan, kernels);
        let (arena, arena_number) = device.arena(arena_bytes)?;
        let mut run = Self {
            inputs: device.allocate(input_offsets.total, "inputs")?,
            outputs: device.allocate(output_offsets.total, "outputs")?,
            staged_inputs: device.pinned(input_offsets.total)?,
            staged_outputs: device.pinned(output_offsets.total)?,
            done: device.event()?,
            device: Arc::clone(device),
            graph: Arc::clone(&of.graph),
            options: of.options.clone(),
            scratch_at: plan.arena_bytes.next_multiple_of(ALIGN),
            plan,
            steps,
            weights,
            states,
            constants: held,
            input_offsets,
            output_offsets,
            arena,
            arena_number,
            arena_bytes,
            words: vec![0; words],
            params: Vec::with_capacity(most_args),
            captured: None,
            ran: false,
            failure: None,
        };
        run.resolve()?;
        Ok(run)
    }

    /// The block that a place is in, and where in it.
    fn block(&self, place: Place) -> (&Memory, usize) {
        let (memory, base): (&Memory, usize) = match place.region {
            Region::Arena => (&self.arena, 0),
            Region::Weight(i) => (&self.weights[i as usize], 0),
            Region::State(i) => (&self.states[i as usize], 0),
            Region::Input(i) => (&self.inputs, self.input_offsets.of[i as usize]),
            Region::Output(i) => (&self.outputs, self.output_offsets.of[i as usize]),
        };
        (memory, base + place.offset)
    }

    /// The address of an operand of a launch.
    fn address(&self, launch: usize, slot: Slot) -> Address {
        let launch = &self.plan.launches[launch];
        let place = match slot {
            Slot::Input(i) => launch.inputs[i],
            Slot::Output(i) => launch.outputs[i],
            Slot::Scratch => Place { region: Region::Arena, offset: self.scratch_at },
        };
        let (memory, at) = self.block(place);
        assert!(at <= memory.bytes(), "{place:?} begins past its block of {} bytes", memory.bytes());
        memory.address() + at as u64
    }

    /// Writes the arguments of all launches, with addresses as they are now.
    fn resolve(&mut self) -> Result<()> {
        self.captured = None;
        let mut words = std::mem::take(&mut self.words);
        for step in &self.steps {
            let Work::Launch { first, args, .. } = &step.work else { continue };
            let outcome =
                args::write(&self.device, args, &mut words[*first..], &|slot| self.address(step.launch, slot));
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
    fn queue_all(&mut self, queue: &Queue<'_>, mut after: impl FnMut(usize) -> Result<()>) -> Result<()> {
        if self.options.poison {
            queue.fill(&self.arena, POISON, self.arena_bytes)?;
            queue.fill(&self.outputs, POISON, self.output_offsets.total)?;
        }
        // SAFETY: both are this bucket's, and `input` waits for the step before it hands the staging memory out.
        unsafe { queue.to_device(&self.inputs, &self.staged_inputs)? };
        for index in 0..self.steps.len() {
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
            queue.fill(&self.inputs, POISON, self.input_offsets.total)?;
        }
        Ok(())
    }

    /// Runs a step with a timed event behind each launch.
    fn queue_timed(&mut self) -> Result<Vec<LaunchTime>> {
        let device = Arc::clone(&self.device);
        let events = (0..=self.steps.len()).map(|_| device.timed_event()).collect::<Result<Vec<_>>>()?;
        let queue = device.queue()?;
        events[0].record()?;
        self.queue_all(&queue, |index| events[index + 1].record())?;
        self.done.record()?;
        self.done.wait()?;
        let mut times: Vec<LaunchTime> = Vec::with_capacity(self.plan.launches.len());
        for (launch, planned) in self.plan.launches.iter().enumerate() {
            let of = &self.plan.kernels[planned.kernel];
            let mut seconds = 0.0;
            for (index, _) in self.steps.iter().enumerate().filter(|(_, step)| step.launch == launch) {
                seconds += events[index + 1].since(&events[index])?;
            }
            times.push(LaunchTime { func: of.func, node: of.node, seconds });
        }
        Ok(times)
    }

    fn queue_one(&mut self, queue: &Queue<'_>, index: usize) -> Result<()> {
        let step = &self.steps[index];
        match &step.work {
            Work::Launch { kernel, grid, threads, shared, early, first, args } => {
                args::point(args, &mut self.words[*first..], &mut self.params);
                // SAFETY: the arguments are what the kernel's text declares, in its order; operands are as large as the
                // plan says, and this bucket holds them until the step is done.
                unsafe { queue.launch(kernel, *grid, *threads, *shared, *early, &mut self.params) }
            }
            Work::Product { product, operands } => {
                let (library, workspace) = self.device.products().expect("made by it");
                let [x, w, r, y] = operands.map(|(slot, offset)| self.address(step.launch, slot) + offset as u64);
                let of = Operands { x, w, r, y, workspace: workspace.address() };
                // SAFETY: operands are as large as the plan says and aligned as it aligns, and this bucket holds them
                // until the step is done; products of one stream take turns with the workspace.
                unsafe { product.queue(library, of, queue.stream()) }
            }
            Work::Copy { from, to, to_offset, bytes } => {
                let to = self.address(step.launch, *to) + *to_offset as u64;
                // SAFETY: operands are as large as the plan says, and an output overlaps no input.
                unsafe { queue.copy(to, self.address(step.launch, *from), *bytes) }
            }
            Work::Constant { at, to, bytes } => {
                let (to, from) = (self.address(step.launch, *to), self.constants.address() + *at as u64);
                // SAFETY: as above; the constants were uploaded to where they are copied from.
                unsafe { queue.copy(to, from, *bytes) }
            }
        }
    }

    /// The op of a step with its operands, and where in the model it is.
    fn described(&self, index: usize) -> String {
        let launch = &self.plan.launches[self.steps[index].launch];
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

    /// Keeps what went wrong: after a fault a GPU's context is of no more use.
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
        // A failure is told by the next `submit`.
        let waited = self.done.wait();
        let _ = self.noted(waited);
        let (at, bytes) = (self.input_offsets.of[index], self.input_offsets.sizes[index]);
        &mut self.staged_inputs.bytes_mut()[at..at + bytes]
    }

    fn submit(&mut self) -> Result<()> {
        let waited = self.done.wait();
        self.noted(waited)?;
        if self.arena_number != self.device.arena_number() {
            (self.arena, self.arena_number) = self.device.arena(self.arena_bytes)?;
            let resolved = self.resolve();
            self.noted(resolved)?;
        }
        let queued = self.queue();
        self.noted(queued)
    }

    fn timed(&mut self) -> Result<Vec<LaunchTime>> {
        let waited = self.done.wait();
        self.noted(waited)?;
        if self.arena_number != self.device.arena_number() {
            (self.arena, self.arena_number) = self.device.arena(self.arena_bytes)?;
            let resolved = self.resolve();
            self.noted(resolved)?;
        }
        let times = self.queue_timed();
        self.noted(times)
    }

    fn poll(&mut self) -> Result<bool> {
        let passed = self.done.passed();
        self.noted(passed)
    }

    fn wait(&mut self) -> Result<()> {
        let waited = self.done.wait();
        self.noted(waited)
    }

    fn output(&self, index: usize) -> &[u8] {
        // A failure was told by `poll` or `wait`.
        let _ = self.done.wait();
        let (at, bytes) = (self.output_offsets.of[index], self.output_offsets.sizes[index]);
        &self.staged_outputs.bytes()[at..at + bytes]
    }
}

impl Drop for CudaRun {
    fn drop(&mut self) {
        // What the step uses must outlive it; of a step that failed nothing runs any more.
        let _ = self.done.wait();
    }
}
