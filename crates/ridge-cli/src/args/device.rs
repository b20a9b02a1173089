//! Arguments for the device and the tensor-parallel ranks.

use std::sync::Arc;

use clap::{Args, ValueEnum};
use ridge::{Cluster, Device, JoinSettings, Placement, TensorParallel};
use ridge_hw::units::Bytes;

use super::numbers::{MAX_THREADS, whole};
use crate::error::{Error, refused};
use crate::output::note;

/// The device, for every command that can run on any device.
#[derive(Clone, Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Device: cpu, cuda (the first NVIDIA GPU), cuda:N, or auto (a GPU if there is one; the CPU for several ranks)
    #[arg(
        long, value_name = "DEVICE", value_parser = device, env = "RIDGE_DEVICE", default_value = "auto",
        help_heading = "Running"
    )]
    device: Device,

    /// Number of compute threads [default: the cores that this process may use]
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, MAX_THREADS>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    threads: Option<usize>,
}

impl DeviceArgs {
    pub(crate) fn placement(&self) -> Placement {
        if self.device == Device::Auto
            && let Some(why) = Device::found().unused_gpu
        {
            note(&format!("the GPU is not used: {why} (--device cpu avoids this note)"));
        }
        Placement { device: self.device, threads: self.threads, ..Placement::default() }
    }
}

/// The device, for commands that can keep weights in memory of the host.
#[derive(Clone, Debug, Args)]
pub(crate) struct LimitedDeviceArgs {
    #[command(flatten)]
    device: DeviceArgs,

    /// Maximum memory to allocate on the GPU, such as 24GiB; weights that do not fit stay in page-locked host memory, experts
    /// first, and are read over the host link [default: all free memory, and no weights on the host]
    #[arg(long, value_name = "SIZE", value_parser = gpu_memory, help_heading = "Running")]
    gpu_memory: Option<Bytes>,

    /// Make the tokens and log-probabilities of a request the same to the bit, whatever other requests run, however its prompt is
    /// divided, and whether parts of it are cached. Always so on the CPU; slower on a GPU, which takes models of bf16 or f16 weights
    #[arg(long, help_heading = "Running")]
    deterministic: bool,

    /// Products of queries and keys of prompts over an int8 cache: exact, or int8 on Hopper GPUs, faster, with queries rounded to
    /// int8 with one scale per token and head
    #[arg(long, value_enum, default_value = "exact", help_heading = "Running")]
    attention: AttentionArg,
}

/// Values of `--attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AttentionArg {
    /// Queries as they are
    Exact,
    /// Queries rounded to int8; takes --cache-dtype int8
    Int8,
}

impl LimitedDeviceArgs {
    pub(crate) fn placement(&self) -> Placement {
        Placement {
            gpu_memory: self.gpu_memory,
            deterministic: self.deterministic,
            int8_attention: self.int8_attention(),
            ..self.device.placement()
        }
    }

    /// Whether `--attention int8` was given.
    pub(crate) fn int8_attention(&self) -> bool {
        self.attention == AttentionArg::Int8
    }

    /// Whether `--deterministic` was given.
    pub(crate) fn deterministic(&self) -> bool {
        self.deterministic
    }
}

/// Parses the most memory of a GPU.
pub(crate) fn gpu_memory(typed: &str) -> Result<Bytes, String> {
    match typed.parse() {
        Ok(Bytes(0)) => Err("must be above 0, such as 24GiB".to_owned()),
        Ok(bytes) => Ok(bytes),
        Err(why) => Err(ridge_hw::units::UnitError::to_string(&why)),
    }
}

/// Maximum number of ranks.
const MAX_RANKS: u64 = 64;

/// The number of tensor-parallel ranks, for commands that run a decoder.
#[derive(Clone, Debug, Args)]
pub(crate) struct ParallelArgs {
    /// Number of tensor-parallel ranks; on the CPU they share the threads; for GPUs see `ridge launch`
    #[arg(
        long = "tp", value_name = "N", value_parser = whole::<usize, 1, MAX_RANKS>,
        allow_negative_numbers = true, default_value_t = 1, help_heading = "Running"
    )]
    ranks: usize,
}

impl ParallelArgs {
    /// Ranks within this process.
    pub(crate) fn here(&self) -> TensorParallel {
        if self.ranks == 1 { TensorParallel::None } else { TensorParallel::Here(self.ranks) }
    }

    /// Ranks within this process, or, under `ridge launch`, the group of ranks that this process belongs to.
    ///
    /// # Errors
    /// When another number of ranks was launched, or the rendezvous fails.
    pub(crate) fn join(&self) -> Result<TensorParallel, Error> {
        let Some(settings) = JoinSettings::from_environment().map_err(ridge::Error::from)? else {
            return Ok(self.here());
        };
        if self.ranks != settings.ranks {
            let why = format!("{} ranks were launched; give --tp {}", settings.ranks, settings.ranks);
            return Err(refused("--tp", self.ranks, &why));
        }
        Ok(TensorParallel::Processes(Arc::new(Cluster::join(&settings).map_err(ridge::Error::from)?)))
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }
}

/// Parses `cpu`, `cuda`, `cuda:N` or `auto`.
fn device(typed: &str) -> Result<Device, String> {
    let number = |text: &str| text.parse().map(Device::Cuda).ok();
    match typed {
        "cpu" => Some(Device::Cpu),
        "cuda" => Some(Device::Cuda(0)),
        // An empty variable is none.
        "auto" | "" => Some(Device::Auto),
        other => other.strip_prefix("cuda:").and_then(number),
    }
    .ok_or_else(|| "--device and RIDGE_DEVICE must be cpu, cuda, cuda:N or auto".to_owned())
}
