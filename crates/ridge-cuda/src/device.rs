//! One GPU: its context, its stream, memory that is given back when its owner goes, loaded kernels and the workspace.

mod held;
mod products;
mod ways;

use std::collections::HashMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ridge_hw::gpu::{Library, Nvidia};
use ridge_runtime::{Result, RuntimeError};

use crate::cache::Cache;
use crate::cublaslt::CublasLt;
use crate::driver::{Address, Driver, Handle};
use crate::error::device as failed;
use crate::kernel::Source;
use crate::library;
use crate::nvrtc::Nvrtc;

pub(crate) use held::{Captured, Event, Loaded};

/// Attributes by their numbers in `CUdevice_attribute`.
const COMPUTE_CAPABILITY_MAJOR: i32 = 75;
const COMPUTE_CAPABILITY_MINOR: i32 = 76;
const MULTIPROCESSORS: i32 = 16;
/// The least compute capability: bf16 conversions are instructions since then.
const LEAST_CAPABILITY: (i32, i32) = (8, 0);

/// The GPU's context and stream, alive as long as anything that was made with them.
pub(crate) struct Context {
    driver: Driver,
    gpu: i32,
    handle: Handle,
    stream: Handle,
    name: String,
    arch: String,
    /// May launches begin before those ahead of them have ended?
    overlaps: bool,
    /// Multiprocessors.
    processors: u32,
}

// SAFETY: the driver's functions may be called from any thread, and the handles are only ever given to them.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn open(nvidia: &Nvidia, ordinal: usize) -> Result<Arc<Self>> {
        let driver = Driver::open(library::path(nvidia, Library::Driver)?)?;
        let count = driver.devices()?;
        if ordinal >= count {
            let has = if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") };
            return Err(failed(format!(
                "there is no GPU {ordinal}: this process sees {has}; check --device and CUDA_VISIBLE_DEVICES"
            )));
        }
        let gpu = driver.device(ordinal)?;
        let name = driver.name(gpu)?;
        let attribute = |number| driver.attribute(gpu, number);
        let (major, minor) = (attribute(COMPUTE_CAPABILITY_MAJOR)?, attribute(COMPUTE_CAPABILITY_MINOR)?);
        if (major, minor) < LEAST_CAPABILITY {
            let (least_major, least_minor) = LEAST_CAPABILITY;
            return Err(failed(format!(
                "{name} has compute capability {major}.{minor}, needs at least {least_major}.{least_minor}; use --device cpu"
            )));
        }
        let processors = attribute(MULTIPROCESSORS)?.unsigned_abs();
        // From 9.0 on, the suffix opens the instructions of exactly this architecture.
        let suffix = if major >= 9 { "a" } else { "" };
        let handle = driver.retain(gpu)?;
        let mut context = Self {
            driver,
            gpu,
            handle,
            stream: std::ptr::null_mut(),
            name,
            arch: format!("sm_{major}{minor}{suffix}"),
            overlaps: major >= 9,
            processors,
        };
        context.enter()?;
        context.stream = context.driver.stream()?;
        Ok(Arc::new(context))
    }

    fn enter(&self) -> Result<()> {
        self.driver.enter(self.handle)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.enter().is_ok() && !self.stream.is_null() {
            self.driver.end_stream(self.stream);
        }
        self.driver.release(self.gpu);
    }
}

/// Memory of the GPU.
pub(crate) struct Memory {
    context: Arc<Context>,
    address: Address,
    bytes: usize,
}

impl Memory {
    pub(crate) fn address(&self) -> Address {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes > 0 && self.context.enter().is_ok() {
            self.context.driver.free(self.address);
        }
    }
}

/// Page-locked memory of the host, which the GPU reads and writes by itself.
pub(crate) struct Pinned {
    context: Arc<Context>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: memory like any other; who may use it when is its owner's care.
unsafe impl Send for Pinned {}

impl Pinned {
    /// The bytes, of which the GPU uses none meanwhile.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: allocated, zeroed at first, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The bytes, of which the GPU uses none meanwhile.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: allocated, zeroed at first, lives as long as `self`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 && self.context.enter().is_ok() {
            self.context.driver.free_host(self.pointer);
        }
    }
}

/// What programs of one GPU share.
pub(crate) struct Device {
    context: Arc<Context>,
    nvrtc: Nvrtc,
    cache: Cache,
    kernels: Mutex<HashMap<Arc<Source>, Arc<Loaded>>>,
    arena: Mutex<Arc<Memory>>,
    /// Counts the workspaces that there have been, so that a step can see without a lock that its own is the present.
    arenas: AtomicUsize,
    /// cuBLASLt and its workspace, from when a program first asks for them; `None` where there is none.
    products: OnceLock<Option<(CublasLt, Memory)>>,
    products_file: Option<PathBuf>,
    /// Which way was the fastest, by what it was for.
    ways: Mutex<HashMap<String, usize>>,
    /// Two halves of page-locked memory through which weights pass, and the marks behind their last copies.
    staging: Mutex<(Pinned, [Event; 2])>,
}

/// Bytes of half of the staging memory.
const STAGING: usize = 16 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Opens GPU `ordinal`.
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        let nvidia = Nvidia::detect();
        let context = Context::open(&nvidia, ordinal)?;
        let nvrtc = Nvrtc::find(&nvidia)?;
        let driver = nvidia.kernel_module.clone().unwrap_or_default();
        let salt = format!("{} {} driver {} {driver}", context.arch, nvrtc.identity(), context.driver.version()?);
        let staging = (pinned(&context, 2 * STAGING)?, [event(&context, false)?, event(&context, false)?]);
        Ok(Self {
            nvrtc,
            cache: Cache::of_user(salt),
            kernels: Mutex::default(),
            arena: Mutex::new(Arc::new(memory(&context, 0, "workspace")?)),
            arenas: AtomicUsize::new(0),
            products: OnceLock::new(),
            ways: Mutex::default(),
            products_file: library::path(&nvidia, Library::CublasLt).ok().map(Path::to_path_buf),
            staging: Mutex::new(staging),
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

    /// Free and total bytes of its memory.
    pub(crate) fn memory_info(&self) -> Result<(usize, usize)> {
        self.context.enter()?;
        self.context.driver.memory()
    }

    /// Memory of the GPU; `what` it is for, should there be too little.
    pub(crate) fn allocate(&self, bytes: usize, what: &str) -> Result<Memory> {
        memory(&self.context, bytes, what)
    }

    /// Page-locked memory of the host, zeroed.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned> {
        pinned(&self.context, bytes)
    }

    pub(crate) fn event(&self) -> Result<Event> {
        event(&self.context, false)
    }

    /// An event that knows its time.
    pub(crate) fn timed_event(&self) -> Result<Event> {
        event(&self.context, true)
    }

    /// Captures what `queue` queues, without running it.
    pub(crate) fn capture(&self, queue: impl FnOnce() -> Result<()>) -> Result<Captured> {
        self.context.enter()?;
        let driver = &self.context.driver;
        driver.begin_capture(self.context.stream)?;
        let queued = queue();
        let handle = driver.end_capture(self.context.stream, queued.is_ok());
        queued?;
        Ok(Captured { context: Arc::clone(&self.context), handle: handle? })
    }

    /// The workspace, at least this large, and its number. Steps that were bound to a smaller one, under another
    /// number, look for it again when they are submitted.
    pub(crate) fn arena(&self, bytes: usize) -> Result<(Arc<Memory>, usize)> {
        let mut arena = lock(&self.arena);
        if arena.bytes < bytes {
            *arena = Arc::new(self.allocate(bytes, "workspace")?);
            self.arenas.fetch_add(1, Ordering::Release);
        }
        Ok((Arc::clone(&arena), self.arena_number()))
    }

    /// The number of the present workspace.
    pub(crate) fn arena_number(&self) -> usize {
        self.arenas.load(Ordering::Acquire)
    }

    /// The kernel of `source`, compiled if neither this process nor the cache has it.
    pub(crate) fn kernel(&self, source: &Arc<Source>) -> Result<Arc<Loaded>> {
        if let Some(loaded) = lock(&self.kernels).get(source) {
            return Ok(Arc::clone(loaded));
        }
        let context = &self.context;
        context.enter()?;
        let compile = || Ok::<_, RuntimeError>(self.nvrtc.compile(source.entry, &source.text, &context.arch)?.cubin);
        let module = self.cache.get(&source.text, compile, |cubin| context.driver.load(cubin))?;
        let module = module.ok_or_else(|| {
            failed(format!("the driver refuses kernel {} for {}; update the driver", source.entry, context.arch))
        })?;
        let name = CString::new(source.entry).map_err(|_| failed("a kernel's name holds a zero byte"))?;
        let function = context.driver.function(module, &name)?;
        let loaded = Arc::new(Loaded { context: Arc::clone(context), module, function });
        lock(&self.kernels).insert(Arc::clone(source), Arc::clone(&loaded));
        Ok(loaded)
    }

    /// Brings bytes to the GPU, `offset` bytes in, through the staging memory; they may be gone when this returns.
    pub(crate) fn upload(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        assert!(offset + bytes.len() <= to.bytes, "{} bytes at {offset} of {}", bytes.len(), to.bytes);
        let context = &self.context;
        context.enter()?;
        let (staging, marks) = &mut *lock(&self.staging);
        for (i, part) in bytes.chunks(STAGING).enumerate() {
            let half = i % 2;
            marks[half].wait()?;
            let at = half * STAGING;
            staging.bytes_mut()[at..at + part.len()].copy_from_slice(part);
            let from = staging.bytes()[at..].as_ptr();
            let address = to.address + (offset + i * STAGING) as u64;
            // SAFETY: both sides are as long, as just checked; this half is not written before the mark behind it.
            unsafe { context.driver.to_device(address, from, part.len(), context.stream)? };
            marks[half].record()?;
        }
        Ok(())
    }

    /// The front of `memory`, after all that was queued.
    pub(crate) fn download(&self, memory: &Memory) -> Result<Vec<u8>> {
        let context = &self.context;
        context.enter()?;
        let mut bytes = vec![0; memory.bytes];
        if !bytes.is_empty() {
            // SAFETY: both sides are as long, and the copy is waited for.
            unsafe { context.driver.to_host(bytes.as_mut_ptr(), memory.address, bytes.len(), context.stream)? };
        }
        context.driver.synchronize(context.stream)?;
        Ok(bytes)
    }

    /// Waits for all that was queued.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.context.enter()?;
        self.context.driver.synchronize(self.context.stream)
    }

    /// What queues work.
    pub(crate) fn queue(&self) -> Result<Queue<'_>> {
        self.context.enter()?;
        Ok(Queue { driver: &self.context.driver, stream: self.context.stream })
    }
}

/// The stream, from a thread that has entered the context.
pub(crate) struct Queue<'a> {
    driver: &'a Driver,
    stream: Handle,
}

impl Queue<'_> {
    /// The stream itself, for a library that queues on it.
    pub(crate) fn stream(&self) -> Handle {
        self.stream
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// As for [`Driver::launch`]; the memory outlives the kernel's run.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Loaded,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        early: bool,
        params: &mut [*mut std::ffi::c_void],
    ) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.driver.launch(kernel.function, grid, threads, shared, early, params, self.stream) }
    }

    /// Queues a captured step.
    ///
    /// # Safety
    /// As for [`Driver::launch_graph`].
    pub(crate) unsafe fn launch_captured(&self, step: &Captured) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.driver.launch_graph(step.handle, self.stream) }
    }

    /// Queues a copy on the GPU.
    ///
    /// # Safety
    /// As for [`Driver::on_device`]; the memory outlives the copy.
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.driver.on_device(to, from, bytes, self.stream) }
    }

    /// Queues the filling of memory with one byte.
    pub(crate) fn fill(&self, memory: &Memory, byte: u8, bytes: usize) -> Result<()> {
        assert!(bytes <= memory.bytes, "{bytes} bytes of {}", memory.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: within the memory, as just checked.
        unsafe { self.driver.fill(memory.address, byte, bytes, self.stream) }
    }

    /// Queues a copy of all of `from` to `to`.
    ///
    /// # Safety
    /// `from` stays as it is, and both live, until the copy is done.
    pub(crate) unsafe fn to_device(&self, to: &Memory, from: &Pinned) -> Result<()> {
        assert!(from.bytes <= to.bytes, "{} bytes to {}", from.bytes, to.bytes);
        if from.bytes == 0 {
            return Ok(());
        }
        // SAFETY: both sides are as long, as just checked; the rest by the caller's promise.
        unsafe { self.driver.to_device(to.address, from.pointer, from.bytes, self.stream) }
    }

    /// Queues a copy of the front of `from` over all of `to`.
    ///
    /// # Safety
    /// Nobody uses `to`, and both live, until the copy is done.
    pub(crate) unsafe fn to_host(&self, to: &mut Pinned, from: &Memory) -> Result<()> {
        assert!(to.bytes <= from.bytes, "{} bytes of {}", to.bytes, from.bytes);
        if to.bytes == 0 {
            return Ok(());
        }
        // SAFETY: both sides are as long, as just checked; the rest by the caller's promise.
        unsafe { self.driver.to_host(to.pointer, from.address, to.bytes, self.stream) }
    }
}

fn memory(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Memory> {
    context.enter()?;
    let address = if bytes == 0 { Some(0) } else { context.driver.allocate(bytes)? };
    let address = address.ok_or_else(|| RuntimeError::OutOfMemory {
        what: format!("{what} on {}", context.name),
        needed: bytes,
        remedy: "choose a smaller model, a smaller context, or --format q8_0",
    })?;
    Ok(Memory { context: Arc::clone(context), address, bytes })
}

fn pinned(context: &Arc<Context>, bytes: usize) -> Result<Pinned> {
    context.enter()?;
    let pointer = if bytes == 0 { Some(std::ptr::null_mut()) } else { context.driver.allocate_host(bytes)? };
    let pointer = pointer.ok_or_else(|| RuntimeError::OutOfMemory {
        what: "page-locked staging memory".into(),
        needed: bytes,
        remedy: "raise the limit of locked memory (ulimit -l), or lower --chunk",
    })?;
    let pinned = Pinned { context: Arc::clone(context), pointer, bytes };
    if bytes > 0 {
        // SAFETY: just allocated, of this length.
        unsafe { pinned.pointer.write_bytes(0, bytes) };
    }
    Ok(pinned)
}

fn event(context: &Arc<Context>, timed: bool) -> Result<Event> {
    context.enter()?;
    Ok(Event { context: Arc::clone(context), handle: context.driver.event(timed)? })
}
