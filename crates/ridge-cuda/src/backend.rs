//! A GPU as a device of the runtime.

use std::sync::Arc;

use ridge_graph::passes::Kernel;
use ridge_graph::{Bindings, DType, Graph, Type};
use ridge_runtime::{Backend, Buffer, Program, Result, WeightData, component_offsets};

use crate::device::{Device, Memory};
use crate::error::device as failed;
use crate::kernel::{Source, name};
use crate::kernels;
use crate::program::CudaProgram;

const RANDOM: &str = include_str!("../kernels/random.cu");

/// How a GPU is used.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Which of the GPUs that the process sees, from 0.
    pub ordinal: usize,
    /// For tests: fills workspace and outputs with NaN before each step, and inputs after it, so that a kernel that
    /// reads what nobody wrote, or leaves a part unwritten, is found out.
    pub poison: bool,
    /// Waits after every launch, so that an error names the kernel that failed. Slow.
    pub check_launches: bool,
}

/// The backend of one NVIDIA GPU.
pub struct Cuda {
    device: Arc<Device>,
    kernels: Vec<Kernel>,
    options: CudaOptions,
}

impl Cuda {
    /// Opens NVIDIA's libraries and a GPU. With `RIDGE_CUDA_CHECK` set in the environment, `check_launches` is on.
    ///
    /// # Errors
    /// When a library is missing or too old, or there is no such GPU; says what mends it.
    pub fn new(mut options: CudaOptions) -> Result<Self> {
        options.check_launches |= std::env::var_os("RIDGE_CUDA_CHECK").is_some_and(|v| v != "0");
        Ok(Self { device: Arc::new(Device::open(options.ordinal)?), kernels: kernels::patterns(), options })
    }

    /// The GPU's name, such as `NVIDIA H200`.
    pub fn gpu(&self) -> &str {
        self.device.name()
    }

    /// Bytes of the GPU's memory that are free now.
    ///
    /// # Errors
    /// When the GPU failed.
    pub fn free_memory(&self) -> Result<usize> {
        Ok(self.device.memory_info()?.0)
    }
}

/// The memory of `buffer`, if it is this backend's.
pub(crate) fn memory(buffer: &Buffer) -> Result<&Arc<Memory>> {
    buffer.inner().ok_or_else(|| failed("the buffer is another backend's"))
}

/// Fills `elements` of `memory` as [`Backend::random`] says.
pub(crate) fn fill_random(
    device: &Device,
    memory: &Memory,
    dtype: DType,
    elements: usize,
    state: u64,
    scale: f64,
) -> Result<()> {
    assert!(elements * dtype.size_bytes() <= memory.bytes(), "{elements} of {dtype} in {} bytes", memory.bytes());
    let defines = [("D", name(dtype)), ("SCALE", &*format!("{scale:e}"))];
    let kernel = device.kernel(&Source::new("random_weight", &defines, RANDOM))?;
    let (mut to, mut numbers) = (memory.address(), [elements as u64, state]);
    let mut params = [(&raw mut to).cast(), (&raw mut numbers).cast()];
    let grid = [elements.div_ceil(4 * 256).clamp(1, 1 << 16) as u32, 1, 1];
    // SAFETY: the arguments are what the kernel's text declares, and the memory holds as many elements.
    unsafe { device.queue()?.launch(&kernel, grid, 256, 0, false, &mut params) }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> Result<Buffer> {
        let (offsets, bytes) = component_offsets(ty, &Bindings::new())?;
        let sizes = match &ty.format {
            None => vec![bytes],
            Some(format) => {
                let components = format.components(&ty.shape);
                let sizes = components.iter().map(|c| Ok(component_offsets(&c.ty(), &Bindings::new())?.1));
                sizes.collect::<Result<Vec<_>>>()?
            }
        };
        let given: Vec<usize> = parts.iter().map(|p| p.bytes().len()).collect();
        if sizes != given {
            return Err(failed(format!("{ty} is stored in parts of {sizes:?} bytes, given are {given:?}")));
        }
        let memory = self.device.allocate(bytes, "a weight")?;
        for (offset, part) in offsets.into_iter().zip(&parts) {
            self.device.upload(&memory, offset, part.bytes())?;
        }
        Ok(Buffer::new(bytes, Arc::new(memory)))
    }

    fn random(&self, ty: &Type, state: u64, scale: f64) -> Result<Option<Buffer>> {
        if ty.format.is_some() || !ty.dtype.is_float() {
            return Ok(None);
        }
        let bytes = component_offsets(ty, &Bindings::new())?.1;
        let memory = self.device.allocate(bytes, "a weight")?;
        let elements = bytes / ty.dtype.size_bytes();
        fill_random(&self.device, &memory, ty.dtype, elements, state, scale)?;
        Ok(Some(Buffer::new(bytes, Arc::new(memory))))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let memory = self.device.allocate(bytes, "a state")?;
        self.device.queue()?.fill(&memory, 0, bytes)?;
        Ok(Buffer::new(bytes, Arc::new(memory)))
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.device.download(memory(buffer)?)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        let memory = memory(buffer)?;
        if bytes.len() > memory.bytes() {
            return Err(failed(format!("{} bytes are more than the buffer's {}", bytes.len(), memory.bytes())));
        }
        self.device.upload(memory, 0, bytes)
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        Ok(Box::new(CudaProgram::new(Arc::clone(&self.device), graph, self.options.clone())))
    }
}
