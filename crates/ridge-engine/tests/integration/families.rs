//! Families with recurrences, and others with caches of their own kind, through the engine on the CPU, with the weights of
//! `fixtures/families`: chunked prompts, ragged batches, preemption, snapshots of prefixes, cancellation, steps in flight and drafts give the tokens of an undisturbed run.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ridge_engine::service::{Policy, Request, RequestId, Service, ServiceOptions};
use ridge_engine::{Engine, EngineOptions, Ngram, Sampling};
use ridge_models::{BuildOptions, Model, ModelFiles, WeightSource};
use ridge_runtime::late::Late;
use ridge_runtime::{Backend, Session};

use crate::fixed::{cpu, run};

/// Tokens of the longest prompt, beyond the windows and convolutions of all families here.
const LONGEST: usize = 43;

fn loaded(family: &str, backend: Arc<dyn Backend>) -> (Session, Model) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/families").join(family);
    let files = ModelFiles::open(Some(&folder)).unwrap_or_else(|e| panic!("{e}"));
    let config = files.config().unwrap_or_else(|e| panic!("{e}"));
    let options = BuildOptions { block_size: 4, ..BuildOptions::default() };
    let mut model = config.build(&options).expect("builds");
    let checkpoint = config.arrange(files.checkpoint().expect("is there")).expect("fits");
    let source = WeightSource::Checkpoint(Arc::new(checkpoint));
    model.graph = source.retype(&model.graph, None).expect("fits");
    let mut session = Session::new(backend);
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    (session, model)
}

fn prompt(vocab: usize, seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i * 7 + i * 5 + seed * (i + 3)) % vocab as u32).collect()
}

/// The greedy answer of an engine with nothing else to do, whose prompt is one chunk.
fn alone(engine: &mut Engine, prompt: &[u32], count: usize) -> Vec<u32> {
    let id = engine.start(Sampling::GREEDY, prompt.len()).expect("has a row");
    let (mut next, mut answer) = (Vec::new(), Vec::new());
    engine.step(&[(id, prompt)], true, &mut next).unwrap_or_else(|e| panic!("{e}"));
    while answer.len() < count {
        let token = next[0];
        answer.push(token);
        engine.step(&[(id, &[token])], true, &mut next).unwrap_or_else(|e| panic!("{e}"));
    }
    engine.end(id);
    answer
}

fn service(family: &str, backend: Arc<dyn Backend>, blocks: Option<usize>, chunk: usize) -> Service {
    let (session, model) = loaded(family, backend);
    let engine = EngineOptions { context: 96, sequences: 3, chunk, blocks };
    let options = ServiceOptions { engine, queue: 100, policy: Policy::FirstCome, prefix_cache: true };
    Service::new(session, &model, options).unwrap_or_else(|e| panic!("{e}"))
}

/// The family's answers do not depend on what else the engine does.
fn answers_are_undisturbed(family: &str) {
    let (session, model) = loaded(family, cpu());
    let vocab = model.vocab_size;
    // Of prompts 0 and 1, 2 and 3, .. the shorter is the beginning of the longer.
    let of = |i: usize| (prompt(vocab, i as u32 / 2, LONGEST - 22 + 4 * i), 9 + i);
    let requests: Vec<(Vec<u32>, usize)> = (0..6).map(of).collect();
    let options = EngineOptions { context: 96, sequences: 1, chunk: 64, blocks: None };
    let mut engine = Engine::new(session, &model, options).unwrap_or_else(|e| panic!("{family}: {e}"));
    let expected: Vec<Vec<u32>> = requests.iter().map(|(prompt, count)| alone(&mut engine, prompt, *count)).collect();
    let distinct: HashSet<&u32> = expected.iter().flatten().collect();
    assert!(distinct.len() > 5, "{family} says little: {expected:?}");
    drop(engine);
    let (mut preempted, mut shared) = (0, 0);
    for (blocks, chunk, late, drafts) in
        [(None, 64, false, false), (Some(23), 7, true, false), (Some(20), 64, false, false), (None, 5, true, true)]
    {
        let backend: Arc<dyn Backend> = if late { Arc::new(Late::new(cpu(), 2)) } else { cpu() };
        let mut service = service(family, backend, blocks, chunk);
        if drafts {
            service = service.with_drafts(Ngram::new(4));
        }
        for cancels in [false, true] {
            let submit = |(prompt, count): &(Vec<u32>, usize)| {
                let request = Request { stop_tokens: Arc::default(), ..Request::new(prompt.clone(), *count) };
                service.submit(request, Duration::ZERO).unwrap_or_else(|e| panic!("{family}: {e}"))
            };
            let ids: Vec<RequestId> = requests.iter().map(submit).collect();
            let heard = run(&mut service, cancels.then_some(ids[1]));
            for (nth, (id, expected)) in ids.iter().zip(&expected).enumerate() {
                let at = format!("{family}, request {nth}, {blocks:?} blocks, chunks of {chunk}, drafts {drafts}");
                if cancels && nth == 1 {
                    let answer = heard.get(id).map(|heard| &heard.answer[..]).unwrap_or_default();
                    assert!(expected.starts_with(answer), "{at}");
                } else {
                    assert_eq!(&heard[id].answer, expected, "{at}");
                }
            }
        }
        preempted += service.stats().preemptions;
        shared += service.stats().prefix_hits;
    }
    assert!(preempted > 0 && shared > 0, "{family}: {preempted} preempted, {shared} shared");
}

#[test]
fn mamba2_is_undisturbed() {
    answers_are_undisturbed("mamba2");
}

#[test]
fn jamba_is_undisturbed() {
    answers_are_undisturbed("jamba");
}

#[test]
fn bamba_is_undisturbed() {
    answers_are_undisturbed("bamba");
}

#[test]
fn qwen3_next_is_undisturbed() {
    answers_are_undisturbed("qwen3_next");
}

#[test]
fn lfm2_is_undisturbed() {
    answers_are_undisturbed("lfm2");
}

#[test]
fn gla_is_undisturbed() {
    answers_are_undisturbed("gla");
}

#[test]
fn rwkv4_is_undisturbed() {
    answers_are_undisturbed("rwkv4");
}

#[test]
fn rwkv6_is_undisturbed() {
    answers_are_undisturbed("rwkv6");
}

#[test]
fn rwkv7_is_undisturbed() {
    answers_are_undisturbed("rwkv7");
}

#[test]
fn zamba2_is_undisturbed() {
    answers_are_undisturbed("zamba2");
}

#[test]
fn gemma3n_is_undisturbed() {
    answers_are_undisturbed("gemma3n");
}

#[test]
fn gemma4_is_undisturbed() {
    answers_are_undisturbed("gemma4");
}

#[test]
fn gemma4_with_experts_is_undisturbed() {
    answers_are_undisturbed("gemma4_moe");
}

#[test]
fn deepseek_v32_is_undisturbed() {
    answers_are_undisturbed("deepseek_v32");
}

#[test]
fn hyena_is_undisturbed() {
    answers_are_undisturbed("hyena");
}

#[test]
fn glm_5_is_undisturbed() {
    answers_are_undisturbed("glm_moe_dsa");
}
