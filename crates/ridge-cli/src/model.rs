//! From a path to a graph, and to weights on a device.

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_hw::units::Bytes;
use ridge_models::{BuildOptions, Model, ModelConfig, ModelFiles, WeightSource, weight_bytes};
use ridge_runtime::Session;

use crate::error::{Error, Result};
use crate::output::Progress;
use crate::settings::ModelSettings;

/// Where the weights of `files` come from: their checkpoint, or random numbers of the dtype that the configuration
/// names.
pub(crate) fn weights(files: &ModelFiles, config: &ModelConfig, random: bool) -> Result<WeightSource> {
    if random {
        return Ok(WeightSource::Random(config.torch_dtype.unwrap_or(ridge_graph::DType::F32)));
    }
    Ok(WeightSource::Checkpoint(Arc::new(config.arrange(files.checkpoint()?)?)))
}

/// The graph of `config` with its weights stored as they will be, for `context` tokens if they are known.
pub(crate) fn build(
    config: &ModelConfig,
    settings: &ModelSettings,
    source: &WeightSource,
    context: Option<usize>,
) -> Result<Model> {
    let mut model = config.build(&BuildOptions { context, ..settings.options })?;
    model.graph = source.retype(&model.graph, settings.format.as_ref())?;
    Ok(model)
}

/// Brings the weights to the CPU.
pub(crate) fn load(model: &Model, source: &WeightSource, threads: Option<usize>) -> Result<(Session, usize)> {
    let cpu = Cpu::new(CpuOptions { threads, ..CpuOptions::default() })?;
    let threads = cpu.threads();
    let mut session = Session::new(Arc::new(cpu));
    let mut progress = Progress::new("loading weights", weight_bytes(&model.graph));
    source.load(&mut session, &model.graph, |bytes| progress.at(bytes))?;
    Ok((session, threads))
}

/// Holds what the model will allocate against what this process can take, before the system does it in its own way.
pub(crate) fn check_memory(model: &Model, context: usize, weights_are_made: bool) -> Result<()> {
    let Some(available) = ridge_hw::cpu::Cpu::detect().available_memory() else { return Ok(()) };
    let tokens = context.div_ceil(model.block_size) * model.block_size;
    let per_token: usize = model.state_groups.iter().map(|g| g.bytes_per_token).sum();
    let cache = Bytes(per_token as u64) * tokens as u64;
    let weights = if weights_are_made { Bytes(weight_bytes(&model.graph)) } else { Bytes(0) };
    let refused = |what, needed, remedy| Err(Error::Memory { what, needed, available, remedy });
    if weights > available {
        return refused("the weights", weights, "choose a smaller model, or --format q8_0");
    }
    if weights + cache > available {
        return refused("the cache, with the weights", weights + cache, "lower --context, or use --cache-dtype bf16");
    }
    Ok(())
}
