//! The devices that a model runs on.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_comm::{Cluster, Loopback};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::shard::MeshAxis;
use ridge_hw::gpu::{Library, LibrarySearch, Nvidia};
use ridge_hw::units::Bytes;
use ridge_runtime::{Backend, Ranks};
use ridge_train::FreeMemory;

use crate::error::{Error, Result};

/// Which device a model is to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    #[default]
    Cpu,
    /// The GPU of this number among those that the process sees; for the ranks of a machine this one and those behind it,
    /// one each.
    Cuda(usize),
    /// The first GPU where [`Device::found`] finds one that can be used, else the CPU. Ranks take the CPU: each would look for itself.
    Auto,
}

/// What [`Device::Auto`] is on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// A GPU, or the CPU.
    pub device: Device,
    /// Why a GPU that is there is not taken, with the remedy.
    pub unused_gpu: Option<String>,
}

impl Device {
    /// Looks for an NVIDIA GPU whose driver is loaded, and for the libraries that running a model on it takes. Opens none: a GPU that is
    /// found here and does not open is an error later, rather than a silent change of the device.
    pub fn found() -> FoundDevice {
        Self::found_among(&Nvidia::detect())
    }

    fn found_among(nvidia: &Nvidia) -> FoundDevice {
        let cpu = |unused_gpu| FoundDevice { device: Self::Cpu, unused_gpu };
        if nvidia.gpus.is_empty() || nvidia.kernel_module.is_none() {
            return cpu(None);
        }
        let missing = |library: &Library| match nvidia.library(*library) {
            Some(LibrarySearch::Missing { remedy, .. }) => Some(format!("{library} is not found: {remedy}")),
            _ => None,
        };
        match [Library::Driver, Library::Nvrtc, Library::CublasLt].iter().find_map(missing) {
            Some(why) => cpu(Some(why)),
            None => FoundDevice { device: Self::Cuda(0), unused_gpu: None },
        }
    }
}

/// Which devices a model is to run on, and how many share it.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    /// The device.
    pub device: Device,
    /// Threads of the CPU, of all ranks together; all usable cores if `None`.
    pub threads: Option<usize>,
    /// Over how many ranks each layer is cut.
    pub tensor_parallel: TensorParallel,
    /// Maximum number of bytes to allocate on each GPU. Weights for which that is not enough are kept in memory of the host,
    /// where the GPU reads them at the rate of its link. `None` for all memory that is free, and no weights on the host.
    pub gpu_memory: Option<Bytes>,
    /// Must the tokens and log-probabilities of a request be the same to the bit, whatever other requests run, however its prompt is
    /// divided into chunks, and whether parts of it are in the cache? On the CPU they always are; on a GPU kernels are chosen
    /// for it, which not all models have.
    pub deterministic: bool,
    /// On a GPU, may attention of prompts over a cache of int8 multiply queries as int8, rounded with a scale for each row of a head?
    /// Faster, with an error of some 0.8 % of queries. Without such a cache, or on a CPU, it is refused.
    pub int8_attention: bool,
}

/// Over how many ranks each layer of a model is cut, and where they are.
#[derive(Clone, Default)]
pub enum TensorParallel {
    /// Layers are whole.
    #[default]
    None,
    /// So many ranks within this process, which drives them as one device.
    Here(usize),
    /// This process is one of several ranks, all of which do the same.
    Processes(Arc<Cluster>),
}

impl std::fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Here(ranks) => write!(f, "Here({ranks})"),
            Self::Processes(cluster) => write!(f, "Processes(rank {} of {})", cluster.rank(), cluster.ranks()),
        }
    }
}

impl TensorParallel {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        match self {
            Self::None => 1,
            Self::Here(ranks) => *ranks,
            Self::Processes(cluster) => cluster.ranks(),
        }
    }

    /// The rank that this process is; `None` where it drives all of them.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Processes(cluster) => Some(cluster.rank()),
            Self::None | Self::Here(_) => None,
        }
    }

    /// The mesh axis, if there is more than one rank.
    pub fn axis(&self) -> Option<MeshAxis> {
        (self.ranks() > 1).then(|| MeshAxis::new(AXIS, self.ranks()))
    }
}

/// The mesh axis of tensor parallelism.
const AXIS: &str = "tp";

impl From<Device> for Placement {
    fn from(device: Device) -> Self {
        Self { device, ..Self::default() }
    }
}

/// An opened device, or several that are driven as one.
pub struct OpenDevice {
    /// What runs programs.
    pub backend: Arc<dyn Backend>,
    /// Its name, such as `cpu` or `NVIDIA H200`.
    pub name: String,
    /// Threads that compute, of a CPU; `None` of a GPU.
    pub threads: Option<usize>,
    /// Bytes of its memory that this process may still allocate for one rank, if known.
    pub available: Option<Bytes>,
    /// May weights be kept in memory of the host? Only where [`Placement::gpu_memory`] asks for it.
    pub keeps_on_host: bool,
}

impl OpenDevice {
    /// Opens the devices.
    ///
    /// # Errors
    /// When a GPU is asked for and there is none, or a library of NVIDIA's is missing; when threads cannot be started;
    /// when there are more ranks than the device has room for.
    pub fn open(placement: &Placement) -> Result<Self> {
        let opened = match placement.device {
            Device::Cpu => Self::cpu(placement),
            Device::Cuda(ordinal) => Self::cuda(ordinal, placement),
            Device::Auto if placement.tensor_parallel.ranks() > 1 => Self::cpu(placement),
            Device::Auto => match Device::found().device {
                Device::Cuda(ordinal) => Self::cuda(ordinal, placement),
                _ => Self::cpu(placement),
            },
        }?;
        match placement.gpu_memory {
            Some(limit) => opened.limited(limit),
            None => Ok(opened),
        }
    }

    /// The same, with at most so many bytes on it.
    fn limited(self, limit: Bytes) -> Result<Self> {
        if self.is_cpu() {
            let why = "has no memory of its own to limit; leave --gpu-memory out, or use --device cuda".to_owned();
            return Err(Error::Device { device: "cpu".to_owned(), why });
        }
        let available = self.available.map_or(limit, |free| Bytes(free.0.min(limit.0)));
        Ok(Self { available: Some(available), keeps_on_host: true, ..self })
    }

    /// Whether it is the CPU.
    pub fn is_cpu(&self) -> bool {
        self.threads.is_some()
    }

    /// Memory that a run of training may still allocate: of a CPU what is left now, of a GPU what was free when it was opened.
    pub fn free_memory(&self) -> FreeMemory {
        let host = ridge_hw::cpu::Cpu::detect().available_memory();
        match self.is_cpu() {
            true => FreeMemory::Shared(host),
            false => FreeMemory::Separate { device: self.available, host },
        }
    }

    fn cpu(Placement { threads, tensor_parallel, .. }: &Placement) -> Result<Self> {
        let available = ridge_hw::cpu::Cpu::detect().available_memory();
        let open = |options: CpuOptions| -> Result<Cpu> { Ok(Cpu::new(options)?) };
        let cpu = match tensor_parallel {
            TensorParallel::None | TensorParallel::Here(0 | 1) => {
                open(CpuOptions { threads: *threads, ..CpuOptions::default() })?
            }
            TensorParallel::Processes(cluster) => {
                let mesh = HashMap::from([(AXIS.to_owned(), cluster.group())]);
                open(CpuOptions { threads: *threads, mesh, ..CpuOptions::default() })?
            }
            TensorParallel::Here(ranks) => return Self::cpu_ranks(*ranks, *threads, available),
        };
        Ok(Self {
            name: cpu.name().to_owned(),
            threads: Some(cpu.threads()),
            available: available.map(|bytes| Bytes(bytes.0 / tensor_parallel.ranks().max(1) as u64)),
            keeps_on_host: false,
            backend: Arc::new(cpu),
        })
    }

    /// Ranks of the CPU's cores, a share of the threads each.
    fn cpu_ranks(ranks: usize, threads: Option<usize>, available: Option<Bytes>) -> Result<Self> {
        let threads = threads.unwrap_or_else(|| ridge_hw::cpu::Cpu::detect().usable_cores());
        let each = (threads / ranks).max(1);
        let groups = Loopback::group(ranks);
        let backends = groups.iter().map(|group| -> Result<Arc<dyn Backend>> {
            let mesh = HashMap::from([(AXIS.to_owned(), Arc::clone(group))]);
            let options = CpuOptions { threads: Some(each), own_threads: true, mesh, ..CpuOptions::default() };
            Ok(Arc::new(Cpu::new(options)?))
        });
        let backend = Ranks::new(backends.collect::<Result<_>>()?, groups.clone());
        Ok(Self {
            name: backend.name().to_owned(),
            threads: Some(each * ranks),
            available: available.map(|bytes| Bytes(bytes.0 / ranks as u64)),
            keeps_on_host: false,
            backend: Arc::new(backend),
        })
    }

    fn cuda(ordinal: usize, placement: &Placement) -> Result<Self> {
        let options = match &placement.tensor_parallel {
            TensorParallel::None | TensorParallel::Here(0 | 1) => CudaOptions { ordinal, ..CudaOptions::default() },
            TensorParallel::Processes(_) if placement.deterministic => {
                let why = "--deterministic runs on one GPU: sums over GPUs have an order that depends on their size; leave --tp out";
                return Err(Error::Device { device: format!("cuda:{ordinal}"), why: why.to_owned() });
            }
            TensorParallel::Processes(cluster) => {
                let mesh = HashMap::from([(AXIS.to_owned(), cluster.group())]);
                CudaOptions { ordinal: ordinal + cluster.local(), mesh, ..CudaOptions::default() }
            }
            TensorParallel::Here(ranks) => {
                let why = format!(
                    "one process drives one GPU; start a rank for each with `ridge launch -n {ranks} -- COMMAND --tp {ranks} \
                     --device cuda`, or use --device cpu"
                );
                return Err(Error::Device { device: format!("cuda:{ordinal}"), why });
            }
        };
        let memory_limit = placement.gpu_memory.map(|limit| usize::try_from(limit.0).unwrap_or(usize::MAX));
        let Placement { deterministic, int8_attention, .. } = *placement;
        let cuda = Cuda::new(CudaOptions { memory_limit, deterministic, int8_attention, ..options })?;
        Ok(Self {
            name: cuda.gpu().to_owned(),
            threads: None,
            available: Some(Bytes(cuda.free_memory()? as u64)),
            keeps_on_host: false,
            backend: Arc::new(cuda),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use ridge_hw::gpu::Gpu;

    use super::*;

    #[test]
    fn a_gpu_is_taken_if_its_driver_and_libraries_are_there() {
        let gpu =
            Gpu { address: "0000:01:00.0".to_owned(), model: None, uuid: None, pci_device: None, numa_node: None };
        let mut machine =
            Nvidia { gpus: Vec::new(), kernel_module: Some("580.65.06".to_owned()), libraries: Vec::new() };
        let of_cpu = |unused_gpu| FoundDevice { device: Device::Cpu, unused_gpu };
        assert_eq!(Device::found_among(&machine), of_cpu(None));
        machine.gpus.push(gpu);
        assert_eq!(Device::found_among(&machine).device, Device::Cuda(0));
        let searched = vec![PathBuf::from("/usr/lib")];
        let remedy = "install it".to_owned();
        machine.libraries.push(LibrarySearch::Missing { library: Library::Nvrtc, searched, remedy });
        let found = Device::found_among(&machine);
        assert!(found.unused_gpu.as_ref().is_some_and(|why| why.contains("install it")), "{found:?}");
        machine.kernel_module = None;
        assert_eq!(Device::found_among(&machine), of_cpu(None));
    }

    #[test]
    fn ranks_take_the_cpu_where_no_device_is_named() {
        let tensor_parallel = TensorParallel::Here(2);
        let placement = Placement { device: Device::Auto, threads: Some(2), tensor_parallel, ..Placement::default() };
        assert!(OpenDevice::open(&placement).expect("opens").is_cpu());
    }
}
