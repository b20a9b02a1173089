//! Buckets that run: launches with their operands' addresses, and the steps that are submitted of them.

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use ridge_graph::{Bindings, FuncId, Graph, Type, Var};
use ridge_runtime::{
    LaunchTime, MemoryBytes, MemoryLedger, Place, Plan, Region, Result, Run, RuntimeError, component_offsets,
};

use crate::bytes::MemoryBlock;
use crate::device::CpuDevice;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, Preparation};
use crate::memory::AlignedMemory;
use crate::pool::{LaunchSequence, MAX_CHUNKS, PoolJob};
use crate::scratch::{POISON, Scratch};
use crate::sync;
use crate::weight::BoundWeight;

/// The least work that is worth handing to another thread.
const NANOS_PER_CHUNK: f64 = 10_000.0;

/// A cache line.
const ROOM_ALIGN: usize = 64;

/// Chunks a thread, so that one that was late or slowed down does not hold up the others.
const CHUNKS_PER_THREAD: usize = 4;

/// Where the room of preparations begins in the workspace: behind what the plan places there.
fn room_offset(plan: &Plan) -> usize {
    plan.arena_bytes.next_multiple_of(ROOM_ALIGN)
}

/// Bytes of workspace: values of the plan, and room for the largest preparation.
pub(crate) fn arena_bytes(plan: &Plan, kernels: &[Arc<dyn CpuKernel>]) -> usize {
    let room = kernels.iter().filter_map(|k| k.preparation()).map(|p| p.bytes).max().unwrap_or(0);
    if room == 0 { plan.arena_bytes } else { room_offset(plan) + room }
}

/// What places refer to, but for the workspace.
pub(crate) struct BucketMemory {
    pub(crate) weights: Vec<BoundWeight>,
    pub(crate) states: Vec<Arc<AlignedMemory>>,
    pub(crate) inputs: Vec<AlignedMemory>,
    pub(crate) outputs: Vec<AlignedMemory>,
}

/// A launch's operand.
struct OperandAddress {
    place: Place,
    bytes: usize,
}

struct BoundLaunch {
    kernel: Arc<dyn CpuKernel>,
    pieces: usize,
    chunks: u16,
    /// Is this the kernel's preparation?
    prepares: bool,
    /// Its operands are `blocks[first..][..inputs]`, then as many as there are outputs, then the room to prepare in.
    first: usize,
    inputs: usize,
    outputs: usize,
}

/// A launch of the plan as traces have it.
struct TracedLaunch {
    func: FuncId,
    node: usize,
    path: Vec<Arc<str>>,
    /// What runs it; `None` where there is nothing to do.
    step: Option<usize>,
}

/// A bucket's launches with all their addresses. Those are found before the first step: see [`BoundBucket::resolve`].
pub(crate) struct BoundBucket {
    steps: Vec<BoundLaunch>,
    traced: Vec<TracedLaunch>,
    addresses: Vec<OperandAddress>,
    memory: BucketMemory,
    /// Where the operands lie, in the order of `addresses`. Written only between steps: see [`BoundBucket::resolve`].
    resolved: UnsafeCell<Vec<MemoryBlock>>,
    poison: bool,
    /// Counts the working memory of the threads that run its launches.
    ledger: Arc<MemoryLedger>,
    watch: LaunchClock,
}

/// When launches ended, while somebody wants to know.
struct LaunchClock {
    on: AtomicBool,
    clock: Instant,
    /// Nanoseconds of the clock at which the last chunk of each launch ended.
    ends: Vec<AtomicU64>,
}

impl LaunchClock {
    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }
}

// SAFETY: while a step is submitted, the addresses in `resolved` point into memory that `memory` and the run's
// `arena_in_use` keep alive; who writes where is the planner's, and the pool runs one launch of a device at a time.
unsafe impl Send for BoundBucket {}
// SAFETY: `resolved` is written by `resolve` alone, which the one owner of the run calls while no step of it is queued.
unsafe impl Sync for BoundBucket {}

impl BoundBucket {
    pub(crate) fn new(
        graph: &Graph,
        plan: &Plan,
        bindings: &Bindings,
        kernels: Vec<Arc<dyn CpuKernel>>,
        memory: BucketMemory,
        device: &CpuDevice,
    ) -> Result<Self> {
        let mut steps = Vec::with_capacity(plan.launches.len());
        let mut traced = Vec::with_capacity(plan.launches.len());
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
            let of = &plan.kernels[launch.kernel];
            let path = launch.path.clone();
            if pieces == 0 {
                traced.push(TracedLaunch { func: of.func, node: of.node, path, step: None });
                continue;
            }
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
                addresses.push(OperandAddress { place: *place, bytes });
            }
            for (place, ty) in launch.outputs.iter().zip(&node.outputs) {
                addresses.push(OperandAddress { place: *place, bytes: bytes(ty)? });
            }
            let preparation = kernel.preparation();
            let room =
                Place { region: Region::Arena, offset: if preparation.is_some() { room_offset(plan) } else { 0 } };
            addresses.push(OperandAddress { place: room, bytes: preparation.map_or(0, |p| p.bytes) });
            let mut add = |prepares: bool, pieces: usize, nanos: f64| {
                steps.push(BoundLaunch {
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
            traced.push(TracedLaunch { func: of.func, node: of.node, path, step: Some(steps.len() - 1) });
        }
        if device.poison {
            let inputs = plan.input_bytes.iter().enumerate().map(|(i, b)| (Region::Input(i as u32), *b));
            steps.push(poisoned(inputs, &mut addresses));
        }
        let resolved = UnsafeCell::new(Vec::with_capacity(addresses.len()));
        let ends = steps.iter().map(|_| AtomicU64::new(0)).collect();
        let watch = LaunchClock { on: AtomicBool::new(false), clock: Instant::now(), ends };
        Ok(Self {
            steps,
            traced,
            addresses,
            memory,
            resolved,
            poison: device.poison,
            ledger: Arc::clone(&device.ledger),
            watch,
        })
    }

    /// Finds every operand's address, with `arena` as the workspace.
    ///
    /// # Safety
    /// No step of this bucket is queued or running.
    unsafe fn resolve(&self, arena: &AlignedMemory) {
        // SAFETY: the only reference, by the caller's promise.
        let resolved = unsafe { &mut *self.resolved.get() };
        resolved.clear();
        let arena = arena.block();
        resolved.extend(self.addresses.iter().map(|address| {
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
            MemoryBlock { ptr: unsafe { base.ptr.add(address.place.offset) }, bytes: address.bytes }
        }));
    }
}

/// A launch that poisons these blocks.
fn poisoned(regions: impl Iterator<Item = (Region, usize)>, addresses: &mut Vec<OperandAddress>) -> BoundLaunch {
    let first = addresses.len();
    addresses.extend(regions.map(|(region, bytes)| OperandAddress { place: Place { region, offset: 0 }, bytes }));
    let outputs = addresses.len() - first;
    addresses.push(OperandAddress { place: Place { region: Region::Arena, offset: 0 }, bytes: 0 });
    BoundLaunch { kernel: Arc::new(PoisonKernel), pieces: 1, chunks: 1, prepares: false, first, inputs: 0, outputs }
}

/// Fills its outputs with what no kernel may rely on.
struct PoisonKernel;

impl CpuKernel for PoisonKernel {
    fn pieces(&self) -> usize {
        1
    }

    fn nanos_per_piece(&self) -> f64 {
        1.0
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: std::ops::Range<usize>, _scratch: &mut Scratch) {
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

struct BucketLaunches(Arc<BoundBucket>);

impl LaunchSequence for BucketLaunches {
    fn launches(&self) -> usize {
        self.0.steps.len()
    }

    fn chunks(&self, launch: usize) -> u16 {
        self.0.steps[launch].chunks
    }

    fn run(&self, launch: usize, chunk: u16, scratch: &mut Scratch) {
        let step = &self.0.steps[launch];
        // SAFETY: a step is running, so nobody writes `resolved`.
        let blocks = unsafe { &*self.0.resolved.get() };
        let (inputs, rest) = blocks[step.first..].split_at(step.inputs);
        let (outputs, rest) = rest.split_at(step.outputs);
        let io = KernelIo { inputs, outputs, room: rest[0] };
        let (chunk, chunks) = (usize::from(chunk), usize::from(step.chunks));
        let pieces = match chunks {
            1 => 0..step.pieces,
            _ => step.pieces * chunk / chunks..step.pieces * (chunk + 1) / chunks,
        };
        scratch.count_in(&self.0.ledger);
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

/// A bucket that is ready to run.
///
/// The workspace is shared by all buckets of the device, and replaced when one needs more. A run keeps it alive only
/// from a submission until the end of that step is seen, so that a workspace that was replaced is freed although idle
/// buckets have used it.
pub(crate) struct CpuRun {
    device: Arc<CpuDevice>,
    steps: Arc<BoundBucket>,
    job: sync::Arc<PoolJob>,
    arena_bytes: usize,
    /// Bytes of inputs and outputs.
    staging: MemoryBytes,
    /// The workspace that operands' addresses were found for, and its number.
    arena: Weak<AlignedMemory>,
    arena_number: usize,
    /// That workspace while a step may use it.
    arena_in_use: Cell<Option<Arc<AlignedMemory>>>,
}

impl CpuRun {
    pub(crate) fn new(device: Arc<CpuDevice>, bound: BoundBucket, arena_bytes: usize, staging: MemoryBytes) -> Self {
        let steps = Arc::new(bound);
        let job = sync::Arc::new(PoolJob::new(Box::new(BucketLaunches(Arc::clone(&steps)))));
        let (arena, arena_number, arena_in_use) = (Weak::new(), 0, Cell::new(None));
        Self { device, steps, job, arena_bytes, staging, arena, arena_number, arena_in_use }
    }

    /// Waits for the submitted step, if there is one, which then needs no workspace.
    fn finish(&self) {
        self.device.pool.wait(&self.job);
        self.arena_in_use.take();
    }

    /// The workspace for the next step, with the addresses of operands in it. Only a new one takes a lock.
    fn current_arena(&mut self) -> Result<Arc<AlignedMemory>> {
        if self.arena_number == self.device.arena_number()
            && let Some(arena) = self.arena.upgrade()
        {
            return Ok(arena);
        }
        let (arena, number) = self.device.arena(self.arena_bytes)?;
        // SAFETY: no step of this bucket is queued: the caller has waited, and only this run submits it.
        unsafe { self.steps.resolve(&arena) };
        (self.arena, self.arena_number) = (Arc::downgrade(&arena), number);
        Ok(arena)
    }

    fn outcome(&self) -> Result<()> {
        match self.job.failure() {
            None => Ok(()),
            Some(why) => Err(RuntimeError::Device { backend: "cpu", why }),
        }
    }
}

impl Run for CpuRun {
    fn input(&mut self, index: usize) -> &mut [u8] {
        self.finish();
        // SAFETY: no step of this bucket is running, and none starts while the slice borrows the run.
        unsafe { self.steps.memory.inputs[index].bytes_mut() }
    }

    fn submit(&mut self) -> Result<()> {
        self.finish();
        self.outcome()?;
        let arena = self.current_arena()?;
        self.arena_in_use.set(Some(arena));
        self.device.pool.submit(&self.job);
        Ok(())
    }

    fn poll(&mut self) -> Result<bool> {
        let finished = self.device.pool.poll(&self.job);
        if finished {
            self.arena_in_use.take();
        }
        self.outcome().map(|()| finished)
    }

    fn wait(&mut self) -> Result<()> {
        self.finish();
        self.outcome()
    }

    fn output(&self, index: usize) -> &[u8] {
        self.finish();
        // SAFETY: no step of this bucket is running, and none starts while the slice borrows the run.
        unsafe { self.steps.memory.outputs[index].bytes() }
    }

    fn memory(&self) -> MemoryBytes {
        self.staging
    }

    fn timed(&mut self) -> Result<Vec<LaunchTime>> {
        self.finish();
        let watch = &self.steps.watch;
        watch.ends.iter().for_each(|end| end.store(0, Ordering::Relaxed));
        watch.on.store(true, Ordering::Relaxed);
        let mut before = watch.now();
        let outcome = self.submit().and_then(|()| self.wait());
        let watch = &self.steps.watch;
        watch.on.store(false, Ordering::Relaxed);
        outcome?;
        let mut times = Vec::with_capacity(self.steps.traced.len());
        if self.steps.poison {
            before = before.max(watch.ends[0].load(Ordering::Relaxed));
        }
        for TracedLaunch { func, node, path, step } in &self.steps.traced {
            // The time of a preparation is that of what it prepares for.
            let end = step.map_or(before, |step| watch.ends[step].load(Ordering::Relaxed));
            let seconds = end.saturating_sub(before) as f64 * 1e-9;
            times.push(LaunchTime { func: *func, node: *node, path: path.clone(), seconds });
            before = before.max(end);
        }
        Ok(times)
    }
}

impl Drop for CpuRun {
    fn drop(&mut self) {
        self.finish();
    }
}
