//! A GPU as a device of the runtime.

use std::sync::Arc;

use ridge_graph::passes::{Kernel, Target};
use ridge_graph::{Bindings, Graph, Type};
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_runtime::{Backend, Buffer, MemoryOwner, MemoryUse, Program, Result, WeightData, component_offsets};

use crate::deterministic;
use crate::device::{CudaDevice, DeviceMemory};
use crate::encode::{encoded, encodes};
use crate::error::device as failed;
use crate::kernels::CudaKernelRegistry;
use crate::options::CudaOptions;
use crate::program::CudaProgram;

/// The backend of one NVIDIA GPU.
pub struct Cuda {
    device: Arc<CudaDevice>,
    registry: Arc<CudaKernelRegistry>,
    /// What the kernels of the registry claim.
    claims: Vec<Kernel>,
    options: CudaOptions,
}

impl Cuda {
    /// Opens NVIDIA's libraries and a GPU. With `RIDGE_CUDA_CHECK` set in the environment, `check_launches` is on.
    ///
    /// # Errors
    /// When a library is missing or too old, or there is no such GPU; says what mends it. When another rank does not come.
    pub fn new(options: CudaOptions) -> Result<Self> {
        Self::with_kernels(options, CudaKernelRegistry::builtin())
    }

    /// As [`Cuda::new`], with the kernels of `registry`.
    ///
    /// # Errors
    /// As for [`Cuda::new`].
    pub fn with_kernels(mut options: CudaOptions, registry: CudaKernelRegistry) -> Result<Self> {
        let registry = if options.deterministic { registry.deterministic() } else { registry };
        let registry = if options.int8_attention { registry.with_int8_attention() } else { registry };
        options.check_launches |= std::env::var_os("RIDGE_CUDA_CHECK").is_some_and(|v| v != "0");
        let device = Arc::new(CudaDevice::open(&options)?);
        let known = target(device.arch(), DeviceSpec::find(device.name()).ok());
        let target = Arc::new(Target { deterministic: options.deterministic, ..known });
        let claims = registry.claims().into_iter().map(|kernel| kernel.on(&target)).collect();
        Ok(Self { device, claims, registry: Arc::new(registry), options })
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

/// A GPU as kernels' offers see it: bandwidth and peak are those of its specification sheet, nominal without one.
pub(crate) fn target(architecture: &str, spec: Option<&DeviceSpec>) -> Target {
    let known = spec.and_then(|spec| spec.roofline(Precision::Bf16).ok());
    let nominal = Target::default();
    Target {
        architecture: architecture.into(),
        bytes_per_second: known.map_or(nominal.bytes_per_second, |roofline| roofline.bandwidth.0),
        flops_per_second: known.map_or(nominal.flops_per_second, |roofline| roofline.peak.0),
        fuses_views: true,
        ..nominal
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn kernels(&self) -> &[Kernel] {
        &self.claims
    }

    fn choices_timed(&self) -> u64 {
        self.device.choices_timed()
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
        let memory = self.device.allocate(bytes, MemoryOwner::Weights)?;
        for (offset, part) in offsets.into_iter().zip(&parts) {
            self.device.upload(&memory, offset, part.bytes())?;
        }
        Ok(Buffer::new(bytes, Arc::new(memory)))
    }

    fn random(&self, ty: &Type, state: u64, scale: f64) -> Result<Option<Buffer>> {
        if !ty.dtype.is_float() || !(ty.format.is_none() || encodes(ty)) {
            return Ok(None);
        }
        let plain = Type { format: None, ..ty.clone() };
        let bytes = component_offsets(&plain, &Bindings::new())?.1;
        let memory = self.device.allocate(bytes, MemoryOwner::Weights)?;
        let elements = bytes / ty.dtype.size_bytes();
        self.device.fill_random(&memory, ty.dtype, elements, state, scale)?;
        if ty.format.is_some() {
            return encoded(&self.device, ty, &memory).map(Some);
        }
        Ok(Some(Buffer::new(bytes, Arc::new(memory))))
    }

    fn encode(&self, ty: &Type, plain: &WeightData) -> Result<Option<Buffer>> {
        if !encodes(ty) {
            return Ok(None);
        }
        let memory = self.device.allocate(plain.bytes().len(), MemoryOwner::Weights)?;
        self.device.upload(&memory, 0, plain.bytes())?;
        encoded(&self.device, ty, &memory).map(Some)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let memory = self.device.allocate(bytes, MemoryOwner::States)?;
        self.device.queue()?.fill(&memory, 0, bytes)?;
        Ok(Buffer::new(bytes, Arc::new(memory)))
    }

    fn allocate_on_host(&self, bytes: usize) -> Result<Buffer> {
        let mut memory = self.device.allocate_on_host(bytes, MemoryOwner::HostStates)?;
        memory.zero_on_host();
        Ok(Buffer::new(bytes, Arc::new(memory)))
    }

    fn moved_to_host(&self, buffer: &Buffer) -> Result<Buffer> {
        let moved = self.device.copied_to_host(DeviceMemory::of(buffer)?, MemoryOwner::HostWeights)?;
        Ok(Buffer::new(buffer.bytes(), Arc::new(moved)))
    }

    fn host_link(&self) -> Result<Option<f64>> {
        self.device.host_link().map(Some)
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.device.order.wait_released()?;
        self.device.download(DeviceMemory::of(buffer)?)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        let memory = DeviceMemory::of(buffer)?;
        if bytes.len() > memory.bytes() {
            return Err(failed(format!("{} bytes are more than the buffer's {}", bytes.len(), memory.bytes())));
        }
        self.device.order.wait_released()?;
        self.device.upload(memory, 0, bytes)
    }

    fn memory(&self) -> MemoryUse {
        self.device.memory()
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        if self.options.deterministic {
            deterministic::check(&graph)?;
        }
        Ok(Box::new(CudaProgram::new(
            Arc::clone(&self.device),
            Arc::clone(&self.registry),
            graph,
            self.options.clone(),
        )))
    }
}
