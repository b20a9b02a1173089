//! `ridge bench`: the speed of a model compared with its roofline floor on this machine. The subcommand `serve` load-tests a
//! server.
//!
//! `args` has the arguments and `test` the tests; `speculation` generates with drafts; `ops` times the ops of a step; `experts` is `--experts`; `report`, `calibrate`
//! and `trace` write the three forms of results. This file runs the tests.

mod args;
mod calibrate;
mod experts;
mod ops;
mod report;
mod serve;
mod speculation;
mod test;
mod trace;
mod work;

use std::time::{Duration, Instant};

use ridge::{CacheSize, DeviceRates, EnginePrograms, LoadedModel, RunSettings, StepExtents};
use ridge_engine::costs::StepCost;
use ridge_engine::{Engine, EngineOptions, Sampling, SequenceId};
use ridge_graph::sample::Rng;
use ridge_hw::roofline::Bound;
use ridge_hw::units::{Bytes, Flops};
use ridge_models::{Model, ModelFiles};
use ridge_runtime::Backend;

pub(crate) use args::BenchArgs;
use args::{BenchCommand, BenchSettings};
use report::{BenchReport, BenchResult, GenerationLimit, PlacedBytes};
use speculation::{SpeculationCosts, SpeculationResult};
use test::BenchTest;
use work::StepWork;

use crate::error::{Result, refused};
use crate::output::{LoadProgress, Spinner, print, print_json, write_file};

/// Default length of prompts, in tokens.
const DEFAULT_PROMPT: usize = 512;
/// Default number of tokens to generate.
const DEFAULT_GENERATE: usize = 128;

/// Runs the command, or its subcommand.
///
/// # Errors
/// When a setting is out of range, the model cannot be loaded or run, or a file cannot be written.
pub(crate) fn run(mut args: BenchArgs) -> Result<()> {
    match args.take_command() {
        Some(BenchCommand::Serve(args)) => serve::run(*args),
        None if args.measures_experts() => experts::run(&args.resolve()?),
        None => measure(&args.resolve()?),
    }
}

fn measure(settings: &BenchSettings) -> Result<()> {
    let files = match (&settings.calibrate, &settings.model.path) {
        (Some(_), None) => ModelFiles::of_text("a model of two layers as wide as 8B", calibrate::CONFIG),
        (_, path) => ModelFiles::open(path.as_deref())?,
    };
    let config = files.config()?;
    let most = config.max_context();
    let Some(room) = most.checked_sub(settings.context).filter(|room| *room > 0) else {
        let why = format!("leaves no room for a test: the model supports at most {most} tokens");
        return Err(refused("--context", settings.context, &why));
    };
    let fits = |flag: &str, tokens: usize| {
        let why =
            format!("with {} in the cache, the model's context has room for at most {room} more", settings.context);
        if tokens > room { Err(refused(flag, tokens, &why)) } else { Ok(tokens) }
    };
    let default = [DEFAULT_PROMPT.min(room)];
    let prompts = if settings.prompt.is_empty() { &default[..] } else { &settings.prompt };
    let mut tests = Vec::new();
    for tokens in prompts {
        tests.push(BenchTest::Prompt(fits("--prompt", *tokens)?));
    }
    tests.push(BenchTest::Generate(fits("--generate", settings.generate.unwrap_or(DEFAULT_GENERATE.min(room)))?));
    tests.retain(|test| test.tokens() > 0);
    let Some(longest) = tests.iter().map(|t| t.tokens()).max() else {
        return Err(refused("--generate", 0, "and --prompt 0 leave no test to run"));
    };

    let most = settings.batch.iter().copied().max().unwrap_or(1);
    if let ([_, _, ..], Some(file)) = (&settings.batch[..], &settings.calibrate) {
        return Err(refused("--calibrate", file.display(), "measures one batch size; give --batch a single number"));
    }
    let context = settings.context + longest;
    let chunk = settings.chunk.min(context);
    let running = RunSettings {
        placement: settings.place.placement(),
        context,
        prompt: context,
        chunk,
        random_weights: settings.random_weights || !files.has_weights() && settings.calibrate.is_some(),
        drafts: settings.drafts,
    };
    let options = EngineOptions { context, sequences: most, chunk, blocks: None };
    let (cached, mut progress) = (CacheSize::Engine(options), LoadProgress::new(!settings.json));
    let workspace = |model: &Model, backend: &dyn Backend| {
        let largest = StepExtents { tokens: chunk * most, sequences: most, context, candidates: 0 };
        ridge::engine_bytes(model, backend, EnginePrograms::Plain, largest)
    };
    let LoadedModel { session, model, device, threads, on_host } =
        ridge::load_model(&files, &config, &settings.model.numbers, &running, cached, workspace, &mut progress)?;
    if let Some(file) = settings.calibrate.as_ref().filter(|_| on_host.bytes.0 > 0) {
        return Err(refused("--calibrate", file.display(), "measures the GPU alone; leave --gpu-memory out"));
    }
    let backend = std::sync::Arc::clone(session.backend());
    let mut engine = Engine::new(session, &model, options)?;
    let kernels = backend.kernels();
    let speculation = SpeculationCosts::new(&model, context, kernels)?;
    let costs = [StepCost::new(&model, context, kernels)?, StepCost::of_answers(&model, context, kernels)?];

    let spinner = Spinner::new();
    let rates = match threads {
        Some(threads) => DeviceRates::measure(&model, settings.context * most, threads, |what| spinner.now(what))?,
        None => DeviceRates::specified(&device, &model)?,
    };
    let rates = match on_host.bytes {
        Bytes(0) => rates,
        _ => rates.with_host_link(&*backend)?,
    };
    let mut results = Vec::with_capacity(tests.len());
    let mut trace = trace::LaunchTrace::default();
    for (test, batch) in tests.iter().flat_map(|test| settings.batch.iter().map(move |batch| (*test, *batch))) {
        spinner.now("running the model");
        if let (BenchTest::Generate(tokens), Some(costs)) = (test, &speculation) {
            let (mut times, mut runs) = (Vec::new(), Vec::new());
            for run in 0..=settings.repeat {
                let (time, drafted) =
                    speculation::timed(&mut engine, &model, tokens, (settings.context, chunk), batch)?;
                if run > 0 {
                    (times, runs) = ([times, vec![time.as_secs_f64()]].concat(), [runs, vec![drafted]].concat());
                }
            }
            let (total, drafting) = runs[0].work(costs, &rates)?;
            let speculation = SpeculationResult { drafts: settings.drafts, runs, drafting_floor: drafting.floor };
            results.push(BenchResult { test, batch, times, total, ops: Vec::new(), speculation: Some(speculation) });
            continue;
        }
        let mut times = Vec::with_capacity(settings.repeat);
        for run in 0..=settings.repeat {
            let time = timed(&mut engine, &model, test, settings.context, batch, chunk)?;
            if run > 0 {
                times.push(time.as_secs_f64());
            }
        }
        let cost = &costs[usize::from(test.answers())];
        let mut depth = settings.context;
        let mut total = StepWork::default();
        for tokens in test.steps(chunk) {
            let work = cost.at(&vec![(depth, tokens); batch])?;
            total.add(&rates, Flops(work.flops), Bytes(work.bytes), Bytes(work.host.bytes()));
            depth += tokens;
        }
        let ops = if settings.ops || settings.trace.is_some() {
            spinner.now("timing each op");
            let profile = ops::measure(&mut engine, &model, cost, (test, batch), settings)?;
            trace.add(&settings.name(test, batch), &profile);
            profile.by_kernel(&rates)
        } else {
            Vec::new()
        };
        results.push(BenchResult { test, batch, times, total, ops, speculation: None });
    }
    drop(spinner);
    if let Some(path) = &settings.calibrate {
        let on = calibrate::CalibratedDevice { name: &device, threads, memory: rates.memory.value.as_f64() };
        let text = calibrate::file(&on, &model, &results, chunk)?;
        write_file(path, &text)?;
    }
    if let Some(path) = &settings.trace {
        trace.write(path, &device, &rates.roofline())?;
    }
    let on = (&*device, threads);
    let generates = tests.iter().any(|test| test.answers()) && settings.batch.len() > 1;
    let limit = generates.then(|| generation_limit(&costs[1], &rates, settings.context)).transpose()?;
    let placed = PlacedBytes { on_host: on_host.bytes, on_gpu: Bytes(backend.memory().live.on_device() as u64) };
    let shown =
        BenchReport { settings, files: &files, model: &model, on, placed, rates: &rates, results: &results, limit };
    if settings.json { print_json(&shown.object()) } else { print(&shown.text()) }
}

/// The smallest batch from which a decode step at `depth` cached tokens is compute-bound.
fn generation_limit(cost: &StepCost, rates: &DeviceRates, depth: usize) -> Result<GenerationLimit> {
    const MOST: usize = 4096;
    let computes = |batch: usize| -> Result<bool> {
        let cost = cost.at(&vec![(depth, 1); batch])?;
        let host = Bytes(cost.host.bytes());
        Ok(rates.bound(Flops(cost.flops), Bytes(cost.bytes), host) == Bound::Compute)
    };
    if !computes(MOST)? {
        return Ok(GenerationLimit(None));
    }
    let (mut below, mut from) = (0, MOST);
    while from - below > 1 {
        let middle = usize::midpoint(below, from);
        if computes(middle)? { from = middle } else { below = middle }
    }
    Ok(GenerationLimit(Some(from)))
}

/// Fills the cache to `depth`, then times all steps of the test, including the transfer of each sampled token.
fn timed(
    engine: &mut Engine,
    model: &Model,
    test: BenchTest,
    depth: usize,
    batch: usize,
    chunk: usize,
) -> Result<Duration> {
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
