//! A model with a recurrence through the engine on the CPU: its state has a fixed size per sequence, and prefix hits,
//! preemption, roll-back, cancellation and steps in flight give what computing everything gives.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::scoring::{Question, Scorer, ScorerOptions};
use ridge_engine::service::{Event, Happened, Policy, Request, RequestId, Service, ServiceOptions};
use ridge_engine::{EmbedOptions, Embedder, Engine, EngineOptions, Ngram, STEPS_IN_FLIGHT, Sampling};
use ridge_graph::{Builder, DType, Shape, Type};
use ridge_models::{
    BuildOptions, HISTORY, Model, Module, Pooling, SentenceConfig, StateGroup, StepInputs, WeightSource, decaying_sum,
    finish_decoder, read_fixed, write_fixed,
};
use ridge_runtime::late::Late;
use ridge_runtime::{Backend, Session};

const VOCAB: usize = 64;
const WIDTH: usize = 32;
const LAYERS: usize = 2;

/// Layers of recurrences whose sums are of integers, so that no order of sums rounds. What a layer gives is a fraction of its
/// sum, in which every token of the sequence shows.
fn toy() -> Model {
    let options = BuildOptions { block_size: 4, ..BuildOptions::default() };
    let mut g = Builder::new();
    let step = StepInputs::ask(&mut g).expect("asks");
    let weight = |g: &mut Builder, name: &str, rows| {
        g.weight(name, Type::tensor(DType::F32, Shape::new([rows, WIDTH]))).expect("is asked for once")
    };
    let layout = g.token_layout(step.seq_ids, step.query_start, step.lengths, step.block_table, options.block_size);
    let (positions, slots) = layout.expect("has types");
    let table = weight(&mut g, "embedding", VOCAB);
    let mut x = g.embedding(table, step.token_ids, DType::F32).expect("embeds");
    let build = |g: &mut Builder, layer: usize, x| -> ridge_graph::Result<ridge_graph::Var> {
        let w = weight(g, &format!("layers.{layer}.in"), WIDTH);
        let y = g.linear(x, w)?;
        let scale = g.constant(DType::F32, 8192.0)?;
        let y = g.mul(y, scale)?;
        let whole = g.cast(y, DType::I32)?;
        let whole = g.cast(whole, DType::F32)?;
        let fixed = read_fixed(g, &format!("layers.{layer}.sum"), DType::F32, WIDTH)?;
        let [sums, after] = decaying_sum(g, [whole, fixed.before], [step.seq_ids, step.query_start], 1.0)?;
        write_fixed(g, &fixed, after)?;
        let small = g.constant(DType::F32, 1.0 / 16.0)?;
        let sums = g.mul(sums, small)?;
        let floor = g.cast(sums, DType::I32)?;
        let floor = g.cast(floor, DType::F32)?;
        let fraction = g.sub(sums, floor)?;
        g.add(fraction, x)
    };
    for layer in 0..LAYERS {
        x = build(&mut g, layer, x).expect("has types");
    }
    let head = |g: &mut Builder, x| {
        let w = g.weight("head", Type::tensor(DType::F32, Shape::new([VOCAB, WIDTH])))?;
        g.linear(x, w)
    };
    let graph = finish_decoder(g, x, &step, [positions, slots], &options, head).expect("builds");
    let group = |states, bytes_per_token, bytes_per_sequence| StateGroup {
        states,
        bytes_per_token,
        bytes_per_sequence,
        window: None,
        heads: 1,
    };
    Model {
        module: Module {
            family: "toy",
            graph,
            state_groups: vec![group((0..LAYERS).map(|l| format!("layers.{l}.sum")).collect(), 0, LAYERS * WIDTH * 4)],
            activations: DType::F32,
            shares: None,
        },
        answers: None,
        drafts: None,
        history: group(vec![HISTORY.to_owned()], 4, 0),
        cache: DType::F32,
        block_size: options.block_size,
        max_context: 256,
        vocab_size: VOCAB,
        eos_token_ids: vec![],
    }
}

pub(crate) fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts"))
}

fn loaded(backend: Arc<dyn Backend>) -> (Session, Model) {
    let mut model = toy();
    let source = WeightSource::Random(DType::F32);
    model.graph = source.retype(&model.graph, None).expect("fits");
    let mut session = Session::new(backend);
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    (session, model)
}

fn engine(chunk: usize) -> Engine {
    let (session, model) = loaded(cpu());
    let options = EngineOptions { context: 200, sequences: 2, chunk, blocks: None };
    Engine::new(session, &model, options).unwrap_or_else(|e| panic!("{e}"))
}

fn prompt(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i * 7 + i * 5 + seed * (i + 3)) % VOCAB as u32).collect()
}

/// The greedy answer, of a prompt in chunks of `chunk`.
fn alone(prompt: &[u32], count: usize, chunk: usize) -> Vec<u32> {
    let mut engine = engine(chunk);
    let id = engine.start(Sampling::GREEDY, prompt.len()).expect("has a row");
    let (mut next, mut answer) = (Vec::new(), Vec::new());
    for part in prompt.chunks(chunk) {
        engine.step(&[(id, part)], true, &mut next).unwrap_or_else(|e| panic!("{e}"));
    }
    while answer.len() < count {
        let token = next[0];
        answer.push(token);
        engine.step(&[(id, &[token])], true, &mut next).unwrap_or_else(|e| panic!("{e}"));
    }
    engine.end(id);
    let lines = engine.state_pool().expect("has states of a fixed size");
    assert_eq!(lines.free(), lines.count(), "lines are left over");
    answer
}

#[test]
fn chunks_do_not_change_an_answer_and_every_token_of_the_prompt_does() {
    let tokens = prompt(3, 41);
    let answer = alone(&tokens, 20, 41);
    assert!([1, 3, 16].iter().all(|chunk| alone(&tokens, 20, *chunk) == answer));
    let distinct: std::collections::HashSet<&u32> = answer.iter().collect();
    assert!(distinct.len() > 3, "the model says little: {answer:?}");
    let mut other = tokens;
    other[0] = (other[0] + 1) % VOCAB as u32;
    assert_ne!(alone(&other, 20, 41), answer, "the first token does not show");
}

#[test]
fn texts_are_embedded_from_no_state() {
    let sentence = SentenceConfig { pooling: Pooling::Last, ..SentenceConfig::default() };
    let (session, model) = loaded(cpu());
    let mut embedder = Embedder::of_decoder(session, &model, EmbedOptions::new(sentence, 64)).expect("is a decoder");
    let texts = [prompt(1, 9), prompt(2, 23), prompt(3, 40)];
    let mut embed = |texts: &[Vec<u32>]| embedder.embed(texts).unwrap_or_else(|e| panic!("{e}"));
    let together = embed(&texts);
    for (text, vector) in texts.iter().zip(&together) {
        assert_eq!(&embed(std::slice::from_ref(text))[0], vector);
        // The state has every token.
        let other = [(text[0] + 1) % VOCAB as u32].into_iter().chain(text[1..].iter().copied()).collect();
        assert_ne!(&embed(&[other])[0], vector);
    }
}

#[test]
fn continuations_are_scored_from_the_state_behind_their_context() {
    let scored = |step: usize, questions: &[Question<'_>]| {
        let (session, model) = loaded(cpu());
        let options = ScorerOptions { context: 64, step, questions: 2 };
        let mut scorer = Scorer::new(session, &model, options).unwrap_or_else(|e| panic!("{e}"));
        scorer.score(questions, |_| ()).unwrap_or_else(|e| panic!("{e}"))
    };
    let texts = [prompt(1, 40), prompt(2, 33), prompt(3, 21)];
    // All of a text behind its first token, in one step.
    let whole: Vec<Vec<f32>> = texts
        .iter()
        .map(|text| {
            let question = Question { context: &text[..1], continuations: vec![&text[1..]] };
            scored(64, &[question]).remove(0).remove(0)
        })
        .collect();
    assert!(whole.iter().flatten().all(|score| *score < 0.0));
    // Steps cut contexts and continuations anywhere, and more questions than there are lines for follow each other.
    for (step, context) in [(64, 17), (5, 17), (3, 1), (1, 9), (64, 20)] {
        let another = prompt(9, 12);
        let questions: Vec<Question<'_>> = texts
            .iter()
            .map(|text| Question {
                context: &text[..context],
                continuations: vec![&another, &text[context..], &another[..3], &text[context..]],
            })
            .collect();
        for (got, whole) in scored(step, &questions).iter().zip(&whole) {
            let rest = &whole[context - 1..];
            assert!(got[1] == rest && got[3] == rest, "steps of {step} behind {context}: {:?} and {rest:?}", got[1]);
            assert_eq!(got[0][..3], got[2]);
        }
    }
    // The first token shows in every score.
    let mut other = texts[0].clone();
    other[0] = (other[0] + 1) % VOCAB as u32;
    let question = Question { context: &other[..17], continuations: vec![&other[17..]] };
    assert!(scored(64, &[question])[0][0].iter().zip(&whole[0][16..]).all(|(a, b)| a != b));
}

#[test]
fn a_sequence_that_is_taken_back_is_computed_again() {
    let tokens = prompt(5, 30);
    let expected = alone(&tokens[..20], 8, 64);
    let mut engine = engine(64);
    let id = engine.start(Sampling::GREEDY, 30).expect("has a row");
    let mut next = Vec::new();
    engine.step(&[(id, &tokens)], true, &mut next).unwrap_or_else(|e| panic!("{e}"));
    // Going back to where it is costs nothing; the state before that is not there.
    engine.truncate(id, 30);
    assert_eq!(engine.length(id), Some(30));
    engine.truncate(id, 20);
    assert_eq!(engine.length(id), Some(0));
    engine.step(&[(id, &tokens[..20])], true, &mut next).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(next[0], expected[0]);
}

/// What a request was answered.
#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) answer: Vec<u32>,
    pub(crate) cached: Option<usize>,
}

/// Answers to all requests; one is cancelled on the way.
pub(crate) fn run(service: &mut Service, cancel: Option<RequestId>) -> BTreeMap<RequestId, Heard> {
    let (mut heard, mut events) = (BTreeMap::<RequestId, Heard>::new(), Vec::new());
    for step in 0.. {
        assert!(step < 5000, "it never ends: {:?}", service.stats());
        if service.is_idle() {
            break;
        }
        if step == 6 {
            cancel.into_iter().for_each(|id| service.cancel(id));
        }
        service.step(Duration::from_millis(step), &mut events);
        for Event { id, what } in events.drain(..) {
            let heard = heard.entry(id).or_default();
            match what {
                Happened::Token { token, .. } => heard.answer.push(token),
                Happened::Done(usage) => heard.cached = Some(usage.cached_tokens),
                Happened::Failed(why) | Happened::Stuck(why) => panic!("{why}"),
                _ => {}
            }
        }
    }
    assert_eq!(service.stats().blocks_used, 0);
    heard
}

fn service(backend: Arc<dyn Backend>, blocks: Option<usize>, chunk: usize) -> Service {
    let (session, model) = loaded(backend);
    let engine = EngineOptions { context: 128, sequences: 4, chunk, blocks };
    let options = ServiceOptions { engine, queue: 100, policy: Policy::FirstCome, prefix_cache: true };
    Service::new(session, &model, options).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn many_at_once_have_the_answers_that_each_has_alone() {
    let requests: Vec<(Vec<u32>, usize)> =
        (0..8).map(|i| (prompt(i / 2, 21 + 3 * i as usize), 12 + i as usize)).collect();
    let expected: Vec<Vec<u32>> = requests.iter().map(|(prompt, count)| alone(prompt, *count, 64)).collect();
    let (mut preempted, mut shared) = (0, 0);
    for (blocks, chunk, late, drafts) in
        [(None, 64, false, false), (Some(34), 16, true, false), (Some(24), 64, false, false), (None, 5, true, true)]
    {
        let backend: Arc<dyn Backend> = if late { Arc::new(Late::new(cpu(), 2)) } else { cpu() };
        let mut service = service(backend, blocks, chunk);
        if drafts {
            service = service.with_drafts(Ngram::new(4));
        }
        for cancels in [false, true] {
            let submit = |(prompt, count): &(Vec<u32>, usize)| {
                let request = Request { stop_tokens: Arc::default(), ..Request::new(prompt.clone(), *count) };
                service.submit(request, Duration::ZERO).unwrap_or_else(|e| panic!("{e}"))
            };
            let ids: Vec<RequestId> = requests.iter().map(submit).collect();
            let heard = run(&mut service, cancels.then_some(ids[1]));
            for (nth, (id, expected)) in ids.iter().zip(&expected).enumerate() {
                if cancels && nth == 1 {
                    let answer = heard.get(id).map(|heard| &heard.answer[..]).unwrap_or_default();
                    assert!(expected.starts_with(answer));
                } else {
                    assert_eq!(&heard[id].answer, expected, "request {nth}, {blocks:?} blocks, chunks of {chunk}");
                }
            }
        }
        preempted += service.stats().preemptions;
        shared += service.stats().prefix_hits;
    }
    assert!(preempted > 0 && shared > 0, "{preempted} preempted, {shared} shared");
}

#[test]
fn a_prompt_starts_from_the_longest_snapshot() {
    let mut service = service(cpu(), None, 64);
    let tokens = prompt(9, 50);
    let mut ask = |tokens: &[u32]| {
        let id = service.submit(Request::new(tokens.to_vec(), 6), Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
        let heard = run(&mut service, None).remove(&id).expect("has events");
        (heard.answer, heard.cached)
    };
    assert_eq!(ask(&tokens).1, Some(0));
    // Chunks end at the last boundary before the prompt's last token, and a snapshot is kept there.
    let (answer, cached) = ask(&tokens);
    assert_eq!((&answer, cached), (&alone(&tokens, 6, 64), Some(48)));
    let longer = [&tokens[..], &prompt(1, 9)].concat();
    let (answer, cached) = ask(&longer);
    assert_eq!((&answer, cached), (&alone(&longer, 6, 64), Some(48)));
    // Blocks alone are no hit: nobody kept the state behind 20 tokens.
    let shorter = [&tokens[..20], &prompt(2, 5)].concat();
    let (answer, cached) = ask(&shorter);
    assert_eq!((&answer, cached), (&alone(&shorter, 6, 64), Some(0)));
}

#[test]
fn the_pool_has_a_line_for_each_step_in_flight_and_for_snapshots() {
    let options = EngineOptions { context: 64, sequences: 3, chunk: 64, blocks: None };
    assert_eq!(options.state_lines(), 3 * (1 + STEPS_IN_FLIGHT + ridge_engine::SNAPSHOTS));
}
