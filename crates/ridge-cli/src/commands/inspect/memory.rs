//! `ridge inspect --memory`: the memory contents of a step over its launches, as JSON or as a figure.

use std::path::Path;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Bindings, Graph, Sym};
use ridge_models::{Network, symbols, with_blocks};
use ridge_runtime::{Backend as _, lower, memory_snapshot, plan};
use serde_json::{Value, json};

use crate::error::{Result, refused};
use crate::output::count;
use crate::snapshot;

/// The output whose step is shown.
pub(super) fn output(network: &Network) -> &'static str {
    match network {
        Network::Decoder(_) => "next",
        Network::Encoder(_) => "hidden",
        Network::ImageClassifier(_) => "logits",
    }
}

/// Default number of tokens of a step.
const TOKENS: usize = 128;

/// The step whose memory is shown.
pub(super) struct InspectedStep {
    pub(super) output: &'static str,
    pub(super) bindings: Bindings,
    /// Its extents, for JSON.
    extents: Value,
    /// Description of the step's input, such as `128 tokens`.
    of: String,
}

impl InspectedStep {
    /// For a decoder, a step of `tokens` tokens of one sequence in a cache for `context` that samples the next token; for an
    /// encoder, one text of `tokens` tokens; for a classifier, one image.
    ///
    /// # Errors
    /// When the step is longer than the context, or `tokens` is given for an image classifier.
    pub(super) fn new(network: &Network, tokens: Option<usize>, context: usize) -> Result<Self> {
        let output = output(network);
        if let Network::ImageClassifier(_) = network {
            if let Some(tokens) = tokens {
                return Err(refused("--tokens", tokens, "applies to texts, but the model classifies images"));
            }
            let bindings = Bindings::new().with(symbols::IMAGES, 1);
            return Ok(Self { output, bindings, extents: json!({ "images": 1 }), of: "an image".to_owned() });
        }
        let tokens = tokens.unwrap_or(TOKENS.min(context));
        if tokens > context {
            let why = format!("exceeds the context of {context}: lower it, or raise --context");
            return Err(refused("--tokens", tokens, &why));
        }
        let mut bindings = Bindings::new().with(symbols::TOKENS, tokens).with(symbols::SEQS, 1);
        if let Network::Decoder(model) = network {
            let table = context.div_ceil(model.block_size);
            let none = [symbols::BIASES, symbols::BREAKERS, symbols::TOP, symbols::FORBIDDEN];
            bindings = none.into_iter().fold(bindings.with(symbols::TABLE, table), |all, name| all.with(name, 0));
            bindings = with_blocks(&model.graph, bindings, table);
        }
        let extents = json!({ "tokens": tokens, "context": context });
        Ok(Self { output, bindings, extents, of: count(tokens, "token") })
    }

    /// Is it a step of one token of one sequence?
    pub(super) fn is_one_token(&self) -> bool {
        self.bindings.get(&Sym::new(symbols::TOKENS)) == Some(1)
    }

    /// Blocks of the sequence's cache.
    pub(super) fn blocks(&self) -> usize {
        self.bindings.get(&Sym::new(symbols::TABLE)).unwrap_or(1)
    }
}

/// Writes the snapshot of a step of `graph`, as the CPU runs it.
///
/// # Errors
/// When `file` is an input of the command, or cannot be written.
pub(super) fn write(graph: &Graph, step: &InspectedStep, input: Option<&Path>, file: &Path) -> Result<()> {
    let is_input = |input: &Path| matches!((input.canonicalize(), file.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if input.is_some_and(is_input) {
        return Err(refused("--memory", file.display(), "is an input of this command; give another name"));
    }
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() })?;
    let lowered = lower(graph, &[step.output], cpu.kernels())?;
    let snapshot = memory_snapshot(&lowered, &plan(&lowered, &step.bindings)?, &step.bindings)?;
    snapshot::write(&snapshot, &step.extents, &step.of, file)
}
