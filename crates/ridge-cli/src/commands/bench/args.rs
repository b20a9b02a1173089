//! Arguments of `ridge bench`, and the settings that they resolve to.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::serve::ServeBenchArgs;
use crate::args::{LimitedDeviceArgs, MAX_COUNT, ModelSettings, NumberArgs, Speculate, speculate, whole};
use crate::error::Result;

/// Measure prompt and generation throughput
///
/// Each result is shown with its floor: the time that the step's bytes and FLOPs, counted from the model's graph, take at
/// the bandwidth and arithmetic rates measured on this machine.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  ridge bench
  ridge bench serve --rate 4           load-tests a server; see its own help
  ridge bench --model DIR --prompt 128,512 --generate 64 --dtype bf16
  ridge bench --model DIR --random-weights --threads 1 --json
  ridge bench --model DIR --context 4096 --prompt 0    with a filled cache
  ridge bench --model DIR --device cuda --dtype bf16 --chunk 2048 --prompt 2048
  ridge bench --batch 1,2,4,8,16       throughput over the batch size
  ridge bench --ops                    time of each op of a step
  ridge bench --speculate mtp:2        drafts by the model's own module
  ridge bench --experts --model DIR --random-weights --batch 1,16,256
  ridge bench --calibrate this.toml    a file for `ridge plan --efficiency`
  ridge bench --trace step.json && ridge plan diagnose step.json

Every test has one warm-up run and then --repeat measured runs. Tokens per second are mean and standard deviation; the \
floor is compared with the median time. Memory bandwidth is measured by reading as many bytes as weights and cache have, \
at most 1 GiB, so a model that fits into a CPU cache is compared with the bandwidth of that cache. On a GPU the rates are \
those of its specification sheet."
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,

    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    /// [default: the embedded model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,

    /// Use random weights; the folder then only needs a config.json
    #[arg(long)]
    random_weights: bool,

    /// Prompt lengths to test, in tokens; 0 for none [default: 512, or the model's maximum]
    #[arg(
        short, long, value_name = "N", value_delimiter = ',', value_parser = whole::<usize, 0, MAX_COUNT>,
        allow_negative_numbers = true
    )]
    prompt: Vec<usize>,

    /// Tokens to generate; 0 for none [default: 128, or the model's maximum]
    #[arg(
        short = 'n', long, value_name = "N", value_parser = whole::<usize, 0, MAX_COUNT>, allow_negative_numbers = true
    )]
    generate: Option<usize>,

    /// Tokens in the cache before each test
    #[arg(
        short = 'd', long, visible_alias = "depth", value_name = "N", value_parser = whole::<usize, 0, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 0
    )]
    context: usize,

    /// Concurrent sequences; with several values, such as 1,2,4,8, each test is run with each
    #[arg(
        short, long, value_name = "N", value_delimiter = ',', value_parser = whole::<usize, 1, 4096>,
        allow_negative_numbers = true, default_value = "1"
    )]
    batch: Vec<usize>,

    /// Runs of each test, after one warm-up run
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, 10000>, allow_negative_numbers = true,
        default_value_t = 5
    )]
    repeat: usize,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Maximum tokens of each prompt that one step processes
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    chunk: usize,

    /// Generate with one token, or N, of each step drafted by the model's own multi-token prediction module and verified by the model
    #[arg(
        long, value_name = "mtp[:N]", value_parser = speculate, allow_negative_numbers = true, default_value = "0",
        hide_default_value = true, help_heading = "Running",
        conflicts_with_all = ["experts", "calibrate", "trace", "ops"]
    )]
    speculate: Speculate,

    #[command(flatten)]
    place: LimitedDeviceArgs,

    /// Show the time of each op in the last step of each test, with its floor
    #[arg(long, help_heading = "Output")]
    ops: bool,

    /// Measure the layers of a model with experts instead: how evenly experts are used, and grouped against padded products, by
    /// --batch tokens of a step
    #[arg(
        long, help_heading = "Output",
        conflicts_with_all = ["prompt", "generate", "context", "chunk", "ops", "calibrate", "trace"]
    )]
    experts: bool,

    /// Measure achievable rates by class of op, by default on a model as wide as an 8B one, and write them to a file for
    /// `ridge plan --efficiency`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    calibrate: Option<PathBuf>,

    /// Write the kernel launches of the last step of each test as a Chrome trace, which `ridge plan diagnose` reads
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,

    /// Print one JSON object: settings, machine rates, time of every run
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum BenchCommand {
    Serve(Box<ServeBenchArgs>),
}

/// The tests and how their results are shown.
pub(super) struct BenchSettings {
    pub(super) model: ModelSettings,
    pub(super) random_weights: bool,
    pub(super) prompt: Vec<usize>,
    pub(super) generate: Option<usize>,
    pub(super) context: usize,
    pub(super) batch: Vec<usize>,
    pub(super) repeat: usize,
    pub(super) chunk: usize,
    /// Tokens that the model's module drafts in each step.
    pub(super) drafts: usize,
    pub(super) place: LimitedDeviceArgs,
    pub(super) ops: bool,
    pub(super) calibrate: Option<PathBuf>,
    pub(super) trace: Option<PathBuf>,
    pub(super) json: bool,
}

impl BenchArgs {
    /// The subcommand, if there is one.
    pub(super) fn take_command(&mut self) -> Option<BenchCommand> {
        self.command.take()
    }

    /// Are experts measured?
    pub(super) fn measures_experts(&self) -> bool {
        self.experts
    }

    pub(super) fn resolve(self) -> Result<BenchSettings> {
        Ok(BenchSettings {
            model: self.numbers.settings(self.model)?,
            random_weights: self.random_weights,
            prompt: self.prompt,
            generate: self.generate,
            context: self.context,
            batch: self.batch,
            repeat: self.repeat,
            chunk: self.chunk,
            drafts: self.speculate.by_module()?,
            place: self.place,
            ops: self.ops || self.calibrate.is_some(),
            calibrate: self.calibrate,
            trace: self.trace,
            json: self.json,
        })
    }
}
