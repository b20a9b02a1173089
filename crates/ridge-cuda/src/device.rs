//! One GPU: its context and stream, memory that is freed with its owner, loaded kernels and the workspace.

mod arena;
mod autotune;
mod context;
mod handles;
mod host;
mod memory;
mod products;
mod random;
mod stream;

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ridge_graph::DType;
use ridge_hw::gpu::{Library, Nvidia};
use ridge_runtime::{Collectives, MemoryOwner, MemoryUse, Result, RuntimeError, StepOrder};

use crate::cache::KernelCache;
use crate::choices::ChoiceFile;
use crate::communicator::{Communicator, MeshRanks};
use crate::cublaslt::CublasLt;
use crate::driver::{Address, Swizzle};
use crate::error::device as failed;
use crate::kernel::CudaSource;
use crate::library;
use crate::nccl::Nccl;
use crate::nvrtc::Nvrtc;
use crate::options::CudaOptions;
use context::CudaContext;
pub(crate) use context::architecture;

pub(crate) use arena::{ArenaLease, SharedArena};
pub(crate) use handles::{CapturedGraph, CudaEvent, LoadedKernel};
use memory::copy_by_threads;
pub(crate) use memory::{DeviceMemory, PinnedMemory};
#[cfg(test)]
pub(crate) use random::RANDOM;
pub(crate) use stream::StreamQueue;

/// What programs of one GPU share.
pub(crate) struct CudaDevice {
    context: Arc<CudaContext>,
    nvrtc: Nvrtc,
    cache: KernelCache,
    kernels: Mutex<HashMap<Arc<CudaSource>, Arc<LoadedKernel>>>,
    /// The workspace of all programs.
    arena: SharedArena<DeviceMemory>,
    /// The block of the host that values of steps are offloaded to.
    host_arena: SharedArena<DeviceMemory>,
    /// Numbers the steps of all programs.
    pub(crate) order: StepOrder,
    /// cuBLASLt and its workspace, from when a program first asks for them; `None` where there is none.
    products: OnceLock<Option<(CublasLt, DeviceMemory)>>,
    products_file: Option<PathBuf>,
    /// The index of the candidate chosen, by the key of the choice.
    chosen: Mutex<HashMap<String, usize>>,
    choices: ChoiceFile,
    /// Choices that were timed.
    timed: AtomicU64,
    /// Two halves of page-locked memory for uploads, and the events behind their last copies.
    staging: Mutex<(PinnedMemory, [CudaEvent; 2])>,
    /// By mesh axis.
    mesh: BTreeMap<String, Arc<Communicator>>,
    /// What the first rank chose, by what it chose among.
    agreed: Mutex<HashMap<String, Vec<u8>>>,
    /// See [`CudaOptions::memory_limit`](crate::CudaOptions::memory_limit).
    memory_limit: Option<usize>,
}

/// Bytes of half of the staging memory.
const STAGING: usize = 32 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Meets the other ranks of each axis that has several. All ranks have the same axes, and meet along them in one order.
fn meet(
    nvidia: &Nvidia,
    context: &Arc<CudaContext>,
    mesh: &HashMap<String, Arc<dyn Collectives>>,
) -> Result<BTreeMap<String, Arc<Communicator>>> {
    let mut axes: Vec<_> = mesh.iter().filter(|(_, group)| group.ranks() > 1).collect();
    axes.sort_unstable_by_key(|(axis, _)| *axis);
    if axes.is_empty() {
        return Ok(BTreeMap::new());
    }
    let nccl = Nccl::open(library::path(nvidia, Library::Nccl)?)?;
    let join = |(axis, group): (&String, &Arc<dyn Collectives>)| {
        let context = Arc::clone(context);
        Ok((axis.clone(), Communicator::join(nccl, Arc::clone(group), move || context.enter())?))
    };
    axes.into_iter().map(join).collect()
}

impl CudaDevice {
    /// Opens a GPU, which is one rank of each axis of the mesh.
    pub(crate) fn open(options: &CudaOptions) -> Result<Self> {
        let nvidia = Nvidia::detect();
        let context = CudaContext::open(&nvidia, options.ordinal)?;
        let nvrtc = Nvrtc::find(&nvidia)?;
        let mesh = meet(&nvidia, &context, &options.mesh)?;
        let driver = nvidia.kernel_module.clone().unwrap_or_default();
        let salt = format!("{} {} driver {} {driver}", context.arch, nvrtc.identity(), context.driver.version()?);
        let products_file = library::path(&nvidia, Library::CublasLt).ok().map(Path::to_path_buf);
        let size = products_file.as_ref().and_then(|f| Some(std::fs::metadata(f).ok()?.len()));
        let size = size.map_or_else(|| "none".into(), |bytes| format!("of {bytes} bytes"));
        // Another text of the kernels among the candidates makes other times.
        let texts = crate::cache::hash(&[crate::gemm::SOURCE.as_bytes()]);
        let timed_on = format!("{}, {salt}, cuBLASLt {size}, kernels {texts:032x}", context.name);
        let staging = (
            PinnedMemory::allocate(&context, 2 * STAGING, MemoryOwner::Upload)?,
            [CudaEvent::new(&context, false)?, CudaEvent::new(&context, false)?],
        );
        Ok(Self {
            nvrtc,
            cache: KernelCache::of_user(salt),
            kernels: Mutex::default(),
            arena: SharedArena::new(),
            host_arena: SharedArena::new(),
            order: StepOrder::default(),
            products: OnceLock::new(),
            chosen: Mutex::default(),
            choices: ChoiceFile::of_user(timed_on),
            products_file,
            timed: AtomicU64::new(0),
            staging: Mutex::new(staging),
            mesh,
            agreed: Mutex::default(),
            memory_limit: options.memory_limit,
            context,
        })
    }

    /// Its name, such as `NVIDIA H200`.
    pub(crate) fn name(&self) -> &str {
        &self.context.name
    }

    /// May launches begin before those ahead of them have ended, if their kernels wait by themselves?
    pub(crate) fn overlaps(&self) -> bool {
        self.context.overlaps
    }

    /// The ranks of each mesh axis.
    pub(crate) fn mesh_ranks(&self) -> MeshRanks {
        self.mesh.iter().map(|(axis, communicator)| (axis.clone(), communicator.ranks())).collect()
    }

    /// This GPU's end of the group along `axis`.
    pub(crate) fn communicator(&self, axis: &str) -> Result<Arc<Communicator>> {
        self.mesh.get(axis).cloned().ok_or_else(|| failed(format!("there are no ranks along `{axis}`")))
    }

    /// What the first rank decides, which it does once: ranks that chose by their own clocks would sum in different
    /// orders, and sample different tokens. `None` where this is the only rank. All ranks bind the same programs in the
    /// same order.
    ///
    /// # Errors
    /// When ranks decide different things, or one is lost.
    fn of_first_rank<const N: usize>(&self, what: &str, decide: impl FnOnce() -> [u8; N]) -> Result<Option<[u8; N]>> {
        if self.mesh.is_empty() {
            return Ok(None);
        }
        if let Some(known) = lock(&self.agreed).get(what) {
            return Ok(known.as_slice().try_into().ok());
        }
        let first = self.mesh.values().all(|communicator| communicator.ranks().1 == 0);
        let mut decided = if first { decide() } else { [0; N] };
        // Along one axis after the other, it comes to all.
        for communicator in self.mesh.values() {
            communicator.share(what, &mut decided)?;
        }
        lock(&self.agreed).insert(what.to_owned(), decided.to_vec());
        Ok(Some(decided))
    }

    /// Counts a choice that is timed.
    fn count_timed(&self) {
        self.timed.fetch_add(1, Ordering::Relaxed);
    }

    /// Choices that were timed so far.
    pub(crate) fn choices_timed(&self) -> u64 {
        self.timed.load(Ordering::Relaxed)
    }

    /// Free and total bytes of its memory.
    pub(crate) fn memory_info(&self) -> Result<(usize, usize)> {
        self.context.enter()?;
        self.context.driver.memory()
    }

    /// What has been allocated, by owner.
    pub(crate) fn memory(&self) -> MemoryUse {
        self.context.ledger.usage()
    }

    /// Memory of the GPU, uninitialised.
    pub(crate) fn allocate(&self, bytes: usize, owner: MemoryOwner) -> Result<DeviceMemory> {
        DeviceMemory::allocate(&self.context, bytes, owner)
    }

    /// Memory to time kernels with, uninitialised.
    ///
    /// # Errors
    /// When memory runs out, or would exceed the limit.
    pub(crate) fn allocate_to_time(&self, bytes: usize) -> Result<DeviceMemory> {
        let all = self.memory().live.on_device() + bytes;
        if self.memory_limit.is_some_and(|limit| limit < all) {
            let what = format!("{} within the limit of {}", MemoryOwner::Tuning, self.name());
            return Err(RuntimeError::OutOfMemory { what, needed: bytes, remedy: "raise the limit of GPU memory" });
        }
        self.allocate(bytes, MemoryOwner::Tuning)
    }

    /// Page-locked memory of the host that launches read and write, uninitialised.
    pub(crate) fn allocate_on_host(&self, bytes: usize, owner: MemoryOwner) -> Result<DeviceMemory> {
        DeviceMemory::allocate_on_host(&self.context, bytes, owner)
    }

    /// Page-locked memory of the host, zeroed.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<PinnedMemory> {
        PinnedMemory::allocate(&self.context, bytes, MemoryOwner::HostStaging)
    }

    pub(crate) fn event(&self) -> Result<CudaEvent> {
        CudaEvent::new(&self.context, false)
    }

    /// An event that knows its time.
    pub(crate) fn timed_event(&self) -> Result<CudaEvent> {
        CudaEvent::new(&self.context, true)
    }

    /// Captures what `queue` queues, without running it.
    pub(crate) fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<CapturedGraph> {
        self.context.enter()?;
        let driver = &self.context.driver;
        driver.begin_capture(self.context.stream)?;
        let queued = queue();
        let handle = driver.end_capture(self.context.stream, queued.is_ok());
        queued?;
        Ok(CapturedGraph::new(&self.context, handle?))
    }

    /// Leases the workspace, at least `bytes` large, until the lease is released. Did its address change since `lease`
    /// had it last?
    ///
    /// # Errors
    /// When it must grow and memory runs out.
    pub(crate) fn lease_arena(&self, lease: &mut ArenaLease<DeviceMemory>, bytes: usize) -> Result<bool> {
        self.arena.lease(lease, bytes, |bytes| self.allocate(bytes, MemoryOwner::Workspace))
    }

    /// As [`lease_arena`](Self::lease_arena), of the block of the host that values are offloaded to.
    ///
    /// # Errors
    /// When it must grow and the system gives no more page-locked memory.
    pub(crate) fn lease_host_arena(&self, lease: &mut ArenaLease<DeviceMemory>, bytes: usize) -> Result<bool> {
        self.host_arena.lease(lease, bytes, |bytes| self.allocate_on_host(bytes, MemoryOwner::HostWorkspace))
    }

    /// The kernel of `source`, compiled if neither this process nor the cache has it.
    pub(crate) fn kernel(&self, source: &Arc<CudaSource>) -> Result<Arc<LoadedKernel>> {
        if let Some(loaded) = lock(&self.kernels).get(source) {
            return Ok(Arc::clone(loaded));
        }
        let context = &self.context;
        context.enter()?;
        let compile = || Ok::<_, RuntimeError>(self.nvrtc.compile(&source.entry, &source.text, &context.arch)?.cubin);
        let module = self.cache.get(&source.text, compile, |cubin| context.driver.load(cubin))?;
        let module = module.ok_or_else(|| {
            failed(format!("the driver refuses kernel {} for {}; update the driver", source.entry, context.arch))
        })?;
        let name = CString::new(&*source.entry).map_err(|_| failed("a kernel's name holds a zero byte"))?;
        let function = context.driver.function(module, &name)?;
        let loaded = Arc::new(LoadedKernel::new(context, module, function));
        lock(&self.kernels).insert(Arc::clone(source), Arc::clone(&loaded));
        Ok(loaded)
    }

    /// Brings bytes to the GPU, `offset` bytes in, through the staging memory; they may be gone when this returns.
    pub(crate) fn upload(&self, to: &DeviceMemory, offset: usize, bytes: &[u8]) -> Result<()> {
        assert!(offset + bytes.len() <= to.bytes(), "{} bytes at {offset} of {}", bytes.len(), to.bytes());
        let context = &self.context;
        context.enter()?;
        let (staging, marks) = &mut *lock(&self.staging);
        for (i, part) in bytes.chunks(STAGING).enumerate() {
            let half = i % 2;
            marks[half].wait()?;
            let at = half * STAGING;
            copy_by_threads(staging.part_mut(at..at + part.len()), part);
            let from = staging.bytes()[at..].as_ptr() as Address;
            let address = to.address() + (offset + i * STAGING) as u64;
            // SAFETY: both sides are as long, as just checked; this half is not written before the mark behind it.
            unsafe { context.driver.on_device(address, from, part.len(), context.stream)? };
            marks[half].record()?;
        }
        Ok(())
    }

    /// The front of `memory`, after all that was queued.
    pub(crate) fn download(&self, memory: &DeviceMemory) -> Result<Vec<u8>> {
        let context = &self.context;
        context.enter()?;
        // Memory of the host too, which kernels may write, is copied in the order of the stream.
        let mut bytes = vec![0; memory.bytes()];
        if !bytes.is_empty() {
            // SAFETY: both sides are as long, and the copy is waited for.
            unsafe { context.driver.to_host(bytes.as_mut_ptr(), memory.address(), bytes.len(), context.stream)? };
        }
        context.driver.synchronize(context.stream)?;
        Ok(bytes)
    }

    /// Waits for all that was queued.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.context.enter()?;
        self.context.driver.synchronize(self.context.side)?;
        self.context.driver.synchronize(self.context.stream)
    }

    /// What queues work.
    pub(crate) fn queue(&self) -> Result<StreamQueue<'_>> {
        StreamQueue::new(&self.context)
    }

    /// What queues work in the lane of communication.
    pub(crate) fn side_queue(&self) -> Result<StreamQueue<'_>> {
        StreamQueue::side(&self.context)
    }

    /// The `TensorMap` of a matrix; see [`LaunchArg::Matrix`](crate::kernel::LaunchArg::Matrix).
    pub(crate) fn tensor_map(
        &self,
        matrix: Address,
        dtype: DType,
        extents: [usize; 2],
        tile: [usize; 2],
    ) -> Result<[u64; 16]> {
        let ([rows, columns], [high, wide]) = (extents.map(|n| n as u64), tile.map(|n| n as u32));
        self.context.driver.tensor_map(
            matrix,
            dtype,
            &[columns, rows],
            &[columns * dtype.size_bytes() as u64],
            &[wide, high],
            Swizzle::Of128,
        )
    }

    /// The `TensorMap` of a matrix of codes; see [`LaunchArg::CodeRows`](crate::kernel::LaunchArg::CodeRows).
    pub(crate) fn tensor_map_of_code_rows(
        &self,
        matrix: Address,
        dtype: DType,
        extents: [usize; 2],
        rows: usize,
    ) -> Result<[u64; 16]> {
        let [high, wide] = extents.map(|n| n as u64);
        let swizzle = if wide == 64 { Swizzle::Of64 } else { Swizzle::Of128 };
        let tile = [wide as u32, rows as u32];
        self.context.driver.tensor_map(matrix, dtype, &[wide, high], &[wide], &tile, swizzle)
    }

    /// The `TensorMap` of a matrix in groups of rows; see [`LaunchArg::Groups`](crate::kernel::LaunchArg::Groups).
    pub(crate) fn tensor_map_of_groups(
        &self,
        matrix: Address,
        dtype: DType,
        extents: [usize; 2],
        groups: usize,
    ) -> Result<[u64; 16]> {
        let ([rows, columns], size) = (extents.map(|n| n as u64), dtype.size_bytes() as u64);
        // Columns of a slice, rows of a group, slices, groups.
        let (extents, row) = ([64, 8, columns / 64, rows / 8], columns * size);
        let tile = [64, 8, (columns / 64) as u32, groups as u32];
        self.context.driver.tensor_map(matrix, dtype, &extents, &[row, 64 * size, 8 * row], &tile, Swizzle::Of128)
    }
}
