//! `ridge bench`: the speed of a model beside the least time that its costs need on this machine. `serve` measures a
//! server instead.

mod calibrate;
mod ops;
mod serve;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use ridge_cpu::measure::{MemoryProbe, f32_matmul};
use ridge_engine::costs::StepCost;
use ridge_engine::{Engine, EngineOptions, Sampling, SequenceId};
use ridge_graph::sample::Rng;
use ridge_graph::{DType, Role};
use ridge_hw::figure::Figure;
use ridge_hw::roofline::Roofline;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds};
use ridge_models::{Model, ModelFiles, parameters, weight_bytes};
use serde_json::{Value, json};

use crate::args::{DeviceChoice, MOST, MOST_THREADS, NumberArgs, device, whole};
use crate::error::{Error, Result};
use crate::model::{self, Prepared, Running};
use crate::output::{Spinner, columns, count, grouped, print, print_json};
use crate::settings::{ModelSettings, refused};

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

Every test runs once to warm up, and then --repeat times. Tokens a second are the mean and the standard deviation; time \
and floor are compared by the median. Memory is measured by reading as many bytes as weights and cache have, up to \
1 GiB, so that a model that fits into a cache is held against the cache. On a GPU the rates are those of its specification sheet."
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,

    /// Folder of a model in the layout of Hugging Face [default: the model that is compiled in]
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
        long, value_name = "N", value_parser = whole::<usize, 0, MOST>, allow_negative_numbers = true,
        default_value_t = 0
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
            json: self.json,
        })
    }
}

const PROMPT: usize = 512;
const GENERATE: usize = 128;
/// How long each rate of the machine is measured.
const BUDGET: Duration = Duration::from_millis(300);
const MOST_READ: Bytes = Bytes::from_gib(1);
/// A spread of the runs, standard deviation over mean, that says more about the machine than about the model.
const NOISY: f64 = 0.1;

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
            model::step_bytes(&model.graph, cpu, &["next", "logits"], step, (context, model))
        })?;
    let backend = std::sync::Arc::clone(session.backend());
    let mut engine = Engine::new(session, &model, EngineOptions { context, sequences: batch, chunk, blocks: None })?;
    let cost = StepCost::new(&model, backend.kernels())?;

    let spinner = Spinner::new();
    let machine = match threads {
        Some(threads) => Machine::measure(&model, settings.context * batch, threads, &spinner)?,
        None => Machine::specified(&device, &model)?,
    };
    let mut results = Vec::with_capacity(tests.len());
    for test in tests {
        spinner.now("running the model");
        let mut times = Vec::with_capacity(settings.repeat);
        for run in 0..=settings.repeat {
            let time = timed(&mut engine, &model, test, settings.context, batch, chunk)?;
            if run > 0 {
                times.push(time.as_secs_f64());
            }
        }
        let mut depth = settings.context;
        let mut total = Amount::default();
        for tokens in test.steps(chunk) {
            let work = cost.at(&vec![(depth, tokens); batch])?;
            total.add(&machine.roofline(), Flops(work.flops), Bytes(work.bytes));
            depth += tokens;
        }
        let ops = match settings.ops {
            true => {
                spinner.now("timing each op");
                ops::measure(&mut engine, &model, &cost, &machine.roofline(), test, settings)?
            }
            false => Vec::new(),
        };
        results.push(Outcome { test, times, total, ops });
    }
    drop(spinner);
    if let Some(path) = &settings.calibrate {
        let on = calibrate::Device { name: &device, threads, memory: machine.memory.value.as_f64() };
        let text = calibrate::file(&on, &model, &results, chunk)?;
        std::fs::write(path, text).map_err(|cause| Error::Write { path: path.display().to_string(), cause })?;
    }
    let on = (&*device, threads);
    let shown = Shown { settings, files: &files, model: &model, on, machine: &machine, results: &results };
    if settings.json { print_json(&shown.object()) } else { print(&shown.text()) }
}

/// Fills the cache to `depth`, then times the test: all of its steps, with the token that each gives at its end.
fn timed(engine: &mut Engine, model: &Model, test: Test, depth: usize, batch: usize, chunk: usize) -> Result<Duration> {
    let mut rng = Rng::new(0);
    let mut next = Vec::with_capacity(batch);
    let ids: Vec<SequenceId> = (0..batch).filter_map(|_| engine.start(Sampling::GREEDY, usize::MAX)).collect();
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
        let sample = matches!(test, Test::Generate(_)) || i + 1 == steps.len();
        engine.step(&work, sample, &mut next)?;
        at += tokens;
    }
    let time = started.elapsed();
    ids.into_iter().for_each(|id| engine.end(id));
    Ok(time)
}

/// Rates that the machine was measured to reach.
pub(crate) struct Machine {
    memory: Figure<BytesPerSecond>,
    arithmetic: Figure<FlopsPerSecond>,
}

impl Machine {
    /// For a model with this many tokens in the cache, on this many threads.
    pub(crate) fn measure(model: &Model, cached: usize, threads: usize, spinner: &Spinner) -> Result<Self> {
        let per_token: usize = model.state_groups.iter().map(|g| g.bytes_per_token).sum();
        let used = Bytes(weight_bytes(&model.graph)) + Bytes(per_token as u64) * cached as u64;
        spinner.now("measuring memory");
        let memory = MemoryProbe::new(used.clamp(Bytes::from_kib(64), MOST_READ), threads).read(threads, BUDGET);
        spinner.now("measuring matrix products");
        Ok(Self { memory, arithmetic: f32_matmul(threads, BUDGET)? })
    }

    /// The rates of a GPU's specification sheet: memory, and dense products of the dtype of the model's weights.
    fn specified(gpu: &str, model: &Model) -> Result<Self> {
        let sheet = DeviceSpec::find(gpu.trim_start_matches("NVIDIA "))
            .map_err(|why| refused("--device", gpu, &format!("has no specification sheet: {why}")))?;
        let wide = model.graph.args(Role::Weight).any(|a| a.ty.shape.rank() == 2 && a.ty.dtype == DType::F32);
        let rate = if wide { sheet.vector_f32.as_ref() } else { sheet.dense_rates.get(&Precision::Bf16) };
        let Some(arithmetic) = rate.cloned() else {
            let why = format!("the sheet of {} gives no rate of products to hold the model against", sheet.name);
            return Err(refused("--device", gpu, &why));
        };
        Ok(Self { memory: sheet.memory_bandwidth.clone(), arithmetic })
    }

    pub(crate) fn roofline(&self) -> Roofline {
        Roofline { bandwidth: self.memory.value, peak: self.arithmetic.value }
    }
}

/// The costs of a test's steps, and their floors one after another.
#[derive(Default)]
struct Amount {
    flops: f64,
    bytes: Bytes,
    floor: f64,
}

impl Amount {
    fn add(&mut self, roofline: &Roofline, flops: Flops, bytes: Bytes) {
        self.flops += flops.0;
        self.bytes += bytes;
        self.floor += roofline.floor(flops, bytes).as_f64();
    }
}

struct Outcome {
    test: Test,
    /// Seconds of each run.
    times: Vec<f64>,
    total: Amount,
    /// What each op takes of the last step, if that was asked for.
    ops: Vec<ops::OpTime>,
}

impl Outcome {
    fn median(&self) -> f64 {
        let mut sorted = self.times.clone();
        sorted.sort_by(f64::total_cmp);
        let half = sorted.len() / 2;
        if sorted.len() % 2 == 1 { sorted[half] } else { f64::midpoint(sorted[half - 1], sorted[half]) }
    }

    /// Mean and standard deviation of the tokens a second, all sequences together.
    fn rate(&self, batch: usize) -> (f64, f64) {
        let rates: Vec<f64> = self.times.iter().map(|t| (self.test.tokens() * batch) as f64 / t).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let squares: f64 = rates.iter().map(|r| (r - mean).powi(2)).sum();
        (mean, (squares / (rates.len().max(2) - 1) as f64).sqrt())
    }
}

struct Shown<'a> {
    settings: &'a BenchSettings,
    files: &'a ModelFiles,
    model: &'a Model,
    /// The device, and threads of the CPU if it is one.
    on: (&'a str, Option<usize>),
    machine: &'a Machine,
    results: &'a [Outcome],
}

impl Shown<'_> {
    fn noisy(&self) -> bool {
        self.results.iter().map(|r| r.rate(1)).any(|(mean, spread)| spread > NOISY * mean)
    }

    fn text(&self) -> String {
        let batch = self.settings.batch;
        let mut text = format!(
            "{}: {}, {} parameters, weights of {}; {}, {}\n",
            self.files,
            self.model.family,
            grouped(parameters(&self.model.graph)),
            Bytes(weight_bytes(&self.model.graph)),
            self.on.1.map_or_else(|| self.on.0.to_owned(), |threads| count(threads, "thread")),
            count(batch, "sequence"),
        );
        text += &format!("memory      {}: {}\n", self.machine.memory, self.machine.memory.source);
        text += &format!("arithmetic  {}: {}\n\n", self.machine.arithmetic, self.machine.arithmetic.source);
        let head = ["test", "tok/s", "time a token", "floor", "of floor", "limit"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for result in self.results {
            let (mean, spread) = result.rate(batch);
            let tokens = (result.test.tokens() * batch) as f64;
            rows.push(vec![
                result.test.name(self.settings.context),
                format!("{mean:.2} ± {spread:.2}"),
                Seconds(result.median() / tokens).to_string(),
                Seconds(result.total.floor / tokens).to_string(),
                format!("{:.0}%", 100.0 * result.total.floor / result.median()),
                self.machine.roofline().bound(Flops(result.total.flops), result.total.bytes).to_string(),
            ]);
        }
        text += &columns(&rows);
        text += &format!(
            "\ntok/s and time measured over {}; floor modelled: costs of the graph at the rates above\n",
            count(self.settings.repeat, "run")
        );
        for result in self.results.iter().filter(|r| !r.ops.is_empty()) {
            text += &format!("\nlast step of {}\n", result.test.name(self.settings.context));
            text += &ops::text(&result.ops);
        }
        if self.noisy() {
            text += "the runs differ much: the machine is busy with other work, or changes its clock\n";
        }
        text
    }

    fn object(&self) -> Value {
        let batch = self.settings.batch;
        let result = |r: &Outcome| {
            let (mean, spread) = r.rate(batch);
            json!({
                "test": r.test.name(self.settings.context),
                "kind": if matches!(r.test, Test::Prompt(_)) { "prompt" } else { "generate" },
                "tokens": r.test.tokens(),
                "ops": self.settings.ops.then(|| ops::object(&r.ops)),
                "measured": {
                    "seconds": r.times,
                    "median_seconds": r.median(),
                    "tokens_per_second": mean,
                    "tokens_per_second_stddev": spread,
                },
                "modelled": {
                    "flops": r.total.flops,
                    "bytes": r.total.bytes,
                    "floor_seconds": r.total.floor,
                    "floor_over_time": r.total.floor / r.median(),
                    "limit": self.machine.roofline().bound(Flops(r.total.flops), r.total.bytes),
                },
            })
        };
        json!({
            "model": self.files.to_string(),
            "parameters": parameters(&self.model.graph),
            "weight_bytes": weight_bytes(&self.model.graph),
            "machine": { "memory_read": self.machine.memory, "f32_matmul": self.machine.arithmetic },
            "results": self.results.iter().map(result).collect::<Vec<_>>(),
            "noisy": self.noisy(),
            "settings": {
                "random_weights": self.settings.random_weights,
                "context": self.settings.context,
                "batch": batch,
                "repeat": self.settings.repeat,
                "chunk": self.settings.chunk,
                "device": self.on.0,
                "threads": self.on.1,
                "format": self.settings.model.format.as_ref().map(|f| f.name()),
                "dtype": self.model.activations.name(),
                "cache_dtype": self.model.cache.name(),
                "activations": self.settings.model.activations.name(),
            },
        })
    }
}
