//! Rows with candidates on the engine itself.

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::{Engine, EngineOptions, Next, Outcome, Prefix, Row, Sampling, SequenceId, Start};
use ridge_models::{BuildOptions, ModelFiles, WeightSource};
use ridge_runtime::Session;

fn engine() -> Engine {
    let files = ModelFiles::open(None).expect("embedded");
    let mut model = files.config().expect("is supported").build(&BuildOptions::default()).expect("builds");
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    model.store(&source, None).expect("fits");
    let cpu = Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts");
    let mut session = Session::new(Arc::new(cpu));
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    Engine::new(session, &model, EngineOptions { context: 128, sequences: 1, chunk: 128, blocks: None })
        .unwrap_or_else(|e| panic!("{e}"))
}

fn start(engine: &mut Engine, shared: &[u32], sampling: &Sampling) -> SequenceId {
    let shared = Some((Prefix::Root(0), shared));
    engine.start_sharing(Start { sampling, prompt: 50, stream: 0, shared }).expect("a row is free")
}

fn submit(engine: &mut Engine, id: SequenceId, tokens: &[u32], candidates: &[u32]) {
    let row = Row { sample: true, candidates, ..Row::of(id, tokens) };
    engine.submit(&[row]).unwrap_or_else(|e| panic!("{e}"));
}

fn complete(engine: &mut Engine) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    engine.complete(&mut outcomes).unwrap_or_else(|e| panic!("{e}"));
    outcomes
}

/// A row whose sequence ends while its candidates are in flight has the length that the device gave it, and the next
/// sequence of the row another.
#[test]
fn a_row_whose_candidates_nobody_waited_for_is_right_for_the_next_sequence() {
    let prompt: Vec<u32> = (0..50).map(|i| 260 + i * i % 200).collect();
    let mut engine = engine();
    let told = Sampling { logprobs: Some(5), ..Sampling::GREEDY };
    let first = start(&mut engine, &prompt, &told);
    submit(&mut engine, first, &prompt, &[]);
    let expected = complete(&mut engine)[0].logprobs.clone().expect("they were asked for");
    engine.end(first);

    // With all candidates accepted it would have 48 tokens, as many as the next sequence begins with.
    let other: Vec<u32> = (0..42).map(|i| 300 + i * 3 % 150).collect();
    let second = start(&mut engine, &[], &Sampling::GREEDY);
    submit(&mut engine, second, &other, &[]);
    let Next::Token(token) = complete(&mut engine)[0].next else { panic!("is finite") };
    submit(&mut engine, second, &[token], &[7; 5]);
    engine.end(second);
    complete(&mut engine);

    let third = start(&mut engine, &prompt, &told);
    assert_eq!(engine.length(third), Some(48));
    submit(&mut engine, third, &prompt[48..], &[]);
    assert_eq!(complete(&mut engine)[0].logprobs.as_ref(), Some(&expected));
}
