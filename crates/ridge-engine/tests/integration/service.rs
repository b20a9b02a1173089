//! Many requests at once on the embedded model on the CPU: each has the answer that it has alone.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::service::{
    Constraint, Event, Happened, Policy, Refused, Request, RequestId, Service, ServiceOptions, Usage,
};
use ridge_engine::{Engine, EngineOptions, Finish, Logprobs, Ngram, Sampling};
use ridge_graph::FormatRef;
use ridge_graph::passes::Activations;
use ridge_models::{BuildOptions, Model, ModelFiles, WeightSource};
use ridge_runtime::late::Late;
use ridge_runtime::{Backend, Session};
use ridge_text::Tokenizer;

const OPTIONS: ServiceOptions = ServiceOptions {
    engine: EngineOptions { context: 256, sequences: 8, chunk: 64, blocks: None },
    queue: 100,
    policy: Policy::FirstCome,
    prefix_cache: true,
};

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts"))
}

fn tokenizer() -> Tokenizer {
    ModelFiles::open(None).and_then(|f| f.tokenizer()).expect("embedded")
}

/// How the embedded model computes tokens of prompts and of answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ways {
    /// Alike.
    One,
    /// By two graphs: in Q8_0, with exact activations for prompts and 8-bit codes for answers.
    Divided,
    /// By one graph, whose attention is told which tokens are of a prompt.
    Told,
}

impl Ways {
    const ALL: [Self; 3] = [Self::One, Self::Divided, Self::Told];
}

/// The embedded model.
fn loaded(backend: Arc<dyn Backend>, ways: Ways) -> (Session, Model) {
    let files = ModelFiles::open(None).expect("embedded");
    let options = BuildOptions { prompt_lengths: ways == Ways::Told, ..BuildOptions::default() };
    let mut model = files.config().expect("is supported").build(&options).expect("builds");
    let divided = ways == Ways::Divided;
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    let format = divided.then(|| FormatRef::from_name("q8_0").expect("is a format"));
    model.graph = source.retype(&model.graph, format.as_ref()).expect("fits");
    if divided {
        model.take_activations(Activations::Exact, Activations::Int8);
    }
    let mut session = Session::new(backend);
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    (session, model)
}

fn service_on(backend: Arc<dyn Backend>, ways: Ways, options: ServiceOptions) -> Service {
    let (session, model) = loaded(backend, ways);
    let service = Service::new(session, &model, options).unwrap_or_else(|e| panic!("{e}"));
    service.with_grammars(&tokenizer()).unwrap_or_else(|e| panic!("{e}"))
}

fn service(options: ServiceOptions) -> Service {
    service_on(cpu(), Ways::One, options)
}

fn encode(text: &str) -> Vec<u32> {
    tokenizer().encode(text, true).expect("encodes")
}

#[derive(Debug, Default)]
struct Heard {
    prompt: Vec<Logprobs>,
    answers: BTreeMap<usize, (Vec<u32>, Vec<Logprobs>)>,
    ended: BTreeMap<usize, (Finish, Option<u32>)>,
    done: Option<Usage>,
    failed: Option<String>,
}

fn hear(heard: &mut BTreeMap<RequestId, Heard>, events: &mut Vec<Event>) {
    for Event { id, what } in events.drain(..) {
        let heard = heard.entry(id).or_default();
        match what {
            Happened::Prompt(scores) => heard.prompt = scores,
            Happened::Token { choice, token, logprobs } => {
                let answer = heard.answers.entry(choice).or_default();
                answer.0.push(token);
                answer.1.extend(logprobs);
            }
            Happened::Ended { choice, finish, stop_token } => {
                heard.ended.insert(choice, (finish, stop_token));
            }
            Happened::Done(usage) => heard.done = Some(usage),
            Happened::Failed(why) | Happened::Stuck(why) => heard.failed = Some(why),
        }
    }
}

/// Runs a service until nothing is left to do.
fn run(service: &mut Service) -> BTreeMap<RequestId, Heard> {
    let (mut heard, mut events) = (BTreeMap::new(), Vec::new());
    for step in 0.. {
        assert!(step < 5000, "it never ends: {:?}", service.stats());
        if service.is_idle() {
            break;
        }
        service.step(Duration::from_millis(step), &mut events);
        hear(&mut heard, &mut events);
    }
    assert_eq!(service.stats().blocks_used, 0, "every block is free again");
    heard
}

fn one(service: &mut Service, request: Request) -> Heard {
    let id = service.submit(request, Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
    run(service).remove(&id).expect("it has events")
}

fn requests() -> Vec<Request> {
    let texts = [
        "Once upon a time, there was a",
        "Once upon a time, there was a little dog who",
        "Lily",
        "Tim and Tom saw a big",
    ];
    let particular = |seed| Sampling {
        temperature: 0.9,
        top_k: 40,
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        dry_multiplier: 0.8,
        logit_bias: vec![(261, -1.0)],
        logprobs: Some(2),
        seed,
        ..Sampling::GREEDY
    };
    let samplings = [Sampling::GREEDY, Sampling { temperature: 1.0, seed: 3, ..Sampling::GREEDY }, particular(4)];
    let all = samplings.iter().flat_map(|sampling| texts.map(|text| (sampling, text)));
    all.enumerate()
        .map(|(i, (sampling, text))| Request {
            sampling: sampling.clone(),
            ..Request::new(encode(&text.repeat(1 + i % 3)), 20 + 5 * i)
        })
        .collect()
}

#[test]
fn many_at_once_have_the_answers_that_each_has_alone() {
    many_at_once(Ways::One);
}

#[test]
fn and_where_prompts_are_computed_exactly_and_answers_by_codes() {
    many_at_once(Ways::Divided);
}

#[test]
fn and_where_attention_is_told_which_tokens_are_of_a_prompt() {
    many_at_once(Ways::Told);
}

/// Though a step may have as many rows, or rows and candidates, as tokens.
#[test]
fn steps_of_prompts_have_ready_buckets_where_attention_is_told() {
    for (chunk, candidates) in [(8, 0), (16, 8)] {
        let engine = EngineOptions { chunk, ..OPTIONS.engine };
        let mut service = service_on(cpu(), Ways::Told, ServiceOptions { engine, ..OPTIONS });
        if candidates > 0 {
            service = service.with_drafts(Ngram { candidates, longest: 2, shortest: 1 });
        }
        let mut service = service.made_ready().expect("fits");
        let ready = service.stats().made;
        // Prompts of one token, too: a step may begin as many as it has tokens.
        let short = (0..20).map(|token| Request::new(vec![300 + token], 3 + token as usize));
        for request in short.chain(requests()) {
            service.submit(request, Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
        }
        let heard = run(&mut service);
        assert!(heard.values().all(|heard| heard.done.is_some() && heard.failed.is_none()));
        assert_eq!(service.stats().made, ready, "steps of {chunk} tokens, {candidates} candidates");
    }
}

#[test]
fn a_step_of_one_token_is_refused_where_attention_is_told() {
    let (session, model) = loaded(cpu(), Ways::Told);
    let engine = EngineOptions { chunk: 1, sequences: 1, ..OPTIONS.engine };
    let refused = Service::new(session, &model, ServiceOptions { engine, ..OPTIONS }).err().map(|e| e.to_string());
    assert!(refused.as_ref().is_some_and(|why| why.contains("at least 2 with --deterministic")), "{refused:?}");
}

fn many_at_once(ways: Ways) {
    let (session, model) = loaded(cpu(), ways);
    let alone = EngineOptions { context: 256, sequences: 1, chunk: 256, blocks: None };
    let mut engine = Engine::new(session, &model, alone).unwrap_or_else(|e| panic!("{e}"));
    let expected: Vec<_> = requests()
        .into_iter()
        .map(|r| {
            let request = ridge_engine::Request {
                prompt: r.prompt,
                sampling: r.sampling,
                max_tokens: r.max_tokens,
                stop_tokens: vec![],
            };
            engine.generate(&request, |_| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
        })
        .collect();
    let (mut preempted, mut shared) = (0, 0);
    for (policy, blocks, prefix_cache, late) in [
        (Policy::FirstCome, None, true, false),
        (Policy::Deadline, Some(20), true, true),
        (Policy::Fair, Some(17), false, false),
        (Policy::Priority, Some(30), true, false),
    ] {
        let engine = EngineOptions { blocks, ..OPTIONS.engine };
        let backend = if late { Arc::new(Late::new(cpu(), 2)) } else { cpu() };
        let mut service = service_on(backend, ways, ServiceOptions { engine, policy, prefix_cache, ..OPTIONS });
        for _ in 0..2 {
            let submit = |r| service.submit(r, Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
            let ids: Vec<RequestId> = requests().into_iter().map(submit).collect();
            let heard = run(&mut service);
            for (id, expected) in ids.iter().zip(&expected) {
                let (tokens, logprobs) = &heard[id].answers[&0];
                assert_eq!((tokens, logprobs), (&expected.tokens, &expected.logprobs), "{policy:?}, {blocks:?} blocks");
                assert_eq!(heard[id].ended[&0], (expected.finish, None));
            }
        }
        preempted += service.stats().preemptions;
        shared += service.stats().prefix_hits;
    }
    assert!(preempted > 0 && shared > 0, "{preempted} preempted, {shared} shared");
}

#[test]
fn a_prompt_finds_what_was_computed_as_a_prompt_alone() {
    let prompt = encode("Once upon a time, there was a");
    for ways in Ways::ALL {
        let mut service = service_on(cpu(), ways, OPTIONS);
        let first = one(&mut service, Request::new(prompt.clone(), 60));
        let first = first.answers.get(&0).unwrap_or_else(|| panic!("{ways:?}: {first:?}")).0.clone();
        // The next turn begins with the answer to the first.
        let turn: Vec<u32> = [&prompt[..], &first, &encode(" The end. Then")].concat();
        let told = Sampling { logprobs: Some(512), ..Sampling::GREEDY };
        let next = Request { sampling: told, ..Request::new(turn.clone(), 20) };
        let heard = one(&mut service, next.clone());
        let found = |heard: &Heard| heard.done.expect("done").cached_tokens / 16;
        // All but the answer's last token was computed.
        let whole = if ways != Ways::One { prompt.len() } else { prompt.len() + first.len() - 1 };
        assert_eq!(found(&heard), whole / 16);
        let again = one(&mut service, next.clone());
        assert_eq!(found(&again), (turn.len() - 1) / 16);
        assert_eq!(again.answers, heard.answers);
        let alone = one(&mut service_on(cpu(), ways, OPTIONS), next);
        assert_eq!(alone.answers, heard.answers, "what others left in the cache shows");
    }
}

#[test]
fn answers_to_one_prompt_share_it_and_differ() {
    let mut service = service(ServiceOptions { prefix_cache: false, ..OPTIONS });
    let prompt = encode(&"Once upon a time, there was a little girl. ".repeat(6));
    let sampling = Sampling { temperature: 1.0, seed: 9, ..Sampling::GREEDY };
    let request = Request { sampling, n: 5, ..Request::new(prompt.clone(), 12) };
    let heard = one(&mut service, request.clone());
    let distinct: std::collections::HashSet<_> = heard.answers.values().map(|a| a.0.clone()).collect();
    assert_eq!((heard.answers.len(), distinct.len()), (5, 5));
    let computed = service.stats().prompt_tokens as usize;
    assert!(computed < prompt.len() + 5 * 16, "{computed} tokens of the prompt were computed");
    // Without a cache of prefixes the next request finds nothing; the answers are the same.
    let again = one(&mut service, request);
    assert_eq!((again.done.map(|u| u.cached_tokens), &again.answers), (Some(0), &heard.answers));
}

#[test]
fn candidates_change_no_answer_and_save_steps() {
    let texts = ["One day, a cat saw a dog. The cat ran. The dog ran. ", "Tim and Sam play. Tim and Sam run. "];
    let greedy = |text: &str| Request::new(encode(&text.repeat(3)), 60);
    let warm = Sampling { temperature: 0.6, frequency_penalty: 0.1, seed: 5, ..Sampling::GREEDY };
    let mut requests: Vec<Request> = texts.iter().map(|text| greedy(text)).collect();
    requests.push(Request { sampling: warm, ..greedy(texts[0]) });
    let all = |mut service: Service| {
        for request in &requests {
            service.submit(request.clone(), Duration::ZERO).unwrap_or_else(|e| panic!("{e}"));
        }
        let heard = run(&mut service);
        let answers: Vec<_> = heard.into_values().map(|heard| heard.answers).collect();
        (answers, service.stats())
    };
    let drafts = || Ngram::new(6);
    for ways in Ways::ALL {
        let alone = |drafts: Option<Ngram>| {
            let service = service_on(cpu(), ways, OPTIONS);
            let mut service = match drafts {
                Some(drafts) => service.with_drafts(drafts),
                None => service,
            };
            let heard = one(&mut service, requests[0].clone());
            (heard.answers, service.stats())
        };
        let ((plain, before), (drafted, after)) = (alone(None), alone(Some(drafts())));
        assert_eq!(plain, drafted, "alone");
        assert!(after.steps < before.steps && after.accepted > 0, "{} and {} steps", before.steps, after.steps);
        let backends = [cpu(), Arc::new(Late::new(cpu(), 2)) as Arc<dyn Backend>];
        for backend in backends {
            let (plain, before) = all(service_on(Arc::clone(&backend), ways, OPTIONS));
            let (drafted, stats) = all(service_on(backend, ways, OPTIONS).with_drafts(drafts()));
            assert_eq!(plain, drafted, "together");
            assert!(stats.accepted > 0 && stats.accepted <= stats.candidates);
            assert!(stats.steps < before.steps, "{} and {} steps", before.steps, stats.steps);
        }
    }
}

#[test]
fn a_prefix_is_found_under_its_own_salt() {
    let mut service = service(OPTIONS);
    let prompt = encode(&"Lily and Tim went to the park. ".repeat(8));
    let cached = |service: &mut Service, salt| {
        one(service, Request { salt, ..Request::new(prompt.clone(), 3) }).done.expect("done").cached_tokens
    };
    assert_eq!(cached(&mut service, 1), 0);
    assert_eq!(cached(&mut service, 1), (prompt.len() - 1) / 16 * 16);
    assert_eq!(cached(&mut service, 2), 0);
    assert!(service.stats().blocks_cached > 0);
}

#[test]
fn prompts_are_told_how_probable_they_are() {
    let mut service = service(OPTIONS);
    let prompt = encode(&"Once upon a time, there was a little dog. ".repeat(7));
    let sampling = Sampling { logprobs: Some(3), ..Sampling::GREEDY };
    let request = Request { sampling, prompt_logprobs: true, ..Request::new(prompt.clone(), 0) };
    let heard = one(&mut service, request.clone());
    assert!(heard.answers.is_empty() && heard.ended[&0] == (Finish::Length, None));
    assert_eq!(heard.prompt.len(), prompt.len() - 1);
    // What is told of a token behind a prompt is what is told of it as an answer.
    for at in [3, 40, prompt.len() - 1] {
        let asked = Sampling { logprobs: Some(512), ..Sampling::GREEDY };
        let answer = one(&mut service, Request { sampling: asked, ..Request::new(prompt[..at].to_vec(), 1) });
        let top = &answer.answers[&0].1[0].top;
        let said = top.iter().find(|(id, _)| *id == prompt[at]).expect("all are told").1;
        let told = &heard.prompt[at - 1];
        assert!((said - told.chosen).abs() < 1e-5, "{said} and {}", told.chosen);
        let ids = |top: &[(u32, f32)]| top.iter().take(3).map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!((told.top.len(), ids(&told.top)), (3, ids(top)));
        let apart = told.top.iter().zip(top).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-5, "{told:?}");
    }
    assert_eq!(one(&mut service, request).prompt, heard.prompt, "what is cached makes no difference");
}

#[test]
fn an_answer_does_not_stop_too_early() {
    let mut service = service(OPTIONS);
    let prompt = encode("Once upon a time");
    let free = one(&mut service, Request::new(prompt.clone(), 30)).answers[&0].0.clone();
    let stop = |min_tokens| Request { min_tokens, stop_tokens: free[..6].into(), ..Request::new(prompt.clone(), 30) };
    let heard = one(&mut service, stop(0));
    assert_eq!((heard.answers.len(), heard.ended[&0]), (0, (Finish::Stop, Some(free[0]))));
    let heard = one(&mut service, stop(8));
    let tokens = &heard.answers[&0].0;
    assert!(tokens.len() >= 8 && tokens[..8].iter().all(|t| !free[..6].contains(t)), "{tokens:?}");
}

fn text_of(heard: &Heard) -> String {
    assert_eq!(heard.failed, None);
    tokenizer().decode(&heard.answers.get(&0).map_or(vec![], |a| a.0.clone()), true).expect("decodes")
}

#[test]
fn constrained_answers_are_of_their_language() {
    let mut service = service(OPTIONS);
    let warm = |seed| Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
    let schema = r##"{"type": "object", "properties": {"name": {"$ref": "#/$defs/name"}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}, "$defs": {"name": {"enum": ["Lily", "Tim"]}}}"##;
    let mut ask = |constraint: Constraint, seed| {
        let request = Request {
            sampling: warm(seed),
            constraint: Some(constraint),
            ..Request::new(encode("Once upon a time"), 150)
        };
        let heard = one(&mut service, request);
        assert_eq!(heard.ended[&0].0, Finish::Stop, "{heard:?}");
        text_of(&heard)
    };
    for seed in 0..4 {
        let text = ask(Constraint::JsonSchema(schema.into()), seed);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(["Lily", "Tim"].contains(&value["name"].as_str().expect("a name")), "{text}");
        assert!((1..100).contains(&value["age"].as_i64().expect("an age")), "{text}");
        let text = ask(Constraint::Regex("[a-c]{3}-[0-9]{2}".into()), seed);
        let (letters, digits) = text.trim_start().split_once('-').unwrap_or_else(|| panic!("{text}"));
        assert!(
            letters.len() == 3 && letters.chars().all(|c| ('a'..='c').contains(&c)) && digits.parse::<u32>().is_ok()
        );
        let choices = ["yes \"sir\"".to_owned(), "no".to_owned(), "a|b".to_owned()];
        let text = ask(Constraint::Choice(choices.to_vec()), seed);
        assert!(choices.iter().any(|c| c == text.trim_start()), "{text}");
        let text = ask(Constraint::Lark("start: \"dog\" (\" \" WORD)+ \".\"\nWORD: /[a-z]{2}/".into()), seed);
        assert!(text.trim_start().starts_with("dog ") && text.ends_with('.'), "{text}");
    }
}

#[test]
fn a_bad_constraint_fails_its_request_alone() {
    let mut service = service(OPTIONS);
    let good = service.submit(Request::new(encode("Lily"), 10), Duration::ZERO).expect("taken");
    let bad = |constraint| Request { constraint: Some(constraint), ..Request::new(encode("Tim"), 10) };
    for (constraint, says) in [
        (Constraint::JsonSchema("{".into()), "json_schema = {: is not JSON"),
        (Constraint::JsonSchema(r#"{"type": "nonsense"}"#.into()), "json_schema"),
        (Constraint::Regex("(((".into()), "regex = (((:"),
        (Constraint::Choice(vec![]), "choice = : has no choices"),
        (Constraint::Lark("start: nothing".into()), "grammar = start: nothing:"),
    ] {
        let refused = service.submit(bad(constraint), Duration::ZERO).expect_err(says);
        assert!(matches!(refused, Refused::Invalid(_)) && refused.to_string().starts_with(says), "{refused}");
    }
    // One that takes long to match is bounded.
    let large = bad(Constraint::Regex("((a{1,500}){1,500}){1,500}b".into()));
    let large = service.submit(large, Duration::ZERO).expect("taken");
    let heard = run(&mut service);
    assert_eq!(heard[&good].answers[&0].0.len(), 10);
    assert!(heard[&large].failed.is_some() || heard[&large].ended[&0].0 == Finish::Length, "{heard:?}");
}

/// Many ways to derive each text.
const AMBIGUOUS: &str = "start: a\na: a a | b\nb: b b | c\nc: c c | /./";

/// Jobs that an executor was given and has not run.
type Jobs = Arc<Mutex<Vec<Box<dyn FnOnce() + Send>>>>;

/// A service whose costly masks are computed when its jobs are run, and requests to it: one that is costly and one beside.
fn with_jobs() -> (Service, Jobs, [RequestId; 2]) {
    let jobs = Jobs::default();
    let given = Arc::clone(&jobs);
    let mut service = service(OPTIONS).with_executor(Arc::new(move |job| given.lock().expect("whole").push(job)));
    let costly = Request { constraint: Some(Constraint::Lark(AMBIGUOUS.into())), ..Request::new(encode("Tim"), 14) };
    let costly = service.submit(costly, Duration::ZERO).expect("taken");
    let plain = service.submit(Request::new(encode("Lily"), 100), Duration::ZERO).expect("taken");
    (service, jobs, [costly, plain])
}

#[test]
fn costly_masks_hold_nobody_else_up_and_change_no_token() {
    let (mut service, jobs, [costly, plain]) = with_jobs();
    let (mut heard, mut events) = (BTreeMap::new(), Vec::new());
    let mut waited = 0;
    for step in 0..5000 {
        if service.is_idle() {
            break;
        }
        service.step(Duration::from_millis(step), &mut events);
        hear(&mut heard, &mut events);
        // Each mask comes three steps late.
        let mut jobs = jobs.lock().expect("whole");
        if !jobs.is_empty() && step % 3 == 0 {
            waited += jobs.len();
            jobs.drain(..).for_each(|job| job());
        }
    }
    assert!(waited > 2, "only {waited} masks were costly: {heard:?}");
    let alone = |constraint, prompt: &str, tokens| {
        let request = Request { constraint, ..Request::new(encode(prompt), tokens) };
        one(&mut self::service(OPTIONS), request).answers.remove(&0).expect("an answer").0
    };
    assert_eq!(heard[&plain].answers[&0].0, alone(None, "Lily", 100));
    assert_eq!(heard[&costly].answers[&0].0, alone(Some(Constraint::Lark(AMBIGUOUS.into())), "Tim", 14));
}

#[test]
fn request_whose_mask_never_comes_fails_alone() {
    let (mut service, jobs, [costly, plain]) = with_jobs();
    let (mut heard, mut events) = (BTreeMap::new(), Vec::new());
    for step in 0..1000 {
        if service.is_idle() {
            break;
        }
        service.step(Duration::from_millis(100 * step), &mut events);
        hear(&mut heard, &mut events);
    }
    assert!(!jobs.lock().expect("whole").is_empty());
    assert!(heard[&costly].failed.as_ref().is_some_and(|why| why.contains("retry later")), "{heard:?}");
    assert_eq!(heard[&plain].answers[&0].0.len(), 100);
    // What comes after all is of no use, and does no harm: cancelled work ends at once.
    jobs.lock().expect("whole").drain(..).for_each(|job| job());
    assert!(service.is_idle());
    service.step(Duration::from_secs(9), &mut Vec::new());
}

#[test]
fn request_whose_mask_is_given_up_fails_alone() {
    let (mut service, jobs, [costly, plain]) = with_jobs();
    let (mut heard, mut events) = (BTreeMap::new(), Vec::new());
    for step in 0..1000 {
        if service.is_idle() {
            break;
        }
        service.step(Duration::from_millis(step), &mut events);
        hear(&mut heard, &mut events);
        // As where the thread that had it panics.
        jobs.lock().expect("whole").clear();
    }
    assert!(heard[&costly].failed.as_ref().is_some_and(|why| why.contains("failed on it")), "{heard:?}");
    assert_eq!(heard[&plain].answers[&0].0.len(), 100);
    assert!(!service.waits_for_masks());
}

#[test]
fn what_cannot_run_is_refused_and_too_many_wait_elsewhere() {
    let mut service =
        service(ServiceOptions { queue: 2, engine: EngineOptions { sequences: 1, ..OPTIONS.engine }, ..OPTIONS });
    let refuse =
        |service: &mut Service, request| service.submit(request, Duration::ZERO).expect_err("refused").to_string();
    assert!(refuse(&mut service, Request::new(vec![], 5)).contains("no tokens"));
    assert!(refuse(&mut service, Request::new(vec![512], 5)).contains("vocabulary of 512"));
    assert!(refuse(&mut service, Request::new(vec![1; 256], 5)).contains("256 tokens"));
    assert!(refuse(&mut service, Request { n: 0, ..Request::new(vec![1], 5) }).starts_with("n = 0"));
    let hot = Sampling { temperature: f32::NAN, ..Sampling::GREEDY };
    assert!(
        refuse(&mut service, Request { sampling: hot, ..Request::new(vec![1], 5) }).starts_with("temperature = NaN")
    );
    let ids: Vec<_> =
        (0..3).map(|_| service.submit(Request::new(vec![1], 5), Duration::ZERO).expect("taken")).collect();
    let busy = service.submit(Request::new(vec![1], 5), Duration::ZERO).expect_err("refused");
    assert!(matches!(busy, Refused::Busy { waiting: 3, limit: 2 }), "{busy}");
    service.cancel(ids[0]);
    service.cancel(ids[0]);
    assert_eq!(run(&mut service).len(), 2);
    let few = ServiceOptions { engine: EngineOptions { chunk: 7, ..OPTIONS.engine }, ..OPTIONS };
    let (session, model) = loaded(cpu(), Ways::One);
    let refused = Service::new(session, &model, few).err().expect("refused").to_string();
    assert!(refused.starts_with("chunk = 7: a step must have room"), "{refused}");
}

#[test]
fn a_service_goes_to_another_thread() {
    fn send<T: Send>(_: &T) {}
    send(&service(OPTIONS));
}
