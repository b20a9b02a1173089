//! From the files of a model to a graph, and to weights on a device.

use std::sync::Arc;

use ridge_engine::{Engine, EngineOptions};
use ridge_graph::Role;
use ridge_graph::passes::round_activations;
use ridge_hw::units::Bytes;
use ridge_models::{BertConfig, BuildOptions, Encoder, Model, ModelConfig, ModelFiles, WeightSource, weight_bytes};
use ridge_runtime::{Backend, Session};

use super::admission::{CacheSize, EnginePrograms, StepExtents, cache_bytes, check_memory, engine_bytes};
use super::placement::{DeviceChoice, OpenDevice};
use super::settings::ModelSettings;
use crate::error::Result;
use crate::output::{Progress, note};

/// Where the weights of `files` come from: their checkpoint, or random numbers of the dtype that the configuration
/// names.
pub(crate) fn weights(files: &ModelFiles, config: &ModelConfig, random: bool) -> Result<WeightSource> {
    if random {
        return Ok(WeightSource::Random(config.torch_dtype.unwrap_or(ridge_graph::DType::F32)));
    }
    Ok(WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint()?)?)))
}

/// Where the weights of an encoder come from, as [`weights`].
fn encoder_weights(files: &ModelFiles, config: &BertConfig, random: bool) -> Result<WeightSource> {
    if random {
        return Ok(WeightSource::Random(config.torch_dtype.unwrap_or(ridge_graph::DType::F32)));
    }
    Ok(WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint()?)?)))
}

/// The graph of `config` with its weights in the formats that they are stored in, for `context` tokens if they are known.
pub(crate) fn build(
    config: &ModelConfig,
    settings: &ModelSettings,
    source: &WeightSource,
    context: Option<usize>,
) -> Result<Model> {
    let mut model = config.build(&BuildOptions { context, ..settings.options(config.torch_dtype) })?;
    model.graph = source.retype(&model.graph, settings.format.as_ref())?;
    Ok(model)
}

/// Makes the products of `model` take activations as `settings` has it for the CPU.
pub(crate) fn round_for_cpu(model: &mut Model, settings: &ModelSettings) {
    let (prompts, answers) = settings.activations.for_prompts_and_answers(model.activations);
    model.take_activations(prompts, answers);
}

/// An encoder whose weights are on the device.
pub(crate) struct LoadedEncoder {
    pub(crate) session: Session,
    pub(crate) encoder: Encoder,
}

/// Loads an encoder onto `device`, with `threads` threads if that is the CPU.
///
/// # Errors
/// When the device cannot be opened, or a file is not readable or does not fit the encoder.
pub(crate) fn load_encoder(
    files: &ModelFiles,
    config: &BertConfig,
    settings: &ModelSettings,
    (device, threads): (DeviceChoice, Option<usize>),
    random_weights: bool,
) -> Result<LoadedEncoder> {
    let source = encoder_weights(files, config, random_weights)?;
    let options = settings.options(config.torch_dtype);
    let mut encoder = config.build(&options)?;
    encoder.graph = source.retype(&encoder.graph, settings.format.as_ref())?;
    let device = OpenDevice::open(device, threads)?;
    if device.is_cpu() {
        // All of its texts are prompts.
        round_activations(&mut encoder.graph, settings.activations.for_prompts_and_answers(options.activations).0);
    }
    let mut session = Session::new(device.backend);
    source.load(&mut session, &encoder.graph, |_| ())?;
    Ok(LoadedEncoder { session, encoder })
}

/// Which matrices `--format` leaves as they are, and why; `None` where it leaves none.
fn left_out(model: &Model, settings: &ModelSettings) -> Option<String> {
    let format = settings.format.as_ref()?;
    let matrices: Vec<_> = model.graph.args(Role::Weight).filter(|a| a.ty.shape.rank() == 2).collect();
    let left: Vec<_> = matrices.iter().filter(|a| a.ty.format.is_none()).collect();
    let (first, of) = (left.first()?, matrices.len());
    let why = format.check(&first.ty.shape).err()?;
    Some(format!(
        "--format {} leaves {} of {of} matrices as they are, such as {}: {why}",
        format.name(),
        left.len(),
        first.name
    ))
}

/// Brings the weights to the device, in the layouts of the programs that were declared to `session`.
pub(crate) fn load(model: &Model, source: &WeightSource, mut session: Session) -> Result<Session> {
    let mut progress = Progress::new("loading weights", weight_bytes(&model.graph));
    source.load(&mut session, &model.graph, |bytes| progress.at(bytes))?;
    Ok(session)
}

/// Where and in which extents a model runs.
pub(crate) struct RunSettings {
    pub(crate) device: DeviceChoice,
    /// Maximum number of tokens of a sequence, prompt and answer together.
    pub(crate) context: usize,
    /// Tokens of the longest prompt that is expected, which decides how much workspace a step needs.
    pub(crate) prompt: usize,
    /// Maximum number of tokens of a prompt that one step processes.
    pub(crate) chunk: usize,
    /// Threads of the CPU; all usable cores if `None`.
    pub(crate) threads: Option<usize>,
    pub(crate) random_weights: bool,
    /// Whether to note which matrices `--format` leaves as they are.
    pub(crate) notes: bool,
}

/// An engine with its model.
pub(crate) struct LoadedEngine {
    pub(crate) engine: Engine,
    pub(crate) model: Model,
    /// Name of the device.
    pub(crate) device: String,
    /// Threads that compute, of a CPU; `None` of a GPU.
    pub(crate) threads: Option<usize>,
}

/// Loads a model into an engine for one sequence.
///
/// # Errors
/// As [`load_model`], and when the engine cannot be made.
pub(crate) fn load_engine(
    files: &ModelFiles,
    config: &ModelConfig,
    settings: &ModelSettings,
    run: &RunSettings,
) -> Result<LoadedEngine> {
    let (context, chunk) = (run.context, run.chunk.min(run.context));
    let largest = StepExtents { tokens: run.prompt.clamp(1, chunk), sequences: 1, context };
    let workspace =
        |model: &Model, backend: &dyn Backend| engine_bytes(model, backend, EnginePrograms::Sampling, largest);
    let options = EngineOptions { context, sequences: 1, chunk, blocks: None };
    let LoadedModel { session, model, device, threads } =
        load_model(files, config, settings, run, CacheSize::Engine(options), workspace)?;
    let engine = Engine::new(session, &model, options)?;
    Ok(LoadedEngine { engine, model, device, threads })
}

/// A model whose weights are on the device.
pub(crate) struct LoadedModel {
    pub(crate) session: Session,
    pub(crate) model: Model,
    /// Name of the device.
    pub(crate) device: String,
    /// Threads that compute, of a CPU; `None` of a GPU.
    pub(crate) threads: Option<usize>,
}

/// A model before its weights are loaded.
struct PlacedModel {
    source: WeightSource,
    model: Model,
    device: OpenDevice,
}

fn place(files: &ModelFiles, config: &ModelConfig, settings: &ModelSettings, run: &RunSettings) -> Result<PlacedModel> {
    let source = weights(files, config, run.random_weights)?;
    let mut model = build(config, settings, &source, Some(run.context))?;
    if run.notes
        && let Some(left_out) = left_out(&model, settings)
    {
        note(&left_out);
    }
    let device = OpenDevice::open(run.device, run.threads)?;
    if device.is_cpu() {
        round_for_cpu(&mut model, settings);
    }
    Ok(PlacedModel { source, model, device })
}

/// Loads a model, if it fits with a cache of this size and the bytes that `workspace` returns.
///
/// # Errors
/// When the device cannot be opened, memory does not suffice, or a file is not readable or does not fit the model.
pub(crate) fn load_model(
    files: &ModelFiles,
    config: &ModelConfig,
    settings: &ModelSettings,
    run: &RunSettings,
    cached: CacheSize,
    workspace: impl Fn(&Model, &dyn Backend) -> Result<Bytes>,
) -> Result<LoadedModel> {
    let PlacedModel { source, model, device } = place(files, config, settings, run)?;
    if let Some(available) = device.available {
        check_memory(&model, cached, || workspace(&model, &*device.backend), available)?;
    }
    let session = Session::new(device.backend);
    ridge_engine::declare(&session, &model, run.context)?;
    let session = load(&model, &source, session)?;
    Ok(LoadedModel { session, model, device: device.name, threads: device.threads })
}

/// What [`load_model`] and an engine after it would allocate.
pub(crate) struct MemoryEstimate {
    /// Name of the device.
    pub(crate) device: String,
    pub(crate) weights: Bytes,
    pub(crate) cache: Bytes,
    /// Tokens of a block of the cache.
    pub(crate) block_size: usize,
    pub(crate) workspace: Bytes,
    /// Bytes that this process may allocate on the device, if known.
    pub(crate) available: Option<Bytes>,
}

/// What a model would allocate with a cache of this size, without loading it.
///
/// # Errors
/// As [`load_model`], but for memory.
pub(crate) fn estimate_memory(
    files: &ModelFiles,
    config: &ModelConfig,
    settings: &ModelSettings,
    run: &RunSettings,
    cached: CacheSize,
    workspace: impl Fn(&Model, &dyn Backend) -> Result<Bytes>,
) -> Result<MemoryEstimate> {
    let PlacedModel { model, device, .. } = place(files, config, settings, run)?;
    Ok(MemoryEstimate {
        weights: Bytes(weight_bytes(&model.graph)),
        cache: cache_bytes(&model, cached),
        block_size: model.block_size,
        workspace: workspace(&model, &*device.backend)?,
        device: device.name,
        available: device.available,
    })
}
