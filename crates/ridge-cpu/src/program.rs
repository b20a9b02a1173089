//! Programs and their buckets: kernels made for fixed shapes, launches with their operands' addresses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use ridge_graph::{Bindings, FuncId, Function, Graph, GroupKind, Op, Type, Var};
use ridge_runtime::{
    Buffer, LaunchTime, Place, Plan, Program, Region, Result, Run, RuntimeError, component_offsets, plan,
};

use crate::backend::Device;
use crate::buffer::{Memory, Storage, storage};
use crate::kernel::{Block, Io, Kernel, Operand, POISON, Preparation, Scratch, Spec};
use crate::pool::{Job, MAX_CHUNKS, Steps};
use crate::weight::{Held, hold, in_panels};
use crate::{fused, kernels, prims};

/// The least work that is worth handing to another thread.
const NANOS_PER_CHUNK: f64 = 10_000.0;

/// A cache line.
const ROOM_ALIGN: usize = 64;

/// Chunks a thread, so that one that was late or slowed down does not hold up the others.
const CHUNKS_PER_THREAD: usize = 4;

pub(crate) struct CpuProgram {
    device: Arc<Device>,
    graph: Arc<Graph>,
}

impl CpuProgram {
    pub(crate) fn new(device: Arc<Device>, graph: Arc<Graph>) -> Self {
        Self { device, graph }
    }

    /// `weights` are what it is bound to, once it is.
    fn kernels(&self, plan: &Plan, bindings: &Bindings, weights: &[Buffer]) -> Result<Kernels> {
        let made = plan.kernels.iter().map(|k| self.kernel(k, bindings, false).map(Arc::from));
        let mut made: Vec<Arc<dyn Kernel>> = made.collect::<Result<_>>()?;
        let is_written = |weight: usize| {
            weights.get(weight).is_some_and(|b| matches!(storage(b).map(|s| &**s), Ok(Storage::Own(_))))
        };
        let (by_panels, inner) = in_panels(plan, &made, is_written);
        for (kernel, of) in made.iter_mut().zip(&plan.kernels).zip(by_panels).filter_map(|(k, by)| by.then_some(k)) {
            *kernel = Arc::from(self.kernel(of, bindings, true)?);
        }
        Ok(Kernels { made, inner })
    }

    fn kernel(
        &self,
        plan: &ridge_runtime::PlannedKernel,
        bindings: &Bindings,
        by_panels: bool,
    ) -> Result<Box<dyn Kernel>> {
        let function = self.graph.function(plan.func);
        let node = &function.nodes[plan.node];
        let operands =
            |types: Vec<&Type>| types.into_iter().map(|t| operand(t, bindings, by_panels)).collect::<Result<_>>();
        let single;
        let body = match &node.op {
            Op::Group(group) => &group.body,
            _ => {
                single = Function::default();
                &single
            }
        };
        let spec = Spec {
            body,
            inputs: operands(node.inputs.iter().map(|v| function.ty(*v)).collect())?,
            outputs: operands(node.outputs.iter().collect())?,
            bindings,
        };
        let made = match &node.op {
            Op::Prim(prim) => prims::make(prim, &spec, &self.device.mesh),
            Op::Group(group) => match &group.kind {
                GroupKind::Fused => fused::make(&spec),
                GroupKind::Kernel(name) => kernels::all()
                    .find(|e| e.name == &**name)
                    .ok_or_else(|| "no such kernel".to_owned())
                    .and_then(|e| (e.make)(&spec)),
            },
            Op::Arg(_) | Op::Composite(_) | Op::Call(_) => Err("the graph is not lowered".into()),
        };
        made.map_err(|why| RuntimeError::Unsupported {
            backend: "cpu",
            op: node.op_name().into(),
            at: if node.scope.is_empty() { function.name.to_string() } else { node.scope.to_string() },
            why,
        })
    }
}

/// What runs a plan's launches.
struct Kernels {
    made: Vec<Arc<dyn Kernel>>,
    /// Of each weight the elements of a row, if it is wanted in panels.
    inner: Vec<Option<usize>>,
}

/// Where the room of preparations begins in the workspace: behind what the plan places there.
fn room_offset(plan: &Plan) -> usize {
    plan.arena_bytes.next_multiple_of(ROOM_ALIGN)
}

/// Bytes of workspace: values of the plan, and room for the largest preparation.
fn arena_bytes(plan: &Plan, kernels: &[Arc<dyn Kernel>]) -> usize {
    let room = kernels.iter().filter_map(|k| k.preparation()).map(|p| p.bytes).max().unwrap_or(0);
    if room == 0 { plan.arena_bytes } else { room_offset(plan) + room }
}

fn operand(ty: &Type, bindings: &Bindings, panels: bool) -> Result<Operand> {
    Ok(Operand { dtype: ty.dtype, format: ty.format.clone(), shape: ty.shape.eval(bindings)?, panels })
}

impl Program for CpuProgram {
    fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>> {
        let plan = plan(&self.graph, bindings)?;
        let Kernels { made: kernels, inner } = self.kernels(&plan, bindings, weights)?;
        let check = |kind: &'static str, buffers: &[Buffer], wanted: &[usize]| -> Result<()> {
            if buffers.len() != wanted.len() || buffers.iter().zip(wanted).any(|(b, w)| b.bytes() < *w) {
                let given: Vec<usize> = buffers.iter().map(Buffer::bytes).collect();
                let why = format!("needs buffers of {wanted:?} bytes, given are {given:?}");
                return Err(RuntimeError::Argument { kind, name: "all".into(), why });
            }
            Ok(())
        };
        check("weight", weights, &plan.weight_bytes)?;
        check("state", states, &plan.state_bytes)?;
        let weights: Vec<Held> = weights.iter().zip(inner).map(|(b, i)| hold(b, i)).collect::<Result<_>>()?;
        let states: Vec<Arc<Memory>> = states.iter().map(hold_state).collect::<Result<_>>()?;
        // Steps write states in place: nothing else may be the same memory.
        for (i, state) in states.iter().enumerate() {
            let is_weight = weights.iter().any(|w| matches!(w, Held::Rows(other) if Arc::ptr_eq(other, state)));
            if is_weight || states[..i].iter().any(|other| Arc::ptr_eq(other, state)) {
                let why = "is also another state or a weight".into();
                return Err(RuntimeError::Argument { kind: "state", name: i.to_string(), why });
            }
        }
        let staging = |sizes: &[usize]| sizes.iter().map(|n| Memory::zeroed(*n, "staging")).collect::<Result<Vec<_>>>();
        let memory =
            Regions { weights, states, inputs: staging(&plan.input_bytes)?, outputs: staging(&plan.output_bytes)? };
        let arena_bytes = arena_bytes(&plan, &kernels);
        let (arena, arena_number) = self.device.arena(arena_bytes)?;
        let steps = Arc::new(Bound::new(&self.graph, &plan, bindings, kernels, memory, arena, &self.device)?);
        let job = Arc::new(Job::new(Box::new(Shared(Arc::clone(&steps)))));
        let device = Arc::clone(&self.device);
        Ok(Box::new(CpuRun { device, steps, job, arena_bytes, arena_number }))
    }

    fn workspace_bytes(&self, bindings: &Bindings) -> Result<usize> {
        let plan = plan(&self.graph, bindings)?;
        Ok(arena_bytes(&plan, &self.kernels(&plan, bindings, &[])?.made) + plan.staging_bytes())
    }
}

/// A state is written in place, so it must be ours to write.
fn hold_state(buffer: &Buffer) -> Result<Arc<Memory>> {
    match &**storage(buffer)? {
        Storage::Own(memory) => Ok(Arc::clone(memory)),
        Storage::Weight(_) => Err(RuntimeError::Argument {
            kind: "state",
            name: "one of them".into(),
            why: "is a weight, which is read-only".into(),
        }),
    }
}

/// What places refer to, but for the workspace.
struct Regions {
    weights: Vec<Held>,
    states: Vec<Arc<Memory>>,
    inputs: Vec<Memory>,
    outputs: Vec<Memory>,
}

/// A launch's operand.
struct Address {
    place: Place,
    bytes: usize,
}

struct Step {
    /// The node that it is of, if it is of one.
    of: Option<(FuncId, usize)>,
    kernel: Arc<dyn Kernel>,
    pieces: usize,
    chunks: u16,
    /// Is this the kernel's preparation?
    prepares: bool,
    /// Its operands are `blocks[first..][..inputs]`, then as many as there are outputs, then the room to prepare in.
    first: usize,
    inputs: usize,
    outputs: usize,
}

/// A bucket's launches with all their addresses.
struct Bound {
    steps: Vec<Step>,
    addresses: Vec<Address>,
    memory: Regions,
    /// Written only between steps: see [`Bound::resolve`].
    resolved: std::cell::UnsafeCell<Resolved>,
    poison: bool,
    watch: Watch,
}

/// When launches ended, while somebody wants to know.
struct Watch {
    on: AtomicBool,
    clock: Instant,
    /// Nanoseconds of the clock at which the last chunk of each launch ended.
    ends: Vec<AtomicU64>,
}

impl Watch {
    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }
}

struct Resolved {
    blocks: Vec<Block>,
    arena: Arc<Memory>,
}

// SAFETY: the addresses in `resolved` point into memory that `memory` and `arena` keep alive; who writes where is the
// planner's, and the pool runs one launch of a device at a time.
unsafe impl Send for Bound {}
// SAFETY: `resolved` is written by `resolve` alone, which the one owner of the run calls while no step of it is queued.
unsafe impl Sync for Bound {}

impl Bound {
    fn new(
        graph: &Graph,
        plan: &Plan,
        bindings: &Bindings,
        kernels: Vec<Arc<dyn Kernel>>,
        memory: Regions,
        arena: Arc<Memory>,
        device: &Device,
    ) -> Result<Self> {
        let mut steps = Vec::with_capacity(plan.launches.len());
        let mut addresses = Vec::new();
        let arena_bytes = arena_bytes(plan, &kernels);
        if device.poison {
            let outputs = plan.output_bytes.iter().enumerate().map(|(i, b)| (Region::Output(i as u32), *b));
            let regions = std::iter::once((Region::Arena, arena_bytes)).chain(outputs);
            steps.push(poisoned(regions, &mut addresses));
        }
        for launch in &plan.launches {
            let kernel = Arc::clone(&kernels[launch.kernel]);
            let pieces = kernel.pieces();
            if pieces == 0 {
                continue;
            }
            let of = &plan.kernels[launch.kernel];
            let function = graph.function(of.func);
            let node = &function.nodes[of.node];
            let bytes = |ty: &Type| -> Result<usize> { Ok(component_offsets(ty, bindings)?.1) };
            let first = addresses.len();
            for (place, var) in launch.inputs.iter().zip(&node.inputs) {
                let var: &Var = var;
                let bytes = match place.region {
                    Region::Weight(i) => memory.weights[i as usize].bytes_of_panels(),
                    _ => None,
                }
                .map_or_else(|| bytes(function.ty(*var)), Ok)?;
                addresses.push(Address { place: *place, bytes });
            }
            for (place, ty) in launch.outputs.iter().zip(&node.outputs) {
                addresses.push(Address { place: *place, bytes: bytes(ty)? });
            }
            let preparation = kernel.preparation();
            let room =
                Place { region: Region::Arena, offset: if preparation.is_some() { room_offset(plan) } else { 0 } };
            addresses.push(Address { place: room, bytes: preparation.map_or(0, |p| p.bytes) });
            let mut add = |prepares: bool, pieces: usize, nanos: f64| {
                steps.push(Step {
                    of: Some((of.func, of.node)),
                    chunks: chunks(pieces, nanos, device.pool.threads()),
                    kernel: Arc::clone(&kernel),
                    pieces,
                    prepares,
                    first,
                    inputs: launch.inputs.len(),
                    outputs: launch.outputs.len(),
                });
            };
            if let Some(Preparation { pieces, nanos_per_piece, .. }) = preparation {
                add(true, pieces, nanos_per_piece);
            }
            add(false, pieces, kernel.nanos_per_piece());
        }
        if device.poison {
            let inputs = plan.input_bytes.iter().enumerate().map(|(i, b)| (Region::Input(i as u32), *b));
            steps.push(poisoned(inputs, &mut addresses));
        }
        let resolved = std::cell::UnsafeCell::new(Resolved { blocks: Vec::with_capacity(addresses.len()), arena });
        let ends = steps.iter().map(|_| AtomicU64::new(0)).collect();
        let watch = Watch { on: AtomicBool::new(false), clock: Instant::now(), ends };
        let bound = Self { steps, addresses, memory, resolved, poison: device.poison, watch };
        // SAFETY: nobody else knows it yet.
        unsafe { bound.resolve(None) };
        Ok(bound)
    }

    /// Finds every operand's address, with `arena` as the workspace if it is another one.
    ///
    /// # Safety
    /// No step of this bucket is queued or running.
    unsafe fn resolve(&self, arena: Option<Arc<Memory>>) {
        // SAFETY: the only reference, by the caller's promise.
        let resolved = unsafe { &mut *self.resolved.get() };
        if let Some(arena) = arena {
            resolved.arena = arena;
        }
        resolved.blocks.clear();
        let arena = resolved.arena.block();
        resolved.blocks.extend(self.addresses.iter().map(|address| {
            let base = match address.place.region {
                Region::Arena => arena,
                Region::Weight(i) => self.memory.weights[i as usize].block(),
                Region::State(i) => self.memory.states[i as usize].block(),
                Region::Input(i) => self.memory.inputs[i as usize].block(),
                Region::Output(i) => self.memory.outputs[i as usize].block(),
            };
            let end = address.place.offset + address.bytes;
            assert!(end <= base.bytes, "{:?} of {} bytes ends past its block", address.place, address.bytes);
            // SAFETY: within the block, as just checked.
            Block { ptr: unsafe { base.ptr.add(address.place.offset) }, bytes: address.bytes }
        }));
    }
}

/// A launch that poisons these blocks.
fn poisoned(regions: impl Iterator<Item = (Region, usize)>, addresses: &mut Vec<Address>) -> Step {
    let first = addresses.len();
    addresses.extend(regions.map(|(region, bytes)| Address { place: Place { region, offset: 0 }, bytes }));
    let outputs = addresses.len() - first;
    addresses.push(Address { place: Place { region: Region::Arena, offset: 0 }, bytes: 0 });
    Step { of: None, kernel: Arc::new(Poison), pieces: 1, chunks: 1, prepares: false, first, inputs: 0, outputs }
}

/// Fills its outputs with what no kernel may rely on.
struct Poison;

impl Kernel for Poison {
    fn pieces(&self) -> usize {
        1
    }

    fn nanos_per_piece(&self) -> f64 {
        1.0
    }

    fn run(&self, io: &Io<'_>, _pieces: std::ops::Range<usize>, _scratch: &mut Scratch) {
        for (i, block) in io.outputs.iter().enumerate() {
            // SAFETY: the only piece.
            unsafe { io.output::<u8>(i).part(0..block.bytes) }.fill(POISON);
        }
    }
}

fn chunks(pieces: usize, nanos_per_piece: f64, threads: usize) -> u16 {
    if threads == 1 {
        return 1;
    }
    let worth = (pieces as f64 * nanos_per_piece / NANOS_PER_CHUNK) as usize;
    pieces.min(worth).clamp(1, (threads * CHUNKS_PER_THREAD).min(MAX_CHUNKS as usize)) as u16
}

struct Shared(Arc<Bound>);

impl Steps for Shared {
    fn launches(&self) -> usize {
        self.0.steps.len()
    }

    fn chunks(&self, launch: usize) -> u16 {
        self.0.steps[launch].chunks
    }

    fn run(&self, launch: usize, chunk: u16, scratch: &mut Scratch) {
        let step = &self.0.steps[launch];
        // SAFETY: a step is running, so nobody writes `resolved`.
        let blocks = unsafe { &(*self.0.resolved.get()).blocks };
        let (inputs, rest) = blocks[step.first..].split_at(step.inputs);
        let (outputs, rest) = rest.split_at(step.outputs);
        let io = Io { inputs, outputs, room: rest[0] };
        let (chunk, chunks) = (usize::from(chunk), usize::from(step.chunks));
        let pieces = match chunks {
            1 => 0..step.pieces,
            _ => step.pieces * chunk / chunks..step.pieces * (chunk + 1) / chunks,
        };
        if self.0.poison {
            scratch.poison();
        }
        if step.prepares {
            step.kernel.prepare(&io, pieces, scratch);
        } else {
            step.kernel.run(&io, pieces, scratch);
        }
        let watch = &self.0.watch;
        if watch.on.load(Ordering::Relaxed) {
            watch.ends[launch].fetch_max(watch.now(), Ordering::Relaxed);
        }
    }
}

struct CpuRun {
    device: Arc<Device>,
    steps: Arc<Bound>,
    job: Arc<Job>,
    arena_bytes: usize,
    arena_number: usize,
}

impl CpuRun {
    fn outcome(&self) -> Result<()> {
        match self.job.failure() {
            None => Ok(()),
            Some(why) => Err(RuntimeError::Device { backend: "cpu", why }),
        }
    }
}

impl Run for CpuRun {
    fn input(&mut self, index: usize) -> &mut [u8] {
        self.device.pool.wait(&self.job);
        // SAFETY: no step of this bucket is running, and none starts while the slice borrows the run.
        unsafe { self.steps.memory.inputs[index].bytes_mut() }
    }

    fn submit(&mut self) -> Result<()> {
        self.device.pool.wait(&self.job);
        self.outcome()?;
        if self.arena_number != self.device.arena_number() {
            let (arena, number) = self.device.arena(self.arena_bytes)?;
            // SAFETY: no step of this bucket is queued: we just waited, and only we submit it.
            unsafe { self.steps.resolve(Some(arena)) };
            self.arena_number = number;
        }
        self.device.pool.submit(&self.job);
        Ok(())
    }

    fn poll(&mut self) -> Result<bool> {
        let finished = self.device.pool.poll(&self.job);
        self.outcome().map(|()| finished)
    }

    fn wait(&mut self) -> Result<()> {
        self.device.pool.wait(&self.job);
        self.outcome()
    }

    fn output(&self, index: usize) -> &[u8] {
        self.device.pool.wait(&self.job);
        // SAFETY: no step of this bucket is running, and none starts while the slice borrows the run.
        unsafe { self.steps.memory.outputs[index].bytes() }
    }

    fn timed(&mut self) -> Result<Vec<LaunchTime>> {
        self.device.pool.wait(&self.job);
        let watch = &self.steps.watch;
        watch.ends.iter().for_each(|end| end.store(0, Ordering::Relaxed));
        watch.on.store(true, Ordering::Relaxed);
        let mut before = watch.now();
        let outcome = self.submit().and_then(|()| self.wait());
        let watch = &self.steps.watch;
        watch.on.store(false, Ordering::Relaxed);
        outcome?;
        let mut times = Vec::with_capacity(self.steps.steps.len());
        for (step, end) in self.steps.steps.iter().zip(&watch.ends) {
            if step.prepares {
                // Its time is that of what it prepares for.
                continue;
            }
            let end = end.load(Ordering::Relaxed);
            if let Some((func, node)) = step.of {
                times.push(LaunchTime { func, node, seconds: end.saturating_sub(before) as f64 * 1e-9 });
            }
            before = before.max(end);
        }
        Ok(times)
    }
}

impl Drop for CpuRun {
    fn drop(&mut self) {
        self.device.pool.wait(&self.job);
    }
}
