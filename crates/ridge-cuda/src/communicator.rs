//! A GPU as one rank of a group: its collectives by NCCL, and what becomes of them when a rank is lost.

use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use ridge_runtime::{Collectives, Result};

use crate::device::StreamQueue;
use crate::driver::{Address, Handle};
use crate::error::device as failed;
use crate::nccl::{Call, Elements, Nccl, UniqueId};

/// The number of ranks of each mesh axis, and which of them this one is.
pub(crate) type MeshRanks = HashMap<String, (usize, usize)>;

/// What a collective does with elements that lie as NCCL has them: parts of ranks one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// Everyone gets the sum.
    AllReduce,
    /// This rank gets the sum, the others zeros.
    Reduce(usize),
    /// Everyone gets what this rank has.
    Broadcast(usize),
    /// Everyone gets the part of each.
    AllGather,
    /// Each gets its part of the sum.
    ReduceScatter,
    /// Each gets one part of each.
    AllToAll,
    /// Rank `to` gets what `from` has, the others zeros.
    Send { from: usize, to: usize },
}

/// Parts of a collective in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    pub(crate) from: Address,
    pub(crate) to: Address,
    /// Elements of one part.
    pub(crate) count: usize,
    pub(crate) elements: Elements,
    /// Bytes of one part.
    pub(crate) bytes: usize,
}

/// This GPU's end of a group.
pub(crate) struct Communicator {
    nccl: &'static Nccl,
    /// `None` once it was given up.
    comm: Mutex<Option<Comm>>,
    group: Arc<dyn Collectives>,
}

/// NCCL's communicator.
#[derive(Clone, Copy)]
struct Comm(Handle);

// SAFETY: NCCL's communicators may be used from any thread, one at a time.
unsafe impl Send for Comm {}

/// How often the state of a group is looked at.
const LOOK: Duration = Duration::from_millis(20);

impl Communicator {
    /// Meets the other ranks of `group`. `enter` makes the GPU that of the thread that calls it.
    ///
    /// # Errors
    /// When NCCL fails, or a rank is lost meanwhile.
    pub(crate) fn join(
        nccl: &'static Nccl,
        group: Arc<dyn Collectives>,
        enter: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<Arc<Self>> {
        let (rank, ranks) = (group.rank(), group.ranks());
        let mine = if rank == 0 { nccl.unique_id() } else { Ok(UniqueId([0; 128])) };
        let mine = mine.inspect_err(|error| group.abort(&error.to_string()))?;
        let mut id = mine.0;
        share(&*group, "a meeting of GPUs", &mut id)?;
        // It returns when all have come. A rank that is lost before is known from its group alone.
        let (done, joined) = channel();
        let join = move || {
            let comm = enter().and_then(|()| nccl.join(UniqueId(id), rank, ranks));
            let _ = done.send(comm.map(Comm));
        };
        std::thread::Builder::new()
            .name("ridge-nccl".into())
            .spawn(join)
            .map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        let comm = loop {
            match joined.recv_timeout(LOOK) {
                Ok(comm) => break comm.inspect_err(|error| group.abort(&error.to_string()))?,
                Err(RecvTimeoutError::Disconnected) => return Err(failed("NCCL's thread ended")),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(error) = group.failure() {
                        return Err(failed(error.to_string()));
                    }
                }
            }
        };
        let communicator = Arc::new(Self { nccl, comm: Mutex::new(Some(comm)), group });
        let watched = Arc::downgrade(&communicator);
        std::thread::Builder::new()
            .name("ridge-ranks".into())
            .spawn(move || watch(&watched))
            .map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        Ok(communicator)
    }

    /// Number of ranks, and which this one is.
    pub(crate) fn ranks(&self) -> (usize, usize) {
        (self.group.ranks(), self.group.rank())
    }

    /// Why the ranks cannot continue, if they cannot.
    pub(crate) fn failure(&self) -> Option<String> {
        self.group.failure().map(|error| error.to_string())
    }

    /// Fails what the other ranks do with this one.
    pub(crate) fn fail(&self, why: &str) {
        self.group.abort(why);
    }

    /// Waits until all ranks have come to the same: ranks that do different things learn of it here, and not by waiting
    /// for each other on their GPUs.
    ///
    /// # Errors
    /// When they do different things, or a rank was lost.
    pub(crate) fn agree(&self, what: &str) -> Result<()> {
        let ranks = self.group.ranks();
        let mut receive: Vec<&mut [u8]> = (0..ranks).map(|_| &mut [][..]).collect();
        self.group.exchange(what, &vec![&[][..]; ranks], &mut receive).map_err(|error| failed(error.to_string()))
    }

    /// Gives all ranks the bytes of the first.
    ///
    /// # Errors
    /// As for [`Communicator::agree`].
    pub(crate) fn share(&self, what: &str, bytes: &mut [u8]) -> Result<()> {
        share(&*self.group, what, bytes)
    }

    /// Queues a transfer.
    ///
    /// # Safety
    /// The parts are there until it is done: one at `from` and `to` each, or as many as there are ranks where each rank
    /// has its own.
    ///
    /// # Errors
    /// When NCCL fails, or the group has.
    pub(crate) unsafe fn queue(&self, transfer: Transfer, parts: Parts, queue: &StreamQueue<'_>) -> Result<()> {
        let comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Comm(comm)) = *comm else {
            return Err(failed(self.failure().unwrap_or_else(|| "the ranks were given up".into())));
        };
        let Parts { from, to, count, elements, bytes } = parts;
        let (nccl, (ranks, rank)) = (self.nccl, self.ranks());
        let call = Call { comm, from, to, count, elements, stream: queue.stream() };
        // SAFETY: all by the caller's promise.
        unsafe {
            match transfer {
                Transfer::AllReduce => nccl.all_reduce(call),
                Transfer::Broadcast(root) => nccl.broadcast(call, root),
                Transfer::AllGather => nccl.all_gather(call),
                Transfer::ReduceScatter => nccl.reduce_scatter(call),
                Transfer::AllToAll => {
                    let all = (0..ranks).map(|rank| (rank, rank * bytes));
                    nccl.point_to_point(call, all.clone(), all)
                }
                Transfer::Reduce(root) => {
                    if rank != root {
                        queue.zero(to, bytes)?;
                    }
                    nccl.reduce(call, root)
                }
                Transfer::Send { from, to: only } => {
                    if rank != only {
                        queue.zero(to, bytes)?;
                    }
                    nccl.point_to_point(call, (rank == from).then_some((only, 0)), (rank == only).then_some((from, 0)))
                }
            }
        }
    }

    /// Ends what is under way on this GPU, and all that will be queued.
    fn give_up(&self) {
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Comm(comm)) = comm.take() {
            // SAFETY: taken from where all others get it.
            unsafe { self.nccl.abort(comm) };
        }
    }

    /// What NCCL knows of a failure.
    fn own_failure(&self) -> Option<String> {
        // While a step is queued, nobody waits for the answer.
        let comm = self.comm.try_lock().ok()?;
        // SAFETY: it lives while the lock is held.
        (*comm).and_then(|Comm(comm)| unsafe { self.nccl.failure(comm) })
    }
}

/// Gives all ranks the bytes of the first.
fn share(group: &dyn Collectives, what: &str, bytes: &mut [u8]) -> Result<()> {
    let (rank, ranks, mine) = (group.rank(), group.ranks(), bytes.to_vec());
    let send: Vec<&[u8]> = (0..ranks).map(|_| if rank == 0 { &mine[..] } else { &[] }).collect();
    let mut receive: Vec<&mut [u8]> = (0..ranks).map(|_| &mut [][..]).collect();
    receive[0] = bytes;
    group.exchange(what, &send, &mut receive).map_err(|error| failed(error.to_string()))
}

/// Gives the communicator up when its group fails: on a GPU, ranks wait for each other for ever. A communicator that
/// nobody uses any more is left to the end of the process: NCCL may wait for ranks that are gone when one is freed.
fn watch(communicator: &Weak<Communicator>) {
    while let Some(communicator) = communicator.upgrade() {
        if communicator.group.failure().is_some() {
            return communicator.give_up();
        }
        if let Some(why) = communicator.own_failure() {
            communicator.group.abort(&why);
        }
        drop(communicator);
        std::thread::sleep(LOOK);
    }
}
