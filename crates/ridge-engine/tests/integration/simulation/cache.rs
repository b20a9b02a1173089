//! What sequences hold of the cache: in windows no more than the closed form, and little of it without tokens.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::service::{Happened, Policy, Request, Service, ServiceOptions};
use ridge_engine::{Engine, EngineOptions, STEPS_IN_FLIGHT, Sampling, row_widths, window_blocks};
use ridge_models::{BuildOptions, Model, ModelConfig, ModelFiles, RowTables, WeightSource};
use ridge_runtime::{Backend, Session};
use serde_json::{Value, json};

use super::device::Parrot;

/// The fixture of a family with blocks of `block_size` tokens, its configuration changed by `change`.
fn family(name: &str, block_size: usize, change: impl FnOnce(&mut Value)) -> (Model, WeightSource) {
    let fixtures = std::env::var_os("RIDGE_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures"), Into::into);
    let folder = fixtures.join("families").join(name);
    let text = std::fs::read_to_string(folder.join("config.json")).expect("a fixture");
    let mut config: Value = serde_json::from_str(&text).expect("is JSON");
    change(&mut config);
    let config = ModelConfig::from_json("config.json", &config.to_string()).expect("is supported");
    let mut model = config.build(&BuildOptions { block_size, ..BuildOptions::default() }).expect("builds");
    let checkpoint = ModelFiles::open(Some(&folder)).and_then(|files| files.checkpoint()).expect("has weights");
    let source = WeightSource::Checkpoint(Arc::new(config.arrange(checkpoint).expect("divides")));
    model.graph = source.retype(&model.graph, None).expect("fits");
    (model, source)
}

fn session(backend: Arc<dyn Backend>, (model, source): &(Model, WeightSource)) -> Session {
    let mut session = Session::new(backend);
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    session
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts"))
}

/// A device that computes nothing, for sequences of at most `context` tokens.
fn blank(model: &Model, context: usize) -> Arc<dyn Backend> {
    let device = Parrot { blank: true, ..Parrot::default() };
    device.tables.get_or_init(|| RowTables::of(&model.graph, row_widths(context.div_ceil(model.block_size))));
    Arc::new(device)
}

/// A window of 1024 at a context of 32k, in chunks and then token by token: the layers with a window hold what the closed
/// form says and no more, those without hold everything, and the pool is as large as what is held.
#[test]
fn windowed_layers_hold_blocks_for_window_and_chunk_alone() {
    const CONTEXT: usize = 32 << 10;
    const WINDOW: usize = 1024;
    let of = family("gemma3", 16, |config| {
        (config["max_position_embeddings"], config["sliding_window"]) = (json!(CONTEXT), json!(WINDOW));
    });
    let device = blank(&of.0, CONTEXT);
    for chunk in [1, 100, 512] {
        let options = EngineOptions { context: CONTEXT, sequences: 2, chunk, blocks: None };
        let mut engine = Engine::new(session(Arc::clone(&device), &of), &of.0, options).expect("starts");
        let pool = |engine: &Engine| {
            let blocks: Vec<[usize; 2]> = engine.window_pools().map(|pool| [pool.count(), pool.free()]).collect();
            let [[count, free]] = blocks[..] else { panic!("{} pools", blocks.len()) };
            (count, count - free)
        };
        let most = window_blocks(WINDOW, chunk, 16);
        // There may be a chunk in each step in flight; this engine completes one before the next.
        assert_eq!(pool(&engine), (2 * window_blocks(WINDOW, STEPS_IN_FLIGHT * chunk, 16), 0));
        let id = engine.start(Sampling::GREEDY, 1).expect("a row is free");
        let (mut length, mut largest, mut next) = (0, 0, Vec::new());
        // Steps of one token are many, so those are few where chunks are of one.
        let end = if chunk == 1 { 2 * WINDOW } else { CONTEXT };
        while length < end {
            // The last tokens come one by one.
            let count = if length + 2 * chunk < end { chunk } else { 1 };
            assert!(engine.grow(id, count));
            largest = largest.max(pool(&engine).1);
            engine.step(&[(id, &vec![7; count])], false, &mut next).unwrap_or_else(|e| panic!("{e}"));
            length += count;
            let held = length.div_ceil(16) - (length + 1).saturating_sub(WINDOW) / 16;
            assert_eq!(pool(&engine).1, held, "after {length} tokens");
            assert_eq!(engine.blocks().count() - engine.blocks().free(), length.div_ceil(16));
        }
        let aligned = |start: usize| (start + WINDOW - 1 + chunk).div_ceil(16) - start / 16;
        // Chunks that divide blocks meet fewer alignments than the closed form allows for.
        let reached = (0..end / chunk).map(|step| aligned((step * chunk + 1).saturating_sub(WINDOW))).max();
        assert!(largest <= most && (chunk > 1 || Some(largest) == reached && largest == most), "{largest} of {most}");
        engine.end(id);
        assert_eq!(pool(&engine).1, 0);
    }
}

/// What each request got, tokens of prompts found in the cache, and preemptions.
fn serve(name: &str, blocks: Option<usize>, sequences: usize, requests: &[Vec<u32>]) -> (Vec<Vec<u32>>, u64, u64) {
    let of = family(name, 4, |_| ());
    let engine = EngineOptions { context: 96, sequences, chunk: 7.max(sequences), blocks };
    let options = ServiceOptions { engine, queue: 100, policy: Policy::FirstCome, prefix_cache: true };
    let mut service = Service::new(session(cpu(), &of), &of.0, options).expect("starts");
    let mut answers = vec![Vec::new(); requests.len()];
    let (mut ids, mut events) = (Vec::new(), Vec::new());
    let mut waiting: VecDeque<&Vec<u32>> = requests.iter().collect();
    while !waiting.is_empty() || !service.is_idle() {
        if let Some(prompt) = waiting.pop_front() {
            ids.push(service.submit(Request::new(prompt.clone(), 30), Duration::ZERO).expect("fits"));
        }
        for _ in 0..3 {
            service.step(Duration::ZERO, &mut events);
        }
        for event in events.drain(..) {
            let at = ids.iter().position(|id| *id == event.id).expect("is known");
            match event.what {
                Happened::Token { token, .. } => answers[at].push(token),
                Happened::Failed(why) => panic!("{why}"),
                _ => {}
            }
        }
    }
    let stats = service.stats();
    assert_eq!((stats.blocks_used, stats.positions_owned), (0, 0), "something was left behind");
    (answers, stats.prefix_hits, stats.preemptions)
}

/// Blocks in front of a window are given to others, prefixes are found in all groups or in none, and a preempted sequence
/// comes again: nothing of it shows in an answer.
#[test]
fn answers_of_models_with_windows_are_those_given_alone() {
    for name in ["gemma3", "gemma2", "mistral"] {
        let prompts: Vec<Vec<u32>> = (0..9u32)
            .map(|i| {
                let length = [9, 30, 41, 22, 50, 30, 41, 55, 12][i as usize];
                (0..length).map(|at| if at < 28 { 3 + at * 7 % 50 } else { 3 + (at * 11 + i * (i % 3)) % 50 }).collect()
            })
            .collect();
        let alone: Vec<Vec<u32>> =
            prompts.iter().map(|prompt| serve(name, None, 1, std::slice::from_ref(prompt)).0.remove(0)).collect();
        assert!(alone.iter().all(|answer| !answer.is_empty()));
        let (together, hits, _) = serve(name, None, 4, &prompts);
        assert_eq!(together, alone, "{name}");
        assert!(hits > 0, "{name}: no prefix is found");
        let (crowded, _, preemptions) = serve(name, Some(30), 4, &prompts);
        assert_eq!(crowded, alone, "{name}");
        assert!(preemptions > 0, "{name}: there is room for all");
    }
}

/// A sequence goes back to where its windows reach, or to its start, and continues as one that never went further.
#[test]
fn a_sequence_with_windows_goes_back_as_far_as_they_reach() {
    let of = family("gemma3", 4, |_| ());
    let options = EngineOptions { context: 96, sequences: 2, chunk: 8, blocks: None };
    let mut engine = Engine::new(session(cpu(), &of), &of.0, options).expect("starts");
    let text: Vec<u32> = (0..60).map(|at| 3 + at * 7 % 50).collect();
    let feed = |engine: &mut Engine, id, to: usize| {
        let mut next = Vec::new();
        while let Some(at) = engine.length(id).filter(|at| *at < to) {
            engine.step(&[(id, &text[at..(at + 5).min(to)])], true, &mut next).unwrap_or_else(|e| panic!("{e}"));
        }
        next[0]
    };
    let [id, other] = [(); 2].map(|()| engine.start(Sampling::GREEDY, 1).expect("a row is free"));
    let want = feed(&mut engine, other, 40);
    feed(&mut engine, id, 41);
    // The window of 8 tokens that ends at position 39 begins in a block that is held.
    engine.truncate(id, 39);
    assert_eq!(engine.length(id), Some(39));
    assert_eq!(feed(&mut engine, id, 40), want);
    feed(&mut engine, id, 60);
    engine.truncate(id, 39);
    assert_eq!(engine.length(id), Some(0), "the window has moved on");
    assert_eq!(feed(&mut engine, id, 40), want);
    [id, other].into_iter().for_each(|id| engine.end(id));
    assert!(engine.window_pools().chain([engine.blocks()]).all(|blocks| blocks.free() == blocks.count()));
}

/// With lengths of real conversations, blocks of the default size are almost full.
#[test]
fn little_of_allocated_blocks_is_without_tokens() {
    const LENGTHS: &str = include_str!("../../data/azure_2023_conv_lengths.csv");
    let number = |text: &str| text.parse::<usize>().expect("a number");
    let lengths = LENGTHS.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let (prompt, answer) = line.split_once(',').expect("two columns");
        (number(prompt), number(answer))
    });
    let block_size = BuildOptions::default().block_size;
    const CONTEXT: usize = 8192;
    let of = family("qwen2", block_size, |config| config["max_position_embeddings"] = json!(CONTEXT));
    let engine = EngineOptions { context: CONTEXT, sequences: 64, chunk: 512, blocks: Some(8192) };
    let options = ServiceOptions { engine, queue: 400, policy: Policy::FirstCome, prefix_cache: true };
    let device = blank(&of.0, CONTEXT);
    let mut service = Service::new(session(device, &of), &of.0, options).expect("starts");
    let (mut owned, mut unused, mut steps, mut events) = (0, 0, 0, Vec::new());
    for (prompt, answer) in lengths {
        let tokens = (0..prompt).map(|at| 3 + ((at * 31 + steps * 17) % 50) as u32).collect();
        service.submit(Request::new(tokens, answer), Duration::ZERO).expect("fits");
        for _ in 0..4 {
            service.step(Duration::ZERO, &mut events);
            let stats = service.stats();
            (owned, unused, steps) = (owned + stats.positions_owned, unused + stats.positions_unused, steps + 1);
        }
        events.clear();
    }
    let share = unused as f64 / owned as f64;
    println!("{:.2} % of {} positions a step", share * 100.0, owned / steps);
    assert!(owned / steps > 1000, "little is allocated");
    assert!(share < 0.04, "{:.2} % of allocated blocks has no token", share * 100.0);
}
