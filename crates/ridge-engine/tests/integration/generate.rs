//! The embedded model through the engine on the CPU: the text it must give, and that nothing but the request decides
//! about it.

use std::ops::ControlFlow;
use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::{
    Engine, EngineError, EngineOptions, Finish, Generated, Request, Sampling, SequenceId, Speculation, TextStream,
};
use ridge_models::embedded::STORIES_260K;
use ridge_models::{BuildOptions, Model, ModelFiles, WeightSource};
use ridge_runtime::{Backend, Session, late::Late};
use ridge_text::Tokenizer;

/// Tokens of `expected_greedy`.
const TOKENS: usize = 200;
const OPTIONS: EngineOptions = EngineOptions { context: 512, sequences: 2, chunk: 512, blocks: None };

fn cpu(threads: usize) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("starts"))
}

fn tokenizer() -> Tokenizer {
    ModelFiles::open(None).and_then(|f| f.tokenizer()).expect("embedded")
}

fn model() -> (Model, WeightSource) {
    let files = ModelFiles::open(None).expect("embedded");
    let config = files.config().expect("is supported");
    let mut model = config.build(&BuildOptions::default()).expect("builds");
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    model.graph = source.retype(&model.graph, None).expect("fits");
    (model, source)
}

fn try_engine(backend: Arc<dyn Backend>, options: EngineOptions) -> Result<Engine, EngineError> {
    let (model, source) = model();
    let mut session = Session::new(backend);
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    Engine::new(session, &model, options)
}

fn engine_on(backend: Arc<dyn Backend>, options: EngineOptions) -> Engine {
    try_engine(backend, options).unwrap_or_else(|e| panic!("{e}"))
}

fn engine(options: EngineOptions) -> Engine {
    engine_on(cpu(1), options)
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request { prompt: prompt.to_vec(), sampling: Sampling::GREEDY, max_tokens, stop_tokens: Vec::new() }
}

fn generate(engine: &mut Engine, request: &Request) -> Generated {
    engine.generate(request, |_| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

/// The tokens that greedily follow the begin token.
fn greedy(count: usize) -> Vec<u32> {
    generate(&mut engine(OPTIONS), &request(&[1], count)).tokens
}

fn warm(seed: u64) -> Sampling {
    Sampling { temperature: 0.9, top_k: 40, top_p: 0.95, seed, ..Sampling::GREEDY }
}

/// With everything that can be asked for.
fn particular(seed: u64) -> Sampling {
    Sampling {
        min_p: 0.02,
        typical_p: 0.95,
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        presence_penalty: 0.1,
        dry_multiplier: 0.8,
        dry_range: 100,
        dry_breakers: vec![13, 426],
        logit_bias: vec![(261, -1.0), (338, 0.5), (2, -100.0)],
        logprobs: Some(seed as u32 % 5),
        ..warm(seed)
    }
}

#[test]
fn the_greedy_text_is_the_published_one_on_any_number_of_threads() {
    let tokenizer = tokenizer();
    let expected = STORIES_260K.expected_greedy.strip_suffix('\n').expect("the file ends a line");
    for threads in [1, 2] {
        let mut engine = engine_on(cpu(threads), OPTIONS);
        let mut text = TextStream::new(&tokenizer, &[]);
        text.skip(&[1]).expect("decodes");
        let mut streamed = String::new();
        let generated = engine.generate(&request(&[1], TOKENS), |token| {
            streamed.push_str(&text.push(token).expect("decodes"));
            ControlFlow::Continue(())
        });
        let generated = generated.unwrap_or_else(|e| panic!("{e}"));
        streamed.push_str(&text.finish().expect("decodes"));
        assert_eq!(streamed, expected, "{threads} threads");
        assert_eq!(tokenizer.decode(&generated.tokens, true).expect("decodes").trim_start(), expected.trim_start());
        assert_eq!((generated.tokens.len(), generated.finish), (TOKENS, Finish::Length));
    }
}

#[test]
fn a_prompt_that_begins_the_answer_is_continued_as_it_whatever_its_chunks() {
    let answer = greedy(TOKENS);
    let prompt: Vec<u32> = [1].into_iter().chain(answer[..130].iter().copied()).collect();
    for chunk in [1, 3, 64, 512] {
        for threads in [1, 2] {
            let mut engine = engine_on(cpu(threads), EngineOptions { chunk, ..OPTIONS });
            let rest = generate(&mut engine, &request(&prompt, TOKENS - 130)).tokens;
            assert_eq!(rest, answer[130..], "chunks of {chunk} on {threads} threads");
        }
    }
}

#[test]
fn a_device_that_completes_late_gives_the_same_tokens() {
    let answer = greedy(40);
    for polls in [0, 3] {
        let mut engine = engine_on(Arc::new(Late::new(cpu(2), polls)), EngineOptions { chunk: 7, ..OPTIONS });
        let prompt: Vec<u32> = [1].into_iter().chain(answer[..20].iter().copied()).collect();
        assert_eq!(generate(&mut engine, &request(&prompt, 20)).tokens, answer[20..]);
    }
}

/// A sequence that is driven step by step.
struct Running {
    id: SequenceId,
    next: Vec<u32>,
    tokens: Vec<u32>,
}

impl Running {
    fn start(engine: &mut Engine, request: &Request) -> Self {
        Self {
            id: engine.start(request.sampling.clone(), request.prompt.len()).expect("a row"),
            next: request.prompt.clone(),
            tokens: Vec::new(),
        }
    }

    fn took(&mut self, token: u32) {
        self.tokens.push(token);
        self.next = vec![token];
    }
}

fn step(engine: &mut Engine, running: &mut [&mut Running]) {
    let mut next = Vec::new();
    let work: Vec<(SequenceId, &[u32])> = running.iter().map(|r| (r.id, &r.next[..])).collect();
    engine.step(&work, true, &mut next).unwrap_or_else(|e| panic!("{e}"));
    for (r, token) in running.iter_mut().zip(next) {
        r.took(token);
    }
}

#[test]
fn interleaved_sequences_give_the_tokens_that_they_give_alone() {
    let tokenizer = tokenizer();
    let prompts = ["Once upon a time, there was a dog", "Lily and Tim went to the park. They saw a big"];
    let prompts = prompts.map(|p| tokenizer.encode(p, true).expect("encodes"));
    for samplings in [
        [Sampling::GREEDY, Sampling::GREEDY],
        [warm(5), warm(5)],
        [warm(1), Sampling::GREEDY],
        [particular(2), particular(9)],
        [particular(4), warm(4)],
        [Sampling::GREEDY, particular(3)],
    ] {
        let requests: Vec<Request> =
            prompts.iter().zip(samplings).map(|(p, sampling)| Request { sampling, ..request(p, 30) }).collect();
        let alone: Vec<Vec<u32>> = requests.iter().map(|r| generate(&mut engine(OPTIONS), r).tokens).collect();
        assert_ne!(alone[0], alone[1]);

        let mut engine = engine_on(cpu(2), OPTIONS);
        let free = engine.free_blocks();
        let mut first = Running::start(&mut engine, &requests[0]);
        for _ in 0..4 {
            step(&mut engine, &mut [&mut first]);
        }
        // The second one's prompt shares a step with a token of the first, and then they change places.
        let mut second = Running::start(&mut engine, &requests[1]);
        assert_eq!(engine.start(Sampling::GREEDY, 1), None, "there are two rows");
        step(&mut engine, &mut [&mut first, &mut second]);
        step(&mut engine, &mut [&mut second]);
        for i in 0..20 {
            if i % 3 == 0 {
                step(&mut engine, &mut [&mut second, &mut first]);
            } else {
                step(&mut engine, &mut [&mut first, &mut second]);
            }
        }
        assert_eq!(first.tokens, alone[0][..25]);
        assert_eq!(second.tokens, alone[1][..22]);

        // A row and blocks that were used before make no difference.
        engine.end(first.id);
        let mut again = Running::start(&mut engine, &requests[0]);
        for _ in 0..8 {
            step(&mut engine, &mut [&mut second, &mut again]);
        }
        assert_eq!((&again.tokens[..], &second.tokens[..]), (&alone[0][..8], &alone[1][..]));
        engine.end(second.id);
        engine.end(again.id);
        assert_eq!(engine.free_blocks(), free);
    }
}

#[test]
fn a_seed_gives_the_same_text_again_and_another_seed_another() {
    for sampling in [warm, particular] {
        let answer = |chunk, seed, threads| {
            let mut engine = engine_on(cpu(threads), EngineOptions { chunk, ..OPTIONS });
            let request = Request { sampling: sampling(seed), ..request(&[1, 403, 407, 261], 60) };
            generate(&mut engine, &request)
        };
        let first = answer(512, 7, 1);
        assert_eq!(answer(1, 7, 2), first);
        assert_ne!(answer(512, 8, 1).tokens, first.tokens);
        // A seed of more than 63 bits is a key like any other.
        assert_eq!(answer(512, u64::MAX, 3), answer(3, u64::MAX, 1));
    }
}

/// The greedy answer to `<s>`, but for some setting.
fn answer_but(setting: impl FnOnce(&mut Sampling)) -> Generated {
    let mut sampling = Sampling::GREEDY;
    setting(&mut sampling);
    generate(&mut engine(OPTIONS), &Request { sampling, ..request(&[1], 120) })
}

#[test]
fn biases_and_penalties_do_what_they_say() {
    let plain = greedy(120);
    let count = |tokens: &[u32], id: u32| tokens.iter().filter(|t| **t == id).count();
    let banned = answer_but(|s| s.logit_bias = vec![(plain[3], -1000.0)]).tokens;
    assert_eq!((&banned[..3], count(&banned, plain[3])), (&plain[..3], 0));
    let forced = answer_but(|s| s.logit_bias = vec![(77, 1000.0)]).tokens;
    assert_eq!(forced, [77; 120]);
    // What costs more than any logit is said once, and a prompt of one token is no answer.
    let once = answer_but(|s| s.presence_penalty = 1000.0).tokens;
    assert!(once.iter().all(|id| count(&once, *id) == 1), "{once:?}");
    let once = answer_but(|s| s.frequency_penalty = 1000.0).tokens;
    assert!(once.iter().all(|id| count(&once, *id) == 1), "{once:?}");
    let kinds = |tokens: &[u32]| tokens.iter().collect::<std::collections::HashSet<_>>().len();
    let varied = answer_but(|s| s.repetition_penalty = 1.5).tokens;
    assert!(kinds(&varied) > kinds(&plain), "{varied:?}");
    // Without DRY some three tokens stand twice; with a high price none do.
    let repeats =
        |tokens: &[u32]| tokens.windows(3).enumerate().any(|(i, w)| tokens[i + 1..].windows(3).any(|v| v == w));
    let dry = |multiplier, breakers| answer_but(|s| (s.dry_multiplier, s.dry_breakers) = (multiplier, breakers)).tokens;
    assert!(repeats(&plain) && !repeats(&dry(1000.0, vec![])));
    // Where every token breaks them there are no repetitions.
    assert_eq!(dry(1000.0, (0..512).collect()), plain);
}

#[test]
fn a_step_that_is_watched_gives_the_same_token_and_every_launch() {
    for threads in [1, 3] {
        let mut engine = engine_on(cpu(threads), OPTIONS);
        let id = engine.start(Sampling::GREEDY, 1).expect("a row");
        let (mut next, answer) = (Vec::new(), greedy(3));
        let started = std::time::Instant::now();
        let times = engine.step_timed(&[(id, &[1])], true, &mut next).expect("it runs");
        let elapsed = started.elapsed().as_secs_f64();
        assert_eq!(next, answer[..1]);
        let graph = engine.lowered(true, false).expect("it ran");
        let count =
            |name: &str| times.iter().filter(|t| graph.function(t.func).nodes[t.node].op_name() == name).count();
        assert_eq!((count("attention"), count("sample_token")), (5, 1));
        let sum: f64 = times.iter().map(|t| t.seconds).sum();
        assert!(times.iter().all(|t| t.seconds >= 0.0) && sum > 0.0 && sum <= elapsed, "{sum} of {elapsed}");
        engine.step(&[(id, &answer[..1])], true, &mut next).expect("it runs");
        assert_eq!(next, answer[1..2]);
    }
    // A device without such a clock says so, and continues.
    let mut engine = engine_on(Arc::new(Late::new(cpu(1), 1)), OPTIONS);
    let id = engine.start(Sampling::GREEDY, 1).expect("a row");
    let refused = engine.step_timed(&[(id, &[1])], true, &mut Vec::new()).expect_err("no clock").to_string();
    assert!(refused.contains("does not time"), "{refused}");
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let answer = answer_but(|s| s.logprobs = Some(512));
    assert_eq!(answer.logprobs.len(), 120);
    for (token, logprobs) in answer.tokens.iter().zip(&answer.logprobs) {
        assert_eq!((logprobs.top.len(), logprobs.top[0]), (512, (*token, logprobs.chosen)));
        assert!(logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
        let total: f64 = logprobs.top.iter().map(|(_, l)| f64::from(*l).exp()).sum();
        assert!((total - 1.0).abs() < 1e-5, "{total}");
    }
    // Adjusted or not, a token is told with the probability that the model gave it.
    let forced = answer_but(|s| {
        s.logprobs = Some(2);
        s.logit_bias = vec![(77, 1000.0)];
    });
    let first = &forced.logprobs[0];
    let unforced = answer.logprobs[0].top.iter().find(|(id, _)| *id == 77).expect("all are told").1;
    assert_eq!((first.chosen, &first.top[..]), (unforced, &answer.logprobs[0].top[..2]));
    assert!(answer_but(|_| ()).logprobs.is_empty());
    assert!(answer_but(|s| s.logprobs = Some(0)).logprobs.iter().all(|l| l.top.is_empty() && l.chosen < 0.0));
}

#[test]
fn sampling_from_the_likeliest_token_alone_is_greedy() {
    let answer = greedy(30);
    for sampling in [Sampling { top_k: 1, ..warm(3) }, Sampling { top_p: 1e-6, ..warm(3) }] {
        assert_eq!(generate(&mut engine(OPTIONS), &Request { sampling, ..request(&[1], 30) }).tokens, answer);
    }
}

#[test]
fn an_answer_ends_where_it_is_told_to() {
    let answer = greedy(40);
    let mut engine = engine(EngineOptions { context: 30, ..OPTIONS });
    let free = engine.free_blocks();
    assert_eq!(
        generate(&mut engine, &request(&[1], 0)),
        Generated { tokens: vec![], logprobs: vec![], finish: Finish::Length, speculation: Speculation::default() }
    );

    let full = generate(&mut engine, &request(&[1], 100));
    assert_eq!((full.tokens, full.finish), (answer[..29].to_vec(), Finish::Context));

    // A token that comes for the first time.
    let at = (5..29).find(|i| !answer[..*i].contains(&answer[*i])).expect("texts have new tokens");
    let stopped = generate(&mut engine, &Request { stop_tokens: vec![answer[at]], ..request(&[1], 100) });
    assert_eq!((stopped.tokens, stopped.finish), (answer[..at].to_vec(), Finish::Stop));

    let mut left = 3;
    let cancelled = engine.generate(&request(&[1], 100), |_| {
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let cancelled = cancelled.expect("runs");
    assert_eq!((cancelled.tokens, cancelled.finish), (answer[..3].to_vec(), Finish::Cancelled));
    assert_eq!(engine.free_blocks(), free, "every block is free again");
}

#[test]
fn requests_that_cannot_run_say_why_and_take_nothing() {
    let mut engine = engine(EngineOptions { context: 20, ..OPTIONS });
    let free = engine.free_blocks();
    let refuse = |engine: &mut Engine, request: &Request| {
        let error = engine.generate(request, |_| panic!("no token may come")).expect_err("refused");
        error.to_string()
    };
    let long = refuse(&mut engine, &request(&[1; 20], 5));
    assert!(long.contains("20 tokens and the context holds 20") && long.contains("raise the context"), "{long}");
    let unknown = refuse(&mut engine, &request(&[1, 512], 5));
    assert!(unknown.contains("token 512 ") && unknown.contains("vocabulary of 512"), "{unknown}");
    let empty = refuse(&mut engine, &request(&[], 5));
    assert!(empty.contains("give a prompt"), "{empty}");
    let sampling = Sampling { temperature: -1.0, ..Sampling::GREEDY };
    let cold = refuse(&mut engine, &Request { sampling, ..request(&[1], 5) });
    assert!(cold.starts_with("temperature = -1"), "{cold}");

    let held = [engine.start(Sampling::GREEDY, 1), engine.start(Sampling::GREEDY, 1)];
    let busy = refuse(&mut engine, &request(&[1], 5));
    assert!(busy.starts_with("sequences = 2"), "{busy}");
    held.into_iter().flatten().for_each(|id| engine.end(id));

    // What fits exactly still runs.
    assert_eq!(generate(&mut engine, &request(&[1; 19], 5)).finish, Finish::Context);
    assert_eq!(engine.free_blocks(), free);
}

#[test]
fn a_step_that_does_not_fit_the_cache_changes_nothing() {
    let answer = greedy(40);
    let mut engine = engine(EngineOptions { context: 32, ..OPTIONS });
    let mut running = Running::start(&mut engine, &request(&[1], 40));
    for _ in 0..10 {
        step(&mut engine, &mut [&mut running]);
    }
    let other = engine.start(Sampling::GREEDY, 1).expect("a row");
    let free = engine.free_blocks();
    let mut next = vec![9];
    let too_many = [(running.id, &answer[9..10]), (other, &[1; 33][..])];
    let error = engine.step(&too_many, true, &mut next).expect_err("32 fit");
    assert!(matches!(error, EngineError::CacheFull { tokens: 33 }), "{error}");
    assert_eq!((engine.free_blocks(), next.len()), (free, 0));
    engine.end(other);
    for _ in 0..22 {
        step(&mut engine, &mut [&mut running]);
    }
    assert_eq!(running.tokens, answer[..32]);
    let error = engine.step(&[(running.id, &answer[31..32])], true, &mut next).expect_err("it is full");
    assert!(matches!(error, EngineError::CacheFull { tokens: 1 }), "{error}");

    let id = running.id;
    engine.end(id);
    let error = engine.step(&[(id, &[1])], true, &mut next).expect_err("it has ended").to_string();
    assert_eq!(error, "sequence = 0: is not running");

    // The next sequence has its row, and is neither stepped nor ended under the old name.
    let next_one = engine.start(Sampling::GREEDY, 1).expect("a row");
    assert!(engine.step(&[(id, &[1])], true, &mut next).is_err());
    engine.end(id);
    engine.step(&[(next_one, &[1])], true, &mut next).expect("it runs");
    assert_eq!(next, answer[..1]);
}

#[test]
fn a_step_that_makes_no_sense_changes_nothing() {
    let mut engine = engine(OPTIONS);
    let [a, b] = [(); 2].map(|()| engine.start(Sampling::GREEDY, 1).expect("a row"));
    let free = engine.free_blocks();
    let mut next = Vec::new();
    let mut refuse =
        |work: &[(SequenceId, &[u32])]| engine.step(work, true, &mut next).expect_err("refused").to_string();
    assert_eq!(
        refuse(&[(b, &[1]), (a, &[1]), (b, &[2])]),
        "sequence = 1: appears twice in one step; give all its tokens together"
    );
    assert_eq!(refuse(&[(a, &[1]), (b, &[])]), "sequence = 1: has no tokens in this step; leave it out");
    assert!(refuse(&[(a, &[1]), (b, &[512])]).contains("512"));
    assert_eq!(engine.free_blocks(), free);
    engine.step(&[], true, &mut next).expect("nothing to do");
    engine.step(&[(a, &[1]), (b, &[1])], true, &mut next).expect("it runs");
    assert_eq!(next, [greedy(1)[0]; 2]);
}

#[test]
fn an_engine_that_cannot_be_names_the_setting() {
    let refuse = |options| try_engine(cpu(1), options).err().expect("refused").to_string();
    assert_eq!(
        refuse(EngineOptions { context: 513, ..OPTIONS }),
        "context = 513: the model supports at most 512 tokens"
    );
    for (name, options) in [
        ("context", EngineOptions { context: 0, ..OPTIONS }),
        ("sequences", EngineOptions { sequences: 0, ..OPTIONS }),
        ("chunk", EngineOptions { chunk: 0, ..OPTIONS }),
    ] {
        assert_eq!(refuse(options), format!("{name} = 0: must be at least 1"));
    }
}

#[test]
fn a_sequence_taken_back_goes_on_as_if_the_rest_had_never_been() {
    let prompt: Vec<u32> = greedy(40);
    let other: Vec<u32> = prompt[30..].iter().rev().copied().collect();
    for kept in [1, 15, 16, 17, 33, 40] {
        let whole: Vec<u32> = prompt[..kept].iter().chain(&other).copied().collect();
        let expected = generate(&mut engine(OPTIONS), &request(&whole, 30));
        let mut engine = engine(OPTIONS);
        let free = engine.free_blocks();
        let id = engine.start(Sampling::GREEDY, 1).expect("a row is free");
        engine.resume(id, &request(&prompt, 20), |_| ControlFlow::Continue(())).expect("runs");
        // The last token was sampled and not fed.
        assert_eq!(engine.length(id), Some(59));
        engine.truncate(id, 100);
        assert_eq!(engine.length(id), Some(59));
        engine.truncate(id, kept);
        assert_eq!(engine.length(id), Some(kept));
        let again = engine.resume(id, &request(&other, 30), |_| ControlFlow::Continue(())).expect("runs");
        assert_eq!(again, expected, "after {kept} tokens");
        engine.truncate(id, 0);
        assert_eq!(engine.free_blocks(), free);
        engine.end(id);
        assert_eq!(engine.length(id), None);
        assert!(engine.resume(id, &request(&other, 1), |_| ControlFlow::Continue(())).is_err());
    }
}

#[test]
fn what_is_in_the_cache_counts_towards_the_context() {
    let mut engine = engine(EngineOptions { context: 40, ..OPTIONS });
    let id = engine.start(Sampling::GREEDY, 1).expect("a row is free");
    let prompt = greedy(30);
    engine.resume(id, &request(&prompt, 1), |_| ControlFlow::Continue(())).expect("runs");
    let refused = engine.resume(id, &request(&prompt[..10], 1), |_| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(EngineError::PromptTooLong { prompt: 40, context: 40 })), "{refused:?}");
    let full = engine.resume(id, &request(&prompt[..6], 100), |_| ControlFlow::Continue(())).expect("runs");
    assert_eq!((full.tokens.len(), full.finish), (4, Finish::Context));
}
