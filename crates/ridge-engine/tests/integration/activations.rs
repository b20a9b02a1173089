//! A model whose prompts are computed with exact activations and whose answers by 8-bit codes: how a token is computed
//! depends on its place alone, whatever stands beside it in a step.

use std::ops::ControlFlow;
use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::{
    Engine, EngineOptions, Generated, Logprobs, Next, Outcome, Request, Row, Sampling, SequenceId, Start,
};
use ridge_graph::passes::Activations::{self, Exact, Int8};
use ridge_graph::{DType, FormatRef};
use ridge_models::{BuildOptions, ModelFiles, WeightSource};
use ridge_runtime::{Backend, Session, late::Late};

const OPTIONS: EngineOptions = EngineOptions { context: 256, sequences: 3, chunk: 256, blocks: None };

fn cpu(threads: usize) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("starts"))
}

/// The embedded model in Q8_0, with activations and cache of `dtype`, whose prompts and answers are computed as said.
fn engine_of(backend: Arc<dyn Backend>, chunk: usize, dtype: DType, ways: (Activations, Activations)) -> Engine {
    let files = ModelFiles::open(None).expect("embedded");
    let options = BuildOptions { activations: dtype, cache: dtype, ..BuildOptions::default() };
    let mut model = files.config().expect("is supported").build(&options).expect("builds");
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    model.graph = source.retype(&model.graph, FormatRef::from_name("q8_0").as_ref()).expect("fits");
    model.take_activations(ways.0, ways.1);
    assert_eq!(model.answers.is_some(), ways.0 != ways.1, "one graph where there is one way");
    let mut session = Session::new(backend);
    ridge_engine::declare(&session, &model, OPTIONS.context).expect("lowers");
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    Engine::new(session, &model, EngineOptions { chunk, ..OPTIONS }).unwrap_or_else(|e| panic!("{e}"))
}

fn engine(threads: usize, chunk: usize) -> Engine {
    engine_of(cpu(threads), chunk, DType::BF16, (Exact, Int8))
}

/// Greedy, with the logits of all tokens as far as probabilities tell them.
fn told() -> Sampling {
    Sampling { logprobs: Some(512), ..Sampling::GREEDY }
}

#[test]
fn declared_programs_are_those_that_the_engine_runs() {
    let outputs =
        |engine: &Engine| -> Vec<Vec<String>> { engine.compiled().iter().map(|p| p.outputs().into()).collect() };
    let [fill, next, scores] = [&[][..], &["next"], &["scores", "score_ids", "score_logprobs"]]
        .map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>());
    // Those of prompts, then those of answers: the engine compiled none again but the changes of rows, which have no
    // outputs either.
    let changes = fill.clone();
    let both = [&fill, &next, &scores, &fill, &next, &changes].map(Clone::clone);
    assert_eq!(outputs(&engine(1, 16)), both);
    let alike = engine_of(cpu(1), 16, DType::BF16, (Exact, Exact));
    assert_eq!(outputs(&alike), [fill, next, scores, changes]);
}

fn prompt(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| if i == 0 { 1 } else { 260 + (i * i * 7 + i * seed) % 250 }).collect()
}

fn generate(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> Generated {
    let request = Request { prompt: prompt.to_vec(), sampling: told(), max_tokens, stop_tokens: Vec::new() };
    engine.generate(&request, |_| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

fn start(engine: &mut Engine, prompt: usize) -> SequenceId {
    engine.start_sharing(Start { sampling: &told(), prompt, stream: 0, shared: None }).expect("a row is free")
}

fn row(id: SequenceId, tokens: &[u32]) -> Row<'_> {
    Row { sample: true, ..Row::of(id, tokens) }
}

/// What a step brings, in the order of its rows.
fn step(engine: &mut Engine, rows: &[Row<'_>]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    engine.submit(rows).and_then(|()| engine.complete(&mut outcomes)).unwrap_or_else(|e| panic!("{e}"));
    assert!(outcomes.iter().map(|o| o.id).eq(rows.iter().map(|r| r.id)));
    outcomes
}

fn said(outcome: &Outcome) -> (u32, &Logprobs) {
    let Next::Token(token) = outcome.next else { panic!("{outcome:?}") };
    (token, outcome.logprobs.as_ref().expect("they were asked for"))
}

#[test]
fn an_answer_has_the_same_bits_whatever_the_chunks_threads_and_device() {
    let prompt = prompt(3, 45);
    let alone = generate(&mut engine(1, 256), &prompt, 30);
    for (threads, chunk) in [(2, 256), (1, 1), (2, 7), (1, 44), (2, 16)] {
        assert_eq!(generate(&mut engine(threads, chunk), &prompt, 30), alone, "{threads} threads, chunks of {chunk}");
    }
    let late = Arc::new(Late::new(cpu(2), 3));
    assert_eq!(generate(&mut engine_of(late, 20, DType::BF16, (Exact, Int8)), &prompt, 30), alone);
}

#[test]
fn steps_shared_with_prompts_of_others_change_no_bit() {
    let (first, second) = (prompt(3, 45), prompt(5, 70));
    let alone = [&first, &second].map(|p| generate(&mut engine(1, 256), p, 12));
    for threads in [1, 2] {
        let mut engine = engine(threads, 256);
        let ids = [&first, &second].map(|p| start(&mut engine, p.len()));
        let mut heard = [(); 2].map(|()| Vec::new());
        let mut hear = |which: usize, outcome: &Outcome| {
            let (token, logprobs) = said(outcome);
            let at = heard[which].len();
            assert_eq!((token, logprobs), (alone[which].tokens[at], &alone[which].logprobs[at]), "{which} at {at}");
            heard[which].push(token);
            token
        };
        let mut last = hear(0, &step(&mut engine, &[row(ids[0], &first)])[0]);
        // Pieces of the second prompt, before and behind a token of the first answer.
        for (i, piece) in second.chunks(9).enumerate() {
            let token = [last];
            let pieces = [row(ids[1], piece), row(ids[0], &token)];
            let pieces = if i % 2 == 0 { pieces } else { [pieces[1], pieces[0]] };
            let outcomes = step(&mut engine, &pieces);
            last = hear(0, &outcomes[(i + 1) % 2]);
            if (i + 1) * 9 >= second.len() {
                hear(1, &outcomes[i % 2]);
            }
        }
        assert_eq!(heard.map(|h| h.len()), [9, 1]);
    }
}

#[test]
fn a_sequence_that_is_computed_again_goes_on_with_the_same_bits() {
    let prompt = prompt(4, 37);
    let alone = generate(&mut engine(1, 256), &prompt, 20);
    let whole: Vec<u32> = prompt.iter().chain(&alone.tokens).copied().collect();
    // All at once, across the end of the prompt, at it, and behind it.
    for cuts in [&[][..], &[20], &[37], &[38], &[5, 36, 50], &[45]] {
        for threads in [1, 2] {
            let mut engine = engine(threads, 256);
            let id = start(&mut engine, prompt.len());
            let ends = cuts.iter().copied().chain([prompt.len() + 15]);
            let (mut from, mut outcomes) = (0, Vec::new());
            for to in ends {
                outcomes = step(&mut engine, &[row(id, &whole[from..to])]);
                assert_eq!(engine.length(id), Some(to));
                from = to;
            }
            let (token, logprobs) = said(&outcomes[0]);
            assert_eq!((token, logprobs), (alone.tokens[15], &alone.logprobs[15]), "cut at {cuts:?}");
        }
    }
}

#[test]
fn what_is_asked_of_a_row_that_crosses_the_end_of_its_prompt_is_all_told() {
    let whole = prompt(6, 60);
    let next: Vec<u32> = whole[1..].iter().chain(&[300]).copied().collect();
    for (length, targets) in [(40, 60), (40, 30), (0, 60), (60, 60)] {
        let mut engine = engine(2, 256);
        let one = start(&mut engine, length);
        let rows = [Row { targets: &next[..targets], ..row(one, &whole) }];
        let scores = step(&mut engine, &rows).remove(0).scores;
        assert_eq!(scores.len(), targets);
        // Token by token they are the same.
        let other = start(&mut engine, length);
        for (at, score) in scores.iter().enumerate() {
            let rows = [Row { targets: &next[at..=at], ..row(other, &whole[at..=at]) }];
            assert_eq!(
                step(&mut engine, &rows)[0].scores,
                std::slice::from_ref(score),
                "token {at} of a prompt of {length}"
            );
        }
    }
}

#[test]
fn prompts_are_computed_exactly_and_answers_by_codes() {
    let prompt = prompt(7, 50);
    for dtype in [DType::BF16, DType::F32] {
        let of = |ways| engine_of(cpu(2), 256, dtype, ways);
        let both = generate(&mut of((Exact, Int8)), &prompt, 3);
        let exact = generate(&mut of((Exact, Exact)), &prompt, 3);
        let by_codes = generate(&mut of((Int8, Int8)), &prompt, 3);
        assert_eq!(both.logprobs[0], exact.logprobs[0], "the first token follows from the prompt");
        assert_ne!(both.logprobs[0], by_codes.logprobs[0]);
        assert_ne!(both.logprobs[1], exact.logprobs[1]);
        assert_ne!(both.logprobs[1], by_codes.logprobs[1], "the cache is not that of codes");
        // The program of codes on an exact cache: what computes prompts there computes answers here, and the reverse.
        let mut reverse = of((Int8, Exact));
        let id = start(&mut reverse, 0);
        let outcomes = step(&mut reverse, &[row(id, &prompt)]);
        assert_eq!(said(&outcomes[0]), (both.tokens[0], &both.logprobs[0]));
        reverse.set_prompt(id, usize::MAX);
        for (at, token) in both.tokens[..2].iter().enumerate() {
            let outcomes = step(&mut reverse, &[row(id, &[*token])]);
            assert_eq!(said(&outcomes[0]), (both.tokens[at + 1], &both.logprobs[at + 1]), "{dtype}");
        }
    }
}

#[test]
fn a_step_of_two_programs_is_not_timed_as_one() {
    let mut engine = engine(1, 256);
    let [a, b] = [1, 0].map(|prompt| engine.start(Sampling::GREEDY, prompt).expect("a row is free"));
    let refused = engine.step_timed(&[(a, &[1]), (b, &[1])], true, &mut Vec::new()).expect_err("two programs");
    assert!(refused.to_string().contains("two programs"), "{refused}");
    for (id, answer) in [(a, false), (b, true)] {
        let times = engine.step_timed(&[(id, &[1])], true, &mut Vec::new()).expect("one program");
        let graph = engine.lowered(true, answer).expect("it ran");
        assert!(!times.is_empty() && times.iter().all(|t| t.node < graph.function(t.func).nodes.len()));
        assert_eq!(graph.to_string().contains("quantize"), answer);
    }
}
