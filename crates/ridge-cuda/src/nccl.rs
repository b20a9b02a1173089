//! Collectives by NCCL (NVIDIA, "NCCL API", 2.19 and later), opened at run time when a GPU is one rank of several.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;
use ridge_graph::DType;
use ridge_runtime::Result;

use crate::driver::{Address, Handle};
use crate::error::device as failed;

/// `ncclResult_t`; 0 is success.
type Code = c_int;

/// `ncclUniqueId`: what the ranks of a communicator share.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// The least version that is accepted, as `ncclGetVersion` tells it: floats of 16 bits, captured steps, and communicators
/// that are aborted from another thread.
const LEAST_VERSION: c_int = 21_900;

/// `ncclSum` and `ncclMax` of `ncclRedOp_t`.
const SUM: c_int = 0;
const MAX: c_int = 2;

/// How the elements of a sum are combined: numbers in `ncclDataType_t` and `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elements {
    dtype: c_int,
    combine: c_int,
}

impl Elements {
    /// Elements that are only moved: bytes.
    pub(crate) const BYTES: Self = Self { dtype: 1, combine: MAX };

    /// Elements that are summed; truth values are true where any is.
    pub(crate) const fn summed(dtype: DType) -> Self {
        let (dtype, combine) = match dtype {
            DType::I8 => (0, SUM),
            DType::U8 => (1, SUM),
            DType::Bool => (1, MAX),
            DType::I32 => (2, SUM),
            DType::I64 => (4, SUM),
            DType::F16 => (6, SUM),
            DType::F32 => (7, SUM),
            DType::BF16 => (9, SUM),
            DType::F8E4M3 => (10, SUM),
            DType::F8E5M2 => (11, SUM),
        };
        Self { dtype, combine }
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The library's functions.
        pub(crate) struct Nccl {
            $($field: unsafe extern "C" fn($($arg),*) -> Code,)*
            error_string: unsafe extern "C" fn(Code) -> *const c_char,
            last_error: unsafe extern "C" fn(Handle) -> *const c_char,
            _library: Library,
        }

        impl Nccl {
            /// Opens NCCL's library at `path`, for as long as the process lives: its threads outlast communicators.
            ///
            /// # Errors
            /// When it cannot be opened, lacks a function, or is too old.
            pub(crate) fn open(path: &Path) -> Result<&'static Self> {
                let missing = |e: libloading::Error| failed(format!("cannot open {}: {e}", path.display()));
                // SAFETY: NVIDIA's library, whose loading runs nothing that Rust relies on being otherwise.
                let library = unsafe { Library::new(path) }.map_err(missing)?;
                let nccl = Self {
                    $($field: {
                        // SAFETY: the type is that of the function in NVIDIA's documentation of this symbol.
                        *unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol) }.map_err(missing)?
                    },)*
                    // SAFETY: as above.
                    error_string: *unsafe { library.get(b"ncclGetErrorString") }.map_err(missing)?,
                    // SAFETY: as above.
                    last_error: *unsafe { library.get(b"ncclGetLastError") }.map_err(missing)?,
                    _library: library,
                };
                let mut version = 0;
                // SAFETY: writes one number.
                nccl.check(unsafe { (nccl.version)(&raw mut version) }, "tell its version")?;
                if version < LEAST_VERSION {
                    return Err(failed(format!(
                        "{} is NCCL {}, needs at least {}: pip install nvidia-nccl-cu13",
                        path.display(), dotted(version), dotted(LEAST_VERSION)
                    )));
                }
                Ok(Box::leak(Box::new(nccl)))
            }
        }
    };
}

functions! {
    version = b"ncclGetVersion" (*mut c_int);
    unique_id = b"ncclGetUniqueId" (*mut UniqueId);
    init_rank = b"ncclCommInitRank" (*mut Handle, c_int, UniqueId, c_int);
    comm_abort = b"ncclCommAbort" (Handle);
    comm_error = b"ncclCommGetAsyncError" (Handle, *mut Code);
    group_start = b"ncclGroupStart" ();
    group_end = b"ncclGroupEnd" ();
    all_reduce = b"ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
    reduce = b"ncclReduce" (*const c_void, *mut c_void, usize, c_int, c_int, c_int, Handle, Handle);
    broadcast = b"ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
    all_gather = b"ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Handle);
    reduce_scatter = b"ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
    send = b"ncclSend" (*const c_void, usize, c_int, c_int, Handle, Handle);
    receive = b"ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, Handle);
}

/// A version as people write it.
fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// What one call communicates: `count` elements at `from` to `count` at `to`, on `stream`.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// The communicator.
    pub(crate) comm: Handle,
    pub(crate) from: Address,
    pub(crate) to: Address,
    pub(crate) count: usize,
    pub(crate) elements: Elements,
    pub(crate) stream: Handle,
}

impl Call {
    fn send(&self) -> *const c_void {
        self.from as *const c_void
    }

    fn receive(&self) -> *mut c_void {
        self.to as *mut c_void
    }
}

impl Nccl {
    fn check(&self, code: Code, what: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let read = |text: *const c_char| {
            // SAFETY: null, or a string of the library's that ends with 0.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned())
        };
        // SAFETY: takes a number only.
        let name = read(unsafe { (self.error_string)(code) }).unwrap_or_else(|| format!("error {code}"));
        // SAFETY: the communicator is not looked at (NCCL API, `ncclGetLastError`).
        let last = read(unsafe { (self.last_error)(std::ptr::null_mut()) }).filter(|last| !last.is_empty());
        let detail = last.map_or_else(String::new, |last| format!(" ({last})"));
        Err(failed(format!("NCCL cannot {what}: {name}{detail}; NCCL_DEBUG=WARN tells more")))
    }

    /// What one rank makes and gives to the others.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one.
        self.check(unsafe { (self.unique_id)(&raw mut id) }, "prepare a meeting of ranks")?;
        Ok(id)
    }

    /// Rank `rank` of `ranks` on the GPU of this thread's context. Returns when all ranks have called it.
    pub(crate) fn join(&self, id: UniqueId, rank: usize, ranks: usize) -> Result<Handle> {
        let mut comm = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (self.init_rank)(&raw mut comm, ranks as c_int, id, rank as c_int) };
        self.check(code, "join the ranks")?;
        Ok(comm)
    }

    /// What has failed of what the communicator does, if anything has.
    ///
    /// # Safety
    /// `comm` lives.
    pub(crate) unsafe fn failure(&self, comm: Handle) -> Option<String> {
        let mut code = 0;
        // SAFETY: writes one number; the rest by the caller's promise.
        let asked = self.check(unsafe { (self.comm_error)(comm, &raw mut code) }, "tell how the ranks are");
        asked.and_then(|()| self.check(code, "communicate with the other ranks")).err().map(|error| error.to_string())
    }

    /// Ends what the communicator does, whatever other ranks do, and frees it.
    ///
    /// # Safety
    /// `comm` is of [`Nccl::join`], and nobody uses it any more.
    pub(crate) unsafe fn abort(&self, comm: Handle) {
        // SAFETY: by the caller's promise.
        unsafe { (self.comm_abort)(comm) };
    }

    /// Queues the sum over ranks, for all of them.
    ///
    /// # Safety
    /// Here and below: the communicator lives, and the memory is there, `count` elements of it on each side, until the
    /// call is done.
    pub(crate) unsafe fn all_reduce(&self, c: Call) -> Result<()> {
        let Elements { dtype, combine } = c.elements;
        // SAFETY: by the caller's promise.
        let code = unsafe { (self.all_reduce)(c.send(), c.receive(), c.count, dtype, combine, c.comm, c.stream) };
        self.check(code, "sum over ranks")
    }

    /// Queues the sum over ranks, for rank `root`.
    ///
    /// # Safety
    /// As for [`Nccl::all_reduce`]; other ranks need no `to`.
    pub(crate) unsafe fn reduce(&self, c: Call, root: usize) -> Result<()> {
        let Elements { dtype, combine } = c.elements;
        // SAFETY: by the caller's promise.
        let code =
            unsafe { (self.reduce)(c.send(), c.receive(), c.count, dtype, combine, root as c_int, c.comm, c.stream) };
        self.check(code, "sum over ranks")
    }

    /// Queues that all ranks get what `root` has.
    ///
    /// # Safety
    /// As for [`Nccl::all_reduce`].
    pub(crate) unsafe fn broadcast(&self, c: Call, root: usize) -> Result<()> {
        let (dtype, root) = (c.elements.dtype, root as c_int);
        // SAFETY: by the caller's promise.
        let code = unsafe { (self.broadcast)(c.send(), c.receive(), c.count, dtype, root, c.comm, c.stream) };
        self.check(code, "broadcast to ranks")
    }

    /// Queues that all ranks get the `count` elements of each, in rank order.
    ///
    /// # Safety
    /// As for [`Nccl::all_reduce`], with `count` elements of each rank at `to`.
    pub(crate) unsafe fn all_gather(&self, c: Call) -> Result<()> {
        // SAFETY: by the caller's promise.
        let code = unsafe { (self.all_gather)(c.send(), c.receive(), c.count, c.elements.dtype, c.comm, c.stream) };
        self.check(code, "gather from ranks")
    }

    /// Queues the sum over ranks, of which each rank gets its `count` elements.
    ///
    /// # Safety
    /// As for [`Nccl::all_reduce`], with `count` elements for each rank at `from`.
    pub(crate) unsafe fn reduce_scatter(&self, c: Call) -> Result<()> {
        let Elements { dtype, combine } = c.elements;
        // SAFETY: by the caller's promise.
        let code = unsafe { (self.reduce_scatter)(c.send(), c.receive(), c.count, dtype, combine, c.comm, c.stream) };
        self.check(code, "sum over ranks and scatter")
    }

    /// Queues sends and receives that run at the same time: `count` elements at `from` to each rank of `send`, and at
    /// `to` from each rank of `receive`, with the bytes at which they begin.
    ///
    /// # Safety
    /// As for [`Nccl::all_reduce`], for every part.
    pub(crate) unsafe fn point_to_point(
        &self,
        c: Call,
        send: impl IntoIterator<Item = (usize, usize)>,
        receive: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<()> {
        let dtype = c.elements.dtype;
        // SAFETY: takes nothing.
        self.check(unsafe { (self.group_start)() }, "begin a group")?;
        let mut outcome = Ok(());
        for (rank, at) in send {
            let from = (c.from + at as u64) as *const c_void;
            // SAFETY: by the caller's promise.
            let code = unsafe { (self.send)(from, c.count, dtype, rank as c_int, c.comm, c.stream) };
            outcome = outcome.and_then(|()| self.check(code, "send to a rank"));
        }
        for (rank, at) in receive {
            let to = (c.to + at as u64) as *mut c_void;
            // SAFETY: by the caller's promise.
            let code = unsafe { (self.receive)(to, c.count, dtype, rank as c_int, c.comm, c.stream) };
            outcome = outcome.and_then(|()| self.check(code, "receive from a rank"));
        }
        // SAFETY: takes nothing; ends the group begun above.
        let ended = self.check(unsafe { (self.group_end)() }, "send and receive between ranks");
        outcome.and(ended)
    }
}
