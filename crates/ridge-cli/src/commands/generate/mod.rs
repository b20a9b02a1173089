//! `ridge generate`: streams one completion.

mod args;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ridge::{Cluster, CollectiveError, LoadedEngine, Placement, RunSettings, TensorParallel};
use ridge_engine::{Engine, Finish, Generated, Request, Speculation, TextStream};
use ridge_graph::sample::Rng;
use ridge_hub::HubModel;
use ridge_hw::units::Seconds;
use ridge_models::{Model, ModelConfig, ModelFiles};
use ridge_text::Tokenizer;
use serde_json::json;

pub(crate) use args::GenerateArgs;
use args::{GeneratePrompt, GenerateSettings};

use crate::args::{decimal, settings_json};
use crate::error::{Error, Result, refused};
use crate::input;
use crate::output::{LoadProgress, be_silent, count, note, print, print_json};

pub(crate) fn run(args: GenerateArgs) -> Result<()> {
    let mut settings = args.resolve()?;
    let parallel = settings.parallel.join()?;
    let TensorParallel::Processes(cluster) = &parallel else { return generate(&settings, &parallel) };
    give_up_when_ranks_do(cluster)?;
    let outcome = agree(&mut settings, cluster).and_then(|()| generate(&settings, &parallel));
    match &outcome {
        Ok(()) => cluster.leave(),
        Err(error) => cluster.fail(&error.to_string()),
    }
    outcome
}

/// Synchronises the ranks: all use the prompt and the seed of the first rank, and only the first rank prints.
fn agree(settings: &mut GenerateSettings, cluster: &Cluster) -> Result<()> {
    let failed = |error: CollectiveError| Error::Ranks { why: error.to_string() };
    let prompt = match &settings.prompt {
        GeneratePrompt::Stdin if cluster.rank() == 0 => input::stdin()?,
        _ => String::new(),
    };
    let mut said = settings.sampling.values.seed.to_le_bytes().to_vec();
    said.extend(prompt.as_bytes());
    let said = cluster.agree(&said).map_err(failed)?;
    let (seed, prompt) = said.split_at(8.min(said.len()));
    settings.sampling.values.seed = seed.try_into().map_or(0, u64::from_le_bytes);
    if settings.prompt == GeneratePrompt::Stdin {
        settings.prompt = GeneratePrompt::Text(String::from_utf8_lossy(prompt).into_owned());
    }
    if cluster.rank() > 0 {
        be_silent();
        (settings.notes, settings.timing, settings.verbose) = (false, false, false);
    }
    Ok(())
}

/// Time for a rank to end by itself after another rank was lost.
const GRACE: Duration = Duration::from_secs(2);

/// Ends this process if the group has failed and the main thread does not detect it, for example while it loads or waits for
/// a device.
fn give_up_when_ranks_do(cluster: &Arc<Cluster>) -> Result<()> {
    let cluster = Arc::downgrade(cluster);
    let watch = move || {
        while let Some(cluster) = cluster.upgrade() {
            if let Some(failure) = cluster.failure() {
                drop(cluster);
                std::thread::sleep(GRACE);
                note(&format!("error: {failure}"));
                #[expect(clippy::exit, reason = "the main thread may be blocked")]
                std::process::exit(1);
            }
            drop(cluster);
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let started = std::thread::Builder::new().name("ranks".into()).spawn(watch);
    started.map(drop).map_err(|cause| Error::Ranks { why: format!("cannot start a thread: {cause}") })
}

fn generate(settings: &GenerateSettings, parallel: &TensorParallel) -> Result<()> {
    let started = Instant::now();
    let files = ModelFiles::open(settings.model.path.as_deref())?;
    let config = files.config()?;
    if let GeneratePrompt::Random(count) = settings.prompt {
        // Checked before the tokens are allocated.
        context(settings, count, config.max_context())?;
    }
    let prompt = PromptTokens::read(settings, &files, &config)?;
    let context = context(settings, prompt.ids.len(), config.max_context())?;

    let running = RunSettings {
        placement: Placement { tensor_parallel: parallel.clone(), ..settings.place.placement() },
        context,
        prompt: prompt.ids.len(),
        chunk: settings.chunk,
        random_weights: settings.random_weights,
        drafts: settings.drafts,
    };
    let mut progress = LoadProgress::new(settings.notes && !settings.json);
    let LoadedEngine { mut engine, model: built, device, threads } =
        ridge::load_engine(&files, &config, &settings.model.numbers, &running, &mut progress)?;
    let load = started.elapsed();

    if settings.notes && settings.sampling.tell_seed && !settings.json {
        let seed = settings.sampling.values.seed;
        note(&format!("seed {seed}; --seed {seed} reproduces this text"));
    }
    if let (true, None, GeneratePrompt::Text(text)) = (settings.notes, &settings.model.path, &settings.prompt)
        && looks_like_a_model(text)
    {
        note(&format!("{text} is used as the prompt of the embedded model; to use it as the model, give -m {text}"));
    }
    if settings.notes && !settings.json && prompt.tokenizer.is_none() {
        note(&format!("no tokenizer.json in {files}; printing token ids"));
    }
    let request = Request {
        prompt: prompt.ids.clone(),
        sampling: settings.sampling.with(prompt.tokenizer.as_ref())?,
        max_tokens: settings.max_tokens,
        stop_tokens: if settings.ignore_eos { Vec::new() } else { built.eos_token_ids.clone() },
    };
    let answer = answer(&mut engine, &request, &prompt, settings)?;
    let times = GenerateTimes { load, ..answer.times };
    if settings.json {
        return print_json(&object(&files, settings, &prompt, &answer, &times, context, (&built, &device, threads)));
    }
    print("\n")?;
    if settings.notes && answer.generated.finish == Finish::Context {
        note(&format!("the context of {} is full", count(context, "token")));
    }
    if settings.timing {
        note(&times.line(prompt.ids.len(), answer.generated.tokens.len()));
    }
    let speculation = answer.generated.speculation;
    if settings.timing && settings.drafts > 0 {
        note(&format!("{} of {} accepted", speculation.accepted, count(speculation.candidates, "draft token")));
    }
    if settings.verbose {
        for program in engine.compiled() {
            let outputs =
                if program.outputs().is_empty() { "no outputs".to_owned() } else { program.outputs().join(", ") };
            let took = Seconds(program.took().as_secs_f64());
            note(&format!("compiled a program for {outputs} in {took}: {}", program.reason()));
        }
    }
    Ok(())
}

/// Whether a prompt was probably meant as a model: a path, a name on the Hub, or one such as Qwen3-0.6B.
fn looks_like_a_model(text: &str) -> bool {
    let is_path = ["/", "./", "../", "~/"].iter().any(|begin| text.starts_with(begin)) || Path::new(text).is_dir();
    let is_name = text.contains('-') && text.contains(|c: char| c.is_ascii_digit());
    text.parse::<HubModel>().is_ok() || (is_path || is_name) && !text.contains(char::is_whitespace)
}

/// The prompt as tokens.
struct PromptTokens {
    tokenizer: Option<Tokenizer>,
    text: Option<String>,
    ids: Vec<u32>,
}

impl PromptTokens {
    fn read(settings: &GenerateSettings, files: &ModelFiles, config: &ModelConfig) -> Result<Self> {
        let tokenizer = if files.has_tokenizer() { Some(files.tokenizer()?) } else { None };
        if tokenizer.is_none() && !settings.stops.is_empty() {
            return Err(Error::StopWithoutTokenizer);
        }
        let (text, ids) = match &settings.prompt {
            GeneratePrompt::Begin => {
                let begin = tokenizer.as_ref().and_then(Tokenizer::bos).or(config.bos_token_id);
                let none = || if tokenizer.is_some() { Error::NoBeginToken } else { Error::NothingToBeginWith };
                (None, vec![begin.ok_or_else(none)?])
            }
            GeneratePrompt::Random(count) => {
                let mut rng = Rng::new(settings.sampling.values.seed);
                (None, (0..*count).map(|_| rng.below(config.vocab_size) as u32).collect())
            }
            GeneratePrompt::Text(text) => (Some(text.clone()), Vec::new()),
            GeneratePrompt::Stdin => (Some(input::stdin()?), Vec::new()),
        };
        match (&tokenizer, &text) {
            (_, None) => Ok(Self { tokenizer, text, ids }),
            (Some(t), Some(text)) => Ok(Self { ids: t.encode(text, true)?, text: Some(text.clone()), tokenizer }),
            (None, Some(_)) => Err(files.tokenizer().err().map_or(Error::NoBeginToken, Error::PromptWithoutTokenizer)),
        }
    }

    /// What `--echo` prints.
    fn echo(&self) -> Result<String> {
        match (&self.text, &self.tokenizer) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(tokenizer)) => Ok(tokenizer.decode(&self.ids, true)?),
            (None, None) => Ok(self.ids.iter().map(|id| format!("{id} ")).collect()),
        }
    }
}

/// The number of tokens that the cache must hold.
fn context(settings: &GenerateSettings, prompt: usize, most: usize) -> Result<usize> {
    if let Some(context) = settings.context.filter(|c| *c > most) {
        return Err(refused("--context", context, &format!("the model supports at most {most} tokens")));
    }
    let full = |context| settings.max_tokens > 0 && prompt >= context || prompt > context;
    match settings.context {
        Some(context) if full(context) && context < most => Err(Error::PromptBeyondContext { prompt, context }),
        _ if full(most) => Err(Error::PromptBeyondModel { prompt, most }),
        chosen => Ok(chosen.unwrap_or(prompt.saturating_add(settings.max_tokens).clamp(1, most))),
    }
}

/// The generated text and its timings.
struct GenerateAnswer {
    generated: Generated,
    /// `None` without a tokenizer.
    text: Option<String>,
    stopped: bool,
    times: GenerateTimes,
}

#[derive(Clone, Copy, Default)]
struct GenerateTimes {
    load: Duration,
    /// Time to the first token, including binding of the first buckets.
    prompt: Duration,
    /// From the first token to the last.
    generate: Duration,
}

/// Generates, and streams the text unless JSON output was requested.
fn answer(
    engine: &mut Engine,
    request: &Request,
    prompt: &PromptTokens,
    settings: &GenerateSettings,
) -> Result<GenerateAnswer> {
    let show = |text: &str| if settings.json || text.is_empty() { Ok(()) } else { print(text) };
    if settings.echo {
        show(&prompt.echo()?)?;
    }
    let mut stream = prompt.tokenizer.as_ref().map(|t| TextStream::new(t, &settings.stops));
    if let Some(stream) = &mut stream {
        stream.skip(&prompt.ids)?;
    }
    let mut text = stream.is_some().then(String::new);
    let mut failure = None;
    let started = Instant::now();
    let mut first = None;
    let mut on_token = |id: u32| -> Result<bool> {
        first.get_or_insert_with(Instant::now);
        match (&mut stream, &mut text) {
            (Some(stream), Some(text)) => {
                let piece = stream.push(id)?;
                show(&piece)?;
                text.push_str(&piece);
                Ok(stream.stopped())
            }
            _ => show(&format!("{id} ")).map(|()| false),
        }
    };
    let generated = engine.generate(request, |id| match on_token(id) {
        Ok(false) => ControlFlow::Continue(()),
        Ok(true) => ControlFlow::Break(()),
        Err(error) => {
            failure = Some(error);
            ControlFlow::Break(())
        }
    })?;
    if let Some(error) = failure {
        return Err(error);
    }
    let ended = Instant::now();
    let first = first.unwrap_or(ended);
    if let (Some(stream), Some(text)) = (&mut stream, &mut text) {
        let rest = stream.finish()?;
        show(&rest)?;
        text.push_str(&rest);
    }
    let stopped = stream.is_some_and(|s| s.stopped());
    let times = GenerateTimes { load: Duration::ZERO, prompt: first - started, generate: ended - first };
    Ok(GenerateAnswer { generated, text, stopped, times })
}

impl GenerateTimes {
    /// Tokens per second of the prompt, and of generation after the first token; `None` if nothing was timed.
    fn rates(&self, prompt: usize, generated: usize) -> (Option<f64>, Option<f64>) {
        let rate =
            |tokens: usize, time: Duration| (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64());
        let prompt = if generated == 0 { 0 } else { prompt };
        (rate(prompt, self.prompt), rate(generated.saturating_sub(1), self.generate))
    }

    fn line(&self, prompt: usize, generated: usize) -> String {
        let part = |tokens: usize, what: &str, time: Duration, rate: Option<f64>| {
            let rate = rate.map_or(String::new(), |r| format!(" ({} tok/s)", three_digits(r)));
            format!("{what}{} in {}{rate}", count(tokens, "token"), Seconds::from(time))
        };
        let (prompt_rate, rate) = self.rates(prompt, generated);
        let prompt = part(prompt, "prompt ", self.prompt, prompt_rate);
        let generated = part(generated, "generated ", self.generate, rate);
        format!("loaded in {}; {prompt}; {generated}", Seconds::from(self.load))
    }
}

fn three_digits(rate: f64) -> String {
    let decimals = (2.0 - rate.max(1e-9).log10().floor()).max(0.0) as usize;
    format!("{rate:.decimals$}")
}

fn object(
    files: &ModelFiles,
    settings: &GenerateSettings,
    prompt: &PromptTokens,
    answer: &GenerateAnswer,
    times: &GenerateTimes,
    context: usize,
    (built, device, threads): (&Model, &str, Option<usize>),
) -> serde_json::Value {
    let (prompt_rate, rate) = times.rates(prompt.ids.len(), answer.generated.tokens.len());
    let finish = match answer.generated.finish {
        // Only a stop string cancels here.
        Finish::Stop | Finish::Cancelled => "stop",
        Finish::Length => "length",
        Finish::Context => "context",
    };
    let sampling = &settings.sampling.values;
    let bias: Vec<_> =
        sampling.logit_bias.iter().map(|(id, value)| json!({ "id": id, "value": decimal(*value) })).collect();
    let top = |(id, logprob): &(u32, f32)| json!({ "id": id, "logprob": logprob });
    let logprobs = sampling.logprobs.map(|_| {
        let each = answer.generated.logprobs.iter().zip(&answer.generated.tokens);
        let each = each
            .map(|(l, id)| json!({ "id": id, "logprob": l.chosen, "top": l.top.iter().map(top).collect::<Vec<_>>() }));
        each.collect::<Vec<_>>()
    });
    let Speculation { candidates, accepted } = answer.generated.speculation;
    let speculation =
        (settings.drafts > 0).then(|| json!({ "draft_tokens": candidates, "accepted_draft_tokens": accepted }));
    let mut all = json!({
        "random_weights": settings.random_weights,
        "dry_breaker": settings.sampling.breakers,
        "logit_bias": bias,
        "seed": sampling.seed,
        "max_tokens": settings.max_tokens,
        "stop": settings.stops,
        "ignore_eos": settings.ignore_eos,
        "context": context,
        "chunk": settings.chunk,
        "drafts": settings.drafts,
        "device": device,
        "threads": threads,
        "format": settings.model.numbers.format.as_ref().map(|f| f.name()),
        "dtype": built.activations.name(),
        "cache_dtype": built.cache.name(),
        "activations": settings.model.numbers.activations.name(),
        "int8_attention": settings.place.int8_attention(),
    });
    all.as_object_mut().into_iter().for_each(|all| all.extend(settings_json(sampling)));
    json!({
        "model": files.to_string(),
        "prompt": prompt.text,
        "text": answer.text,
        "tokens": answer.generated.tokens,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stopped_by_string": answer.stopped,
        "prompt_tokens": prompt.ids.len(),
        "generated_tokens": answer.generated.tokens.len(),
        "speculation": speculation,
        "measured": {
            "load_seconds": times.load.as_secs_f64(),
            "prompt_seconds": times.prompt.as_secs_f64(),
            "generate_seconds": times.generate.as_secs_f64(),
            "prompt_tokens_per_second": prompt_rate,
            "generated_tokens_per_second": rate,
        },
        "settings": all,
    })
}
