//! `ridge inspect --memory`: the memory contents of a step over its launches, as JSON or as a figure.

use std::path::Path;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Bindings, Graph};
use ridge_hw::units::Bytes;
use ridge_models::{Network, symbols, with_blocks};
use ridge_plan::plot::{Axis, Block, Blocks, Mark, Unit, draw};
use ridge_runtime::{Backend as _, MemorySnapshot, NamedBytes, lower, memory_snapshot, plan};
use serde_json::{Value, json};

use crate::error::{Result, refused};
use crate::output::{count, write_file};

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
    output: &'static str,
    bindings: Bindings,
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
    let is_svg = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("svg"));
    let text = if is_svg { figure(&snapshot, &step.of) } else { object(&snapshot, &step.extents).to_string() };
    write_file(file, &text)
}

fn object(snapshot: &MemorySnapshot, extents: &Value) -> Value {
    let mut step = extents.clone();
    step["launches"] = snapshot.launches.into();
    let named = |all: &[NamedBytes]| -> Vec<Value> {
        all.iter().map(|NamedBytes { name, bytes }| json!({ "name": name, "bytes": bytes })).collect()
    };
    let values: Vec<Value> = (snapshot.values.iter())
        .map(|v| {
            json!({
                "place": v.place, "op": v.op, "offset": v.offset, "bytes": v.bytes, "first": v.first, "last": v.last,
            })
        })
        .collect();
    json!({
        "step": step,
        "workspace": {
            "bytes": snapshot.arena_bytes,
            "peak": { "launch": snapshot.peak, "op": snapshot.peak_op, "bytes": snapshot.peak_bytes },
            "values": values,
        },
        "weights": named(&snapshot.weights),
        "states": named(&snapshot.states),
        "inputs": named(&snapshot.inputs),
        "outputs": named(&snapshot.outputs),
        "sources": { "bytes": "exact: the plan of the step as the CPU runs it, without scratch memory of kernels" },
    })
}

/// Number of ops with their own colour; smaller ones share the last colour.
const KINDS: usize = 7;

fn figure(snapshot: &MemorySnapshot, of: &str) -> String {
    // By op, in decreasing order of memory over the step.
    let mut ops: Vec<(String, usize)> = Vec::new();
    for value in &snapshot.values {
        let area = value.bytes * (value.last - value.first + 1);
        match ops.iter_mut().find(|(op, _)| *op == value.op) {
            Some((_, sum)) => *sum += area,
            None => ops.push((value.op.clone(), area)),
        }
    }
    ops.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let mut kinds: Vec<String> = ops.into_iter().map(|(op, _)| op).collect();
    if kinds.len() > KINDS {
        kinds.truncate(KINDS);
        kinds.push("others".to_owned());
    }
    let last = kinds.len().saturating_sub(1);
    let blocks = snapshot.values.iter().map(|v| Block {
        x: (v.first as f64, v.last as f64 + 1.0),
        y: (v.offset as f64, (v.offset + v.bytes) as f64),
        kind: kinds.iter().position(|kind| *kind == v.op).unwrap_or(last),
        tip: format!("{} {}: {}, launches {} to {}", v.op, v.place, Bytes(v.bytes as u64), v.first, v.last),
    });
    let peak = format!("peak {}: {}", Bytes(snapshot.peak_bytes as u64), snapshot.peak_op);
    let title =
        format!("Workspace of a step of {of}: {}, by the op that computes a value", Bytes(snapshot.arena_bytes as u64));
    let chart = Blocks {
        title,
        x: Axis::linear("launch", Unit::Number),
        y: Axis::linear("address in the workspace", Unit::Bytes),
        blocks: blocks.collect(),
        kinds,
        marks: vec![Mark { name: peak, x: snapshot.peak as f64 + 0.5 }],
    };
    draw(&[chart.into()])
}
