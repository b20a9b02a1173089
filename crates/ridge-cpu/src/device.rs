//! What all programs of one backend share: threads, mesh groups and the workspace.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ridge_runtime::{MemoryLedger, MemoryOwner, Result, RuntimeError, StepOrder};

use crate::bytes::MemoryBlock;
use crate::lane::Lane;
use crate::memory::AlignedMemory;
use crate::mesh::MeshGroups;
use crate::pool::{LaunchSequence, PoolJob, ThreadPool};
use crate::scratch::Scratch;
use crate::sync;

/// The memory that steps work in.
pub(crate) struct Workspace {
    /// Values of the plan and preparations of kernels.
    values: AlignedMemory,
    /// What values are moved to that a device would keep in memory of the host, if any are.
    host: Option<AlignedMemory>,
}

impl Workspace {
    fn new(ledger: &Arc<MemoryLedger>, [values, host]: [usize; 2]) -> Result<Self> {
        let values = AlignedMemory::zeroed(ledger, MemoryOwner::Workspace, values)?;
        let host = (host > 0).then(|| AlignedMemory::zeroed(ledger, MemoryOwner::HostWorkspace, host)).transpose()?;
        Ok(Self { values, host })
    }

    /// Both memories.
    pub(crate) fn blocks(&self) -> [MemoryBlock; 2] {
        let values = self.values.block();
        [values, self.host.as_ref().map_or(MemoryBlock { bytes: 0, ..values }, AlignedMemory::block)]
    }

    fn bytes(&self) -> [usize; 2] {
        self.blocks().map(|block| block.bytes)
    }
}

/// What programs of one backend share.
pub(crate) struct CpuDevice {
    pub(crate) pool: ThreadPool,
    pub(crate) mesh: MeshGroups,
    /// Collectives that run beside computation; started for the first bucket that has such.
    lane: OnceLock<Arc<Lane>>,
    /// See [`CpuOptions::poison`].
    pub(crate) poison: bool,
    /// Counts all that is allocated.
    pub(crate) ledger: Arc<MemoryLedger>,
    /// Numbers its steps.
    pub(crate) order: Arc<StepOrder>,
    arena: Mutex<Arc<Workspace>>,
    /// Counts the workspaces that there have been, so that a step can see without a lock that its own is the present.
    arenas: AtomicUsize,
}

impl CpuDevice {
    pub(crate) fn new(pool: ThreadPool, mesh: MeshGroups, poison: bool) -> Result<Self> {
        let ledger = Arc::default();
        let arena = Mutex::new(Arc::new(Workspace::new(&ledger, [0; 2])?));
        Ok(Self {
            pool,
            mesh,
            poison,
            ledger,
            order: Arc::default(),
            lane: OnceLock::new(),
            arena,
            arenas: AtomicUsize::new(0),
        })
    }

    /// The lane of communication.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn lane(&self) -> Result<Arc<Lane>> {
        if let Some(lane) = self.lane.get() {
            return Ok(Arc::clone(lane));
        }
        let lane = Lane::new(self.pool.handle()).map_err(|e| RuntimeError::Device {
            backend: "cpu",
            why: format!("cannot start a thread for communication: {e}"),
        })?;
        Ok(Arc::clone(self.lane.get_or_init(|| Arc::new(lane))))
    }

    /// The workspace, its two memories at least this large, and its number. Steps that were bound to a smaller one, under another
    /// number, look for it again when they are submitted.
    pub(crate) fn arena(&self, [values, host]: [usize; 2]) -> Result<(Arc<Workspace>, usize)> {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let [has_values, has_host] = arena.bytes();
        if has_values < values || has_host < host {
            // The old one is given up first, so that both are never needed at a time unless a step uses it.
            *arena = Arc::new(Workspace::new(&self.ledger, [0; 2])?);
            *arena = Arc::new(Workspace::new(&self.ledger, [values.max(has_values), host.max(has_host)])?);
            self.arenas.fetch_add(1, Ordering::Release);
        }
        Ok((Arc::clone(&arena), self.arena_number()))
    }

    /// Copies as many bytes as both have, after all steps submitted so far and before any later one.
    ///
    /// # Errors
    /// When a step that this thread submitted waits for its late inputs.
    pub(crate) fn copy(&self, from: MemoryBlock, to: MemoryBlock) -> Result<()> {
        self.order.wait_released()?;
        let job = sync::Arc::new(PoolJob::new(Box::new(HostCopy { from, to })));
        self.pool.submit(&job);
        self.pool.wait(&job);
        Ok(())
    }

    /// The number of the present workspace.
    pub(crate) fn arena_number(&self) -> usize {
        self.arenas.load(Ordering::Acquire)
    }
}

/// A copy between the host and memory of steps, which takes its turn among them.
struct HostCopy {
    from: MemoryBlock,
    to: MemoryBlock,
}

// SAFETY: `CpuDevice::copy` waits until the copy has been made, so both blocks outlive it.
unsafe impl Send for HostCopy {}
// SAFETY: as above; the one chunk is run by one thread.
unsafe impl Sync for HostCopy {}

impl LaunchSequence for HostCopy {
    fn launches(&self) -> usize {
        1
    }

    fn chunks(&self, _launch: usize) -> u16 {
        1
    }

    fn run(&self, _launch: usize, _chunk: u16, _scratch: &mut Scratch) {
        // SAFETY: `from` is readable and `to` writable for that many bytes. One of them is the caller's own memory, the
        // other belongs to steps, none of which runs while this one does.
        unsafe { std::ptr::copy_nonoverlapping(self.from.ptr, self.to.ptr, self.from.bytes.min(self.to.bytes)) }
    }
}
