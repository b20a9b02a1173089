//! Users of a service who come, wait, lose patience and go, in a time of their own.
//!
//! Everything follows from a seed. After each step the budget is checked, and at the end that every request had the events
//! that it must have, that each answer is the one that it has alone, and that no block is owned.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ridge_engine::service::{
    BlockUse, Constraint, Event, Happened, Policy, Refused, Request, RequestId, Service, ServiceOptions, Stats, Targets,
};
use ridge_engine::{EngineOptions, Finish, Logprobs, Made, Ngram, Sampling, row_widths};
use ridge_graph::FormatRef;
use ridge_graph::passes::Activations;
use ridge_models::{BuildOptions, Model, ModelFiles, RowTables, WeightSource};
use ridge_runtime::Session;

use super::device::{DAMAGED, Parrot, VOCAB, cache, keep, next_token, score};

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) struct Rng(pub u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// The embedded model with blocks of `block_size` tokens; `divided` has products by codes for tokens of answers.
pub(crate) fn model(block_size: usize, divided: bool) -> (Model, WeightSource) {
    let files = ModelFiles::open(None).expect("embedded");
    let options = BuildOptions { block_size, ..BuildOptions::default() };
    let mut model = files.config().expect("is supported").build(&options).expect("builds");
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    let format = divided.then(|| FormatRef::from_name("q8_0").expect("is a format"));
    model.graph = source.retype(&model.graph, format.as_ref()).expect("fits");
    if divided {
        model.take_activations(Activations::Exact, Activations::Int8);
    }
    (model, source)
}

/// A service of it on `backend`.
pub(crate) fn service(device: &Parrot, (block_size, divided): (usize, bool), options: ServiceOptions) -> Service {
    let (model, source) = model(block_size, divided);
    let blocks = options.engine.context.div_ceil(block_size);
    device.tables.get_or_init(|| RowTables::of(&model.graph, row_widths(blocks)));
    let mut session = Session::new(Arc::new(device.clone()));
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    let service = Service::new(session, &model, options).unwrap_or_else(|e| panic!("{e}"));
    let tokenizer = ModelFiles::open(None).expect("embedded").tokenizer().expect("reads");
    service.with_grammars(&tokenizer).expect("its tokens are bytes")
}

/// What answers may have to be.
const CONSTRAINTS: [&str; 4] =
    ["[a-z ]{3,12}", "(yes|no|perhaps)( and (yes|no))*", "[0-9]+\\.[0-9]{2}", "(a|ab|abc)+d"];

/// What a request has brought so far.
struct Open {
    request: Request,
    answers: Vec<Vec<u32>>,
    ended: Vec<Option<(Finish, Option<u32>)>>,
    prompt: Option<Vec<Logprobs>>,
    /// Answers that the user ended.
    stopped: Vec<usize>,
    submitted: u64,
}

/// What a world has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub steps: u64,
    pub submitted: u64,
    pub done: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub refused: u64,
    pub answers: u64,
    /// Steps from arrival to the end at most.
    pub longest: u64,
    pub stats: Stats,
}

impl Seen {
    pub(crate) fn add(&mut self, other: &Self) {
        for (to, from) in [
            (&mut self.steps, other.steps),
            (&mut self.submitted, other.submitted),
            (&mut self.done, other.done),
            (&mut self.failed, other.failed),
            (&mut self.cancelled, other.cancelled),
            (&mut self.refused, other.refused),
            (&mut self.answers, other.answers),
            (&mut self.stats.preemptions, other.stats.preemptions),
            (&mut self.stats.prefix_hits, other.stats.prefix_hits),
            (&mut self.stats.prefix_queries, other.stats.prefix_queries),
            (&mut self.stats.failed_steps, other.stats.failed_steps),
            (&mut self.stats.candidates, other.stats.candidates),
            (&mut self.stats.accepted, other.stats.accepted),
            (&mut self.stats.generated_tokens, other.stats.generated_tokens),
            (&mut self.stats.prompt_tokens, other.stats.prompt_tokens),
        ] {
            *to += from;
        }
        self.longest = self.longest.max(other.longest);
    }
}

/// A service, its users and its clock.
pub(crate) struct World {
    rng: Rng,
    device: Parrot,
    service: Service,
    /// What was made for its steps beforehand, if it was.
    ready: Option<Made>,
    /// Another, which has one request at a time.
    alone: Option<Service>,
    /// Tokens of answers are computed by codes, those of prompts exactly.
    divided: bool,
    options: ServiceOptions,
    now: Duration,
    open: HashMap<RequestId, Open>,
    /// One in so many rounds brings a request, and so on.
    rates: [usize; 4],
    seen: Seen,
    events: Vec<Event>,
}

/// Steps that no request may take longer than, under policies that pass nobody by.
const PATIENCE: u64 = 20_000;

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let block_size = rng.of(&[1, 4, 16]);
        let sequences = 1 + rng.below(12);
        let context = 8 + rng.below(120);
        let whole = context.div_ceil(block_size);
        let options = ServiceOptions {
            engine: EngineOptions {
                context,
                sequences,
                chunk: sequences + rng.below(64),
                // From too few for two sequences to enough for all.
                blocks: Some(whole.div_ceil(2) + rng.below(whole * sequences)),
            },
            queue: rng.below(30),
            policy: rng.of(&[Policy::FirstCome, Policy::Priority, Policy::Deadline, Policy::Fair]),
            prefix_cache: !rng.one_in(4),
        };
        let device = Parrot::default();
        let rates = [1 + rng.below(6), 5 + rng.below(60), 20 + rng.below(200), 100 + rng.below(2000)];
        let divided = rng.one_in(2);
        let mut service = service(&device, (block_size, divided), options);
        if rng.one_in(3) {
            let shortest = 1 + rng.below(2);
            service = service.with_drafts(Ngram {
                candidates: 1 + rng.below(16),
                longest: shortest + rng.below(3),
                shortest,
            });
        }
        let mut ready = None;
        if rng.one_in(2) {
            service = service.made_ready().expect("the device has room");
            ready = Some(service.stats().made);
        }
        let now = Duration::from_secs(7);
        Self {
            rng,
            ready,
            device,
            service,
            alone: None,
            divided,
            options,
            now,
            open: HashMap::new(),
            rates,
            seen: Seen::default(),
            events: Vec::new(),
        }
    }

    /// Runs `rounds` steps with users, and then until all that wait are served.
    pub(crate) fn run(mut self, rounds: u64) -> Seen {
        for _ in 0..rounds {
            let [arrive, cancel, stop, fail] = self.rates;
            if self.rng.one_in(arrive) {
                self.arrive();
            }
            if self.rng.one_in(cancel)
                && let Some(id) = self.any()
            {
                self.service.cancel(id);
                self.open.remove(&id);
                self.seen.cancelled += 1;
            }
            if self.rng.one_in(stop)
                && let Some(id) = self.any()
            {
                let open = &self.open[&id];
                let choice = self.rng.below(open.request.n + 1);
                let before = self.events.len();
                self.service.stop(id, choice, &mut self.events);
                if self.events.len() > before
                    && let Some(open) = self.open.get_mut(&id)
                {
                    open.stopped.push(choice);
                }
            }
            if self.rng.one_in(fail) {
                self.device.fail.store(true, Ordering::Relaxed);
            }
            self.step();
        }
        self.device.fail.store(false, Ordering::Relaxed);
        let mut last = 0;
        while !self.service.is_idle() {
            self.step();
            last += 1;
            assert!(last < 10 * PATIENCE, "what is left is never done: {:?}", self.service.stats());
        }
        assert!(self.open.is_empty(), "{} requests were forgotten", self.open.len());
        let stats = self.service.stats();
        assert_eq!((stats.running, stats.waiting, stats.blocks_used), (0, 0, 0), "something was left behind");
        assert!(self.service.blocks().iter().all(|b| !matches!(b, BlockUse::Used(_))));
        assert!(
            self.ready.is_none_or(|made| made == stats.made),
            "{:?} was ready, and now there is {:?}",
            self.ready,
            stats.made
        );
        self.seen.stats = stats;
        self.seen
    }

    fn any(&mut self) -> Option<RequestId> {
        // By number: the order of a hash map is not that of the seed.
        let mut ids: Vec<RequestId> = self.open.keys().copied().collect();
        ids.sort_unstable();
        (!ids.is_empty()).then(|| self.rng.of(&ids))
    }

    fn arrive(&mut self) {
        let rng = &mut self.rng;
        let (topic, length) = (rng.below(4) as u32, 1 + rng.below(self.options.engine.context));
        let same = rng.below(length + 1);
        // Some say one thing over and over, so that equal blocks stand at different places.
        let period = rng.of(&[1, 50]);
        let mut token =
            |i: usize| if i < same { topic * 100 + i as u32 % period + 20 } else { rng.below(VOCAB) as u32 };
        let mut prompt: Vec<u32> = (0..length).map(&mut token).collect();
        if !rng.one_in(50) {
            prompt.iter_mut().filter(|t| **t == DAMAGED).for_each(|t| *t += 1);
        }
        let millis = |rng: &mut Rng| (!rng.one_in(3)).then(|| Duration::from_millis(rng.below(3000) as u64));
        let request = Request {
            sampling: Sampling { logprobs: rng.one_in(5).then(|| rng.below(4) as u32), ..Sampling::GREEDY },
            n: if rng.one_in(4) { 1 + rng.below(4) } else { 1 },
            min_tokens: if rng.one_in(3) { rng.below(10) } else { 0 },
            stop_tokens: (0..rng.below(60)).map(|_| rng.below(VOCAB) as u32).collect(),
            priority: rng.below(3) as i32,
            targets: Targets { ttft: millis(rng), tpot: millis(rng) },
            tenant: rng.of(&["a", "b", "c"]).into(),
            salt: rng.below(2) as u64,
            prompt_logprobs: rng.one_in(6),
            constraint: rng.one_in(5).then(|| Constraint::Regex(rng.of(&CONSTRAINTS).to_owned())),
            ..Request::new(prompt, rng.below(40))
        };
        match self.service.submit(request.clone(), self.now) {
            Ok(id) => {
                let n = request.n;
                let (answers, ended, submitted) = (vec![Vec::new(); n], vec![None; n], self.seen.steps);
                let open = Open { request, answers, ended, prompt: None, stopped: Vec::new(), submitted };
                self.open.insert(id, open);
                self.seen.submitted += 1;
            }
            Err(Refused::Busy { waiting, .. }) => {
                assert!(waiting >= self.options.queue);
                self.seen.refused += 1;
            }
            Err(_) => self.seen.refused += 1,
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.rng.below(50) as u64);
        let ran = self.service.step(self.now, &mut self.events);
        let tokens: usize = ran.work.iter().map(|w| w.1).sum();
        let (rows, engine) = (ran.work.len(), self.options.engine);
        assert!(tokens <= engine.chunk && rows <= engine.sequences, "{tokens} tokens of {rows} sequences");
        assert!(ran.work.iter().all(|w| w.1 > 0 && w.0 + w.1 <= engine.context));
        let stats = self.service.stats();
        assert!(stats.running <= engine.sequences && stats.blocks_used <= stats.blocks);
        self.seen.steps += 1;
        for event in std::mem::take(&mut self.events) {
            self.heard(event);
        }
        if self.options.policy != Policy::Priority {
            for open in self.open.values() {
                let waited = self.seen.steps - open.submitted;
                assert!(waited < PATIENCE, "a request starves: {:?}", open.request);
            }
        }
    }

    fn heard(&mut self, Event { id, what }: Event) {
        let open = self.open.get_mut(&id).unwrap_or_else(|| panic!("{id:?} is over, and has {what:?}"));
        match what {
            Happened::Prompt(scores) => {
                assert!(open.prompt.replace(scores).is_none(), "a prompt is told twice");
                assert!(open.answers.iter().all(Vec::is_empty), "a prompt is told after the answer");
            }
            Happened::Token { choice, token, logprobs } => {
                assert!(open.ended[choice].is_none(), "an answer continues after its end");
                if let Some(logprobs) = &logprobs {
                    let said: Vec<u32> = open.request.prompt.iter().chain(&open.answers[choice]).copied().collect();
                    let exact = if self.divided { open.request.prompt.len() } else { said.len() };
                    assert_eq!(logprobs.chosen, score(&cache(&said, exact), token));
                }
                assert_eq!(logprobs.map(|l| l.top.len() as u32), open.request.sampling.logprobs);
                open.answers[choice].push(token);
            }
            Happened::Ended { choice, finish, stop_token } => {
                assert!(open.ended[choice].replace((finish, stop_token)).is_none(), "an answer ends twice");
                self.seen.answers += 1;
            }
            Happened::Done(usage) => {
                let open = self.open.remove(&id).expect("found above");
                assert_eq!(usage.prompt_tokens, open.request.prompt.len());
                assert_eq!(usage.completion_tokens, open.answers.iter().map(Vec::len).sum::<usize>());
                assert!(usage.cached_tokens < usage.prompt_tokens);
                self.seen.longest = self.seen.longest.max(self.seen.steps - open.submitted);
                self.seen.done += 1;
                self.judge(&open);
            }
            Happened::Stuck(why) => panic!("every constraint can be followed: {why}"),
            Happened::Failed(why) => {
                let open = self.open.remove(&id).expect("found above");
                let damaged = open.request.prompt.contains(&DAMAGED);
                assert!(
                    why.contains(if damaged { "not finite" } else { "told to fail" }) || why.contains("told to fail"),
                    "{why}"
                );
                self.seen.failed += 1;
            }
        }
    }

    /// The answer that a request has from a service of its own, which follows grammars.
    fn served_alone(&mut self, request: &Request, choice: usize) -> (Vec<u32>, (Finish, Option<u32>)) {
        let engine = self.options.engine;
        let alone = self.alone.get_or_insert_with(|| {
            let options = ServiceOptions { queue: 0, policy: Policy::FirstCome, prefix_cache: false, ..self.options };
            service(&Parrot::default(), (self.service.block_size(), self.divided), options)
        });
        // Answers of one request are told apart by their numbers, so all before it run too.
        let request = Request { n: choice + 1, prompt_logprobs: false, ..request.clone() };
        assert!(engine.sequences > 0);
        alone.submit(request, Duration::ZERO).unwrap_or_else(|_| panic!("it was taken before"));
        let (mut answer, mut ended, mut events) = (Vec::new(), None, Vec::new());
        while !alone.is_idle() {
            alone.step(Duration::ZERO, &mut events);
            for Event { what, .. } in events.drain(..) {
                match what {
                    Happened::Token { choice: of, token, .. } if of == choice => answer.push(token),
                    Happened::Ended { choice: of, finish, stop_token } if of == choice => {
                        ended = Some((finish, stop_token));
                    }
                    _ => {}
                }
            }
        }
        (answer, ended.expect("it ends"))
    }

    /// Holds what a request brought against what it brings alone.
    fn judge(&mut self, open: &Open) {
        let request = &open.request;
        let blocks = self.service.stats().blocks * self.service.block_size();
        let context = self.options.engine.context.min(blocks);
        if let Some(scores) = &open.prompt {
            let kept = cache(&request.prompt, request.prompt.len());
            let tops = request.sampling.logprobs.unwrap_or(0);
            let alone = |i: usize| Logprobs {
                chosen: score(&kept[..i], request.prompt[i]),
                top: (0..tops).map(|token| (token, score(&kept[..i], token))).collect(),
            };
            assert_eq!(*scores, (1..kept.len()).map(alone).collect::<Vec<_>>());
        } else {
            assert!(!request.prompt_logprobs || open.stopped.contains(&0), "the prompt was never told");
        }
        for (choice, (answer, ended)) in open.answers.iter().zip(&open.ended).enumerate() {
            let ended = ended.expect("every answer ends before its request is done");
            if open.stopped.contains(&choice) && answer.is_empty() {
                continue;
            }
            let (alone, finish) = match &request.constraint {
                None => alone(request, choice as u64, context, self.divided),
                Some(_) => self.served_alone(request, choice),
            };
            if open.stopped.contains(&choice) {
                assert!(alone.starts_with(answer), "{request:?}: {answer:?} is not how {alone:?} begins");
            } else {
                assert_eq!((answer, ended), (&alone, finish), "answer {choice} to {request:?}");
            }
        }
    }
}

/// The answer that a request has when nobody else is there.
fn alone(request: &Request, stream: u64, context: usize, divided: bool) -> (Vec<u32>, (Finish, Option<u32>)) {
    let mut said = request.prompt.clone();
    let prompt = said.len();
    let mut kept = cache(&said, prompt);
    loop {
        let answer = said[prompt..].to_vec();
        if answer.len() == request.max_tokens {
            return (answer, (Finish::Length, None));
        }
        if said.len() == context {
            return (answer, (Finish::Context, None));
        }
        let early = answer.len() < request.min_tokens;
        let stops = |token: u32| request.stop_tokens.contains(&token);
        let next = next_token(&kept, stream, |t| early && stops(t)).expect("it is not damaged");
        if stops(next) {
            return (answer, (Finish::Stop, Some(next)));
        }
        kept.push(keep(kept.last().copied(), next, divided));
        said.push(next);
    }
}
