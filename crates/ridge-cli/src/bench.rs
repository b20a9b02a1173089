//! `ridge bench`: the speed of a model beside the least time that its costs need on this machine. `serve` measures a
//! server instead.

mod calibrate;
mod machine;
mod ops;
mod report;
mod serve;
mod trace;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use ridge_engine::costs::StepCost;
use ridge_engine::{Engine, EngineOptions, Sampling, SequenceId};
use ridge_graph::sample::Rng;
use ridge_hw::units::{Bytes, Flops};
use ridge_models::{Model, ModelFiles};

use crate::args::{DeviceChoice, MOST, MOST_THREADS, NumberArgs, device, whole};
use crate::error::{Error, Result};
use crate::model::{self, Prepared, Running};
use crate::output::{Spinner, print, print_json};
use crate::settings::{ModelSettings, refused};
use machine::Amount;
pub(crate) use machine::Machine;
use report::{Outcome, Shown};

/// Measure how fast a model reads prompts and generates
///
/// Each speed stands beside its floor: the time that the step's bytes and arithmetic, told by the model's graph, need at
/// the rates that this machine was measured to reach.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  ridge bench
  ridge bench serve --rate 4    how a server answers, see its own help
  ridge bench --model DIR --prompt 128,512 --generate 64 --dtype bf16
  ridge bench --model DIR --random-weights --threads 1 --json
  ridge bench --model DIR --context 4096 --prompt 0    generation at a depth
  ridge bench --model DIR --device cuda --dtype bf16 --chunk 2048 --prompt 2048
  ridge bench --ops    what each op takes of a step
  ridge bench --calibrate this.toml    for `ridge plan --efficiency`
  ridge bench --trace step.json && ridge plan diagnose step.json

Every test runs once to warm up, and then --repeat times. Tokens a second are the mean and the standard deviation; time \
and floor are compared by the median. Memory is measured by reading as many bytes as weights and cache have, up to \
1 GiB, so that a model that fits into a cache is held against the cache. On a GPU the rates are those of its specification sheet."
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,

    /// Folder of a model in the layout of Hugging Face, or a GGUF file [default: the model that is compiled in]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Take random numbers for weights; the folder then needs a config.json alone
    #[arg(long)]
    random_weights: bool,

    /// Tokens of prompts to read, one test each; 0 for none [default: 512, or what the model was made for]
    #[arg(
        short, long, value_name = "N", value_delimiter = ',', value_parser = whole::<usize, 0, MOST>,
        allow_negative_numbers = true
    )]
    prompt: Vec<usize>,

    /// Tokens to generate; 0 for none [default: 128, or what the model was made for]
    #[arg(
        short = 'n', long, value_name = "N", value_parser = whole::<usize, 0, MOST>, allow_negative_numbers = true
    )]
    generate: Option<usize>,

    /// Tokens in the cache before each test
    #[arg(
        short = 'd', long, visible_alias = "depth", value_name = "N", value_parser = whole::<usize, 0, MOST>,
        allow_negative_numbers = true, default_value_t = 0
    )]
    context: usize,

    /// Sequences at a time
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, 4096>, allow_negative_numbers = true,
        default_value_t = 1
    )]
    batch: usize,

    /// Runs of each test, after one to warm up
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, 10000>, allow_negative_numbers = true,
        default_value_t = 5
    )]
    repeat: usize,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Tokens of each prompt that one step processes at most
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    chunk: usize,

    /// Where it runs: cpu, cuda for the first NVIDIA GPU, cuda:N for another, auto for a GPU where there is one
    #[arg(
        long, value_name = "DEVICE", value_parser = device, default_value = "cpu", help_heading = "Running"
    )]
    device: DeviceChoice,

    /// Threads that compute [default: the cores that this process may use]
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, MOST_THREADS>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    threads: Option<usize>,

    /// Show what each op takes of the last step of each test, and how near it is to its floor
    #[arg(long, help_heading = "Output")]
    ops: bool,

    /// Measure what this machine reaches by class of op, on a model of 8B's width where none is given, and write it to a file
    /// that `ridge plan --efficiency` reads
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    calibrate: Option<PathBuf>,

    /// Write the launches of the last step of each test as a Chrome trace, which `ridge plan diagnose` judges
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,

    /// Print one JSON object: settings, rates of the machine, every run's time
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    Serve(Box<serve::ServeBenchArgs>),
}

struct BenchSettings {
    model: ModelSettings,
    random_weights: bool,
    prompt: Vec<usize>,
    generate: Option<usize>,
    context: usize,
    batch: usize,
    repeat: usize,
    chunk: usize,
    device: DeviceChoice,
    threads: Option<usize>,
    ops: bool,
    calibrate: Option<PathBuf>,
    trace: Option<PathBuf>,
    json: bool,
}

impl BenchArgs {
    pub(crate) fn run(mut self) -> Result<()> {
        match self.command.take() {
            Some(BenchCommand::Serve(args)) => serve::run(args.resolve()?),
            None => run(&self.resolve()?),
        }
    }

    fn resolve(self) -> Result<BenchSettings> {
        Ok(BenchSettings {
            model: ModelSettings::new(self.model, &self.numbers)?,
            random_weights: self.random_weights,
            prompt: self.prompt,
            generate: self.generate,
            context: self.context,
            batch: self.batch,
            repeat: self.repeat,
            chunk: self.chunk,
            device: self.device,
            threads: self.threads,
            ops: self.ops || self.calibrate.is_some(),
            calibrate: self.calibrate,
            trace: self.trace,
            json: self.json,
        })
    }
}

const PROMPT: usize = 512;
const GENERATE: usize = 128;

/// What one test runs.
#[derive(Clone, Copy)]
enum Test {
    /// Tokens of a prompt.
    Prompt(usize),
    /// Tokens one at a time.
    Generate(usize),
}

impl Test {
    fn tokens(self) -> usize {
        let (Self::Prompt(tokens) | Self::Generate(tokens)) = self;
        tokens
    }

    /// Tokens of the prompt of its sequences: all of them, or those that are in the cache before.
    fn prompt(self, depth: usize) -> usize {
        match self {
            Self::Prompt(tokens) => depth + tokens,
            Self::Generate(_) => depth,
        }
    }

    /// Are its tokens those of an answer?
    fn answers(self) -> bool {
        matches!(self, Self::Generate(_))
    }

    /// Tokens of each step.
    fn steps(self, chunk: usize) -> Vec<usize> {
        match self {
            Self::Prompt(tokens) => (0..tokens.div_ceil(chunk)).map(|i| chunk.min(tokens - i * chunk)).collect(),
            Self::Generate(tokens) => vec![1; tokens],
        }
    }

    fn name(self, depth: usize) -> String {
        let at = if depth > 0 { format!(" @ d{depth}") } else { String::new() };
        match self {
            Self::Prompt(tokens) => format!("pp{tokens}{at}"),
            Self::Generate(tokens) => format!("tg{tokens}{at}"),
        }
    }
}

fn run(settings: &BenchSettings) -> Result<()> {
    let files = match (&settings.calibrate, &settings.model.path) {
        (Some(_), None) => ModelFiles::of_text("a model of two layers as wide as 8B", calibrate::CONFIG),
        (_, path) => ModelFiles::open(path.as_deref())?,
    };
    let config = files.config()?;
    let most = config.max_context();
    let Some(room) = most.checked_sub(settings.context).filter(|room| *room > 0) else {
        let why = format!("leaves no room for a test: the model was made for at most {most} tokens");
        return Err(refused("--context", settings.context, &why));
    };
    let fits = |flag: &str, tokens: usize| {
        let why = format!("with {} in the cache, the model was made for {room} more at most", settings.context);
        if tokens > room { Err(refused(flag, tokens, &why)) } else { Ok(tokens) }
    };
    let default = [PROMPT.min(room)];
    let prompts = if settings.prompt.is_empty() { &default[..] } else { &settings.prompt };
    let mut tests = Vec::new();
    for tokens in prompts {
        tests.push(Test::Prompt(fits("--prompt", *tokens)?));
    }
    tests.push(Test::Generate(fits("--generate", settings.generate.unwrap_or(GENERATE.min(room)))?));
    tests.retain(|test| test.tokens() > 0);
    let Some(longest) = tests.iter().map(|t| t.tokens()).max() else {
        return Err(refused("--generate", 0, "and --prompt 0 leave nothing to run"));
    };

    let (context, batch) = (settings.context + longest, settings.batch);
    let chunk = settings.chunk.min(context);
    let running = Running {
        device: settings.device,
        context,
        prompt: context,
        chunk,
        threads: settings.threads,
        random_weights: settings.random_weights || !files.has_weights() && settings.calibrate.is_some(),
        notes: !settings.json,
    };
    let cached = context.next_multiple_of(settings.model.options(config.torch_dtype).block_size) * batch;
    let Prepared { session, model, device, threads } =
        model::prepare(&files, &config, &settings.model, &running, cached, |model, cpu| {
            let step = (chunk * batch, batch);
            model::step_bytes(model, cpu, &["next", "logits"], step, context)
        })?;
    let backend = std::sync::Arc::clone(session.backend());
    let mut engine = Engine::new(session, &model, EngineOptions { context, sequences: batch, chunk, blocks: None })?;
    let costs = [StepCost::new(&model, backend.kernels())?, StepCost::of_answers(&model, backend.kernels())?];

    let spinner = Spinner::new();
    let machine = match threads {
        Some(threads) => Machine::measure(&model, settings.context * batch, threads, &spinner)?,
        None => Machine::specified(&device, &model)?,
    };
    let mut results = Vec::with_capacity(tests.len());
    let mut trace = trace::Trace::default();
    for test in tests {
        spinner.now("running the model");
        let mut times = Vec::with_capacity(settings.repeat);
        for run in 0..=settings.repeat {
            let time = timed(&mut engine, &model, test, settings.context, batch, chunk)?;
            if run > 0 {
                times.push(time.as_secs_f64());
            }
        }
        let cost = &costs[usize::from(test.answers())];
        let mut depth = settings.context;
        let mut total = Amount::default();
        for tokens in test.steps(chunk) {
            let work = cost.at(&vec![(depth, tokens); batch])?;
            total.add(&machine.roofline(), Flops(work.flops), Bytes(work.bytes));
            depth += tokens;
        }
        let ops = if settings.ops || settings.trace.is_some() {
            spinner.now("timing each op");
            let profile = ops::measure(&mut engine, &model, cost, test, settings)?;
            trace.add(&test.name(settings.context), &profile);
            profile.by_kernel(&machine.roofline())
        } else {
            Vec::new()
        };
        results.push(Outcome { test, times, total, ops });
    }
    drop(spinner);
    if let Some(path) = &settings.calibrate {
        let on = calibrate::Device { name: &device, threads, memory: machine.memory.value.as_f64() };
        let text = calibrate::file(&on, &model, &results, chunk)?;
        std::fs::write(path, text).map_err(|cause| Error::Write { path: path.display().to_string(), cause })?;
    }
    if let Some(path) = &settings.trace {
        trace.write(path, &device, &machine.roofline())?;
    }
    let on = (&*device, threads);
    let shown = Shown { settings, files: &files, model: &model, on, machine: &machine, results: &results };
    if settings.json { print_json(&shown.object()) } else { print(&shown.text()) }
}

/// Fills the cache to `depth`, then times the test: all of its steps, with the token that each gives at its end.
fn timed(engine: &mut Engine, model: &Model, test: Test, depth: usize, batch: usize, chunk: usize) -> Result<Duration> {
    let mut rng = Rng::new(0);
    let mut next = Vec::with_capacity(batch);
    let ids: Vec<SequenceId> = (0..batch).filter_map(|_| engine.start(Sampling::GREEDY, test.prompt(depth))).collect();
    let mut random = |count: usize| -> Vec<u32> { (0..count).map(|_| rng.below(model.vocab_size) as u32).collect() };
    let texts: Vec<Vec<u32>> = ids.iter().map(|_| random(depth + test.tokens())).collect();
    let mut at = 0;
    while at < depth {
        let end = (at + chunk).min(depth);
        let work: Vec<_> = ids.iter().zip(&texts).map(|(id, text)| (*id, &text[at..end])).collect();
        engine.step(&work, false, &mut next)?;
        at = end;
    }
    let steps = test.steps(chunk);
    let started = Instant::now();
    for (i, tokens) in steps.iter().enumerate() {
        let work: Vec<_> = ids.iter().zip(&texts).map(|(id, text)| (*id, &text[at..at + tokens])).collect();
        let sample = test.answers() || i + 1 == steps.len();
        engine.step(&work, sample, &mut next)?;
        at += tokens;
    }
    let time = started.elapsed();
    ids.into_iter().for_each(|id| engine.end(id));
    Ok(time)
}
