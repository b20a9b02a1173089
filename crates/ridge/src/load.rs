//! From model files to a graph and to weights on a device.

use std::sync::Arc;

use ridge_engine::{EmbedOptions, Embedder, Engine, EngineOptions};
use ridge_graph::passes::{Activations, round_activations};
use ridge_graph::{Arg, DType, Graph, Role};
use ridge_hw::units::Bytes;
use ridge_models::{
    BuildOptions, Model as Decoder, ModelConfig, ModelFiles, Network, NetworkConfig, PredictionSummary, WeightSource,
};
use ridge_runtime::{Backend, Session};

use crate::admission::{CacheSize, EnginePrograms, StepExtents, cache_bytes, check_memory, compare, engine_bytes};
use crate::error::{Error, Result, Smaller};
use crate::host_weights::{HostWeights, keep_on_host};
use crate::placement::{OpenDevice, Placement};
use crate::settings::NumberSettings;

/// Who wants to know how loading goes. `()` does not.
pub trait LoadObserver {
    /// So many bytes of weights are loaded, of so many.
    fn loading(&mut self, _done: u64, _total: u64) {}

    /// Something that whoever asked for it may not expect.
    fn note(&mut self, _note: LoadNote) {}
}

impl LoadObserver for () {}

/// What may be unexpected about a model that is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadNote {
    /// Some matrices stay as they are stored, for their shape does not fit the format that was asked for.
    LeftOut {
        /// The format.
        format: String,
        /// How many of the matrices.
        matrices: usize,
        /// Of so many.
        of: usize,
        /// One of them.
        example: String,
        /// Why it does not fit.
        why: String,
    },
    /// Some tensors of the checkpoint are of parts of the model that Ridge does not run, such as layers that predict further
    /// tokens.
    Unused {
        /// How many.
        tensors: usize,
        /// One of them.
        example: String,
    },
    /// Some weights are kept in memory of the host, since the GPU may not take all: each step is bound by the link to it.
    OnHost {
        /// How many.
        tensors: usize,
        /// Bytes of them.
        bytes: Bytes,
        /// Bytes of all weights.
        of: Bytes,
    },
}

/// Where the weights of `files` come from: their checkpoint, or random numbers in the dtype and formats that the
/// configuration names.
pub(crate) fn weights(files: &ModelFiles, config: &ModelConfig, random: bool) -> Result<WeightSource> {
    weights_for(files, config, random, &BuildOptions::default())
}

/// As [`weights`], for a model that is built with `options`.
fn weights_for(files: &ModelFiles, config: &ModelConfig, random: bool, options: &BuildOptions) -> Result<WeightSource> {
    if random {
        return Ok(WeightSource::RandomAsPublished(Box::new(config.clone())));
    }
    Ok(WeightSource::Checkpoint(Arc::new(config.arrange_for(files.checkpoint()?, options)?)))
}

/// As [`weights`], of a network of any kind.
fn network_weights(files: &ModelFiles, config: &NetworkConfig, random: bool) -> Result<WeightSource> {
    match config {
        NetworkConfig::Decoder(config) => weights(files, config, random),
        _ if random => Ok(WeightSource::Random(config.torch_dtype().unwrap_or(DType::F32))),
        _ => Ok(WeightSource::Checkpoint(Arc::new(files.network_checkpoint(config)?))),
    }
}

/// A network of any kind with its weights in the formats that they are stored in, and where they come from.
///
/// # Errors
/// When a file is not readable or does not fit the network.
pub fn build_network(
    files: &ModelFiles,
    config: &NetworkConfig,
    numbers: &NumberSettings,
    context: Option<usize>,
    random_weights: bool,
) -> Result<(Network, WeightSource)> {
    let source = network_weights(files, config, random_weights)?;
    let mut network = config.build(&BuildOptions { context, ..numbers.options(config.torch_dtype()) })?;
    network.module_mut().store(&source, numbers.format.as_ref())?;
    Ok((network, source))
}

/// The module of a decoder that drafts further tokens, with `context` tokens in the cache and weights in the formats that the
/// config publishes, or that of `numbers`; `None` where it has none.
///
/// # Errors
/// When a format does not fit a weight.
pub fn summarize_prediction(
    config: &ModelConfig,
    numbers: &NumberSettings,
    context: usize,
) -> Result<Option<PredictionSummary>> {
    if !config.predicts() {
        return Ok(None);
    }
    let source = WeightSource::RandomAsPublished(Box::new(config.clone()));
    let built = |drafts| -> Result<Decoder> {
        let options = BuildOptions { context: Some(context), drafts, ..numbers.options(config.torch_dtype) };
        let mut model = config.build(&options)?;
        model.store(&source, numbers.format.as_ref())?;
        Ok(model)
    };
    Ok(PredictionSummary::new(&built(0)?, &built(1)?, context)?)
}

/// Makes the products of `network` take activations as `numbers` has it for the device: the CPU or a GPU.
pub fn round_network(network: &mut Network, numbers: &NumberSettings, on_cpu: bool) {
    let (prompts, answers) = rounding(numbers, network.module().activations, on_cpu);
    match network {
        Network::Decoder(model) => model.take_activations(prompts, answers),
        // Their tokens are all those of prompts.
        Network::Encoder(_) | Network::ImageClassifier(_) => {
            round_activations(&mut network.module_mut().graph, prompts);
        }
    }
}

/// How products take activations of `dtype`, those of prompts and those of answers.
pub(crate) fn rounding(numbers: &NumberSettings, dtype: DType, on_cpu: bool) -> (Activations, Activations) {
    if on_cpu { numbers.activations.for_prompts_and_answers(dtype) } else { [numbers.activations.on_gpu(); 2].into() }
}

/// A network whose weights are on the device.
pub struct LoadedNetwork {
    /// The weights.
    pub session: Session,
    /// The graph.
    pub network: Network,
}

/// Loads a network of any kind onto one device.
///
/// # Errors
/// When the device cannot be opened, or a file is not readable or does not fit the network.
pub fn load_network(
    files: &ModelFiles,
    config: &NetworkConfig,
    numbers: &NumberSettings,
    placement: &Placement,
    random_weights: bool,
    observer: &mut dyn LoadObserver,
) -> Result<LoadedNetwork> {
    let (mut network, source) = build_network(files, config, numbers, None, random_weights)?;
    let device = OpenDevice::open(placement)?;
    round_network(&mut network, numbers, device.is_cpu());
    let total = network.module().weight_bytes();
    // Where a limit was set. These networks are loaded whole.
    if let Some(available) = device.available.filter(|available| device.keeps_on_host && available.0 < total) {
        let (what, needed) = ("the weights", Bytes(total));
        return Err(Error::Memory { what, needed, available, smaller: Smaller::Model, or_on_host: false });
    }
    if let Some(note) = left_out(&network.module().graph, numbers) {
        observer.note(note);
    }
    let mut session = Session::new(device.backend);
    network.module().load(&source, &mut session, None, |done| observer.loading(done, total))?;
    Ok(LoadedNetwork { session, network })
}

/// Loads a model onto one device to make vectors of texts, or to score them.
///
/// # Errors
/// As for [`load_network`], and when it sees images.
pub fn load_embedder(
    files: &ModelFiles,
    options: EmbedOptions,
    numbers: &NumberSettings,
    placement: &Placement,
    random_weights: bool,
    observer: &mut dyn LoadObserver,
) -> Result<Embedder> {
    let config = files.embedding_config(&options.sentence)?;
    let no_texts = || Error::Kind { model: files.to_string(), wanted: "text model" };
    if matches!(config, NetworkConfig::ImageClassifier(_)) {
        return Err(no_texts());
    }
    let LoadedNetwork { session, network } =
        load_network(files, &config, numbers, placement, random_weights, observer)?;
    Ok(match &network {
        Network::Encoder(encoder) => Embedder::of_encoder(session, encoder, options)?,
        Network::Decoder(model) => Embedder::of_decoder(session, model, options)?,
        Network::ImageClassifier(_) => return Err(no_texts()),
    })
}

/// Which matrices a format leaves as they are stored, and why; `None` where it leaves none.
pub fn left_out(graph: &Graph, numbers: &NumberSettings) -> Option<LoadNote> {
    let format = numbers.format.as_ref()?;
    let matrices: Vec<_> = graph.args(Role::Weight).filter(|a| matches!(a.ty.shape.rank(), 2 | 3)).collect();
    let misfit = |a: &&&Arg| a.ty.format.as_ref() != Some(format) && format.check(&a.ty.shape).is_err();
    let left: Vec<_> = matrices.iter().filter(misfit).collect();
    let (first, of) = (left.first()?, matrices.len());
    let why = format.check(&first.ty.shape).err()?;
    let (format, example) = (format.name().to_owned(), first.name.to_string());
    Some(LoadNote::LeftOut { format, matrices: left.len(), of, example, why })
}

/// Where and in which extents a generator runs.
#[derive(Clone, Debug)]
pub struct RunSettings {
    /// On which devices.
    pub placement: Placement,
    /// Maximum number of tokens of a sequence, prompt and answer together.
    pub context: usize,
    /// Tokens of the longest prompt that is expected, which decides how much workspace a step needs.
    pub prompt: usize,
    /// Maximum number of tokens of a prompt that one step processes.
    pub chunk: usize,
    /// Take random weights: only the configuration is read.
    pub random_weights: bool,
    /// Tokens that the model's own prediction module drafts in each step; 0 for none, and the module is not loaded.
    pub drafts: usize,
}

/// An engine with its model.
pub struct LoadedEngine {
    /// The engine.
    pub engine: Engine,
    /// The graph, of one rank where its layers are cut.
    pub model: Decoder,
    /// Name of the device.
    pub device: String,
    /// Threads that compute, of a CPU; `None` of a GPU.
    pub threads: Option<usize>,
}

/// Loads a generator into an engine for one sequence.
///
/// # Errors
/// As for [`load_model`], and when the engine cannot be made.
pub fn load_engine(
    files: &ModelFiles,
    config: &ModelConfig,
    numbers: &NumberSettings,
    run: &RunSettings,
    observer: &mut dyn LoadObserver,
) -> Result<LoadedEngine> {
    let (context, chunk) = (run.context, run.chunk.min(run.context));
    let largest = StepExtents { tokens: run.prompt.clamp(1, chunk), sequences: 1, context, candidates: 0 };
    let workspace =
        |model: &Decoder, backend: &dyn Backend| engine_bytes(model, backend, EnginePrograms::Sampling, largest);
    let options = EngineOptions { context, sequences: 1, chunk, blocks: None };
    let LoadedModel { session, model, device, threads, .. } =
        load_model(files, config, numbers, run, CacheSize::Engine(options), workspace, observer)?;
    let engine = Engine::new(session, &model, options)?;
    Ok(LoadedEngine { engine, model, device, threads })
}

/// A generator whose weights are on the device.
pub struct LoadedModel {
    /// The weights.
    pub session: Session,
    /// The graph, of one rank where its layers are cut.
    pub model: Decoder,
    /// Name of the device.
    pub device: String,
    /// Threads that compute, of a CPU; `None` of a GPU.
    pub threads: Option<usize>,
    /// The weights that are kept in memory of the host rather than on the device.
    pub on_host: HostWeights,
}

/// A model before its weights are loaded.
struct PlacedModel {
    source: WeightSource,
    model: Decoder,
    device: OpenDevice,
}

impl PlacedModel {
    /// Requires that the model fits with a cache of this size and the bytes that `workspace` returns. Where the GPU's memory is
    /// limited, weights leave it for memory of the host until the rest fits.
    ///
    /// # Errors
    /// Says what does not fit, and what makes it smaller.
    fn admit(
        &mut self,
        cached: CacheSize,
        workspace: impl Fn(&Decoder, &dyn Backend) -> Result<Bytes>,
        observer: &mut dyn LoadObserver,
    ) -> Result<HostWeights> {
        let Some(available) = self.device.available else { return Ok(HostWeights::default()) };
        let backend = &*self.device.backend;
        let refused = match check_memory(&self.model, cached, || workspace(&self.model, backend), available) {
            Ok(()) => return Ok(HostWeights::default()),
            Err(refused) => refused,
        };
        match refused {
            Error::Memory { .. } if self.device.keeps_on_host => {}
            Error::Memory { what, needed, available, smaller, .. } => {
                return Err(Error::Memory { what, needed, available, smaller, or_on_host: !self.device.is_cpu() });
            }
            other => return Err(other),
        }
        let (cache, of) = (cache_bytes(&self.model, cached), Bytes(self.model.weight_bytes()));
        let host = ridge_hw::cpu::Cpu::detect().available_memory();
        let (kept, _) = keep_on_host(&mut self.model, cache, |model| workspace(model, backend), available, host)?;
        observer.note(LoadNote::OnHost { tensors: kept.names.len(), bytes: kept.bytes, of });
        Ok(kept)
    }
}

fn place(
    files: &ModelFiles,
    config: &ModelConfig,
    numbers: &NumberSettings,
    run: &RunSettings,
    observer: &mut dyn LoadObserver,
) -> Result<PlacedModel> {
    if run.drafts > 0 && !config.predicts() {
        return Err(Error::NoPredictions { family: config.model_type() });
    }
    let device = OpenDevice::open(&run.placement)?;
    let cache = numbers.options(config.torch_dtype).cache;
    if run.placement.int8_attention && (device.is_cpu() || cache != DType::I8) {
        let why = match device.is_cpu() {
            true => "attention by products of int8 is for GPUs; leave --attention int8 out".to_owned(),
            false => {
                format!("attention by products of int8 takes a cache of int8, not of {cache}; add --cache-dtype int8")
            }
        };
        return Err(Error::Device { device: device.name, why });
    }
    let options = BuildOptions {
        context: Some(run.context),
        drafts: run.drafts,
        // The CPU computes tokens of prompts and of answers alike.
        prompt_lengths: run.placement.deterministic && !device.is_cpu(),
        ..numbers.options(config.torch_dtype)
    };
    let source = weights_for(files, config, run.random_weights, &options)?;
    let mut model = config.build(&options)?;
    model.store(&source, numbers.format.as_ref())?;
    if let Some(left_out) = left_out(&model.graph, numbers) {
        observer.note(left_out);
    }
    if let WeightSource::Checkpoint(checkpoint) = &source
        && let Some(example) = checkpoint.unused().first()
    {
        observer.note(LoadNote::Unused { tensors: checkpoint.unused().len(), example: example.clone() });
    }
    if let Some(axis) = run.placement.tensor_parallel.axis() {
        model.cut(config, &axis)?;
    }
    let (prompts, answers) = rounding(numbers, model.activations, device.is_cpu());
    model.take_activations(prompts, answers);
    Ok(PlacedModel { source, model, device })
}

/// Loads a generator, if it fits with a cache of this size and the bytes that `workspace` returns.
///
/// # Errors
/// When the device cannot be opened, memory does not suffice, or a file is not readable or does not fit the model.
pub fn load_model(
    files: &ModelFiles,
    config: &ModelConfig,
    numbers: &NumberSettings,
    run: &RunSettings,
    cached: CacheSize,
    workspace: impl Fn(&Decoder, &dyn Backend) -> Result<Bytes>,
    observer: &mut dyn LoadObserver,
) -> Result<LoadedModel> {
    let mut placed = place(files, config, numbers, run, observer)?;
    let on_host = placed.admit(cached, workspace, observer)?;
    let PlacedModel { source, model, device } = placed;
    let mut session = Session::new(device.backend);
    session.keep_on_host(on_host.names.iter().map(String::as_str));
    ridge_engine::declare(&session, &model, run.context)?;
    let total = model.weight_bytes();
    let rank = run.placement.tensor_parallel.rank();
    model.load(&source, &mut session, rank, |done| observer.loading(done, total))?;
    Ok(LoadedModel { session, model, device: device.name, threads: device.threads, on_host })
}

/// What [`load_model`] and an engine after it would allocate, of one rank where there are several.
pub struct MemoryEstimate {
    /// Name of the device.
    pub device: String,
    /// The weights, but for those in memory of the host.
    pub weights: Bytes,
    /// Weights in memory of the host.
    pub on_host: Bytes,
    /// Keys, values and tokens.
    pub cache: Bytes,
    /// Tokens of a block of the cache.
    pub block_size: usize,
    /// What steps need besides.
    pub workspace: Bytes,
    /// Bytes that this process may allocate on the device, if known.
    pub available: Option<Bytes>,
}

impl MemoryEstimate {
    /// Compares it with what this process may allocate, as [`load_model`] does.
    ///
    /// # Errors
    /// Says what does not fit, and what makes it smaller.
    pub fn check(&self) -> Result<()> {
        self.available.map_or(Ok(()), |available| compare(self.weights, self.cache, || Ok(self.workspace), available))
    }
}

/// What a generator would allocate with a cache of this size, without loading it.
///
/// # Errors
/// As for [`load_model`], but for memory.
pub fn estimate_memory(
    files: &ModelFiles,
    config: &ModelConfig,
    numbers: &NumberSettings,
    run: &RunSettings,
    cached: CacheSize,
    workspace: impl Fn(&Decoder, &dyn Backend) -> Result<Bytes>,
    observer: &mut dyn LoadObserver,
) -> Result<MemoryEstimate> {
    let mut placed = place(files, config, numbers, run, observer)?;
    let on_host = match placed.device.keeps_on_host {
        true => placed.admit(cached, &workspace, observer)?.bytes,
        false => Bytes(0),
    };
    let PlacedModel { model, device, .. } = placed;
    Ok(MemoryEstimate {
        weights: Bytes(model.weight_bytes() - on_host.0),
        on_host,
        cache: cache_bytes(&model, cached),
        block_size: model.block_size,
        workspace: workspace(&model, &*device.backend)?,
        device: device.name,
        available: device.available,
    })
}

#[cfg(test)]
mod tests;
