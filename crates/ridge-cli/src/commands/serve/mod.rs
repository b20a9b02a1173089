//! `ridge serve`: serves a model over HTTP. `args` has the arguments.

mod args;
mod reranker;

use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ridge::{
    CacheSize, DeviceRates, EnginePrograms, LoadedModel, NumberSettings, OpenDevice, Placement, RunSettings,
    StepExtents,
};
use ridge_engine::costs::StepCost;
use ridge_engine::service::{Service, ServiceOptions};
use ridge_engine::{EmbedOptions, EngineOptions, Ngram};
use ridge_hw::units::{Bytes, Flops};
use ridge_models::{EncoderConfig, Model, ModelConfig, ModelFiles, NetworkConfig, SentenceConfig};
use ridge_runtime::Backend;
use ridge_serve::{Floor, ReservedAddress, Runs, ServeError, ServedModel, serve, start_log};
use ridge_text::template::Clock;
use ridge_text::{ChatInput, ChatTemplates, Tokenizer};

use args::LogFormatArg;
pub(crate) use args::ServeArgs;

use crate::args::Speculate;
use crate::conversation::story_template;
use crate::error::{Result, refused};
use crate::output::{LoadProgress, columns, count, note, print};

/// The default context: sufficient for most uses, without the memory of a model's maximum.
const DEFAULT_CONTEXT: usize = 4096;

pub(crate) fn run(args: ServeArgs) -> Result<()> {
    let settings = args.numbers.settings(args.model.clone())?;
    let options = args.options()?;
    // First, so that a port in use or a missing key file is reported immediately.
    let reserved = if args.dry_run { Vec::new() } else { reserve(&args)? };
    let files = ModelFiles::open(args.model.as_deref())?;
    let sentence = reranker::sentence_config(&args, &files)?;
    let (served, runs) = match files.embedding_config(&sentence)? {
        NetworkConfig::Encoder(config) if args.dry_run => {
            // Checks that the device exists.
            OpenDevice::open(&args.place.placement())?;
            let encoder = config.build(&settings.numbers.options(config.torch_dtype))?;
            let weights = Bytes(encoder.weight_bytes()).to_string();
            return print(&columns(&[vec!["weights".to_owned(), weights, "none: an encoder has no cache".to_owned()]]));
        }
        NetworkConfig::Encoder(config) => encoder(&args, &settings.numbers, &files, sentence, &config)?,
        _ if args.dry_run => return dry_run(&args, &settings.numbers, &files),
        _ => generator(&args, &settings.numbers, &files)?,
    };
    start_log(args.log_format.format(), args.log_level.level());
    // Everything is ready.
    let listeners = reserved.into_iter().map(ReservedAddress::listen).collect::<Result<Vec<TcpListener>, _>>()?;
    let local = |host: &String| matches!(host.as_str(), "127.0.0.1" | "localhost" | "::1");
    if options.keys.is_empty() && !args.host.iter().all(local) {
        note("anyone who can reach this address can use the server; --api-keys FILE requires an API key");
    }
    let address = |(listener, host): (&TcpListener, &String)| {
        format!("http://{}", listener.local_addr().map_or_else(|_| host.clone(), |address| address.to_string()))
    };
    let addresses: Vec<String> = listeners.iter().zip(&args.host).map(address).collect();
    let (addresses, context) = (addresses.join(", "), count(served.context, "token"));
    let serving = format!("serving {} at {addresses}, context of {context}", served.name);
    match args.log_format {
        LogFormatArg::Text => note(&serving),
        LogFormatArg::Json => tracing::info!("{serving}"),
    }
    Ok(serve(listeners, served, runs, options)?)
}

/// Listens on all addresses at one port.
fn reserve(args: &ServeArgs) -> Result<Vec<ReservedAddress>> {
    let mut port = args.port;
    let mut reserved = Vec::with_capacity(args.host.len());
    for host in &args.host {
        let address = ReservedAddress::new(host, port)?;
        // With port 0, the first listener picks a free port for all.
        port = address.port()?;
        reserved.push(address);
    }
    Ok(reserved)
}

fn name(args: &ServeArgs, files: &ModelFiles) -> String {
    // A model from the Hub keeps its name on the Hub.
    let hub = || args.model.as_ref().filter(|model| !model.exists())?.to_str().map(str::to_owned);
    let folder = || args.model.as_ref().and_then(|m| m.canonicalize().ok()?.file_name()?.to_str().map(str::to_owned));
    let whole = || files.to_string().trim_end_matches(" (embedded)").to_owned();
    args.served_model_name.clone().or_else(hub).or_else(folder).unwrap_or_else(whole)
}

fn tokenizer(files: &ModelFiles) -> Result<Option<Tokenizer>> {
    Ok(if files.has_tokenizer() { Some(files.tokenizer()?) } else { None })
}

fn templates(args: &ServeArgs, files: &ModelFiles) -> Result<ChatTemplates> {
    let templates = files.chat_templates()?;
    let embedded = || (templates.is_empty() && files.is_embedded()).then(story_template);
    let given = args.chat_template()?.or_else(embedded);
    Ok(match given {
        Some(template) => templates.with_files(vec![template]),
        None => templates,
    })
}

/// Settings for a decoder.
struct GeneratorPlan {
    config: ModelConfig,
    running: RunSettings,
    engine: EngineOptions,
    /// Capacity of the cache, in tokens.
    cached: usize,
    /// Draft tokens of a sequence and step that are found earlier in it, at most.
    candidates: usize,
}

fn plan(args: &ServeArgs, numbers: &NumberSettings, files: &ModelFiles) -> Result<GeneratorPlan> {
    let config = files.config()?;
    let most = config.max_context();
    if let Some(context) = args.context.filter(|context| *context > most) {
        return Err(refused("--context", context, &format!("the model supports at most {most} tokens")));
    }
    let block_size = numbers.options(config.torch_dtype).block_size;
    let capacity = args.cache_tokens.map(|tokens| tokens.div_ceil(block_size) * block_size);
    if let (Some(tokens), Some(context)) = (args.cache_tokens, args.context)
        && capacity.is_some_and(|capacity| context > capacity)
    {
        let why =
            format!("does not hold one sequence of --context {context} tokens; give at least as many, or less context");
        return Err(refused("--cache-tokens", tokens, &why));
    }
    // What is not asked for is no more than the cache holds.
    let context = args.context.unwrap_or(DEFAULT_CONTEXT.min(most).min(capacity.unwrap_or(most)));
    let (sequences, chunk) = (args.sequences, args.chunk.max(args.sequences));
    let running = RunSettings {
        placement: Placement { tensor_parallel: args.parallel.here(), ..args.place.placement() },
        context,
        prompt: context,
        chunk,
        random_weights: args.random_weights,
        drafts: args.speculate.drafts(),
    };
    let blocks = capacity.unwrap_or(context.next_multiple_of(block_size) * sequences) / block_size;
    let engine = EngineOptions { context, sequences, chunk, blocks: Some(blocks) };
    let candidates = match args.speculate {
        Speculate::Lookup(candidates) => candidates,
        Speculate::Off | Speculate::Module(_) => 0,
    };
    Ok(GeneratorPlan { config, running, engine, cached: blocks * block_size, candidates })
}

impl GeneratorPlan {
    /// Workspace of a step, in bytes.
    fn workspace(&self, model: &Model, backend: &dyn Backend) -> Result<Bytes, ridge::Error> {
        let EngineOptions { chunk, sequences, context, .. } = self.engine;
        let largest = StepExtents { tokens: chunk, sequences, context, candidates: self.candidates };
        ridge::engine_bytes(model, backend, EnginePrograms::All, largest)
    }
}

/// The ranks that the figures refer to.
fn of_each(ranks: usize) -> String {
    if ranks == 1 { String::new() } else { format!("per rank, for {ranks} ranks, like all figures below") }
}

/// The memory that would be allocated.
fn dry_run(args: &ServeArgs, numbers: &NumberSettings, files: &ModelFiles) -> Result<()> {
    let plan = plan(args, numbers, files)?;
    let workspace = |model: &Model, backend: &dyn Backend| plan.workspace(model, backend);
    let memory = ridge::estimate_memory(
        files,
        &plan.config,
        numbers,
        &plan.running,
        CacheSize::Engine(plan.engine),
        workspace,
        &mut LoadProgress::new(true),
    )?;
    let EngineOptions { context, sequences, chunk, .. } = plan.engine;
    let blocks = plan.cached / memory.block_size;
    let row = |name: &str, value: String, what: String| vec![name.to_owned(), value, what];
    let on_host = (memory.on_host.0 > 0)
        .then(|| row("on the host", memory.on_host.to_string(), "weights in host memory, beside the total".to_owned()));
    let all = memory.weights + memory.cache + memory.workspace;
    let fits = memory.check();
    let of = memory.available.map_or(String::new(), |a| format!("of {a} available to this process"));
    let full = plan.cached / context;
    let rows = [
        row("device", memory.device, String::new()),
        row("weights", memory.weights.to_string(), of_each(args.parallel.ranks())),
        row("cache", memory.cache.to_string(), format!("{} of {} tokens", count(blocks, "block"), memory.block_size)),
        row("workspace", memory.workspace.to_string(), format!("{} per step", count(chunk, "token"))),
        row("total", all.to_string(), of),
        row("context", count(context, "token"), "prompt plus response".to_owned()),
        row("sequences", sequences.to_string(), format!("concurrent; {} at full context", full.min(sequences))),
    ];
    print(&columns(&rows.into_iter().chain(on_host).collect::<Vec<_>>()))?;
    Ok(fits?)
}

fn generator(args: &ServeArgs, numbers: &NumberSettings, files: &ModelFiles) -> Result<(ServedModel, Runs)> {
    let plan = plan(args, numbers, files)?;
    let GeneratorPlan { config, running, engine, cached, candidates } = &plan;
    let tokenizer = tokenizer(files)?;
    let templates = templates(args, files)?;
    let workspace = |model: &Model, backend: &dyn Backend| plan.workspace(model, backend);
    let (cache, mut progress) = (CacheSize::Engine(*engine), LoadProgress::new(true));
    let prepared = ridge::load_model(files, config, numbers, running, cache, workspace, &mut progress)?;
    // The graph is that of one rank, but the measurement is of the whole machine.
    let floor = if args.no_roofline || args.parallel.ranks() > 1 { None } else { floor(&prepared, *engine, *cached)? };
    let LoadedModel { session, model, .. } = prepared;
    let engine = *engine;
    let (queue, policy, prefix_cache) = (args.max_requests, args.policy.policy(), !args.no_prefix_cache);
    let mut service = Service::new(session, &model, ServiceOptions { engine, queue, policy, prefix_cache })?;
    if let Some(tokenizer) = &tokenizer {
        service = service.with_grammars(tokenizer)?;
    }
    if *candidates > 0 {
        service = service.with_drafts(Ngram::new(*candidates));
    }
    let service = service.made_ready()?;
    let mut eos: Vec<u32> = model.eos_token_ids.clone();
    if let Some(tokenizer) = &tokenizer {
        let input = ChatInput::new(Vec::new(), Clock::now_utc());
        eos.extend(tokenizer.eos().into_iter().chain(templates.end_of_turn(None, &input, tokenizer)));
    }
    eos.sort_unstable();
    eos.dedup();
    let runs = Runs::Engine(Box::new(service), floor);
    Ok((
        ServedModel { name: name(args, files), tokenizer, templates, prompt: None, eos, context: engine.context },
        runs,
    ))
}

/// Idle time before the machine is measured, and the number of attempts.
const IDLE: Duration = Duration::from_secs(1);
const TRIES: usize = 100;

/// Reports the floor of each step from the machine's measured rates. A separate thread measures them while no step runs;
/// until then there is no floor.
fn floor(prepared: &LoadedModel, engine: EngineOptions, cached: usize) -> Result<Option<Floor>> {
    // Only CPUs are measured.
    let Some(threads) = prepared.threads else { return Ok(None) };
    let cost = StepCost::new(&prepared.model, engine.context, prepared.session.backend().kernels())?;
    let (model, rates, steps) = (prepared.model.clone(), Arc::new(OnceLock::new()), Arc::new(AtomicU64::new(0)));
    let (measured, ran) = (Arc::clone(&rates), Arc::clone(&steps));
    let measure = move || {
        for _ in 0..TRIES {
            let before = ran.load(Ordering::Relaxed);
            std::thread::sleep(IDLE);
            if ran.load(Ordering::Relaxed) != before {
                continue;
            }
            let found = DeviceRates::measure(&model, cached, threads, |_| ());
            if ran.load(Ordering::Relaxed) == before {
                match found {
                    Ok(found) => _ = measured.set(found.roofline()),
                    Err(why) => tracing::warn!("step times are not compared with their floor: {why}"),
                }
                return;
            }
        }
        tracing::warn!(
            "step times are not compared with their floor: the machine was never idle long enough for the measurement"
        );
    };
    std::thread::Builder::new().name("roofline".into()).spawn(measure).map_err(ServeError::System)?;
    Ok(Some(Box::new(move |work: &[(usize, usize)]| {
        steps.fetch_add(1, Ordering::Relaxed);
        let work = cost.at(work).ok()?;
        Duration::try_from_secs_f64(rates.get()?.floor(Flops(work.flops), Bytes(work.bytes)).as_f64()).ok()
    })))
}

fn encoder(
    args: &ServeArgs,
    numbers: &NumberSettings,
    files: &ModelFiles,
    sentence: SentenceConfig,
    config: &EncoderConfig,
) -> Result<(ServedModel, Runs)> {
    if args.parallel.ranks() > 1 {
        return Err(refused("--tp", args.parallel.ranks(), "applies to decoders only, but this is an encoder"));
    }
    if args.place.deterministic() {
        return Err(refused("--deterministic", true, "applies to decoders only, but this is an encoder"));
    }
    if args.place.int8_attention() {
        return Err(refused("--attention", "int8", "applies to decoders only, but this is an encoder"));
    }
    let prompt = sentence.prompt.clone();
    let options = EmbedOptions { sentence, tokens: args.chunk.max(4096), scores: true };
    let (placement, mut progress) = (args.place.placement(), LoadProgress::new(false));
    let embedder = ridge::load_embedder(files, options, numbers, &placement, args.random_weights, &mut progress)?;
    let context = args.context.unwrap_or(usize::MAX).min(embedder.max_tokens());
    let (templates, eos) = (reranker::templates(args, files, config, prompt.as_deref())?, Vec::new());
    let runs = Runs::Embedder(Box::new(embedder));
    Ok((ServedModel { name: name(args, files), tokenizer: tokenizer(files)?, templates, prompt, eos, context }, runs))
}
