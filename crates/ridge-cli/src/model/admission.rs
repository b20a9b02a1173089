//! What a model allocates on its device, and whether that fits, before anything large is allocated.

use ridge_graph::{Bindings, Graph};
use ridge_hw::units::Bytes;
use ridge_models::{Model, symbols, weight_bytes};
use ridge_runtime::Backend;

use crate::error::{Error, Result};

/// Bytes of a cache of `tokens` tokens: keys and values of all layers, and the history of tokens.
pub(crate) fn cache_bytes(model: &Model, tokens: usize) -> Bytes {
    let per_token: usize = model.state_groups.iter().chain([&model.history]).map(|g| g.bytes_per_token).sum();
    Bytes(per_token as u64) * tokens as u64
}

/// Bytes of workspace that a prompt of `prompt` tokens needs, in steps of at most `chunk`.
pub(super) fn prompt_bytes(
    model: &Model,
    backend: &dyn Backend,
    context: usize,
    prompt: usize,
    chunk: usize,
) -> Result<Bytes> {
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

/// Compares what the model will allocate with what this process may allocate, so that the message comes from here rather than from the
/// system. All weights count: those that kernels read in the mapped file are few, and known only once they are loaded.
///
/// # Errors
/// Says what does not fit, and which flag makes it smaller.
pub(super) fn check_memory(
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
    use ridge_cpu::{Cpu, CpuOptions};
    use ridge_models::{BuildOptions, ModelFiles};

    use super::*;

    #[test]
    fn what_does_not_fit_is_named_with_its_flag() {
        let files = ModelFiles::open(None).unwrap();
        let model = files.config().unwrap().build(&BuildOptions::default()).unwrap();
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let weights = Bytes(weight_bytes(&model.graph));
        let cache = cache_bytes(&model, 512);
        let workspace = |chunk| prompt_bytes(&model, &cpu, 512, 500, chunk);
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
