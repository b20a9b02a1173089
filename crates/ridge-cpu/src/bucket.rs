//! Buckets: launches with their operands' addresses, for steps of each slot.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use ridge_graph::{Bindings, FuncId, Graph, Role, Type, Var};
use ridge_runtime::{Collectives, MemoryLedger, Place, Plan, Region, Result, StepOrder, component_offsets};

use crate::bytes::MemoryBlock;
use crate::device::{CpuDevice, Workspace};
use crate::gate::Gate;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, Preparation};
use crate::lane::{Communication, Lane};
use crate::memory::AlignedMemory;
use crate::pool::{LaunchSequence, MAX_CHUNKS, panic_message};
use crate::scratch::{POISON, Scratch};
use crate::slot::{BoundSlot, SlotMemory};
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

/// Bytes of workspace: values of the plan, with room for the largest preparation, and those in memory of the host.
pub(crate) fn arena_bytes(plan: &Plan, kernels: &[Arc<dyn CpuKernel>]) -> [usize; 2] {
    let room = kernels.iter().filter_map(|k| k.preparation()).map(|p| p.bytes).max().unwrap_or(0);
    [if room == 0 { plan.arena_bytes } else { room_offset(plan) + room }, plan.host_bytes]
}

/// What places refer to, but for the workspace and outputs.
pub(crate) struct BucketMemory {
    pub(crate) weights: Vec<BoundWeight>,
    pub(crate) states: Vec<Arc<AlignedMemory>>,
    /// Step inputs as the device has them.
    pub(crate) inputs: Vec<AlignedMemory>,
}

/// A launch's operand.
struct OperandAddress {
    place: Place,
    bytes: usize,
}

enum LaunchWork {
    Kernel(Arc<dyn CpuKernel>),
    /// Hands the kernel to the lane of communication.
    Communicate(Arc<dyn CpuKernel>),
    /// Begins this segment of the step: copies what was staged.
    Begin(usize),
    /// The end of a step that communicates.
    Join,
}

struct BoundLaunch {
    work: LaunchWork,
    pieces: usize,
    chunks: u16,
    /// Is this the kernel's preparation?
    prepares: bool,
    /// How many collectives of the lane must be complete before it begins.
    after: usize,
    /// Its operands are `blocks[first..][..inputs]`, then as many as there are outputs, then the room to prepare in.
    first: usize,
    inputs: usize,
    outputs: usize,
}

/// A launch of the plan as traces have it.
pub(crate) struct TracedLaunch {
    pub(crate) func: FuncId,
    pub(crate) node: usize,
    pub(crate) path: Vec<Arc<str>>,
    /// Does it run in the lane of communication?
    pub(crate) communicates: bool,
    /// What runs it; `None` where there is nothing to do.
    pub(crate) step: Option<usize>,
}

/// A bucket's launches. The addresses of their operands are found before the first step of each slot: see
/// [`BoundBucket::resolve`].
pub(crate) struct BoundBucket {
    steps: Vec<BoundLaunch>,
    pub(crate) traced: Vec<TracedLaunch>,
    addresses: Vec<OperandAddress>,
    pub(crate) memory: BucketMemory,
    pub(crate) slots: Vec<BoundSlot>,
    /// The launch that begins the segment of late inputs, if the program has any.
    pub(crate) cut: Option<usize>,
    /// Of each step input: is it late?
    pub(crate) late: Vec<bool>,
    pub(crate) order: Arc<StepOrder>,
    /// The groups of ranks that are failed with a step, for others would wait for this rank.
    groups: Vec<Arc<dyn Collectives>>,
    /// Runs collectives beside the other launches; `None` where none does.
    lane: Option<Arc<Lane>>,
    pub(crate) poison: bool,
    /// Counts the working memory of the threads that run its launches.
    pub(crate) ledger: Arc<MemoryLedger>,
    pub(crate) watch: LaunchClock,
}

/// When launches ended, while somebody wants to know.
pub(crate) struct LaunchClock {
    pub(crate) on: AtomicBool,
    pub(crate) clock: Instant,
    /// Nanoseconds of the clock at which the last chunk of each launch ended.
    pub(crate) ends: Vec<AtomicU64>,
}

impl LaunchClock {
    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }
}

impl BoundBucket {
    pub(crate) fn new(
        graph: &Graph,
        plan: &Plan,
        bindings: &Bindings,
        kernels: Vec<Arc<dyn CpuKernel>>,
        (memory, slots): (BucketMemory, Vec<SlotMemory>),
        device: &CpuDevice,
    ) -> Result<Self> {
        let late: Vec<bool> = graph.args(Role::StepInput).map(|arg| arg.late).collect();
        let mut steps = Vec::with_capacity(plan.launches.len());
        let mut traced = Vec::with_capacity(plan.launches.len());
        let mut addresses = Vec::new();
        let arena_bytes = arena_bytes(plan, &kernels);
        steps.push(begins(0));
        let mut cut = None;
        if device.poison {
            let outputs = plan.output_bytes.iter().enumerate().map(|(i, b)| (Region::Output(i as u32), *b));
            let regions = [Region::Arena, Region::Host]
                .into_iter()
                .zip(arena_bytes)
                .filter(|(_, bytes)| *bytes > 0)
                .chain(outputs);
            steps.push(poisoned(regions, &mut addresses));
        }
        for (index, launch) in plan.launches.iter().enumerate() {
            if index == plan.cut {
                cut = Some(steps.len());
                steps.push(begins(1));
            }
            let kernel = Arc::clone(&kernels[launch.kernel]);
            let pieces = kernel.pieces();
            let of = &plan.kernels[launch.kernel];
            let (path, communicates) = (launch.path.clone(), launch.communicates);
            if pieces == 0 {
                traced.push(TracedLaunch { func: of.func, node: of.node, path, communicates, step: None });
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
                let kernel = Arc::clone(&kernel);
                let (work, chunks) = match launch.communicates {
                    true => (LaunchWork::Communicate(kernel), 1),
                    false => (LaunchWork::Kernel(kernel), chunks(pieces, nanos, device.pool.threads())),
                };
                steps.push(BoundLaunch {
                    chunks,
                    work,
                    pieces,
                    prepares,
                    after: launch.after,
                    first,
                    inputs: launch.inputs.len(),
                    outputs: launch.outputs.len(),
                });
            };
            if let Some(Preparation { pieces, nanos_per_piece, .. }) = preparation {
                add(true, pieces, nanos_per_piece);
            }
            add(false, pieces, kernel.nanos_per_piece());
            let step = Some(steps.len() - 1);
            traced.push(TracedLaunch { func: of.func, node: of.node, path, communicates, step });
        }
        if cut.is_none() && late.contains(&true) {
            cut = Some(steps.len());
            steps.push(begins(1));
        }
        let communicating = plan.launches.iter().filter(|launch| launch.communicates).count();
        let lane = if communicating > 0 { Some(device.lane()?) } else { None };
        if lane.is_some() {
            steps.push(BoundLaunch { work: LaunchWork::Join, after: communicating, ..begins(0) });
        }
        let slots = slots.into_iter().map(|memory| BoundSlot::new(memory, addresses.len())).collect();
        let ends = steps.iter().map(|_| AtomicU64::new(0)).collect();
        let watch = LaunchClock { on: AtomicBool::new(false), clock: Instant::now(), ends };
        Ok(Self {
            steps,
            traced,
            addresses,
            memory,
            slots,
            cut,
            late,
            order: Arc::clone(&device.order),
            groups: device.mesh.values().map(Arc::clone).collect(),
            lane,
            poison: device.poison,
            ledger: Arc::clone(&device.ledger),
            watch,
        })
    }

    /// The number of launches, with those that copy.
    pub(crate) fn launches(&self) -> usize {
        self.steps.len()
    }

    /// Finds every operand's address for steps of `slot`, with `arena` as the workspace.
    ///
    /// # Safety
    /// No step of this slot is queued or running.
    pub(crate) unsafe fn resolve(&self, slot: usize, arena: &Workspace) {
        let slot = &self.slots[slot];
        let [arena, host] = arena.blocks();
        let operands = self.addresses.iter().map(|address| {
            let base = match address.place.region {
                Region::Arena => arena,
                Region::Host => host,
                Region::Weight(i) => self.memory.weights[i as usize].block(),
                Region::State(i) => self.memory.states[i as usize].block(),
                Region::Input(i) => self.memory.inputs[i as usize].block(),
                Region::Output(i) => slot.memory.outputs[i as usize].block(),
            };
            let end = address.place.offset + address.bytes;
            assert!(end <= base.bytes, "{:?} of {} bytes ends past its block", address.place, address.bytes);
            // SAFETY: within the block, as just checked.
            MemoryBlock { ptr: unsafe { base.ptr.add(address.place.offset) }, bytes: address.bytes }
        });
        // SAFETY: by the caller's promise.
        unsafe { slot.resolve(operands) };
    }
}

/// The launch that begins a segment.
fn begins(segment: usize) -> BoundLaunch {
    let work = LaunchWork::Begin(segment);
    BoundLaunch { work, pieces: 1, chunks: 1, prepares: false, after: 0, first: 0, inputs: 0, outputs: 0 }
}

/// A launch that poisons these blocks.
fn poisoned(regions: impl Iterator<Item = (Region, usize)>, addresses: &mut Vec<OperandAddress>) -> BoundLaunch {
    let first = addresses.len();
    addresses.extend(regions.map(|(region, bytes)| OperandAddress { place: Place { region, offset: 0 }, bytes }));
    let outputs = addresses.len() - first;
    addresses.push(OperandAddress { place: Place { region: Region::Arena, offset: 0 }, bytes: 0 });
    let work = LaunchWork::Kernel(Arc::new(PoisonKernel));
    BoundLaunch { work, pieces: 1, chunks: 1, prepares: false, after: 0, first, inputs: 0, outputs }
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

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {
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
    let most = pieces.min(worth).min(threads * CHUNKS_PER_THREAD).min(MAX_CHUNKS as usize).max(1);
    // Of more chunks than threads every thread takes as many: 18 chunks would keep 16 threads as long as 32 of their size.
    let load = |rounds: usize| rounds * pieces.div_ceil(rounds * threads);
    let least = (1..=most / threads).map(load).min().unwrap_or(0);
    // The most rounds that are nearly as good: a thread that was late leaves the others more to share.
    let rounds = (1..=most / threads).rev().find(|rounds| 20 * load(*rounds) <= 21 * least);
    rounds.map_or(most, |rounds| rounds * threads) as u16
}

/// Launches of a bucket for one slot: those of a whole step or of a segment.
pub(crate) struct BucketLaunches {
    pub(crate) bucket: Arc<BoundBucket>,
    pub(crate) slot: usize,
    pub(crate) launches: Range<usize>,
}

impl LaunchSequence for BucketLaunches {
    fn launches(&self) -> usize {
        self.launches.len()
    }

    fn chunks(&self, launch: usize) -> u16 {
        self.bucket.steps[self.launches.start + launch].chunks
    }

    fn failed(&self, why: &str) {
        self.bucket.fail(self.slot, why);
    }

    fn gate(&self, launch: usize) -> Option<(&Gate, usize)> {
        let step = &self.bucket.steps[self.launches.start + launch];
        (step.after > 0).then(|| (&self.bucket.slots[self.slot].gate, step.after))
    }

    fn run(&self, launch: usize, chunk: u16, scratch: &mut Scratch) {
        let (bucket, slot) = (&*self.bucket, &self.bucket.slots[self.slot]);
        let launch = self.launches.start + launch;
        let step = &bucket.steps[launch];
        match (&step.work, &bucket.lane) {
            (LaunchWork::Begin(segment), _) => {
                if *segment == 0 {
                    slot.gate.reset();
                }
                // SAFETY: the launch has one chunk; the run gives out no staging memory that the segment copies.
                unsafe { slot.begin_segment(*segment, &bucket.memory.inputs, &bucket.order, bucket.poison) };
                bucket.ended(launch);
            }
            (LaunchWork::Communicate(_), Some(lane)) => {
                let bucket = Arc::clone(&self.bucket);
                lane.queue(Box::new(QueuedCollective { bucket, slot: self.slot, launch }));
            }
            (LaunchWork::Kernel(kernel) | LaunchWork::Communicate(kernel), _) if !slot.has_failed() => {
                let (chunk, chunks) = (usize::from(chunk), usize::from(step.chunks));
                let pieces = match chunks {
                    1 => 0..step.pieces,
                    _ => step.pieces * chunk / chunks..step.pieces * (chunk + 1) / chunks,
                };
                bucket.run_kernel(&**kernel, self.slot, launch, pieces, scratch);
            }
            _ => {}
        }
    }
}

impl BoundBucket {
    /// The step in `slot` failed: what others do for it fails too.
    fn fail(&self, slot: usize, why: &str) {
        let slot = &self.slots[slot];
        slot.fail(why);
        self.order.failed(slot.number(), why);
        self.groups.iter().for_each(|group| group.abort(why));
    }

    /// Notes when a launch ended, while somebody wants to know.
    fn ended(&self, launch: usize) {
        if self.watch.on.load(Ordering::Relaxed) {
            self.watch.ends[launch].fetch_max(self.watch.now(), Ordering::Relaxed);
        }
    }

    fn run_kernel(
        &self,
        kernel: &dyn CpuKernel,
        slot: usize,
        launch: usize,
        pieces: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let step = &self.steps[launch];
        // SAFETY: a step of the slot is running.
        let blocks = unsafe { self.slots[slot].operands() };
        let (inputs, rest) = blocks[step.first..].split_at(step.inputs);
        let (outputs, rest) = rest.split_at(step.outputs);
        let io = KernelIo { inputs, outputs, room: rest[0] };
        scratch.count_in(&self.ledger);
        if self.poison {
            scratch.poison();
        }
        if step.prepares {
            kernel.prepare(&io, pieces, scratch);
        } else {
            kernel.run(&io, pieces, scratch);
        }
        self.ended(launch);
    }
}

/// A collective that runs beside other launches of its step.
struct QueuedCollective {
    bucket: Arc<BoundBucket>,
    slot: usize,
    launch: usize,
}

impl Communication for QueuedCollective {
    fn run(&self, scratch: &mut Scratch) {
        let (bucket, step) = (&*self.bucket, &self.bucket.steps[self.launch]);
        let LaunchWork::Communicate(kernel) = &step.work else { return };
        if bucket.slots[self.slot].has_failed() {
            return;
        }
        let run = || bucket.run_kernel(&**kernel, self.slot, self.launch, 0..step.pieces, scratch);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
            bucket.fail(self.slot, &panic_message(&*panic));
        }
    }

    fn gate(&self) -> &Gate {
        &self.bucket.slots[self.slot].gate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_few_where_work_is_little_and_whole_rounds_where_it_is_much() {
        let little = NANOS_PER_CHUNK / 10.0;
        assert_eq!(chunks(1000, little, 1), 1);
        assert_eq!(chunks(5, little, 16), 1);
        assert_eq!(chunks(60, little, 16), 6);
        // Work for 18 and for 28 chunks, by 16 threads.
        assert_eq!(chunks(64, 0.29 * NANOS_PER_CHUNK, 16), 16);
        assert_eq!(chunks(96, 0.3 * NANOS_PER_CHUNK, 16), 16);
        assert_eq!(chunks(1000, NANOS_PER_CHUNK, 16), 64);
        assert_eq!(chunks(10, NANOS_PER_CHUNK, 2), 2);
        // Fewer pieces than threads are a chunk each.
        assert_eq!(chunks(7, NANOS_PER_CHUNK, 16), 7);
        for (pieces, threads) in [(1, 2), (33, 16), (64, 16), (97, 64), (4008, 3)] {
            let chunks = usize::from(chunks(pieces, NANOS_PER_CHUNK, threads));
            assert!((1..=pieces).contains(&chunks) && chunks <= threads * CHUNKS_PER_THREAD, "{pieces}, {threads}");
        }
    }
}
