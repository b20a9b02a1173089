//! Speculation by a model's own prediction module, with the trained models of `fixtures/prediction`: most drafts are right, and texts are those
//! without drafts.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ridge_engine::service::{Policy, Request, RequestId, Service, ServiceOptions, Stats};
use ridge_engine::{Engine, EngineOptions, Generated, Next, Prefix, Row, SAMPLED, Sampling, SequenceId, Start};
use ridge_graph::passes::Activations;
use ridge_models::{BuildOptions, Model, ModelFiles, WeightSource};
use ridge_runtime::late::Late;
use ridge_runtime::{Backend, Session};

use crate::fixed::{cpu, run};

const FAMILIES: [&str; 3] = ["glm4_moe", "deepseek_v3", "deepseek_v32"];
const DRAFTS: usize = 3;

fn loaded(family: &str, drafts: usize, divided: bool, backend: Arc<dyn Backend>) -> (Session, Model) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/prediction").join(family);
    let files = ModelFiles::open(Some(&folder)).unwrap_or_else(|e| panic!("{e}"));
    let config = files.config().unwrap_or_else(|e| panic!("{e}"));
    let options = BuildOptions { block_size: 4, drafts, ..BuildOptions::default() };
    let mut model = config.build(&options).expect("builds");
    let checkpoint = config.arrange_for(files.checkpoint().expect("is there"), &options).expect("fits");
    let source = WeightSource::Checkpoint(Arc::new(checkpoint));
    let format = divided.then(|| ridge_graph::FormatRef::from_name("q8_0").expect("is a format"));
    model.store(&source, format.as_ref()).expect("fits");
    if divided {
        model.take_activations(Activations::Exact, Activations::Int8);
        assert!(model.answers.is_some(), "weights are in blocks");
    }
    let mut session = Session::new(backend);
    ridge_engine::declare(&session, &model, 96).expect("compiles");
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    (session, model)
}

/// A text of the language that the models were trained on, as far as it matters: tokens that they know.
fn prompt(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 3 + (i * i * 7 + i * 5 + seed * (i + 3)) % 45).collect()
}

fn engine(family: &str, drafts: usize) -> Engine {
    let (session, model) = loaded(family, drafts, false, cpu());
    let options = EngineOptions { context: 96, sequences: 2, chunk: 64, blocks: None };
    Engine::new(session, &model, options).unwrap_or_else(|e| panic!("{family}: {e}"))
}

fn requests() -> Vec<Request> {
    let warm = |seed| Sampling { temperature: 0.7, top_p: 0.95, seed, ..Sampling::GREEDY };
    let greedy = |i: u32| Request::new(prompt(i / 2, 21 + 4 * i as usize), 24 + i as usize);
    let mut requests: Vec<Request> = (0..4).map(greedy).collect();
    requests.push(Request { sampling: warm(5), ..greedy(0) });
    requests.push(Request { sampling: Sampling { frequency_penalty: 0.2, ..warm(6) }, ..greedy(1) });
    requests.push(Request { sampling: Sampling { logprobs: Some(2), ..Sampling::GREEDY }, ..greedy(4) });
    requests.push(Request { min_tokens: 9, stop_tokens: (10..30).collect(), ..greedy(2) });
    requests
}

/// Everything that all requests were answered, one of which is cancelled on the way if `cancels`.
fn answers(service: &mut Service, requests: &[Request], cancels: bool) -> Vec<Vec<u32>> {
    let submit = |request: &Request| service.submit(request.clone(), Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
    let ids: Vec<RequestId> = requests.iter().map(submit).collect();
    let mut heard = run(service, cancels.then_some(ids[1]));
    ids.iter().map(|id| heard.remove(id).unwrap_or_default().answer).collect()
}

struct Setting {
    drafts: usize,
    divided: bool,
    blocks: Option<usize>,
    chunk: usize,
    late: bool,
}

fn service(family: &str, setting: &Setting) -> Service {
    let backend: Arc<dyn Backend> = if setting.late { Arc::new(Late::new(cpu(), 2)) } else { cpu() };
    let (session, model) = loaded(family, setting.drafts, setting.divided, backend);
    let engine = EngineOptions { context: 96, sequences: 3, chunk: setting.chunk, blocks: setting.blocks };
    let options = ServiceOptions { engine, queue: 100, policy: Policy::FirstCome, prefix_cache: true };
    Service::new(session, &model, options).unwrap_or_else(|e| panic!("{family}: {e}"))
}

fn plain(divided: bool) -> Setting {
    Setting { drafts: 0, divided, blocks: None, chunk: 64, late: false }
}

#[test]
fn most_drafts_are_accepted_and_save_steps() {
    for family in FAMILIES {
        let requests: Vec<Request> = requests().into_iter().take(4).collect();
        let told = |setting: &Setting| -> (Vec<Vec<u32>>, Stats) {
            let mut service = service(family, setting);
            (answers(&mut service, &requests, false), service.stats())
        };
        let (expected, before) = told(&plain(false));
        let (found, after) = told(&Setting { drafts: DRAFTS, ..plain(false) });
        assert_eq!(found, expected, "{family}");
        let (accepted, candidates) = (after.accepted, after.candidates);
        println!("{family}: {accepted} of {candidates}; {} and {} steps", before.steps, after.steps);
        assert!(accepted * 2 > candidates, "{family}: {accepted} of {candidates} drafts");
        assert!(after.steps * 3 < before.steps * 2, "{family}: {} and {} steps", before.steps, after.steps);
    }
}

#[test]
fn drafts_change_no_answer() {
    for (family, divided) in [(FAMILIES[0], false), (FAMILIES[1], false), (FAMILIES[2], false), (FAMILIES[0], true)] {
        let requests = requests();
        let expected = answers(&mut service(family, &plain(divided)), &requests, false);
        let (mut preempted, mut shared, mut rejected) = (0, 0, 0);
        for (drafts, blocks, chunk, late) in
            [(1, None, 64, false), (DRAFTS, Some(23), 7, true), (DRAFTS, Some(22), 64, false), (5, None, 5, true)]
        {
            let mut service = service(family, &Setting { drafts, divided, blocks, chunk, late });
            for cancels in [false, true] {
                let found = answers(&mut service, &requests, cancels);
                for (nth, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let at = format!("{family}, request {nth}, {drafts} drafts, {blocks:?} blocks, chunks of {chunk}");
                    match cancels && nth == 1 {
                        true => assert!(expected.starts_with(found), "{at}"),
                        false => assert_eq!(found, expected, "{at}"),
                    }
                }
            }
            let stats = service.stats();
            assert!(stats.accepted > 0, "{family}, {drafts} drafts");
            preempted += stats.preemptions;
            shared += stats.prefix_hits;
            rejected += stats.candidates - stats.accepted;
        }
        assert!(preempted > 0 && shared > 0 && rejected > 0, "{family}: {preempted}, {shared}, {rejected}");
    }
}

#[test]
fn nothing_is_compiled_or_bound_while_a_ready_service_drafts() {
    let mut service = service("glm4_moe", &Setting { drafts: 2, ..plain(false) }).made_ready().expect("fits");
    let before = service.stats().made;
    answers(&mut service, &requests(), true);
    assert_eq!(service.stats().made, before);
    assert!(service.stats().accepted > 0);
}

/// The drafts behind `tokens`, of which those of `chunks` are given one after another; what follows them is what the model samples.
fn drafts_behind(engine: &mut Engine, id: SequenceId, tokens: &[u32], chunk: usize) -> (u32, Vec<u32>) {
    let from = engine.length(id).expect("runs");
    let mut chunks = tokens[from..].chunks(chunk).peekable();
    let mut outcomes = Vec::new();
    while let Some(part) = chunks.next() {
        let follower = chunks.peek().map(|next| next[0]);
        engine
            .submit(&[Row { sample: follower.is_none(), follower, ..Row::of(id, part) }])
            .unwrap_or_else(|e| panic!("{e}"));
        engine.complete(&mut outcomes).unwrap_or_else(|e| panic!("{e}"));
    }
    let Next::Token(next) = outcomes[0].next else { panic!("is sampled") };
    (next, engine.drafts(id).to_vec())
}

fn start(engine: &mut Engine, shared: &[u32]) -> SequenceId {
    let shared = Some((Prefix::Root(0), shared));
    engine.start_sharing(Start { sampling: &Sampling::GREEDY, prompt: 9, stream: 0, shared }).expect("a row is free")
}

/// The entries of the module's cache are those of one chunk, however they came there: drafts show all of them.
#[test]
fn drafts_do_not_depend_on_how_their_tokens_were_computed() {
    for family in FAMILIES {
        let mut engine = engine(family, DRAFTS);
        let tokens = prompt(4, 43);
        let alone = start(&mut engine, &[]);
        let expected = drafts_behind(&mut engine, alone, &tokens, 64);
        assert_eq!(expected.1.len(), DRAFTS);
        // Other drafts have been written behind the tokens that are taken back.
        engine.truncate(alone, 30);
        assert_eq!(drafts_behind(&mut engine, alone, &tokens, 64), expected, "{family} after a truncation");
        engine.end(alone);
        for chunk in [1, 5, 17] {
            let id = start(&mut engine, &[]);
            assert_eq!(drafts_behind(&mut engine, id, &tokens, chunk), expected, "{family} in chunks of {chunk}");
            engine.end(id);
        }
        let id = start(&mut engine, &tokens);
        assert!(engine.length(id) >= Some(40), "{family} shares nothing");
        assert_eq!(drafts_behind(&mut engine, id, &tokens, 64), expected, "{family} behind a shared prefix");
        engine.end(id);

        // Behind a text of the model's own, with candidates that are right and one that is wrong.
        let id = start(&mut engine, &[]);
        let (mut text, mut outcomes) = (tokens[..30].to_vec(), Vec::new());
        let (mut next, mut drafts) = drafts_behind(&mut engine, id, &text, 64);
        let mut accepted = 0;
        while text.len() < 50 {
            text.push(next);
            let wrong = (drafts[1] + 1) % 48;
            let candidates = [drafts[0], drafts[1], if text.len() % 2 == 0 { drafts[2] } else { wrong }];
            let last = [next];
            let row = Row { sample: true, candidates: &candidates, ..Row::of(id, &last) };
            engine.submit(&[row]).unwrap_or_else(|e| panic!("{e}"));
            engine.complete(&mut outcomes).unwrap_or_else(|e| panic!("{e}"));
            text.extend(&candidates[..outcomes[0].accepted]);
            accepted += outcomes[0].accepted;
            let Next::Token(token) = outcomes[0].next else { panic!("is sampled") };
            (next, drafts) = (token, engine.drafts(id).to_vec());
        }
        engine.end(id);
        let id = start(&mut engine, &[]);
        assert_eq!(drafts_behind(&mut engine, id, &text, 64), (next, drafts), "{family} behind candidates");
        assert!(accepted > 5, "{family}: {accepted} accepted");
    }
}

/// The drafts behind a text, beside a sequence that has `drafts` behind a full block and no further one, in a row whose columns there
/// have blocks of the text.
fn drafts_in_a_full_pool(family: &str, text: &[u32], drafts: bool) -> Vec<u32> {
    let (session, model) = loaded(family, 2 * DRAFTS, false, cpu());
    let options = EngineOptions { context: 96, sequences: 2, chunk: 64, blocks: Some(10) };
    let mut engine = Engine::new(session, &model, options).unwrap_or_else(|e| panic!("{family}: {e}"));
    let before = engine.start(Sampling::GREEDY, 9).expect("a row is free");
    assert!(engine.grow(before, 40));
    drafts_behind(&mut engine, before, &prompt(7, 35), 64);
    engine.end(before);
    let one = engine.start(Sampling::GREEDY, 9).expect("a row is free");
    assert!(engine.grow(one, 16));
    let other = engine.start(Sampling::GREEDY, 9).expect("a row is free");
    assert!(engine.grow(other, 24) && !engine.grow(other, 25), "all blocks are in use");
    let (seen, last) = text.split_at(text.len() - 1);
    engine.step(&[(other, seen)], false, &mut Vec::new()).unwrap_or_else(|e| panic!("{e}"));
    if drafts {
        let (_, found) = drafts_behind(&mut engine, one, &prompt(2, 16), 64);
        assert_eq!(found.len(), 2 * DRAFTS);
    }
    engine.submit(&[Row { sample: true, ..Row::of(other, last) }]).unwrap_or_else(|e| panic!("{e}"));
    engine.complete(&mut Vec::new()).unwrap_or_else(|e| panic!("{e}"));
    engine.drafts(other).to_vec()
}

/// Columns of a row keep blocks of the sequence that had it before, which another one may have now.
#[test]
fn drafts_without_a_block_of_their_own_touch_no_other_sequence() {
    for family in FAMILIES {
        for seed in 0..6 {
            let text = prompt(seed, 18);
            let [expected, found] = [false, true].map(|drafts| drafts_in_a_full_pool(family, &text, drafts));
            assert_eq!(found, expected, "{family}, text {seed}");
        }
    }
}

#[test]
fn drafts_of_two_steps_in_flight_are_those_of_the_last() {
    for family in FAMILIES {
        let mut engine = engine(family, DRAFTS);
        let mut tokens = prompt(3, 30);
        let id = start(&mut engine, &[]);
        let (next, _) = drafts_behind(&mut engine, id, &tokens, 64);
        tokens.push(next);
        let expected = drafts_behind(&mut engine, id, &tokens, 64);
        engine.end(id);
        let id = start(&mut engine, &[]);
        engine.submit(&[Row { sample: true, ..Row::of(id, &tokens[..30]) }]).expect("runs");
        engine.submit(&[Row { sample: true, ..Row::of(id, &[SAMPLED]) }]).expect("runs");
        let mut outcomes = Vec::new();
        engine.complete(&mut outcomes).expect("runs");
        engine.complete(&mut outcomes).expect("runs");
        let Next::Token(token) = outcomes[0].next else { panic!("is sampled") };
        assert_eq!((token, engine.drafts(id).to_vec()), expected, "{family}");
    }
}

fn generate(engine: &mut Engine, id: Option<SequenceId>, request: &ridge_engine::Request) -> Generated {
    let all = |_| ControlFlow::Continue(());
    match id {
        None => engine.generate(request, all),
        Some(id) => engine.resume(id, request, all),
    }
    .unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_single_user_gets_the_same_text_in_fewer_steps() {
    for family in FAMILIES {
        let (mut plain, mut drafting) = (engine(family, 0), engine(family, DRAFTS));
        let warm = Sampling { temperature: 0.9, seed: 3, ..Sampling::GREEDY };
        let (mut candidates, mut accepted) = (0, 0);
        for (nth, sampling) in [Sampling::GREEDY, warm.clone(), Sampling { min_p: 0.1, ..warm }].into_iter().enumerate()
        {
            for (max_tokens, stop_tokens) in [(30, vec![]), (30, (40..48).collect()), (2, vec![]), (200, vec![])] {
                let prompt = prompt(nth as u32, 20 + nth);
                let request = ridge_engine::Request { prompt, sampling: sampling.clone(), max_tokens, stop_tokens };
                let found = generate(&mut drafting, None, &request);
                let expected = generate(&mut plain, None, &request);
                assert_eq!(found.tokens, expected.tokens, "{family}");
                assert_eq!(found.finish, expected.finish, "{family}");
                candidates += found.speculation.candidates;
                accepted += found.speculation.accepted;
            }
        }
        assert!(accepted * 3 > candidates && accepted < candidates, "{family}: {accepted} of {candidates}");
    }
}

/// A conversation goes on behind an answer that drafts went beyond.
#[test]
fn a_sequence_goes_on_behind_an_answer_with_drafts() {
    for family in FAMILIES {
        let told: Vec<_> = [0, DRAFTS]
            .map(|drafts| {
                let mut engine = engine(family, drafts);
                let id = engine.start(Sampling::GREEDY, 20).expect("a row is free");
                let request = |prompt: Vec<u32>, stop_tokens: Vec<u32>| ridge_engine::Request {
                    prompt,
                    sampling: Sampling::GREEDY,
                    max_tokens: 9,
                    stop_tokens,
                };
                let first = generate(&mut engine, Some(id), &request(prompt(1, 20), vec![]));
                let length = engine.length(id);
                let last = first.tokens[first.tokens.len() - 1];
                let second = generate(&mut engine, Some(id), &request(vec![last, 9, 17], (3..24).collect()));
                (first.tokens, length, second.tokens, second.finish, engine.length(id))
            })
            .into();
        assert_eq!(told[0], told[1], "{family}");
    }
}
