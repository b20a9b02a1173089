//! What can be typed, with its help. `settings` says what it means.

mod sampling;

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand};
use ridge_graph::ops::Activations;
use ridge_graph::{DType, format};

pub(crate) use sampling::{SamplingArgs, SamplingSettings};

use crate::bench::BenchArgs;
use crate::chat::ChatArgs;
use crate::convert::ConvertArgs;
use crate::embed::EmbedArgs;
use crate::eval::EvalArgs;
use crate::quantize::QuantizeArgs;
use crate::serve::ServeArgs;
use crate::shell::{CompletionsArgs, ManArgs};
use crate::tokenize::TokenizeArgs;

/// Runs language models and tells what they cost.
#[derive(Debug, Parser)]
#[command(
    name = "ridge",
    version,
    arg_required_else_help = true,
    max_term_width = 100,
    after_help = "\
Examples:
  ridge generate                              a story by the small model that is compiled in
  ridge generate --model DIR \"Once upon a\"    a downloaded model goes on
  ridge chat --model DIR                      a conversation with it
  ridge serve --model DIR                     OpenAI's API and a page, for many users
  ridge tokenize \"Once upon a\"                how a text becomes tokens
  ridge eval --perplexity FILE                how well a model predicts a text
  ridge bench --model DIR                     how fast it is, beside its floor
  ridge quantize DIR out.gguf --format q4_k   smaller weights, in a file that llama.cpp reads too
  ridge inspect DIR                           what it is made of and what a token costs
  ridge doctor                                what this machine has and reaches
  ridge plan fit DIR --device H100            whether it fits, and for how many users"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Generate(GenerateArgs),
    Chat(ChatArgs),
    Serve(ServeArgs),
    Embed(EmbedArgs),
    Tokenize(TokenizeArgs),
    Bench(BenchArgs),
    Eval(EvalArgs),
    Inspect(InspectArgs),
    Doctor(DoctorArgs),
    Plan(PlanArgs),
    Convert(ConvertArgs),
    Quantize(QuantizeArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Tell what a model needs and takes on given hardware, before it runs
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(subcommand)]
    pub(crate) command: crate::plan::PlanCommand,
}

/// How numbers are kept, for every command that builds a model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Numbers")]
pub(crate) struct NumberArgs {
    /// Store matrices in this format, converted while loading
    #[arg(long, value_parser = formats())]
    pub(crate) format: Option<String>,

    /// Dtype of activations [default: what the model names; bf16 for GGUF files but those of f32]
    #[arg(long, value_parser = FLOATS, value_name = "DTYPE")]
    pub(crate) dtype: Option<String>,

    /// Dtype of the keys and values in the cache, int8 with a scale for each key and value of each head [default: that of
    /// activations]
    #[arg(long, value_parser = ["f32", "bf16", "f16", "int8"], value_name = "DTYPE")]
    pub(crate) cache_dtype: Option<String>,

    /// How weights in formats of blocks are multiplied on the CPU: by exact activations, or by ones rounded to 8-bit codes,
    /// 256 to a scale
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) activations: ActivationsChoice,
}

/// How products take activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ActivationsChoice {
    /// Exact for tokens of a prompt where they are of bf16 and the CPU has AMX, else rounded: each in its fastest way
    Auto,
    /// All rounded
    Int8,
    /// All exact
    Exact,
}

impl ActivationsChoice {
    /// Name on the command line and in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Int8 => Activations::Int8.name(),
            Self::Exact => Activations::Exact.name(),
        }
    }

    /// How tokens of prompts and those of answers enter products, where activations are of `dtype`.
    pub(crate) fn ways(self, dtype: DType) -> (Activations, Activations) {
        match self {
            Self::Auto if dtype == DType::BF16 && ridge_cpu::has_tiles() => (Activations::Exact, Activations::Int8),
            Self::Auto | Self::Int8 => (Activations::Int8, Activations::Int8),
            Self::Exact => (Activations::Exact, Activations::Exact),
        }
    }
}

pub(crate) const FLOATS: [&str; 3] = ["f32", "bf16", "f16"];

pub(crate) fn formats() -> PossibleValuesParser {
    format::all().iter().map(|f| f.name()).collect::<Vec<_>>().into()
}

/// Most of what is counted, and the largest key.
pub(crate) const MOST: u64 = u64::MAX;
/// Most threads that one may ask for.
pub(crate) const MOST_THREADS: u64 = 1024;

/// What `128k` may mean.
fn written_out(typed: &str) -> String {
    let thousands = typed.strip_suffix(['k', 'K']).and_then(|n| n.parse::<u32>().ok());
    thousands.map_or(String::new(), |n| {
        let n = u64::from(n);
        format!("; write {typed} out: {} or {}", n * 1000, n * 1024)
    })
}

/// A whole number from `LEAST` to `MOST`.
pub(crate) fn whole<T: TryFrom<u64>, const LEAST: u64, const MOST: u64>(typed: &str) -> Result<T, String> {
    let value = typed.parse().ok().filter(|value| (LEAST..=MOST).contains(value));
    value
        .and_then(|value: u64| T::try_from(value).ok())
        .ok_or_else(|| format!("must be a whole number from {LEAST} to {MOST}{}", written_out(typed)))
}

/// The device that a model runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    Cpu,
    /// The GPU of this number among those that the process sees.
    Cuda(usize),
    /// The first GPU if it can be used, else the CPU.
    Auto,
}

pub(crate) fn device(typed: &str) -> Result<DeviceChoice, String> {
    let number = |text: &str| text.parse().map(DeviceChoice::Cuda).ok();
    match typed {
        "cpu" => Some(DeviceChoice::Cpu),
        "cuda" => Some(DeviceChoice::Cuda(0)),
        "auto" => Some(DeviceChoice::Auto),
        other => other.strip_prefix("cuda:").and_then(number),
    }
    .ok_or_else(|| "must be cpu, cuda, cuda:N or auto".to_owned())
}

/// Let a model go on with a text
///
/// Without --model, the model is stories260K, a small one that is compiled in. Without PROMPT, the text starts from
/// nothing.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge generate --greedy
  ridge generate --model ~/Llama-3.2-1B --dtype bf16 \"The ridge point is\"
  ridge generate --seed 7 --stop $'\\n' - < prompt.txt
  ridge generate -- \"--greedy is a flag that\"  # dashes are text behind `--`
  ridge generate --model DIR --random-weights --prompt-tokens 512 -v

Standard input is read only where the prompt is `-`. The sampling settings of a model's generation_config.json are not \
taken, so that the same command samples all models alike; its end tokens are.

The text goes to standard output as it comes, everything else to standard error.
Exit codes: 0 done, 1 failed, 2 not understood.")]
pub(crate) struct GenerateArgs {
    /// The text to go on with; `-` reads it from standard input, less one newline at its end
    pub(crate) prompt: Option<String>,

    /// Folder of a model in the layout of Hugging Face (config.json, *.safetensors, tokenizer.json),
    /// or a GGUF file
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,

    /// Take random numbers for weights; the folder then needs a config.json alone
    #[arg(long)]
    pub(crate) random_weights: bool,

    /// Take this many random tokens for a prompt
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, conflicts_with = "prompt"
    )]
    pub(crate) prompt_tokens: Option<usize>,

    /// Tokens to generate at most
    #[arg(
        short = 'n', long, value_name = "N", value_parser = whole::<usize, 0, MOST>,
        allow_negative_numbers = true, default_value_t = 200
    )]
    pub(crate) max_tokens: usize,

    /// End before this text; may be given several times
    #[arg(long, value_name = "STRING")]
    pub(crate) stop: Vec<String>,

    /// Go on behind the tokens that end a text
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Tell the log-probability of each token, and of this many of the likeliest in its place, with --json
    #[arg(long, value_name = "N", value_parser = whole::<u32, 0, 1024>, allow_negative_numbers = true, requires = "json")]
    pub(crate) logprobs: Option<u32>,

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    #[command(flatten)]
    pub(crate) numbers: NumberArgs,

    /// Tokens of the context, prompt and answer together [default: as many as they need]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    pub(crate) context: Option<usize>,

    /// Tokens of the prompt that one step processes at most
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    pub(crate) chunk: usize,

    /// Where it runs: cpu, cuda for the first NVIDIA GPU, cuda:N for another, auto for a GPU where there is one
    #[arg(
        long, value_name = "DEVICE", value_parser = device, default_value = "cpu", help_heading = "Running"
    )]
    pub(crate) device: DeviceChoice,

    /// Threads that compute [default: the cores that this process may use]
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, MOST_THREADS>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    pub(crate) threads: Option<usize>,

    /// Print the prompt before the answer
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    pub(crate) echo: bool,

    /// Print one JSON object at the end and nothing before it: text, tokens, why it ended, times, settings
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,

    /// Print the times even where standard error is not a terminal
    #[arg(short, long, help_heading = "Output")]
    pub(crate) verbose: bool,

    /// Print nothing but the text, and errors
    #[arg(short, long, help_heading = "Output", conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

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
  ridge inspect --lowered")]
pub(crate) struct InspectArgs {
    /// Folder of a model in the layout of Hugging Face, a GGUF file, or a config.json [default: the model that is compiled in]
    #[arg(value_name = "MODEL")]
    pub(crate) path: Option<PathBuf>,

    /// The same, as other commands call it
    #[arg(long, value_name = "DIR", conflicts_with = "path")]
    pub(crate) model: Option<PathBuf>,

    /// Tokens in the cache that costs are told for [default: 4096, or what the model was made for if that is less]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST>, allow_negative_numbers = true)]
    pub(crate) context: Option<usize>,

    #[command(flatten)]
    pub(crate) numbers: NumberArgs,

    /// Print the graph as text
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    pub(crate) graph: bool,

    /// Print the graph as the CPU runs it: claimed by kernels, fused
    #[arg(long, help_heading = "Output", conflicts_with = "json")]
    pub(crate) lowered: bool,

    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// Show what this machine has and what it reaches
///
/// Looks for the CPU, its memory, NVIDIA GPUs and the libraries that drive them, and measures for about two seconds
/// what memory and matrix products reach.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge doctor
  ridge doctor --json | jq .measured")]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
