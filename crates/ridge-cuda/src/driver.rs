//! The part of the CUDA driver's interface that Ridge calls (CUDA Driver API, 12.0 and later), opened at run time.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;
use ridge_graph::DType;

use crate::error::device;
use ridge_runtime::Result;

/// `CUresult`; 0 is success.
type Code = c_int;
/// `CUdeviceptr`.
pub(crate) type Address = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`.
pub(crate) type Handle = *mut c_void;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Code = 600;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: Code = 2;

/// The least driver that is accepted, as `cuDriverGetVersion` tells it.
const LEAST_VERSION: c_int = 12_000;

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: *const Attribute,
    count: c_uint,
}

/// `CUtensorMap`, opaque.
#[repr(C, align(64))]
#[derive(Default)]
struct TensorMap([u64; 16]);

/// Bytes by which the copy engine swizzles a box: CU_TENSOR_MAP_SWIZZLE_64B and _128B.
#[derive(Clone, Copy)]
pub(crate) enum Swizzle {
    Of64 = 2,
    Of128 = 3,
}

/// `CUlaunchAttribute`.
#[repr(C)]
struct Attribute {
    id: c_int,
    padding: c_int,
    value: [c_int; 16],
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The driver's functions.
        pub(crate) struct CudaDriver {
            $($field: unsafe extern "C" fn($($arg),*) -> Code,)*
            _library: Library,
        }

        impl CudaDriver {
            /// Opens the driver's library at `path`.
            ///
            /// # Errors
            /// When it cannot be opened, lacks a function, or is too old.
            pub(crate) fn open(path: &Path) -> Result<Self> {
                let failed = |e: libloading::Error| device(format!("cannot open {}: {e}", path.display()));
                // SAFETY: the driver's library runs no code at loading that could break what Rust relies on.
                let library = unsafe { Library::new(path) }.map_err(failed)?;
                let driver = Self {
                    $($field: {
                        // SAFETY: the type is that of the function in NVIDIA's documentation of this symbol.
                        *unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol) }.map_err(failed)?
                    },)*
                    _library: library,
                };
                // SAFETY: takes a number only.
                driver.check(unsafe { (driver.init)(0) }, "start the driver")?;
                let version = driver.version()?;
                if version < LEAST_VERSION {
                    return Err(device(format!(
                        "the driver speaks CUDA {}.{}, needs at least {}.0; install a newer NVIDIA driver",
                        version / 1000, version % 1000 / 10, LEAST_VERSION / 1000
                    )));
                }
                Ok(driver)
            }
        }
    };
}

functions! {
    init = b"cuInit" (c_uint);
    driver_version = b"cuDriverGetVersion" (*mut c_int);
    error_name = b"cuGetErrorName" (Code, *mut *const c_char);
    error_string = b"cuGetErrorString" (Code, *mut *const c_char);
    device_count = b"cuDeviceGetCount" (*mut c_int);
    device_get = b"cuDeviceGet" (*mut c_int, c_int);
    device_name = b"cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute = b"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain = b"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    context_release = b"cuDevicePrimaryCtxRelease_v2" (c_int);
    context_set = b"cuCtxSetCurrent" (Handle);
    memory_info = b"cuMemGetInfo_v2" (*mut usize, *mut usize);
    memory_alloc = b"cuMemAlloc_v2" (*mut Address, usize);
    memory_free = b"cuMemFree_v2" (Address);
    host_alloc = b"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free = b"cuMemFreeHost" (*mut c_void);
    copy_to_device = b"cuMemcpyHtoDAsync_v2" (Address, *const c_void, usize, Handle);
    copy_to_host = b"cuMemcpyDtoHAsync_v2" (*mut c_void, Address, usize, Handle);
    copy_on_device = b"cuMemcpyAsync" (Address, Address, usize, Handle);
    fill = b"cuMemsetD8Async" (Address, u8, usize, Handle);
    stream_create = b"cuStreamCreate" (*mut Handle, c_uint);
    stream_destroy = b"cuStreamDestroy_v2" (Handle);
    stream_synchronize = b"cuStreamSynchronize" (Handle);
    event_create = b"cuEventCreate" (*mut Handle, c_uint);
    event_destroy = b"cuEventDestroy_v2" (Handle);
    event_record = b"cuEventRecord" (Handle, Handle);
    event_query = b"cuEventQuery" (Handle);
    stream_wait = b"cuStreamWaitEvent" (Handle, Handle, c_uint);
    event_synchronize = b"cuEventSynchronize" (Handle);
    event_elapsed = b"cuEventElapsedTime" (*mut f32, Handle, Handle);
    capture_begin = b"cuStreamBeginCapture_v2" (Handle, c_int);
    capture_end = b"cuStreamEndCapture" (Handle, *mut Handle);
    graph_instantiate = b"cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
    graph_launch = b"cuGraphLaunch" (Handle, Handle);
    graph_destroy = b"cuGraphDestroy" (Handle);
    graph_end = b"cuGraphExecDestroy" (Handle);
    module_load = b"cuModuleLoadData" (*mut Handle, *const c_void);
    module_unload = b"cuModuleUnload" (Handle);
    module_function = b"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    function_set = b"cuFuncSetAttribute" (Handle, c_int, c_int);
    tensor_map = b"cuTensorMapEncodeTiled" (
        *mut TensorMap, c_int, c_uint, Address, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int,
        c_int
    );
    launch = b"cuLaunchKernelEx" (*const Config, Handle, *mut *mut c_void, *mut *mut c_void);
}

impl CudaDriver {
    fn check(&self, code: Code, what: &str) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(device(format!("cannot {what}: {}", self.describe(code)))) }
    }

    /// What the driver calls an error, such as `CUDA_ERROR_INVALID_VALUE (invalid argument)`.
    fn describe(&self, code: Code) -> String {
        let text = |function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: writes the address of a static string, or null.
            unsafe { function(code, &raw mut text) };
            // SAFETY: not null, so a string of the driver's that ends with 0 and stays.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.error_name).unwrap_or_else(|| format!("error {code}"));
        text(self.error_string).map_or(name.clone(), |what| format!("{name} ({what})"))
    }

    /// Version of CUDA that the driver speaks: 13000 for 13.0.
    pub(crate) fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: writes one number.
        self.check(unsafe { (self.driver_version)(&raw mut version) }, "read the driver's version")?;
        Ok(version)
    }

    /// GPUs that this process may use.
    pub(crate) fn devices(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: writes one number.
        self.check(unsafe { (self.device_count)(&raw mut count) }, "count the GPUs")?;
        Ok(count as usize)
    }

    /// The handle of GPU `ordinal`.
    pub(crate) fn device(&self, ordinal: usize) -> Result<c_int> {
        let mut handle = 0;
        // SAFETY: writes one number.
        self.check(unsafe { (self.device_get)(&raw mut handle, ordinal as c_int) }, "open the GPU")?;
        Ok(handle)
    }

    /// The name of a GPU, such as `NVIDIA H200`.
    pub(crate) fn name(&self, gpu: c_int) -> Result<String> {
        let mut name = [0 as c_char; 256];
        // SAFETY: writes at most 256 bytes, the last of them 0.
        self.check(unsafe { (self.device_name)(name.as_mut_ptr(), 256, gpu) }, "read the GPU's name")?;
        // SAFETY: ends with 0.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Attribute `attribute` of a GPU, by its number in `CUdevice_attribute`.
    pub(crate) fn attribute(&self, gpu: c_int, attribute: c_int) -> Result<c_int> {
        let mut value = 0;
        let read = "read what the GPU can do";
        // SAFETY: writes one number.
        self.check(unsafe { (self.device_attribute)(&raw mut value, attribute, gpu) }, read)?;
        Ok(value)
    }

    /// Holds the GPU's primary context.
    pub(crate) fn retain(&self, gpu: c_int) -> Result<Handle> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        self.check(unsafe { (self.context_retain)(&raw mut context, gpu) }, "make a context on the GPU")?;
        Ok(context)
    }

    /// Lets the primary context go.
    pub(crate) fn release(&self, gpu: c_int) {
        // SAFETY: called once for each `retain`, when nothing of the context is left.
        unsafe { (self.context_release)(gpu) };
    }

    /// Makes `context` this thread's.
    pub(crate) fn enter(&self, context: Handle) -> Result<()> {
        // SAFETY: a context that is held.
        self.check(unsafe { (self.context_set)(context) }, "use the GPU from this thread")
    }

    /// Free and total bytes of the GPU's memory.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        self.check(unsafe { (self.memory_info)(&raw mut free, &raw mut total) }, "read how much memory is free")?;
        Ok((free, total))
    }

    /// Memory on the GPU; `None` when there is not as much.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        let mut address = 0;
        // SAFETY: writes one address.
        match unsafe { (self.memory_alloc)(&raw mut address, bytes) } {
            OUT_OF_MEMORY => Ok(None),
            code => self.check(code, "allocate memory on the GPU").map(|()| Some(address)),
        }
    }

    /// Gives memory on the GPU back, when what uses it is done.
    pub(crate) fn free(&self, address: Address) {
        // SAFETY: from `allocate`, given back once by its owner.
        unsafe { (self.memory_free)(address) };
    }

    /// Page-locked memory of the host; `None` when there is not as much.
    pub(crate) fn allocate_host(&self, bytes: usize) -> Result<Option<*mut u8>> {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: writes one address.
        match unsafe { (self.host_alloc)(&raw mut pointer, bytes, 0) } {
            OUT_OF_MEMORY => Ok(None),
            code => self.check(code, "allocate page-locked memory").map(|()| Some(pointer.cast())),
        }
    }

    /// Gives page-locked memory back.
    pub(crate) fn free_host(&self, pointer: *mut u8) {
        // SAFETY: from `allocate_host`, given back once by its owner.
        unsafe { (self.host_free)(pointer.cast()) };
    }

    /// Queues a copy to the GPU.
    ///
    /// # Safety
    /// Both sides have `bytes` bytes, and the source stays as it is until the copy is done.
    pub(crate) unsafe fn to_device(&self, to: Address, from: *const u8, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: by the caller's promise.
        self.check(unsafe { (self.copy_to_device)(to, from.cast(), bytes, stream) }, "copy to the GPU")
    }

    /// Queues a copy from the GPU.
    ///
    /// # Safety
    /// Both sides have `bytes` bytes, and nobody else uses the target until the copy is done.
    pub(crate) unsafe fn to_host(&self, to: *mut u8, from: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: by the caller's promise.
        self.check(unsafe { (self.copy_to_host)(to.cast(), from, bytes, stream) }, "copy from the GPU")
    }

    /// Queues a copy on the GPU.
    ///
    /// # Safety
    /// Both sides are memory of this context of `bytes` bytes that do not overlap.
    pub(crate) unsafe fn on_device(&self, to: Address, from: Address, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: by the caller's promise.
        self.check(unsafe { (self.copy_on_device)(to, from, bytes, stream) }, "copy on the GPU")
    }

    /// Queues the filling of memory with one byte.
    ///
    /// # Safety
    /// `to` is memory of this context of `bytes` bytes.
    pub(crate) unsafe fn fill(&self, to: Address, byte: u8, bytes: usize, stream: Handle) -> Result<()> {
        // SAFETY: by the caller's promise.
        self.check(unsafe { (self.fill)(to, byte, bytes, stream) }, "fill memory on the GPU")
    }

    /// A stream that does not wait for the default one.
    pub(crate) fn stream(&self) -> Result<Handle> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes one handle; 1 is CU_STREAM_NON_BLOCKING.
        self.check(unsafe { (self.stream_create)(&raw mut stream, 1) }, "make a stream")?;
        Ok(stream)
    }

    /// Ends a stream.
    pub(crate) fn end_stream(&self, stream: Handle) {
        // SAFETY: from `stream`, ended once by its owner.
        unsafe { (self.stream_destroy)(stream) };
    }

    /// Waits for all that was queued on a stream.
    pub(crate) fn synchronize(&self, stream: Handle) -> Result<()> {
        // SAFETY: a stream that lives.
        self.check(unsafe { (self.stream_synchronize)(stream) }, "finish what was queued")
    }

    /// An event, which knows its time if it is to.
    pub(crate) fn event(&self, timed: bool) -> Result<Handle> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle; 2 is CU_EVENT_DISABLE_TIMING.
        self.check(unsafe { (self.event_create)(&raw mut event, if timed { 0 } else { 2 }) }, "make an event")?;
        Ok(event)
    }

    /// Milliseconds between two timed events that have come.
    pub(crate) fn elapsed(&self, from: Handle, to: Handle) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: writes one number; both events live.
        self.check(unsafe { (self.event_elapsed)(&raw mut milliseconds, from, to) }, "read a launch's time")?;
        Ok(milliseconds)
    }

    /// Records what is queued on `stream` from now on, rather than running it.
    pub(crate) fn begin_capture(&self, stream: Handle) -> Result<()> {
        // CU_STREAM_CAPTURE_MODE_RELAXED: other threads may load kernels meanwhile.
        const RELAXED: c_int = 2;
        // SAFETY: a stream that lives.
        self.check(unsafe { (self.capture_begin)(stream, RELAXED) }, "capture a step")
    }

    /// What was recorded, ready to be launched; `keep` is false to throw it away.
    pub(crate) fn end_capture(&self, stream: Handle, keep: bool) -> Result<Handle> {
        let (mut graph, mut ready) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: writes one handle.
        self.check(unsafe { (self.capture_end)(stream, &raw mut graph) }, "end a step's capture")?;
        let code = if keep {
            // SAFETY: writes one handle; the graph was just made.
            unsafe { (self.graph_instantiate)(&raw mut ready, graph, 0) }
        } else {
            0
        };
        // SAFETY: made above, destroyed once.
        unsafe { (self.graph_destroy)(graph) };
        self.check(code, "prepare a captured step").map(|()| ready)
    }

    /// Queues a captured step.
    ///
    /// # Safety
    /// What was captured may run: the memory that it uses is there until it is done.
    pub(crate) unsafe fn launch_graph(&self, graph: Handle, stream: Handle) -> Result<()> {
        // SAFETY: by the caller's promise.
        self.check(unsafe { (self.graph_launch)(graph, stream) }, "launch a captured step")
    }

    /// Ends a captured step that is not running.
    pub(crate) fn end_graph(&self, graph: Handle) {
        // SAFETY: from `end_capture`, ended once by its owner.
        unsafe { (self.graph_end)(graph) };
    }

    /// Ends an event.
    pub(crate) fn end_event(&self, event: Handle) {
        // SAFETY: from `event`, ended once by its owner.
        unsafe { (self.event_destroy)(event) };
    }

    /// Queues the event behind what the stream has.
    pub(crate) fn record(&self, event: Handle, stream: Handle) -> Result<()> {
        // SAFETY: both live.
        self.check(unsafe { (self.event_record)(event, stream) }, "mark the end of a step")
    }

    /// What is queued on `stream` from now on waits for what `event` was recorded behind.
    pub(crate) fn stream_waits(&self, stream: Handle, event: Handle) -> Result<()> {
        // SAFETY: both live.
        self.check(unsafe { (self.stream_wait)(stream, event, 0) }, "have one lane wait for another")
    }

    /// Has the event come?
    pub(crate) fn has_come(&self, event: Handle) -> Result<bool> {
        // SAFETY: an event that lives.
        match unsafe { (self.event_query)(event) } {
            NOT_READY => Ok(false),
            code => self.check(code, "finish a step").map(|()| true),
        }
    }

    /// Waits for the event.
    pub(crate) fn await_event(&self, event: Handle) -> Result<()> {
        // SAFETY: an event that lives.
        self.check(unsafe { (self.event_synchronize)(event) }, "finish a step")
    }

    /// Loads machine code; `None` where it is none that this GPU takes.
    pub(crate) fn load(&self, cubin: &[u8]) -> Option<Handle> {
        let mut module = std::ptr::null_mut();
        // SAFETY: an ELF file says its own length; what NVRTC wrote is whole, and the cache checks what it reads.
        (unsafe { (self.module_load)(&raw mut module, cubin.as_ptr().cast()) } == 0).then_some(module)
    }

    /// Unloads a module.
    pub(crate) fn unload(&self, module: Handle) {
        // SAFETY: from `load`, unloaded once by its owner.
        unsafe { (self.module_unload)(module) };
    }

    /// The kernel `name` of a module.
    pub(crate) fn function(&self, module: Handle, name: &CStr) -> Result<Handle> {
        let mut function = std::ptr::null_mut();
        // SAFETY: a module that lives and a string that ends with 0.
        let code = unsafe { (self.module_function)(&raw mut function, module, name.as_ptr()) };
        self.check(code, &format!("find kernel {}", name.to_string_lossy()))?;
        Ok(function)
    }

    /// Lets a kernel be launched with so many bytes of shared memory beside its own.
    pub(crate) fn reserve_shared(&self, function: Handle, bytes: u32) -> Result<()> {
        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        const MAX_SHARED: c_int = 8;
        // SAFETY: a function of a module that lives.
        let code = unsafe { (self.function_set)(function, MAX_SHARED, bytes as c_int) };
        self.check(code, &format!("give a kernel {bytes} bytes of shared memory"))
    }

    /// What the copy engine is told of an array of 8-bit codes or 16-bit floats: extents from the innermost on, strides in bytes of all axes
    /// but that one, and boxes of `tile`.
    pub(crate) fn tensor_map<const RANK: usize>(
        &self,
        matrix: Address,
        dtype: DType,
        extents: &[u64; RANK],
        strides: &[u64],
        tile: &[c_uint; RANK],
        swizzle: Swizzle,
    ) -> Result<[u64; 16]> {
        assert_eq!(strides.len() + 1, RANK, "a stride for each axis but the first");
        // CU_TENSOR_MAP_DATA_TYPE_UINT8, _FLOAT16 and _BFLOAT16, _L2_PROMOTION_L2_128B.
        let number = match dtype {
            DType::F8E4M3 | DType::I8 => 0,
            DType::F16 => 6,
            _ => 9,
        };
        const PROMOTION: c_int = 2;
        let mut map = TensorMap::default();
        let steps = [1; RANK];
        let (extents, strides, tile, steps) = (extents.as_ptr(), strides.as_ptr(), tile.as_ptr(), steps.as_ptr());
        let rank = RANK as c_uint;
        // SAFETY: writes one map, and reads `RANK` numbers of each and a stride less; the matrix is not touched.
        let code = unsafe {
            (self.tensor_map)(
                &raw mut map,
                number,
                rank,
                matrix,
                extents,
                strides,
                tile,
                steps,
                0,
                swizzle as c_int,
                PROMOTION,
                0,
            )
        };
        self.check(code, "describe a matrix to the copy engine").map(|()| map.0)
    }

    /// Queues a kernel over a grid of blocks of `threads` threads, with `shared` bytes of shared memory each. If `early`,
    /// it may begin before the kernel ahead of it has ended, for which it waits by itself.
    ///
    /// # Safety
    /// `params` point to the kernel's arguments, of its number and types, and the addresses among them are memory that
    /// is as large as the kernel takes it for.
    pub(crate) unsafe fn launch(
        &self,
        function: Handle,
        [x, y, z]: [u32; 3],
        threads: u32,
        shared: u32,
        early: bool,
        params: &mut [*mut c_void],
        stream: Handle,
    ) -> Result<()> {
        // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        const EARLY: c_int = 6;
        let (params, none) = (params.as_mut_ptr(), std::ptr::null_mut());
        let mut attribute = Attribute { id: EARLY, padding: 0, value: [0; 16] };
        attribute.value[0] = 1;
        let config = Config {
            grid: [x, y, z],
            block: [threads, 1, 1],
            shared,
            stream,
            attributes: &raw const attribute,
            count: u32::from(early),
        };
        // SAFETY: by the caller's promise.
        let code = unsafe { (self.launch)(&raw const config, function, params, none) };
        self.check(code, "launch a kernel")
    }
}
