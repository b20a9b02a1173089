//! The interface of a device.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ridge_graph::passes::Kernel;
use ridge_graph::{Bindings, FuncId, Graph, Type};

use crate::error::{Result, RuntimeError};
use crate::memory::{MemoryBytes, MemoryUse};

/// Memory of a device, shared and freed with its last owner. Only the backend that made it looks inside.
#[derive(Clone)]
pub struct Buffer {
    bytes: usize,
    inner: Arc<dyn Any + Send + Sync>,
}

impl Buffer {
    /// Wraps a backend's own memory of `bytes` bytes.
    pub fn new(bytes: usize, inner: impl Any + Send + Sync) -> Self {
        Self { bytes, inner: Arc::new(inner) }
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many share it.
    pub(crate) fn owners(&self) -> usize {
        Arc::strong_count(&self.inner)
    }

    /// The backend's own memory, if it is a `T`.
    pub fn inner<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.inner.downcast_ref()
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}

/// Bytes of a weight on the host.
#[derive(Clone)]
pub enum WeightData {
    /// Part of something that stays where it is, such as a mapped file: a CPU uses it in place where it can.
    Shared(Arc<dyn AsRef<[u8]> + Send + Sync>, Range<usize>),
    /// Bytes made for the purpose.
    Owned(Vec<u8>),
}

impl WeightData {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Shared(owner, range) => &(**owner).as_ref()[range.clone()],
            Self::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for WeightData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WeightData({} bytes)", self.bytes().len())
    }
}

/// A device. Runs submitted to one backend, of whatever program, take effect in the order of submission. A step that
/// failed fails those submitted behind it before its failure was reported.
pub trait Backend: Send + Sync {
    /// Its name, such as `cpu`.
    fn name(&self) -> &'static str;

    /// The kernels that may claim patterns of a graph.
    fn kernels(&self) -> &[Kernel];

    /// Brings a weight to the device. `parts` are its components' bytes in the order of its format; one for plain
    /// storage.
    ///
    /// # Errors
    /// When sizes do not fit `ty`, or memory runs out.
    fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> Result<Buffer>;

    /// How many ranks it drives as one. Every step runs on all of them.
    fn ranks(&self) -> usize {
        1
    }

    /// Brings each rank its share, of type `ty`, of a weight that is cut over the ranks: parts as for
    /// [`upload`](Backend::upload), by rank.
    ///
    /// # Errors
    /// As for [`upload`](Backend::upload), and when there are more or fewer shares than ranks.
    fn upload_shares(&self, ty: &Type, mut shares: Vec<Vec<WeightData>>) -> Result<Buffer> {
        match (shares.pop(), shares.is_empty()) {
            (Some(only), true) => self.upload(ty, only),
            _ => Err(RuntimeError::Device { backend: self.name(), why: "it is one rank; give it one share".into() }),
        }
    }

    /// Repacks a weight of type `ty` that [`upload`](Backend::upload) made in the layout of this name, which a kernel's
    /// offer asked for. Nothing where it is in that layout already, or is writable. Programs that want rows still read it.
    ///
    /// # Errors
    /// When the backend has no such layout, or memory runs out.
    fn set_layout(&self, _buffer: &Buffer, _ty: &Type, _layout: &str) -> Result<()> {
        Ok(())
    }

    /// A weight of random numbers made on the device, stored in the format of `ty`: element `i` is `scale` times the sum less 255 of two bytes,
    /// the low ones of `bits >> (48 - 16 * (i % 4))`, where `bits` is draw `i / 4` of SplitMix64 that begins at `state`.
    /// `None` where the device leaves that to the host.
    ///
    /// # Errors
    /// When memory runs out.
    fn random(&self, _ty: &Type, _state: u64, _scale: f64) -> Result<Option<Buffer>> {
        Ok(None)
    }

    /// A weight of the elements `plain`, of the dtype of `ty`, stored in the format of `ty` as the format's `encode` makes it, by
    /// the device. `None` where the device leaves that to the host.
    ///
    /// # Errors
    /// When memory runs out.
    fn encode(&self, _ty: &Type, _plain: &WeightData) -> Result<Option<Buffer>> {
        Ok(None)
    }

    /// Zeroed memory for a state.
    ///
    /// # Errors
    /// When memory runs out.
    fn allocate(&self, bytes: usize) -> Result<Buffer>;

    /// Zeroed memory of the host for a state that steps read and write in place there, so that it takes none of the
    /// device's. That of [`allocate`](Backend::allocate) where the device has no memory of its own.
    ///
    /// # Errors
    /// When memory runs out.
    fn allocate_on_host(&self, bytes: usize) -> Result<Buffer> {
        self.allocate(bytes)
    }

    /// The bytes of a weight in memory of the host, where kernels read them in place, so that it takes none of the device's; the
    /// same buffer where the device has no memory of its own.
    ///
    /// # Errors
    /// When the buffer is another backend's, or memory runs out.
    fn moved_to_host(&self, buffer: &Buffer) -> Result<Buffer> {
        Ok(buffer.clone())
    }

    /// Bytes a second that copies from memory of the host to that of the device reach, measured now; `None` where the device
    /// has no memory of its own.
    ///
    /// # Errors
    /// When memory runs out, or the device failed.
    fn host_link(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// May steps and [`write`](Backend::write) change the buffer? Not where [`upload`](Backend::upload) left the bytes in a
    /// mapped file or in another layout.
    fn is_writable(&self, _buffer: &Buffer) -> bool {
        true
    }

    /// Copies a buffer to the host, after all runs submitted so far.
    ///
    /// # Errors
    /// When the buffer is another backend's, or the device failed.
    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>>;

    /// Overwrites the front of a buffer, after all runs submitted so far.
    ///
    /// # Errors
    /// When the buffer is another backend's or too small, or the device failed.
    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()>;

    /// What it has allocated, by owner. Programs, buckets and buffers that were dropped count no more. A backend that does
    /// not allocate has nothing; one that wraps another gives the other's.
    fn memory(&self) -> MemoryUse {
        MemoryUse::default()
    }

    /// Choices among kernels that were made by timing them, by all programs so far.
    fn choices_timed(&self) -> u64 {
        0
    }

    /// Bytes that memory for a weight or state of `bytes` bytes takes, with what is added so that it is aligned.
    fn padded_bytes(&self, bytes: usize) -> usize {
        bytes
    }

    /// Prepares a lowered graph.
    ///
    /// # Errors
    /// Names an op that it has no kernel for.
    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>>;
}

/// A graph compiled for a device, for any bindings of its symbols.
pub trait Program: Send + Sync {
    /// Prepares one bucket: everything that a step of these bindings needs is allocated here. `weights`, which steps read,
    /// and `states`, which they update and which are writable, are in the order of the main function's arguments of
    /// those roles.
    ///
    /// # Errors
    /// When a symbol is unbound, a buffer too small, or memory runs out.
    fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>>;

    /// Bytes that a bucket takes besides weights and states, by owner, without preparing it: to the byte what
    /// [`bind`](Program::bind) allocates, of owners that buckets share what this one needs. Memory that a backend only
    /// uses to time kernels while it binds is not counted: it does without.
    ///
    /// # Errors
    /// When a symbol is unbound.
    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes>;

    /// The sum of [`Program::memory`] in the memory of the device.
    ///
    /// # Errors
    /// When a symbol is unbound.
    fn workspace_bytes(&self, bindings: &Bindings) -> Result<usize> {
        Ok(self.memory(bindings)?.on_device())
    }
}

impl LaunchTime {
    /// Where in the model the launch is: its calls and the node's scope in `graph`, the lowered graph, joined by dots. Empty
    /// for a node of main without a scope.
    pub fn place(&self, graph: &Graph) -> String {
        let scope = &graph.function(self.func).nodes[self.node].scope;
        let parts: Vec<&str> =
            self.path.iter().chain([scope]).map(|part| &**part).filter(|part| !part.is_empty()).collect();
        parts.join(".")
    }
}

/// What one launch of a step took.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchTime {
    /// The function of the node that was launched, in the lowered graph.
    pub func: FuncId,
    /// The node's index there.
    pub node: usize,
    /// The calls that led to it, outermost first; see [`PlannedLaunch::path`](crate::PlannedLaunch::path).
    pub path: Vec<Arc<str>>,
    /// Seconds from the beginning of the step to its end.
    pub end: f64,
    /// Seconds from the end of the launch before to its own. What runs in the lane of communication
    /// ([`PlannedLaunch::communicates`](crate::PlannedLaunch::communicates)) begins when what is computed before it and
    /// what is communicated before it have ended.
    pub seconds: f64,
}

/// Steps of one bucket that may be in flight at a time: the slots of its ring of staging memory.
pub const SLOTS: usize = 2;

/// What was staged of a step input: its first `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    /// The step input, in the order of the main function's step inputs.
    pub input: usize,
    /// Bytes from its start.
    pub bytes: usize,
}

/// One bucket of a program, ready to run again and again. Nothing is allocated after it is made.
///
/// Each step uses one of [`SLOTS`] slots from [`submit`](Run::submit) until it is complete. A slot has staging memory for
/// all step inputs and outputs. The device has one copy of the step inputs, zero at first: what a step does not stage is
/// as the bucket's step before left it.
///
/// A step may be submitted before its late inputs are known. It is *held* then: what does not depend on them runs, and
/// nothing is queued behind it until it is released.
pub trait Run: Send {
    /// Staging memory of step input `index` in `slot`. What it holds after a step is not defined. Where a step of the slot
    /// is in flight, waits until it is complete, unless the step is held and the input is late.
    fn input(&mut self, slot: usize, index: usize) -> &mut [u8];

    /// Queues one step and returns at once: copies of what was staged, in the order of the inputs and at most one of each,
    /// then the launches. With `held`, queues only the launches that do not depend on late inputs, none of which `staged`
    /// may name. The step that was in the slot before must be complete.
    ///
    /// # Errors
    /// When the device failed before, or a step submitted by this thread is held.
    fn submit(&mut self, slot: usize, staged: &[Staged], held: bool) -> Result<()>;

    /// Queues the rest of the held step of `slot`, with these late inputs.
    ///
    /// # Errors
    /// When the device failed before.
    fn release(&mut self, slot: usize, staged: &[Staged]) -> Result<()>;

    /// Is the last step of `slot` complete? A held step is not.
    ///
    /// # Errors
    /// When the step, or one submitted before it, failed.
    fn poll(&mut self, slot: usize) -> Result<bool>;

    /// Waits until the last step of `slot`, which is not held, is complete.
    ///
    /// # Errors
    /// As for [`poll`](Run::poll).
    fn wait(&mut self, slot: usize) -> Result<()>;

    /// Data output `index` of the last step of `slot`, which must be complete.
    fn output(&self, slot: usize, index: usize) -> &[u8];

    /// Bytes of owners that the bucket has its own of, as [`Program::memory`] predicted them.
    fn memory(&self) -> MemoryBytes {
        MemoryBytes::default()
    }

    /// How many steps of the bucket run otherwise than all that follow, since the device records them, say.
    fn steps_to_learn(&self) -> usize {
        0
    }

    /// Runs one step to its end and tells what each launch took: one for each launch of the plan, in order, whatever the
    /// device. The launches are those of [`Run::submit`], queued one by one where that would launch them captured, so
    /// outputs are the same bits. May allocate, and takes a little longer than a step that is not watched.
    ///
    /// # Errors
    /// As for [`Run::submit`] and [`Run::wait`], and where the backend has no such clock.
    fn timed(&mut self, _slot: usize, _staged: &[Staged]) -> Result<Vec<LaunchTime>> {
        Err(RuntimeError::Device { backend: "this backend", why: "does not time single launches".to_owned() })
    }
}
