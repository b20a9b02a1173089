//! A GPU that need not be there, for plans: graphs are compiled and their memory is counted as on the GPU itself.

use std::sync::Arc;

use ridge_graph::passes::Kernel;
use ridge_graph::{Bindings, Graph, Type};
use ridge_hw::spec::DeviceSpec;
use ridge_runtime::{Backend, Buffer, MemoryBytes, Program, Result, Run, WeightData, plan};

use crate::backend::target;
use crate::communicator::MeshRanks;
use crate::compile;
use crate::device::architecture;
use crate::error::device as failed;
use crate::kernels::CudaKernelRegistry;
use crate::launches::{StepLaunch, of_node};
use crate::program::bucket_memory;

/// The backend of one NVIDIA GPU as its specification sheet has it. It compiles and plans; whatever would need the GPU is an
/// error.
pub struct PlannedGpu {
    registry: Arc<CudaKernelRegistry>,
    claims: Vec<Kernel>,
    architecture: String,
    /// Bytes a second over the link to the host, as the sheet has it.
    link: Option<f64>,
}

impl PlannedGpu {
    /// The GPU of this sheet, with the kernels that [`Cuda::new`](crate::Cuda::new) has.
    ///
    /// # Errors
    /// When the sheet has no compute capability, as those of other makers.
    pub fn new(spec: &DeviceSpec) -> Result<Self> {
        let capability = spec.compute_capability.as_deref().and_then(|text| {
            let (major, minor) = text.split_once('.')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        });
        let (major, minor) = capability.ok_or_else(|| {
            failed(format!("{} has no compute capability in its sheet; plan for an NVIDIA GPU", spec.name))
        })?;
        let registry = CudaKernelRegistry::builtin();
        let architecture = architecture(major, minor);
        let target = Arc::new(target(&architecture, Some(spec)));
        let claims = registry.claims().into_iter().map(|kernel| kernel.on(&target)).collect();
        let link = spec.host_link.as_ref().map(|figure| figure.value.0);
        Ok(Self { registry: Arc::new(registry), claims, architecture, link })
    }

    /// The launches of a step of `lowered`, a graph lowered for [`Backend::kernels`] of this GPU, in their order. Where candidates
    /// are timed on a GPU, those of the first are listed.
    ///
    /// # Errors
    /// When a symbol is unbound, or an op has no kernel.
    pub fn launches(&self, lowered: &Graph, bindings: &Bindings) -> Result<Vec<StepLaunch>> {
        let plan = plan(lowered, bindings)?;
        let kernels = compile::kernels(&self.registry, lowered, &plan, bindings, &MeshRanks::new())?;
        let launches = plan.launches.iter().flat_map(|launch| {
            let of = &plan.kernels[launch.kernel];
            let function = lowered.function(of.func);
            let (node, kernel) = (&function.nodes[of.node], &kernels[launch.kernel]);
            of_node(function, node, launch, kernel, &self.architecture)
        });
        Ok(launches.collect())
    }
}

fn absent<T>() -> Result<T> {
    Err(failed("the GPU is only planned for; run on one with --device cuda"))
}

impl Backend for PlannedGpu {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn kernels(&self) -> &[Kernel] {
        &self.claims
    }

    fn upload(&self, _ty: &Type, _parts: Vec<WeightData>) -> Result<Buffer> {
        absent()
    }

    fn allocate(&self, _bytes: usize) -> Result<Buffer> {
        absent()
    }

    fn host_link(&self) -> Result<Option<f64>> {
        Ok(self.link)
    }

    fn read(&self, _buffer: &Buffer) -> Result<Vec<u8>> {
        absent()
    }

    fn write(&self, _buffer: &Buffer, _bytes: &[u8]) -> Result<()> {
        absent()
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        Ok(Box::new(PlannedProgram { registry: Arc::clone(&self.registry), graph }))
    }
}

struct PlannedProgram {
    registry: Arc<CudaKernelRegistry>,
    graph: Arc<Graph>,
}

impl Program for PlannedProgram {
    fn bind(&self, _bindings: &Bindings, _weights: &[Buffer], _states: &[Buffer]) -> Result<Box<dyn Run>> {
        absent()
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        bucket_memory(&self.registry, &self.graph, bindings, &MeshRanks::new())
    }
}
