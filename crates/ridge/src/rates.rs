//! Measured memory and arithmetic rates of a device, with which a model's speed is compared.

use ridge_cpu::measure::{MemoryProbe, matmul};
use ridge_graph::format::CodeType;
use ridge_graph::ops::Quantize;
use ridge_graph::passes::Activations;
use ridge_graph::{DType, Graph, Op, Role};
use ridge_hw::figure::Figure;
use ridge_hw::roofline::{Bound, Roofline};
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds};
use ridge_models::Model;
use ridge_runtime::Backend;
use std::time::Duration;

use crate::error::{Error, Result};

/// How long each rate is measured.
const BUDGET: Duration = Duration::from_millis(300);
/// Maximum number of bytes that the measurement of memory reads.
const MAX_READ: Bytes = Bytes::from_gib(1);

/// Rates of a device: measured of a CPU, specified of a GPU, but for the link to the host, which is measured.
pub struct DeviceRates {
    /// Of its memory.
    pub memory: Figure<BytesPerSecond>,
    /// Of matrix products.
    pub arithmetic: Figure<FlopsPerSecond>,
    /// Of copies from memory of the host, where weights are kept there.
    pub host_link: Option<Figure<BytesPerSecond>>,
}

impl DeviceRates {
    /// Measures the CPU for a model with `cached` tokens in the cache, on `threads` threads: reads as many bytes as weights
    /// and cache have, and multiplies matrices of the dtype of its activations, or of int8 where its prompts round them. Says
    /// through `now` what it does.
    ///
    /// # Errors
    /// When there are no kernels for the dtype.
    pub fn measure(model: &Model, cached: usize, threads: usize, now: impl Fn(&'static str)) -> Result<Self> {
        let per_token: usize = model.state_groups.iter().map(|g| g.bytes_per_token).sum();
        let used = Bytes(model.weight_bytes()) + Bytes(per_token as u64) * cached as u64;
        now("measuring memory");
        let memory = MemoryProbe::new(used.clamp(Bytes::from_kib(64), MAX_READ), threads)?.read(threads, BUDGET);
        now("measuring matrix products");
        let rounded = of_prompts(&model.graph) == Some(CodeType::Int8);
        let activations = if rounded { Activations::Int8 } else { Activations::Exact };
        Ok(Self { memory, host_link: None, arithmetic: matmul(model.activations, activations, threads, BUDGET)? })
    }

    /// The rates of a GPU's specification sheet: memory, and dense products of the dtype of the model's weights, or of 8-bit codes where
    /// its prompts round to them.
    ///
    /// # Errors
    /// When there is no sheet of that GPU, or it has no rate for the dtype.
    pub fn specified(gpu: &str, model: &Model) -> Result<Self> {
        let sheet = DeviceSpec::find(gpu.trim_start_matches("NVIDIA "))
            .map_err(|why| refused(gpu, format!("has no specification sheet: {why}")))?;
        let wide = model.graph.args(Role::Weight).any(|a| a.ty.shape.rank() == 2 && a.ty.dtype == DType::F32);
        let precision = match of_prompts(&model.graph) {
            Some(CodeType::Int8) => Precision::Int8,
            Some(CodeType::F8E4M3 | CodeType::F8E5M2) => Precision::Fp8,
            None => Precision::Bf16,
        };
        let rate = if wide {
            sheet.vector_f32.as_ref()
        } else {
            sheet.dense_rates.get(&precision).or_else(|| sheet.dense_rates.get(&Precision::Bf16))
        };
        let Some(arithmetic) = rate.cloned() else {
            let why = format!("the sheet of {} has no matrix-product rate to compare with", sheet.name);
            return Err(refused(gpu, why));
        };
        Ok(Self { memory: sheet.memory_bandwidth.clone(), arithmetic, host_link: None })
    }

    /// These rates with that of the link to memory of the host, measured now.
    ///
    /// # Errors
    /// When memory runs out, or the device failed.
    pub fn with_host_link(self, backend: &dyn Backend) -> Result<Self> {
        let method = "copies of up to 64 MiB from page-locked memory of the host, the best of 5 runs";
        let host_link = backend.host_link()?.map(|rate| Figure::measured(BytesPerSecond(rate), method));
        Ok(Self { host_link, ..self })
    }

    /// The least time of a step: the longest of arithmetic, of traffic in memory of the device, and of what is read from memory
    /// of the host, each alone.
    pub fn floor(&self, flops: Flops, bytes: Bytes, host: Bytes) -> Seconds {
        self.roofline().floor(flops, bytes).max(self.link_seconds(host))
    }

    /// Which of the three takes longest.
    pub fn bound(&self, flops: Flops, bytes: Bytes, host: Bytes) -> Bound {
        let roofline = self.roofline();
        match self.link_seconds(host) > roofline.floor(flops, bytes) {
            true => Bound::HostLink,
            false => roofline.bound(flops, bytes),
        }
    }

    fn link_seconds(&self, host: Bytes) -> Seconds {
        self.host_link.as_ref().map_or(Seconds(0.0), |link| host / link.value)
    }

    /// The roofline of both.
    pub fn roofline(&self) -> Roofline {
        Roofline { bandwidth: self.memory.value, peak: self.arithmetic.value }
    }
}

fn refused(gpu: &str, why: String) -> Error {
    Error::Device { device: gpu.to_owned(), why }
}

/// What products of the tokens of prompts take activations as, if they round them.
fn of_prompts(graph: &Graph) -> Option<CodeType> {
    graph.functions.iter().flat_map(|f| &f.nodes).find_map(|node| match &node.op {
        Op::Composite(op) => op.downcast::<Quantize>().map(|quantize| quantize.format.codes),
        _ => None,
    })
}
