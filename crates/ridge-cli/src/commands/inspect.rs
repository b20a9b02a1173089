//! `ridge inspect`: what a model is made of and what a token of it costs.

use std::path::PathBuf;

use clap::Args;
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::Graph;
use ridge_hw::units::{Bytes, Flops};
use ridge_models::summary::{Scope, Summary};
use ridge_models::{Model, ModelFiles};
use ridge_runtime::Backend as _;
use serde_json::json;

use super::memory_snapshot;
use crate::args::{MAX_COUNT, NumberArgs, whole};
use crate::error::{Result, refused};
use crate::model::{self, ModelSettings};
use crate::output::{columns, count, grouped, print, print_json};

/// Show what a model is made of and what a token of it costs
///
/// Nothing is loaded and nothing runs: the figures are read off the model's graph. A config.json alone is enough, of
/// any size.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge inspect
  ridge inspect ~/models/Llama-3.1-8B --context 131072 --cache-dtype bf16
  ridge inspect config.json --format q8_0 --json
  ridge inspect --lowered
  ridge inspect --memory step.svg --tokens 128")]
pub(crate) struct InspectArgs {
    /// Folder of a model in the layout of Hugging Face, a GGUF file, or a config.json [default: the model that is compiled in]
    #[arg(value_name = "MODEL")]
    path: Option<PathBuf>,

    /// The same, as other commands call it
    #[arg(long, value_name = "DIR", conflicts_with = "path")]
    model: Option<PathBuf>,

    /// Tokens in the cache for which costs are computed [default: 4096, or what the model was made for if that is less]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, allow_negative_numbers = true)]
    context: Option<usize>,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Print the graph as text
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    graph: bool,

    /// Print the graph as the CPU runs it: claimed by kernels, fused
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    lowered: bool,

    /// Write which values a step has in memory, and when, as the CPU runs it: JSON, or a figure if FILE ends in .svg
    #[arg(long, help_heading = "Output", value_name = "FILE", conflicts_with_all = ["graph", "lowered"])]
    memory: Option<PathBuf>,

    /// Tokens of the step that --memory shows, of one sequence [default: 128, or --context if that is less]
    #[arg(long, help_heading = "Output", value_name = "N", requires = "memory", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true)]
    tokens: Option<usize>,

    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Debug)]
struct InspectSettings {
    model: ModelSettings,
    context: Option<usize>,
    /// The file of a step's memory.
    memory: Option<PathBuf>,
    tokens: Option<usize>,
    output: InspectOutput,
}

#[derive(Debug, PartialEq, Eq)]
enum InspectOutput {
    Tables,
    Json,
    Graph,
    LoweredGraph,
}

impl InspectArgs {
    fn resolve(self) -> Result<InspectSettings> {
        Ok(InspectSettings {
            model: self.numbers.settings(self.path.or(self.model))?,
            context: self.context,
            memory: self.memory,
            tokens: self.tokens,
            output: match (self.graph, self.lowered) {
                (_, true) => InspectOutput::LoweredGraph,
                (true, false) => InspectOutput::Graph,
                (false, _) if self.json => InspectOutput::Json,
                (false, _) => InspectOutput::Tables,
            },
        })
    }
}

/// Tokens of the cache for which costs are computed, if the model was made for so many.
const CONTEXT: usize = 4096;

/// Tokens of the step whose memory is shown.
const TOKENS: usize = 128;

pub(crate) fn run(args: InspectArgs) -> Result<()> {
    inspect(&args.resolve()?)
}

fn inspect(settings: &InspectSettings) -> Result<()> {
    let path = settings.model.path.as_deref();
    let files = match path {
        Some(file) if file.is_file() => ModelFiles::from_config(file)?,
        _ => ModelFiles::open(path)?,
    };
    let config = files.config()?;
    let source = model::weights(&files, &config, !files.has_weights())?;
    let mut model = model::build(&config, &settings.model, &source, settings.context)?;
    model::round_for_cpu(&mut model, &settings.model);
    match settings.output {
        InspectOutput::Graph => return print(&graphs(&model, |graph| Ok(graph.to_string()))?),
        InspectOutput::LoweredGraph => return print(&lowered(&model)?),
        InspectOutput::Tables | InspectOutput::Json => {}
    }
    if let Some(context) = settings.context.filter(|c| *c > model.max_context) {
        let why = format!("the model was made for at most {} tokens", model.max_context);
        return Err(refused("--context", context, &why));
    }
    if let Some(file) = &settings.memory {
        let context = settings.context.unwrap_or(CONTEXT.min(model.max_context));
        let tokens = settings.tokens.unwrap_or(TOKENS.min(context));
        memory_snapshot::write(&model, (tokens, context), path, file)?;
    }
    let summary = Summary::new(&model, settings.context.unwrap_or(CONTEXT.min(model.max_context)))?;
    let source = if files.has_weights() {
        "exact: as the checkpoint stores them"
    } else if config.torch_dtype.is_some() {
        "modelled: as if stored in the dtype that the configuration names"
    } else {
        "modelled: as if stored in f32, for the configuration names no dtype"
    };
    let converted =
        format!("modelled: as --format {} makes them", settings.model.format.as_ref().map_or("", |f| f.name()));
    let source = if settings.model.format.is_some() { &converted } else { source };
    match settings.output {
        InspectOutput::Json => print_json(&object(&files, &settings.model, &model, &summary, source)),
        _ => print(&text(&files, &model, &summary, source)),
    }
}

/// The graphs as the CPU runs them for a token.
fn lowered(model: &Model) -> Result<String> {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() })?;
    graphs(model, |graph| Ok(ridge_runtime::lower(graph, &["next"], cpu.kernels())?.to_string()))
}

/// The text of a model's graph; of both, each under a heading, where tokens of answers have one of their own.
fn graphs(model: &Model, text: impl Fn(&Graph) -> Result<String>) -> Result<String> {
    let prompts = text(&model.graph)?;
    let Some(answers) = &model.answers else { return Ok(prompts) };
    Ok(format!("# tokens of prompts\n{prompts}\n# tokens of answers\n{}", text(answers)?))
}

const COSTS: &str = "modelled: the formulas of all ops of the step that makes one token";

fn object(
    files: &ModelFiles,
    settings: &ModelSettings,
    model: &Model,
    summary: &Summary,
    weights: &str,
) -> serde_json::Value {
    json!({
        "model": files.to_string(),
        "summary": summary,
        "sources": { "parameters": "exact", "weight_bytes": weights, "kv_bytes_per_token": "exact", "token": COSTS },
        "settings": {
            "format": settings.format.as_ref().map(|f| f.name()),
            "dtype": model.activations.name(),
            "cache_dtype": model.cache.name(),
        },
    })
}

fn text(files: &ModelFiles, model: &Model, s: &Summary, weights: &str) -> String {
    let mut rows = Vec::new();
    tree(&s.tree, 0, &mut rows);
    // Numbers end where those above and below end.
    for column in [2, 3] {
        let width = rows.iter().map(|r| r[column].len()).max().unwrap_or(0);
        for row in &mut rows {
            row[column] = format!("{:>width$}", row[column]);
        }
    }
    let title = format!(
        "{files}: {}, {} in its vocabulary, context of {}\n\n",
        s.family,
        count(s.vocab_size, "token"),
        count(s.max_context, "token")
    );
    let bytes = |n: u64| format!("{} ({})", Bytes(n), grouped(n));
    let row = |name: &str, value: String, source: &str| vec![name.to_owned(), value, source.to_owned()];
    let mut facts = vec![row("parameters", grouped(s.parameters), "exact")];
    facts.push(row("weights", bytes(s.weight_bytes), weights));
    if s.storage.len() > 1 {
        for part in &s.storage {
            let share = format!("{} parameters", grouped(part.parameters));
            facts.push(row(&format!("  {}", part.name), bytes(part.bytes), &share));
        }
    }
    let cache = format!("exact: keys and values in {} (--cache-dtype)", model.cache);
    facts.push(row("cache of a token", bytes(s.kv_bytes_per_token), &cache));
    facts.push(row(&format!("cache of {}", grouped(s.token.context as u64)), bytes(s.token.kv_bytes), "exact"));

    let t = &s.token;
    let flops = |n: u64| Flops(n as f64).to_string();
    let costs = [
        row("matrix products", flops(t.matrix_flops), &format!("= {}", t.matrix_formula)),
        row("vector arithmetic", flops(t.vector_flops), "elementwise, sums"),
        row("special functions", flops(t.special_flops), "exponentials, roots, divisions"),
        row("bytes read", Bytes(t.bytes_read).to_string(), "if each op reads each input once"),
        row("bytes written", Bytes(t.bytes_written).to_string(), "if each op writes each output once"),
    ];
    let heading = format!("\nOne token at a context of {} ({COSTS}):\n", grouped(t.context as u64));
    let indented: String = columns(&costs).lines().map(|line| format!("  {line}\n")).collect();
    title + &columns(&rows) + "\n" + &columns(&facts) + &heading + &indented
}

/// A line for each scope: name, type, parameters and bytes. Below a scope that repeats stands one of the repeats.
fn tree(scopes: &[Scope], depth: usize, rows: &mut Vec<Vec<String>>) {
    for scope in scopes {
        let repeats = if scope.repeats > 1 { format!(" x{}", scope.repeats) } else { String::new() };
        let ty = match &scope.ty {
            Some(ty) => ty.clone(),
            None if scope.repeats > 1 => "below: one of them".to_owned(),
            None => String::new(),
        };
        let name = format!("{:indent$}{}{repeats}", "", scope.name, indent = 2 * depth);
        rows.push(vec![name, ty, grouped(scope.parameters), Bytes(scope.bytes).to_string()]);
        tree(&scope.children, depth + 1, rows);
    }
}
