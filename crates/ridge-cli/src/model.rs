//! From a path to a graph, and to weights on a device.

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_cuda::{Cuda, CudaOptions};
use ridge_engine::{Engine, EngineOptions};
use ridge_graph::passes::round_activations;
use ridge_graph::{Bindings, Graph, Role};
use ridge_hw::units::Bytes;
use ridge_models::{
    BertConfig, BuildOptions, Encoder, Model, ModelConfig, ModelFiles, WeightSource, symbols, weight_bytes,
};
use ridge_runtime::{Backend, Session};

use crate::args::DeviceChoice;
use crate::error::{Error, Result};
use crate::output::{Progress, note};
use crate::settings::ModelSettings;

/// Where the weights of `files` come from: their checkpoint, or random numbers of the dtype that the configuration
/// names.
pub(crate) fn weights(files: &ModelFiles, config: &ModelConfig, random: bool) -> Result<WeightSource> {
    if random {
        return Ok(WeightSource::Random(config.torch_dtype.unwrap_or(ridge_graph::DType::F32)));
    }
    Ok(WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint()?)?)))
}

/// Where the weights of an encoder come from, as [`weights`].
pub(crate) fn encoder_weights(files: &ModelFiles, config: &BertConfig, random: bool) -> Result<WeightSource> {
    if random {
        return Ok(WeightSource::Random(config.torch_dtype.unwrap_or(ridge_graph::DType::F32)));
    }
    Ok(WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint()?))))
}

/// The graph of `config` with its weights stored as they will be, for `context` tokens if they are known.
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

/// Makes `model` take activations as the CPU is to.
pub(crate) fn take_activations(model: &mut Model, settings: &ModelSettings) {
    let (prompts, answers) = settings.activations.ways(model.activations);
    model.take_activations(prompts, answers);
}

/// The graph of an encoder for the CPU with its weights stored as they will be. Its texts are all prompts.
pub(crate) fn build_encoder(config: &BertConfig, settings: &ModelSettings, source: &WeightSource) -> Result<Encoder> {
    let options = settings.options(config.torch_dtype);
    let mut encoder = config.build(&options)?;
    encoder.graph = source.retype(&encoder.graph, settings.format.as_ref())?;
    round_activations(&mut encoder.graph, settings.activations.ways(options.activations).0);
    Ok(encoder)
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

/// The device that a model runs on.
struct Device {
    backend: Arc<dyn Backend>,
    /// Its name, such as `cpu` or `NVIDIA H200`.
    name: String,
    /// Threads of the CPU that compute, if it is one.
    threads: Option<usize>,
    /// Bytes of its memory that are left, if it tells.
    available: Option<Bytes>,
}

impl Device {
    /// The device chosen, on `threads` threads if it is the CPU.
    fn open(choice: DeviceChoice, threads: Option<usize>) -> Result<Self> {
        match choice {
            DeviceChoice::Cpu => Self::cpu(threads),
            DeviceChoice::Cuda(ordinal) => Self::cuda(ordinal),
            DeviceChoice::Auto => Self::cuda(0).or_else(|_| Self::cpu(threads)),
        }
    }

    fn cpu(threads: Option<usize>) -> Result<Self> {
        let cpu = Cpu::new(CpuOptions { threads, ..CpuOptions::default() })?;
        Ok(Self {
            name: cpu.name().to_owned(),
            threads: Some(cpu.threads()),
            available: ridge_hw::cpu::Cpu::detect().available_memory(),
            backend: Arc::new(cpu),
        })
    }

    fn cuda(ordinal: usize) -> Result<Self> {
        let cuda = Cuda::new(CudaOptions { ordinal, ..CudaOptions::default() })?;
        Ok(Self {
            name: cuda.gpu().to_owned(),
            threads: None,
            available: Some(Bytes(cuda.free_memory()? as u64)),
            backend: Arc::new(cuda),
        })
    }
}

/// Brings the weights to the device.
pub(crate) fn load(model: &Model, source: &WeightSource, backend: Arc<dyn Backend>) -> Result<Session> {
    let mut session = Session::new(backend);
    let mut progress = Progress::new("loading weights", weight_bytes(&model.graph));
    source.load(&mut session, &model.graph, |bytes| progress.at(bytes))?;
    Ok(session)
}

/// How an engine is to run.
pub(crate) struct Running {
    pub(crate) device: DeviceChoice,
    pub(crate) context: usize,
    /// Tokens of the longest prompt that is expected, for what memory it takes.
    pub(crate) prompt: usize,
    pub(crate) chunk: usize,
    /// All usable cores, if `None`.
    pub(crate) threads: Option<usize>,
    pub(crate) random_weights: bool,
    /// Say what `--format` leaves as it is.
    pub(crate) notes: bool,
}

/// A model that is ready to run.
pub(crate) struct Started {
    pub(crate) engine: Engine,
    pub(crate) model: Model,
    /// The device that it runs on.
    pub(crate) device: String,
    /// Threads of the CPU that compute, if it is one.
    pub(crate) threads: Option<usize>,
}

/// Loads a model, for one sequence.
pub(crate) fn start(
    files: &ModelFiles,
    config: &ModelConfig,
    settings: &ModelSettings,
    running: &Running,
) -> Result<Started> {
    let (context, chunk) = (running.context, running.chunk.min(running.context));
    let tokens = context.next_multiple_of(settings.options(config.torch_dtype).block_size);
    let workspace = |model: &Model, backend: &dyn Backend| workspace(model, backend, context, running.prompt, chunk);
    let Prepared { session, model, device, threads } = prepare(files, config, settings, running, tokens, workspace)?;
    let engine = Engine::new(session, &model, EngineOptions { context, sequences: 1, chunk, blocks: None })?;
    Ok(Started { engine, model, device, threads })
}

/// A model whose weights are on the device.
pub(crate) struct Prepared {
    pub(crate) session: Session,
    pub(crate) model: Model,
    /// The device.
    pub(crate) device: String,
    /// Threads of the CPU that compute, if it is one.
    pub(crate) threads: Option<usize>,
}

/// A model before its weights are loaded.
struct Opened {
    source: WeightSource,
    model: Model,
    device: Device,
}

fn open(files: &ModelFiles, config: &ModelConfig, settings: &ModelSettings, running: &Running) -> Result<Opened> {
    let source = weights(files, config, running.random_weights)?;
    let mut model = build(config, settings, &source, Some(running.context))?;
    if running.notes
        && let Some(left_out) = left_out(&model, settings)
    {
        note(&left_out);
    }
    let device = Device::open(running.device, running.threads)?;
    if device.threads.is_some() {
        take_activations(&mut model, settings);
    }
    Ok(Opened { source, model, device })
}

/// Loads a model, if it fits with a cache of `cached` tokens and the bytes that `workspace` says.
pub(crate) fn prepare(
    files: &ModelFiles,
    config: &ModelConfig,
    settings: &ModelSettings,
    running: &Running,
    cached: usize,
    workspace: impl Fn(&Model, &dyn Backend) -> Result<Bytes>,
) -> Result<Prepared> {
    let Opened { source, model, device } = open(files, config, settings, running)?;
    if let Some(available) = device.available {
        check_memory(&model, cached, || workspace(&model, &*device.backend), available)?;
    }
    let session = load(&model, &source, device.backend)?;
    Ok(Prepared { session, model, device: device.name, threads: device.threads })
}

/// What [`prepare`] and an engine behind it would take.
pub(crate) struct Memory {
    pub(crate) device: String,
    pub(crate) weights: Bytes,
    pub(crate) cache: Bytes,
    /// Tokens of a block of the cache.
    pub(crate) block_size: usize,
    pub(crate) workspace: Bytes,
    pub(crate) available: Option<Bytes>,
}

/// What a model takes with a cache of `cached` tokens, without loading it.
pub(crate) fn memory(
    files: &ModelFiles,
    config: &ModelConfig,
    settings: &ModelSettings,
    running: &Running,
    cached: usize,
    workspace: impl Fn(&Model, &dyn Backend) -> Result<Bytes>,
) -> Result<Memory> {
    let Opened { model, device, .. } = open(files, config, settings, running)?;
    Ok(Memory {
        weights: Bytes(weight_bytes(&model.graph)),
        cache: cache_bytes(&model, cached),
        block_size: model.block_size,
        workspace: workspace(&model, &*device.backend)?,
        device: device.name,
        available: device.available,
    })
}

fn cache_bytes(model: &Model, tokens: usize) -> Bytes {
    let per_token: usize = model.state_groups.iter().chain([&model.history]).map(|g| g.bytes_per_token).sum();
    Bytes(per_token as u64) * tokens as u64
}

/// Bytes of workspace that a prompt of `prompt` tokens needs, in steps of at most `chunk`.
fn workspace(model: &Model, backend: &dyn Backend, context: usize, prompt: usize, chunk: usize) -> Result<Bytes> {
    let bytes = |outputs: &[&str], tokens| step_bytes(model, backend, outputs, (tokens, 1), context);
    // The last step gives a token; those before only fill the cache.
    let last = prompt.saturating_sub(1) % chunk + 1;
    let filling = if prompt > chunk { bytes(&[], chunk)? } else { Bytes(0) };
    Ok(filling.max(bytes(&["next"], last)?))
}

/// Bytes of workspace and outputs of a step of `tokens` tokens and `seqs` sequences of `context` tokens, be they of prompts
/// or of answers.
pub(crate) fn step_bytes(
    model: &Model,
    backend: &dyn Backend,
    outputs: &[&str],
    step: (usize, usize),
    context: usize,
) -> Result<Bytes> {
    let bytes = |graph: &Graph| graph_bytes(graph, backend, outputs, step, (context, model));
    Ok(bytes(&model.graph)?.max(model.answers.as_ref().map_or(Ok(Bytes(0)), bytes)?))
}

/// As [`step_bytes`], of one graph.
pub(crate) fn graph_bytes(
    graph: &Graph,
    backend: &dyn Backend,
    outputs: &[&str],
    (tokens, seqs): (usize, usize),
    (context, model): (usize, &Model),
) -> Result<Bytes> {
    let table = context.div_ceil(model.block_size);
    let lowered = ridge_runtime::lower(graph, outputs, backend.kernels())?;
    let bindings = Bindings::new().with(symbols::TOKENS, tokens).with(symbols::SEQS, seqs);
    let bindings = bindings.with(symbols::TABLE, table).with(symbols::BLOCKS, table * seqs);
    let plan = ridge_runtime::plan(&lowered, &bindings)?;
    Ok(Bytes((plan.arena_bytes + plan.output_bytes.iter().sum::<usize>()) as u64))
}

/// Holds what the model will allocate against what this process can take, before the system does it in its own way. All weights count:
/// those that kernels take where the file is mapped are few, and which they are is known when they are loaded.
fn check_memory(
    model: &Model,
    cached: usize,
    workspace: impl FnOnce() -> Result<Bytes>,
    available: Bytes,
) -> Result<()> {
    let cache = cache_bytes(model, cached);
    let weights = Bytes(weight_bytes(&model.graph));
    let refused = |what, needed, remedy| Err(Error::Memory { what, needed, available, remedy });
    if weights > available {
        return refused("the weights", weights, "choose a smaller model, or --format q8_0");
    }
    if weights + cache > available {
        return refused("the weights and the cache", weights + cache, "lower --context, or use --cache-dtype bf16");
    }
    let needed = weights + cache + workspace()?;
    if needed > available {
        return refused("the workspace of a step, the weights and the cache", needed, "lower --chunk");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_named_with_its_flag() {
        let files = ModelFiles::open(None).unwrap();
        let model = files.config().unwrap().build(&BuildOptions::default()).unwrap();
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let weights = Bytes(weight_bytes(&model.graph));
        let cache = cache_bytes(&model, 512);
        let workspace = |chunk| workspace(&model, &cpu, 512, 500, chunk);
        let check = |chunk, available| check_memory(&model, 512, || workspace(chunk), available);
        let said = |chunk, available| check(chunk, available).unwrap_err().to_string();
        assert!(said(500, Bytes(weights.0 - 1)).starts_with("the weights need "));
        assert!(said(500, weights).contains("--context"));
        assert!(said(500, weights + cache).starts_with("the workspace of a step, the weights and the cache need "));
        assert!(said(500, weights + cache).contains("--chunk"));
        // Smaller steps need less, and that is enough.
        let little = weights + cache + workspace(10).unwrap();
        assert!(check(10, little).is_ok());
        assert!(said(500, little).contains("--chunk"));
    }
}
