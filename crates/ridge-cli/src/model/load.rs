//! From the files of a model to a graph, and to weights on a device.

use std::sync::Arc;

use ridge_engine::{Engine, EngineOptions};
use ridge_files::Checkpoint;
use ridge_graph::passes::round_activations;
use ridge_graph::{DType, Role};
use ridge_hw::units::Bytes;
use ridge_models::{BuildOptions, Model, ModelConfig, ModelFiles, Network, NetworkConfig, WeightSource};
use ridge_runtime::{Backend, Session};

use super::admission::{CacheSize, EnginePrograms, StepExtents, cache_bytes, check_memory, engine_bytes};
use super::placement::{DeviceChoice, OpenDevice};
use super::settings::ModelSettings;
use crate::error::{Result, refused};
use crate::output::{Progress, note};

/// Where the weights of `files` come from: their checkpoint, or random numbers of the dtype that the configuration
/// names.
fn weights(files: &ModelFiles, config: &ModelConfig, random: bool) -> Result<WeightSource> {
    source(files, config.torch_dtype, random, |checkpoint| config.arrange(checkpoint))
}

fn source(
    files: &ModelFiles,
    named: Option<DType>,
    random: bool,
    arrange: impl FnOnce(Checkpoint) -> ridge_models::Result<Checkpoint>,
) -> Result<WeightSource> {
    if random {
        return Ok(WeightSource::Random(named.unwrap_or(DType::F32)));
    }
    Ok(WeightSource::Checkpoint(Arc::new(arrange(files.checkpoint()?)?)))
}

/// A network of any kind with its weights in the formats that they are stored in, and where they come from. Those of a
/// family that only is planned are random.
pub(crate) fn build_network(
    files: &ModelFiles,
    config: &NetworkConfig,
    settings: &ModelSettings,
    context: Option<usize>,
    random_weights: bool,
) -> Result<(Network, WeightSource)> {
    let random = random_weights || matches!(config, NetworkConfig::Planned(_));
    let source = source(files, config.torch_dtype(), random, |checkpoint| config.arrange(checkpoint))?;
    let mut network = config.build(&BuildOptions { context, ..settings.options(config.torch_dtype()) })?;
    network.module_mut().store(&source, settings.format.as_ref())?;
    Ok((network, source))
}

/// Makes the products of `network` take activations as `settings` has it for the CPU.
pub(crate) fn round_network_for_cpu(network: &mut Network, settings: &ModelSettings) {
    match network {
        Network::Decoder(model) => round_for_cpu(model, settings),
        // Their tokens are all those of prompts.
        Network::Encoder(_) | Network::ImageClassifier(_) => {
            let module = network.module_mut();
            round_activations(&mut module.graph, settings.activations.for_prompts_and_answers(module.activations).0);
        }
    }
}

/// The graph of `config` with its weights in the formats that they are stored in, for `context` tokens if they are known.
fn build(
    config: &ModelConfig,
    settings: &ModelSettings,
    source: &WeightSource,
    context: Option<usize>,
) -> Result<Model> {
    let mut model = config.build(&BuildOptions { context, ..settings.options(config.torch_dtype) })?;
    model.store(source, settings.format.as_ref())?;
    Ok(model)
}

/// Makes the products of `model` take activations as `settings` has it for the CPU.
fn round_for_cpu(model: &mut Model, settings: &ModelSettings) {
    let (prompts, answers) = settings.activations.for_prompts_and_answers(model.activations);
    model.take_activations(prompts, answers);
}

/// A network whose weights are on the device.
pub(crate) struct LoadedNetwork {
    pub(crate) session: Session,
    pub(crate) network: Network,
}

/// Loads a network onto `device`, with `threads` threads if that is the CPU.
///
/// # Errors
/// When the device cannot be opened, or a file is not readable or does not fit the network.
pub(crate) fn load_network(
    files: &ModelFiles,
    config: &NetworkConfig,
    settings: &ModelSettings,
    (device, threads): (DeviceChoice, Option<usize>),
    random_weights: bool,
) -> Result<LoadedNetwork> {
    if let NetworkConfig::Planned(planned) = config {
        let why = format!("is of the family {}, which can be planned and not run yet", planned.family);
        return Err(refused("--model", files, &why));
    }
    let (mut network, source) = build_network(files, config, settings, None, random_weights)?;
    let device = OpenDevice::open(device, threads)?;
    if device.is_cpu() {
        round_network_for_cpu(&mut network, settings);
    }
    let mut progress = Progress::new("loading weights", network.module().weight_bytes());
    let mut session = Session::new(device.backend);
    source.load(&mut session, &network.module().graph, |bytes| progress.at(bytes))?;
    Ok(LoadedNetwork { session, network })
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
    let mut progress = Progress::new("loading weights", model.weight_bytes());
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
        weights: Bytes(model.weight_bytes()),
        cache: cache_bytes(&model, cached),
        block_size: model.block_size,
        workspace: workspace(&model, &*device.backend)?,
        device: device.name,
        available: device.available,
    })
}
