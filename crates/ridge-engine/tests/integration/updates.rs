//! The engine on weights that another program of the same session updates: it sees each update, and reuses nothing of the
//! cache that was computed from older weights.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::mixed::{copy_of_master, master, mixed_step};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::service::{Event, Happened, Policy, Request, Service, ServiceOptions, Usage};
use ridge_engine::{Engine, EngineOptions};
use ridge_graph::ops::AdamW;
use ridge_graph::{Bindings, Builder, DType, Graph, Result, Role, Tensor, Type, passes};
use ridge_models::{BuildOptions, Model, ModelFiles, WeightSource, symbols, with_loss};
use ridge_runtime::late::Late;
use ridge_runtime::{Backend, Bucket, Recipe, Refresh, Session, WeightData};

const OPTIONS: EngineOptions = EngineOptions { context: 256, sequences: 4, chunk: 32, blocks: None };

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts"))
}

/// The values of a layer with their sign changed.
fn update(model: &Model) -> Graph {
    let arg = model.graph.args(Role::Weight).find(|a| a.name.contains("v_proj")).expect("a decoder has values");
    let negated = || -> Result<Graph> {
        let mut g = Builder::new();
        let state = g.state(&arg.name, arg.ty.clone())?;
        let old = g.state_read(state)?;
        let new = g.neg(old)?;
        g.state_write(state, new)?;
        g.finish(Vec::new())
    };
    negated().expect("builds")
}

/// A service of the embedded model and a program that updates its weights, which ran `updates` times before.
fn service(backend: Arc<dyn Backend>, updates: usize) -> (Service, Bucket) {
    let files = ModelFiles::open(None).expect("embedded");
    let mut model = files.config().expect("is supported").build(&BuildOptions::default()).expect("builds");
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    model.graph = source.retype(&model.graph, None).expect("fits");
    let mut session = Session::new(backend);
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    let graph = update(&model);
    session.allocate_states(&graph, &Bindings::new()).expect("fits");
    let compiled = session.compile(&graph, &[]).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    (0..updates).for_each(|_| bucket.submit().expect("runs"));
    let options = ServiceOptions { engine: OPTIONS, queue: 10, policy: Policy::FirstCome, prefix_cache: true };
    (Service::new(session.share(), &model, options).expect("starts"), bucket)
}

/// Runs until nothing is left to do. The tokens of the answers, and what the last request used.
fn run(service: &mut Service) -> (Vec<u32>, Usage) {
    let (mut tokens, mut used, mut events) = (Vec::new(), None, Vec::new());
    for step in 0..1000 {
        if service.is_idle() {
            return (tokens, used.expect("a request was over"));
        }
        service.step(Duration::from_millis(step), &mut events);
        for Event { what, .. } in events.drain(..) {
            match what {
                Happened::Token { token, .. } => tokens.push(token),
                Happened::Done(usage) => used = Some(usage),
                Happened::Failed(why) | Happened::Stuck(why) => panic!("{why}"),
                Happened::Prompt(_) | Happened::Ended { .. } => {}
            }
        }
    }
    panic!("it never ends: {:?}", service.stats());
}

fn answer(service: &mut Service, prompt: &[u32]) -> (Vec<u32>, usize) {
    service.submit(Request::new(prompt.to_vec(), 24), Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
    let (tokens, usage) = run(service);
    (tokens, usage.cached_tokens)
}

fn prompt() -> Vec<u32> {
    let tokenizer = ModelFiles::open(None).and_then(|f| f.tokenizer()).expect("embedded");
    tokenizer.encode(&"Once upon a time, there was a little girl. ".repeat(5), true).expect("encodes")
}

#[test]
fn prefixes_are_reused_within_a_version_of_the_weights_and_never_across_versions() {
    let prompt = prompt();
    let fresh = [0, 1].map(|updates| answer(&mut service(cpu(), updates).0, &prompt).0);
    assert_ne!(fresh[0], fresh[1], "the update shows");
    for backend in [cpu(), Arc::new(Late::new(cpu(), 2))] {
        let (mut service, mut update) = service(backend, 0);
        for version in 0..4 {
            let (tokens, cached) = answer(&mut service, &prompt);
            assert_eq!((&tokens, cached), (&fresh[version % 2], 0), "version {version}");
            let (tokens, cached) = answer(&mut service, &prompt);
            assert_eq!((&tokens, cached), (&fresh[version % 2], (prompt.len() - 1) / 16 * 16), "version {version}");
            update.submit().expect("runs");
        }
    }
}

#[test]
fn what_running_sequences_add_after_an_update_is_reused_by_nobody() {
    let prompt = prompt();
    let fresh = answer(&mut service(cpu(), 1).0, &prompt).0;
    // Updates while the prompt is being computed, before its first block is full and later, and within the answer.
    for steps in 1..8 {
        let (mut service, mut update) = service(cpu(), 0);
        service.submit(Request::new(prompt.clone(), 24), Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
        let mut events = Vec::new();
        (0..steps).for_each(|_| _ = service.step(Duration::ZERO, &mut events));
        update.submit().expect("runs");
        run(&mut service);
        let (tokens, cached) = answer(&mut service, &prompt);
        assert_eq!((tokens, cached), (fresh.clone(), 0), "updated after {steps} steps");
    }
}

/// A batch of one sequence with the next tokens as targets.
fn batch(tokens: &[i64], block_size: usize) -> (Vec<(&'static str, Tensor)>, Bindings) {
    let (n, blocks) = (tokens.len(), tokens.len().div_ceil(block_size));
    let i32s = |shape: &[usize], values: Vec<i64>| Tensor::int(DType::I32, shape, values);
    let targets = tokens[1..].iter().copied().chain([-100]).collect();
    let inputs = vec![
        ("token_ids", i32s(&[n], tokens.to_vec())),
        ("seq_ids", i32s(&[n], vec![0; n])),
        ("query_start", i32s(&[2], vec![0, n as i64])),
        ("lengths", i32s(&[1], vec![0])),
        ("block_table", i32s(&[1, blocks], (0..blocks as i64).collect())),
        ("targets", i32s(&[n], targets)),
        ("lr", Tensor::float(DType::F32, &[], vec![1e-2])),
    ];
    let extents = [(symbols::TOKENS, n), (symbols::SEQS, 1), (symbols::TABLE, blocks), (symbols::BLOCKS, blocks)];
    let bindings =
        extents.into_iter().fold(Bindings::new(), |bindings, (symbol, extent)| bindings.with(symbol, extent));
    (inputs, bindings)
}

#[test]
fn between_training_steps_the_engine_generates_what_a_fresh_session_does() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama/gqa2_tied");
    let files = ModelFiles::open(Some(&folder)).expect("a model");
    let options =
        BuildOptions { activations: DType::BF16, cache: DType::BF16, block_size: 4, ..BuildOptions::default() };
    let mut model = files.config().expect("is supported").build(&options).expect("builds");
    let bf16 = |_: &str, ty: &Type| Some(Type { dtype: DType::BF16, ..ty.clone() });
    model.graph = passes::retype(&model.graph, &bf16).expect("fits");
    let checkpoint = files.checkpoint().expect("its weights");
    let engine_options = EngineOptions { context: 48, sequences: 2, chunk: 16, blocks: None };
    let tokens: Vec<i64> = (0..21).map(|i| 3 + i * i * 7 % 90).collect();
    let (inputs, bindings) = batch(&tokens, 4);
    for refresh in [Refresh::Fused, Refresh::Lazy] {
        let backend = cpu();
        let mut session = Session::new(Arc::clone(&backend));
        for arg in model.graph.args(Role::Weight) {
            let view = checkpoint.tensor(&arg.name).expect("in the file");
            let ty = Type { dtype: DType::F32, ..arg.ty.clone() };
            session.load(&master(&arg.name), &ty, vec![WeightData::Owned(view.data.to_vec())]).expect("fits");
            let graph = copy_of_master(&arg.name, &arg.ty).expect("builds");
            session.derive(&Recipe { graph, refresh, evictable: false }).expect("is new");
        }
        let mut loss = with_loss(&model.graph).expect("has logits");
        passes::prune(&mut loss, &["loss"]).expect("has it");
        let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let step = mixed_step(&loss, adamw, refresh == Refresh::Fused).expect("differentiates");
        session.allocate_states(&step, &bindings).unwrap_or_else(|e| panic!("{e}"));
        let compiled = session.compile(&step, &["loss"]).unwrap_or_else(|e| panic!("{e}"));
        let mut bucket = compiled.bucket(&bindings).unwrap_or_else(|e| panic!("{e}"));
        let mut engine = Engine::new(session.share(), &model, engine_options).unwrap_or_else(|e| panic!("{e}"));
        let prompt: Vec<u32> = tokens[..9].iter().map(|token| *token as u32).collect();
        let generate = |engine: &mut Engine| {
            let request = ridge_engine::Request {
                prompt: prompt.clone(),
                sampling: ridge_engine::Sampling::GREEDY,
                max_tokens: 16,
                stop_tokens: Vec::new(),
            };
            engine.generate(&request, |_| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}")).tokens
        };
        let untrained = generate(&mut engine);
        for count in 1..=20 {
            for (name, tensor) in &inputs {
                bucket.set(name, tensor).expect("fits");
            }
            bucket.set("step", &Tensor::float(DType::F32, &[], vec![f64::from(count)])).expect("fits");
            bucket.submit().unwrap_or_else(|e| panic!("{e}"));
            let got = generate(&mut engine);
            let mut fresh = Session::new(Arc::clone(&backend));
            for arg in model.graph.args(Role::Weight) {
                let bytes = backend.read(&session.state(&master(&arg.name)).expect("loaded")).expect("reads");
                let rounded = DType::BF16.encode(DType::F32.decode(&bytes));
                fresh.load(&arg.name, &arg.ty, vec![WeightData::Owned(rounded)]).expect("fits");
            }
            let mut fresh = Engine::new(fresh, &model, engine_options).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(got, generate(&mut fresh), "after step {count}, {refresh:?}");
        }
        let answer: Vec<i64> = generate(&mut engine).into_iter().map(i64::from).collect();
        assert_ne!(generate(&mut engine), untrained);
        assert_eq!(answer[..12], tokens[9..], "it has learnt its text by heart");
    }
}
