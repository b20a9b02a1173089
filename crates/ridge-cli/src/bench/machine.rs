//! What the machine reaches, which a model's speed is held against.

use ridge_cpu::measure::{MemoryProbe, matmul};
use ridge_graph::ops::{Activations, Linear};
use ridge_graph::{DType, Graph, Op, Role};
use ridge_hw::figure::Figure;
use ridge_hw::roofline::Roofline;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond};
use ridge_models::{Model, weight_bytes};
use std::time::Duration;

use crate::error::Result;
use crate::output::Spinner;
use crate::settings::refused;

/// How long each rate of the machine is measured.
const BUDGET: Duration = Duration::from_millis(300);
const MOST_READ: Bytes = Bytes::from_gib(1);

/// Rates that the machine was measured to reach.
pub(crate) struct Machine {
    pub(super) memory: Figure<BytesPerSecond>,
    pub(super) arithmetic: Figure<FlopsPerSecond>,
}

impl Machine {
    /// For a model with this many tokens in the cache, on this many threads: memory, and products of the dtype of its
    /// activations, or of 8-bit codes where its prompts are multiplied so.
    pub(crate) fn measure(model: &Model, cached: usize, threads: usize, spinner: &Spinner) -> Result<Self> {
        let per_token: usize = model.state_groups.iter().map(|g| g.bytes_per_token).sum();
        let used = Bytes(weight_bytes(&model.graph)) + Bytes(per_token as u64) * cached as u64;
        spinner.now("measuring memory");
        let memory = MemoryProbe::new(used.clamp(Bytes::from_kib(64), MOST_READ), threads).read(threads, BUDGET);
        spinner.now("measuring matrix products");
        Ok(Self { memory, arithmetic: matmul(model.activations, of_prompts(&model.graph), threads, BUDGET)? })
    }

    /// The rates of a GPU's specification sheet: memory, and dense products of the dtype of the model's weights.
    pub(super) fn specified(gpu: &str, model: &Model) -> Result<Self> {
        let sheet = DeviceSpec::find(gpu.trim_start_matches("NVIDIA "))
            .map_err(|why| refused("--device", gpu, &format!("has no specification sheet: {why}")))?;
        let wide = model.graph.args(Role::Weight).any(|a| a.ty.shape.rank() == 2 && a.ty.dtype == DType::F32);
        let rate = if wide { sheet.vector_f32.as_ref() } else { sheet.dense_rates.get(&Precision::Bf16) };
        let Some(arithmetic) = rate.cloned() else {
            let why = format!("the sheet of {} gives no rate of products to hold the model against", sheet.name);
            return Err(refused("--device", gpu, &why));
        };
        Ok(Self { memory: sheet.memory_bandwidth.clone(), arithmetic })
    }

    pub(crate) fn roofline(&self) -> Roofline {
        Roofline { bandwidth: self.memory.value, peak: self.arithmetic.value }
    }
}

/// How products by weights in formats take the tokens of prompts.
fn of_prompts(graph: &Graph) -> Activations {
    let nodes = graph.functions.iter().flat_map(|f| &f.nodes);
    let rounded = nodes.into_iter().any(|node| match &node.op {
        Op::Composite(op) => op.downcast::<Linear>().is_some_and(|linear| linear.activations == Activations::Int8),
        _ => false,
    });
    if rounded { Activations::Int8 } else { Activations::Exact }
}

/// The costs of a test's steps, and their floors one after another.
#[derive(Default)]
pub(super) struct Amount {
    pub(super) flops: f64,
    pub(super) bytes: Bytes,
    pub(super) floor: f64,
}

impl Amount {
    pub(super) fn add(&mut self, roofline: &Roofline, flops: Flops, bytes: Bytes) {
        self.flops += flops.0;
        self.bytes += bytes;
        self.floor += roofline.floor(flops, bytes).as_f64();
    }
}
