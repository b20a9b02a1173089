//! A generator on a GPU of limited memory that need not be there: which weights are kept in memory of the host, and what a step
//! moves.

use ridge_cuda::PlannedGpu;
use ridge_engine::EngineOptions;
use ridge_engine::costs::{StepCost, StepWork};
use ridge_hw::spec::DeviceSpec;
use ridge_hw::units::Bytes;
use ridge_models::{BuildOptions, Model, ModelConfig, WeightSource};
use ridge_runtime::Backend;

use crate::admission::{CacheSize, EnginePrograms, StepExtents, cache_bytes, engine_bytes};
use crate::error::Result;
use crate::host_weights::{HostWeights, keep_on_host};
use crate::settings::NumberSettings;

/// What a plan is for.
#[derive(Clone, Copy, Debug)]
pub struct HostPlanSettings {
    /// Maximum number of bytes to allocate on the GPU.
    pub gpu_memory: Bytes,
    /// Maximum number of tokens of a sequence, prompt and answer together.
    pub context: usize,
    /// Concurrent sequences.
    pub sequences: usize,
    /// Maximum number of tokens of a step.
    pub chunk: usize,
}

/// Memory and work as the engine would have them.
pub struct HostPlan {
    /// Weights on the GPU.
    pub on_gpu: Bytes,
    /// Weights in memory of the host.
    pub on_host: HostWeights,
    /// Keys, values and tokens, on the GPU.
    pub cache: Bytes,
    /// What steps need besides on the GPU, slots of fetched weights included.
    pub workspace: Bytes,
    prompts: StepCost,
    answers: StepCost,
}

impl HostPlan {
    /// Plans for the GPU of this sheet, with weights as `source` has them.
    ///
    /// # Errors
    /// When the sheet is of no NVIDIA GPU, the model has an op without a kernel, or what must stay on the GPU does not fit.
    pub fn new(
        config: &ModelConfig,
        source: &WeightSource,
        numbers: &NumberSettings,
        sheet: &DeviceSpec,
        settings: HostPlanSettings,
    ) -> Result<Self> {
        let HostPlanSettings { gpu_memory, context, sequences, chunk } = settings;
        let gpu = PlannedGpu::new(sheet)?;
        let options = BuildOptions { context: Some(context), ..numbers.options(config.torch_dtype) };
        let mut model = config.build(&options)?;
        model.store(source, numbers.format.as_ref())?;
        let rounding = numbers.activations.on_gpu();
        model.take_activations(rounding, rounding);
        let cached = CacheSize::Engine(EngineOptions { context, sequences, chunk, blocks: None });
        let cache = cache_bytes(&model, cached);
        let largest = StepExtents { tokens: chunk, sequences, context, candidates: 0 };
        let workspace = |model: &Model| engine_bytes(model, &gpu, EnginePrograms::Sampling, largest);
        let (on_host, workspace) = keep_on_host(&mut model, cache, workspace, gpu_memory, None)?;
        Ok(Self {
            on_gpu: Bytes(model.weight_bytes() - on_host.bytes.0),
            on_host,
            cache,
            workspace,
            prompts: StepCost::new(&model, context, gpu.kernels())?,
            answers: StepCost::of_answers(&model, context, gpu.kernels())?,
        })
    }

    /// The work of a step over sequences of `(tokens in the cache, tokens of the step)`: of answers where each has one token.
    ///
    /// # Errors
    /// A mistake of ours: when the graph costs in symbols that no step has.
    pub fn step(&self, sequences: &[(usize, usize)]) -> Result<StepWork> {
        let answers = sequences.iter().all(|(_, tokens)| *tokens == 1);
        Ok(if answers { &self.answers } else { &self.prompts }.at(sequences)?)
    }
}
