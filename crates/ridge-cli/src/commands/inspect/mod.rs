//! `ridge inspect`: a network's structure and the cost of a step. `show.rs` has its tables, `memory.rs` the memory contents
//! of a step, `launches.rs` its launches on a GPU.

mod launches;
mod memory;
mod show;

use std::path::PathBuf;

use clap::Args;
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Graph, Role};
use ridge_models::summary::{EncoderSummary, ImageClassifierSummary, Summary};
use ridge_models::{ModelFiles, Network, NetworkConfig};
use ridge_runtime::Backend as _;

use crate::args::{MAX_COUNT, ModelSettings, NumberArgs, whole};
use crate::error::{Result, refused};
use crate::output::{load_note, note, print, print_json};
use memory::{InspectedStep, output};
use show::Inspected;

/// Show a model's structure, parameters and cost per token
///
/// Works for decoders, encoders and image classifiers. Nothing is loaded or run: all figures are computed from the model's
/// graph, and a config.json is sufficient.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge inspect
  ridge inspect ~/models/Llama-3.1-8B --context 131072 --cache-dtype bf16
  ridge inspect config.json --format q8_0 --json
  ridge inspect --lowered
  ridge inspect --memory step.svg --tokens 128
  ridge inspect config.json --launches H100 --tokens 1")]
pub(crate) struct InspectArgs {
    /// Model: a folder in the Hugging Face layout, a GGUF file, a config.json, or the ORG/NAME of a model downloaded with
    /// `ridge pull` [default: the embedded model]
    #[arg(value_name = "MODEL")]
    path: Option<PathBuf>,

    /// The same as MODEL
    #[arg(short, long, value_name = "MODEL", conflicts_with = "path")]
    model: Option<PathBuf>,

    /// Cached tokens, or for encoders tokens of the text, for which costs are computed [default: 4096, or the model's maximum if that is less]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, allow_negative_numbers = true)]
    context: Option<usize>,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Print the graph as text
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    graph: bool,

    /// Print the graph as lowered for the CPU: claimed by kernels, fused
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    lowered: bool,

    /// Write the memory contents of a step over its launches, as lowered for the CPU: JSON, or a figure if FILE ends in .svg
    #[arg(long, help_heading = "Output", value_name = "FILE", conflicts_with_all = ["graph", "lowered"])]
    memory: Option<PathBuf>,

    /// Print the launches of a step on this NVIDIA GPU, which need not be there
    #[arg(long, help_heading = "Output", value_name = "GPU", conflicts_with_all = ["graph", "lowered", "memory"])]
    launches: Option<String>,

    /// Tokens of the step shown by --memory or --launches, in one sequence [default: 128, or --context if that is less; for
    /// encoders the whole text]
    #[arg(long, help_heading = "Output", value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
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
    /// The GPU whose launches are shown.
    launches: Option<String>,
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
        if let (Some(tokens), None, None) = (self.tokens, &self.memory, &self.launches) {
            return Err(refused("--tokens", tokens, "is of --memory and --launches; give one of them"));
        }
        Ok(InspectSettings {
            model: self.numbers.settings(self.path.or(self.model))?,
            context: self.context,
            memory: self.memory,
            launches: self.launches,
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

/// Default number of cached tokens for which costs are computed, limited by the model's maximum.
const CONTEXT: usize = 4096;

pub(crate) fn run(args: InspectArgs) -> Result<()> {
    inspect(&args.resolve()?)
}

fn inspect(settings: &InspectSettings) -> Result<()> {
    let path = settings.model.path.as_deref();
    let files = match path {
        Some(file) if file.is_file() => ModelFiles::from_config(file)?,
        path => ModelFiles::open(path)?,
    };
    let sentence = files.sentence_config().unwrap_or_else(|error| {
        note(&format!("the model's modules behind its layers are left out, as they cannot be read: {error}"));
        None
    });
    let config = files.embedding_config(&sentence.unwrap_or_default())?;
    let (mut network, _) =
        ridge::build_network(&files, &config, &settings.model.numbers, settings.context, !files.has_weights())?;
    ridge::round_network(&mut network, &settings.model.numbers, settings.launches.is_none());
    if let Some(left_out) = ridge::left_out(&network.module().graph, &settings.model.numbers) {
        note(&load_note(&left_out));
    }
    match settings.output {
        InspectOutput::Graph => return print(&graphs(&network, |graph| Ok(graph.to_string()))?),
        InspectOutput::LoweredGraph => return print(&lowered(&network)?),
        InspectOutput::Tables | InspectOutput::Json => {}
    }
    let context = context(&network, settings)?;
    if let Some(file) = &settings.memory {
        let step = InspectedStep::new(&network, settings.tokens, context)?;
        memory::write(&network.module().graph, &step, path, file)?;
    }
    if let Some(gpu) = &settings.launches {
        let step = InspectedStep::new(&network, settings.tokens, context)?;
        let listed = launches::of(&network, &step, gpu)?;
        return match settings.output {
            InspectOutput::Json => print_json(&launches::object(&listed)),
            _ => print(&launches::text(&listed)),
        };
    }
    let inspected = match &network {
        Network::Decoder(model) => Inspected::Decoder(Summary::new(model, context)?, model.cache),
        Network::Encoder(encoder) => Inspected::Encoder(EncoderSummary::new(encoder, context)?),
        Network::ImageClassifier(classifier) => Inspected::ImageClassifier(ImageClassifierSummary::new(classifier)?),
    };
    let storage = storage_source(&files, &config, &network, &settings.model);
    let prediction = match &config {
        NetworkConfig::Decoder(config) => ridge::summarize_prediction(config, &settings.model.numbers, context)?,
        _ => None,
    };
    match settings.output {
        InspectOutput::Json => {
            let activations = network.module().activations;
            print_json(&inspected.object(&files, &settings.model, activations, &storage, prediction.as_ref()))
        }
        _ => print(&inspected.text(&files, &storage, prediction.as_ref())),
    }
}

/// Cached tokens, or for encoders tokens of the text, for which costs are computed.
fn context(network: &Network, settings: &InspectSettings) -> Result<usize> {
    let most = match network {
        Network::Decoder(model) => model.max_context,
        Network::Encoder(encoder) => encoder.max_context,
        Network::ImageClassifier(_) => {
            return match settings.context {
                Some(context) => {
                    Err(refused("--context", context, "applies to texts, but the model classifies images"))
                }
                None => Ok(0),
            };
        }
    };
    if let Some(context) = settings.context.filter(|context| *context > most) {
        let why = format!("the model supports at most {most} tokens");
        return Err(refused("--context", context, &why));
    }
    Ok(settings.context.unwrap_or(CONTEXT.min(most)))
}

/// The provenance of storage figures.
fn storage_source(files: &ModelFiles, config: &NetworkConfig, network: &Network, settings: &ModelSettings) -> String {
    let in_formats = network.module().graph.args(Role::Weight).any(|weight| weight.ty.format.is_some());
    match (&settings.numbers.format, config.torch_dtype()) {
        (Some(format), _) => format!("modelled: as converted by --format {}", format.name()),
        (None, _) if files.has_weights() => "exact: as stored in the checkpoint".to_owned(),
        (None, _) if in_formats => {
            "modelled: in the formats in which the configuration says that it is published".to_owned()
        }
        (None, Some(_)) => "modelled: for the dtype named in the configuration".to_owned(),
        (None, None) => "modelled: for f32, because the configuration names no dtype".to_owned(),
    }
}

/// The graphs as the CPU runs them for a step.
fn lowered(network: &Network) -> Result<String> {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() })?;
    graphs(network, |graph| Ok(ridge_runtime::lower(graph, &[output(network)], cpu.kernels())?.to_string()))
}

/// The text of a network's graph; of both graphs, each under a heading, if generated tokens use a separate one.
fn graphs(network: &Network, text: impl Fn(&Graph) -> Result<String>) -> Result<String> {
    let prompts = text(&network.module().graph)?;
    let Network::Decoder(model) = network else { return Ok(prompts) };
    let Some(answers) = &model.answers else { return Ok(prompts) };
    Ok(format!("# prompt tokens\n{prompts}\n# generated tokens\n{}", text(answers)?))
}
