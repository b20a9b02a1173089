//! Programs: lowered graphs with the kernels of a device, of which buckets are bound.

mod actions;
mod lanes;
mod layout;
mod run;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ridge_graph::{Bindings, Graph};
use ridge_runtime::{Buffer, MemoryBytes, Program, Result, Run, RuntimeError, plan};

use crate::communicator::MeshRanks;
use crate::compile;
use crate::device::{CudaDevice, DeviceMemory};
use crate::kernel::CudaSource;
use crate::kernels::CudaKernelRegistry;
use crate::options::CudaOptions;
use layout::BucketLayout;
use run::CudaRun;

/// A lowered graph on a GPU.
pub(crate) struct CudaProgram {
    device: Arc<CudaDevice>,
    registry: Arc<CudaKernelRegistry>,
    graph: Arc<Graph>,
    options: CudaOptions,
}

impl CudaProgram {
    pub(crate) fn new(
        device: Arc<CudaDevice>,
        registry: Arc<CudaKernelRegistry>,
        graph: Arc<Graph>,
        options: CudaOptions,
    ) -> Self {
        Self { device, registry, graph, options }
    }
}

impl Program for CudaProgram {
    fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>> {
        let plan = plan(&self.graph, bindings)?;
        let weights = memory_of("weight", weights, &plan.weight_bytes)?;
        let states = memory_of("state", states, &plan.state_bytes)?;
        // Steps write states in place: nothing else may be the same memory.
        for (i, state) in states.iter().enumerate() {
            if weights.iter().chain(&states[..i]).any(|other| Arc::ptr_eq(other, state)) {
                let why = "is also another state or a weight".into();
                return Err(RuntimeError::Argument { kind: "state", name: i.to_string(), why });
            }
        }
        let kernels = compile::kernels(&self.registry, &self.graph, &plan, bindings, &self.device.mesh_ranks())?;
        load_all(&self.device, &compile::distinct(&kernels, Some(self.device.arch())))?;
        let (device, graph) = (Arc::clone(&self.device), Arc::clone(&self.graph));
        Ok(Box::new(CudaRun::new(device, graph, self.options.clone(), plan, &kernels, weights, states)?))
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        bucket_memory(&self.registry, &self.graph, bindings, &self.device.mesh_ranks())
    }
}

/// What a bucket of `graph` takes besides weights and states, on a rank of `mesh`. Needs no GPU.
///
/// # Errors
/// When a symbol is unbound, or an op has no kernel.
pub(crate) fn bucket_memory(
    registry: &CudaKernelRegistry,
    graph: &Graph,
    bindings: &Bindings,
    mesh: &MeshRanks,
) -> Result<MemoryBytes> {
    let plan = plan(graph, bindings)?;
    let kernels = compile::kernels(registry, graph, &plan, bindings, mesh)?;
    Ok(BucketLayout::new(&plan, &kernels).memory())
}

/// The memory of buffers, which must be as large as `wanted` says.
fn memory_of(kind: &'static str, buffers: &[Buffer], wanted: &[usize]) -> Result<Vec<Arc<DeviceMemory>>> {
    if buffers.len() != wanted.len() || buffers.iter().zip(wanted).any(|(b, w)| b.bytes() < *w) {
        let given: Vec<usize> = buffers.iter().map(Buffer::bytes).collect();
        let why = format!("needs buffers of {wanted:?} bytes, given are {given:?}");
        return Err(RuntimeError::Argument { kind, name: "all".into(), why });
    }
    buffers.iter().map(|b| DeviceMemory::of(b).cloned()).collect()
}

/// Compiles and loads what is not loaded yet, several at a time.
fn load_all(device: &CudaDevice, sources: &[Arc<CudaSource>]) -> Result<()> {
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
    let work = || {
        while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = device.kernel(source) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(sources.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
