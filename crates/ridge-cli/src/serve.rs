//! `ridge serve`: a model for many users, over HTTP.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::costs::StepCost;
use ridge_engine::service::{Policy, Service, ServiceOptions};
use ridge_engine::{EmbedOptions, Embedder, EngineOptions};
use ridge_hw::units::{Bytes, Flops};
use ridge_models::{Model, ModelConfig, ModelFiles, Pooling, weight_bytes};
use ridge_runtime::{Backend, Session};
use ridge_serve::{Floor, KEY_VARIABLE, Keys, LogFormat, Runs, ServeOptions, ServedModel, listen, serve, start_log};
use ridge_text::template::Clock;
use ridge_text::{ChatInput, ChatTemplates, Tokenizer};

use crate::args::{DeviceChoice, MOST, MOST_THREADS, NumberArgs, device, whole};
use crate::bench::Machine;
use crate::error::Result;
use crate::input;
use crate::model::{self, Prepared, Running};
use crate::output::{Spinner, columns, count, note, print};
use crate::settings::{ModelSettings, refused};

/// Serve a model over HTTP, by OpenAI's API, to many users at a time
///
/// Without --model, the model is stories260K, a small one that is compiled in. A browser shows a chat and the engine at
/// work at the same address.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge serve                        the small model that is compiled in
  ridge serve --model DIR --dtype bf16 --cache-dtype bf16
  ridge serve --model DIR --host 0.0.0.0 --api-keys keys.txt
  ridge serve --model DIR --dry-run  what it would allocate

Then: curl localhost:8000/v1/completions -d '{\"prompt\": \"Once\"}'

Answers: /v1/completions, /v1/chat/completions, /v1/embeddings (encoders), /v1/models, /tokenize, /detokenize. State: \
/health, /ready, /metrics (Prometheus), /version, /live.

SIGTERM or Ctrl-C ends it when the answers that run have ended, a second one at once. The log goes to standard error.
Exit codes: 0 ended when told, 1 failed, 2 not understood.")]
pub(crate) struct ServeArgs {
    /// Folder of a model in the layout of Hugging Face, or a GGUF file
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Take random numbers for weights
    #[arg(long)]
    random_weights: bool,

    /// What clients call the model [default: the name of its folder]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,

    /// Take this chat template in place of the model's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,

    /// Address to listen at; 0.0.0.0 is every address of this machine
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS", help_heading = "Network")]
    host: String,

    /// Port to listen at; 0 takes a free one
    #[arg(long, default_value_t = 8000, value_name = "PORT", help_heading = "Network")]
    port: u16,

    /// Let pages of this origin use the server, `*` for any; may be given several times
    #[arg(long, value_name = "ORIGIN", help_heading = "Network")]
    cors_origin: Vec<String>,

    /// Let in only those who have a key of this file: one a line, perhaps behind a name. The variable RIDGE_API_KEY may
    /// hold one, too
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    api_keys: Option<PathBuf>,

    /// Tokens of a prompt and its answer together at most [default: what the model was made for, at most 4096]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    context: Option<usize>,

    /// Answers that run at a time at most
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, 65536>,
        allow_negative_numbers = true, default_value_t = 32, help_heading = "Running"
    )]
    sequences: usize,

    /// Tokens that the cache holds, of all answers together [default: as many as they could have]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    cache_tokens: Option<usize>,

    /// Tokens that one step processes at most
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MOST>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    chunk: usize,

    /// Whose tokens a step runs first when not all fit: of whoever came first, of the smallest `priority`, of those due
    /// first, or of the key that was served least
    #[arg(long, value_enum, default_value = "first-come", help_heading = "Running")]
    policy: PolicyArg,

    /// Compute every prompt anew, also where the cache has its beginning
    #[arg(long, help_heading = "Running")]
    no_prefix_cache: bool,

    /// Do not measure what the machine reaches, which takes half a second, to tell each step's time beside its floor
    #[arg(long, help_heading = "Running")]
    no_roofline: bool,

    /// Where it runs: cpu, cuda for the first NVIDIA GPU, cuda:N for another, auto for a GPU where there is one
    #[arg(long, value_name = "DEVICE", value_parser = device, default_value = "cpu", help_heading = "Running")]
    device: DeviceChoice,

    /// Threads that compute [default: the cores that this process may use]
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, MOST_THREADS>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    threads: Option<usize>,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Requests that run or wait at most; more are refused with status 429
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST>, default_value_t = 2048, help_heading = "Limits")]
    max_requests: usize,

    /// Connections at a time at most
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MOST>, default_value_t = 4096, help_heading = "Limits")]
    max_connections: usize,

    /// Mebibytes of a request at most
    #[arg(long, value_name = "MIB", value_parser = whole::<usize, 1, 1024>, default_value_t = 16, help_heading = "Limits")]
    max_body: usize,

    /// Seconds that a client may take to send the head of a request, and as many for its body
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, SECONDS>, default_value_t = 15, help_heading = "Limits")]
    read_timeout: u64,

    /// Seconds that a client may take nothing of its answer
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, SECONDS>, default_value_t = 30, help_heading = "Limits")]
    write_timeout: u64,

    /// Seconds that an answer may take [default: any]
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, SECONDS>, help_heading = "Limits")]
    request_timeout: Option<u64>,

    /// Seconds that a step may take before /health says that the engine hangs
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, SECONDS>, default_value_t = 60, help_heading = "Limits")]
    stall_timeout: u64,

    /// Seconds that answers which run may go on when the server is told to end
    #[arg(long, value_name = "S", value_parser = whole::<u64, 0, SECONDS>, default_value_t = 30, help_heading = "Limits")]
    drain_timeout: u64,

    /// How the log looks
    #[arg(long, value_enum, default_value = "text", help_heading = "Log")]
    log_format: LogFormatArg,

    /// What the log has
    #[arg(long, value_enum, default_value = "info", help_heading = "Log")]
    log_level: LogLevelArg,

    /// Write requests, prompts and all, to the log
    #[arg(long, help_heading = "Log")]
    log_prompts: bool,

    /// Print what would be allocated, and end
    #[arg(long)]
    dry_run: bool,
}

const SECONDS: u64 = 86400;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PolicyArg {
    FirstCome,
    Priority,
    Deadline,
    Fair,
}

impl PolicyArg {
    fn policy(self) -> Policy {
        match self {
            Self::FirstCome => Policy::FirstCome,
            Self::Priority => Policy::Priority,
            Self::Deadline => Policy::Deadline,
            Self::Fair => Policy::Fair,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormatArg {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogLevelArg {
    Error,
    Warn,
    Info,
    Debug,
}

/// The context where nobody chose one: what most use, without the memory that a model's longest would take.
const USUAL_CONTEXT: usize = 4096;

pub(crate) fn run(args: ServeArgs) -> Result<()> {
    let settings = ModelSettings::new(args.model.clone(), &args.numbers)?;
    let options = options(&args)?;
    // Before anything slow: a port that is taken, or a key file that is not there, should be told at once.
    let listener = if args.dry_run { None } else { Some(listen(&args.host, args.port)?) };
    let files = ModelFiles::open(args.model.as_deref())?;
    let (served, runs) = match files.encoder_config()? {
        None if args.dry_run => return dry_run(&args, &settings, &files),
        Some(config) if args.dry_run => {
            let weights = Bytes(weight_bytes(&config.build(&settings.options(config.torch_dtype))?.graph)).to_string();
            return print(&columns(&[vec![
                "weights".to_owned(),
                weights,
                "of an encoder, which has no cache".to_owned(),
            ]]));
        }
        Some(_) => encoder(&args, &settings, &files)?,
        None => generator(&args, &settings, &files)?,
    };
    let Some(listener) = listener else { return Ok(()) };
    start_log(
        match args.log_format {
            LogFormatArg::Text => LogFormat::Text,
            LogFormatArg::Json => LogFormat::Json,
        },
        match args.log_level {
            LogLevelArg::Error => tracing::Level::ERROR,
            LogLevelArg::Warn => tracing::Level::WARN,
            LogLevelArg::Info => tracing::Level::INFO,
            LogLevelArg::Debug => tracing::Level::DEBUG,
        },
    );
    if options.keys.is_empty() && !matches!(args.host.as_str(), "127.0.0.1" | "localhost" | "::1") {
        note("anyone who reaches this address may use the server; --api-keys FILE lets in those who have a key");
    }
    let address = listener.local_addr().map_or(args.host, |a| a.to_string());
    let serving = format!("serving {} at http://{address}, context of {}", served.name, count(served.context, "token"));
    match args.log_format {
        LogFormatArg::Text => note(&serving),
        LogFormatArg::Json => tracing::info!("{serving}"),
    }
    Ok(serve(listener, served, runs, options)?)
}

fn options(args: &ServeArgs) -> Result<ServeOptions> {
    let variable = match std::env::var(KEY_VARIABLE) {
        Ok(key) => Some(key),
        Err(std::env::VarError::NotPresent) => None,
        Err(std::env::VarError::NotUnicode(_)) => return Err(refused(KEY_VARIABLE, "", "must be a text")),
    };
    if args.cors_origin.len() > 1 && args.cors_origin.iter().any(|o| o == "*") {
        return Err(refused("--cors-origin", "*", "is any origin; give it alone"));
    }
    if let Some(bad) = args.cors_origin.iter().find(|o| *o != "*" && !o.starts_with("http")) {
        return Err(refused("--cors-origin", bad, "must be an origin such as https://example.org, or *"));
    }
    let seconds = Duration::from_secs;
    Ok(ServeOptions {
        keys: Keys::read(args.api_keys.as_deref(), variable.as_deref())?,
        cors: args.cors_origin.clone(),
        max_body: args.max_body << 20,
        max_connections: args.max_connections,
        policy: args.policy.policy(),
        max_requests: args.max_requests,
        read_timeout: seconds(args.read_timeout),
        write_timeout: seconds(args.write_timeout),
        request_timeout: args.request_timeout.map(seconds),
        stall: seconds(args.stall_timeout),
        drain: seconds(args.drain_timeout),
        log_prompts: args.log_prompts,
    })
}

fn name(args: &ServeArgs, files: &ModelFiles) -> String {
    let folder = || args.model.as_ref().and_then(|m| m.canonicalize().ok()?.file_name()?.to_str().map(str::to_owned));
    let whole = || files.to_string().trim_end_matches(" (embedded)").to_owned();
    args.served_model_name.clone().or_else(folder).unwrap_or_else(whole)
}

fn tokenizer(files: &ModelFiles) -> Result<Option<Tokenizer>> {
    Ok(if files.has_tokenizer() { Some(files.tokenizer()?) } else { None })
}

/// The embedded model has never seen a conversation: what is said to it, one message behind the other, is a story that
/// it goes on with.
const STORY: &str = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}";

fn templates(args: &ServeArgs, files: &ModelFiles) -> Result<ChatTemplates> {
    let templates = files.chat_templates()?;
    let given = match &args.chat_template {
        Some(file) => Some((file.display().to_string(), input::file(file)?)),
        None if templates.is_empty() && files.is_embedded() => {
            Some(("the template of the embedded model".to_owned(), STORY.to_owned()))
        }
        None => None,
    };
    Ok(match given {
        Some((file, source)) => templates.with_files(vec![("default".to_owned(), file, source)]),
        None => templates,
    })
}

/// How a generator is to run.
struct Plan {
    config: ModelConfig,
    running: Running,
    engine: EngineOptions,
    /// Tokens that the cache holds.
    cached: usize,
}

fn plan(args: &ServeArgs, settings: &ModelSettings, files: &ModelFiles) -> Result<Plan> {
    let config = files.config()?;
    let most = config.max_context();
    if let Some(context) = args.context.filter(|context| *context > most) {
        return Err(refused("--context", context, &format!("the model was made for at most {most} tokens")));
    }
    let context = args.context.unwrap_or(USUAL_CONTEXT.min(most));
    let (sequences, chunk) = (args.sequences, args.chunk.max(args.sequences));
    let running = Running {
        device: args.device,
        context,
        prompt: context,
        chunk,
        threads: args.threads,
        random_weights: args.random_weights,
        notes: true,
    };
    let block_size = settings.options(config.torch_dtype).block_size;
    let blocks = args.cache_tokens.map_or(context.div_ceil(block_size) * sequences, |n| n.div_ceil(block_size));
    let engine = EngineOptions { context, sequences, chunk, blocks: Some(blocks) };
    Ok(Plan { config, running, engine, cached: blocks * block_size })
}

impl Plan {
    /// Bytes of a step's workspace.
    fn workspace(&self, model: &Model, backend: &dyn Backend) -> Result<Bytes> {
        let step = (self.engine.chunk, self.engine.sequences);
        model::step_bytes(model, backend, &["next"], step, self.engine.context)
    }
}

/// What would be allocated.
fn dry_run(args: &ServeArgs, settings: &ModelSettings, files: &ModelFiles) -> Result<()> {
    let plan = plan(args, settings, files)?;
    let workspace = |model: &Model, backend: &dyn Backend| plan.workspace(model, backend);
    let memory = model::memory(files, &plan.config, settings, &plan.running, plan.cached, workspace)?;
    let EngineOptions { context, sequences, chunk, .. } = plan.engine;
    let blocks = plan.cached / memory.block_size;
    let row = |name: &str, value: String, what: String| vec![name.to_owned(), value, what];
    let all = memory.weights + memory.cache + memory.workspace;
    let of = memory.available.map_or(String::new(), |a| format!("of {a} that this process can take"));
    let full = plan.cached / context;
    print(&columns(&[
        row("device", memory.device, String::new()),
        row("weights", memory.weights.to_string(), String::new()),
        row("cache", memory.cache.to_string(), format!("{} of {} tokens", count(blocks, "block"), memory.block_size)),
        row("workspace", memory.workspace.to_string(), format!("{} a step", count(chunk, "token"))),
        row("in all", all.to_string(), of),
        row("context", count(context, "token"), "prompt and answer together".to_owned()),
        row("sequences", sequences.to_string(), format!("at a time; {} at full context", full.min(sequences))),
    ]))
}

fn generator(args: &ServeArgs, settings: &ModelSettings, files: &ModelFiles) -> Result<(ServedModel, Runs)> {
    let plan = plan(args, settings, files)?;
    let Plan { config, running, engine, cached } = &plan;
    let tokenizer = tokenizer(files)?;
    let templates = templates(args, files)?;
    let workspace = |model: &Model, backend: &dyn Backend| plan.workspace(model, backend);
    let prepared = model::prepare(files, config, settings, running, *cached, workspace)?;
    let floor = if args.no_roofline { None } else { floor(&prepared, *cached)? };
    let Prepared { session, model, .. } = prepared;
    let engine = *engine;
    let (queue, policy, prefix_cache) = (args.max_requests, args.policy.policy(), !args.no_prefix_cache);
    let mut service = Service::new(session, &model, ServiceOptions { engine, queue, policy, prefix_cache })?;
    if let Some(tokenizer) = &tokenizer {
        service = service.with_grammars(tokenizer)?;
    }
    let mut eos: Vec<u32> = model.eos_token_ids.clone();
    if let Some(tokenizer) = &tokenizer {
        let input = ChatInput::new(Vec::new(), Clock::now_utc());
        eos.extend(tokenizer.eos().into_iter().chain(templates.end_of_turn(None, &input, tokenizer)));
    }
    eos.sort_unstable();
    eos.dedup();
    let runs = Runs::Engine(Box::new(service), floor);
    Ok((ServedModel { name: name(args, files), tokenizer, templates, eos, context: engine.context }, runs))
}

/// Tells what a step takes at least, by what this machine was measured to reach.
fn floor(prepared: &Prepared, cached: usize) -> Result<Option<Floor>> {
    // Only CPUs are measured.
    let Some(threads) = prepared.threads else { return Ok(None) };
    let cost = StepCost::new(&prepared.model, prepared.session.backend().kernels())?;
    let roofline = Machine::measure(&prepared.model, cached, threads, &Spinner::new())?.roofline();
    Ok(Some(Box::new(move |work: &[(usize, usize)]| {
        let work = cost.at(work).ok()?;
        Duration::try_from_secs_f64(roofline.floor(Flops(work.flops), Bytes(work.bytes)).as_f64()).ok()
    })))
}

fn encoder(args: &ServeArgs, settings: &ModelSettings, files: &ModelFiles) -> Result<(ServedModel, Runs)> {
    let Some(config) = files.encoder_config()? else { return Err(refused("--model", "", "is no encoder")) };
    let said = files.sentence_config()?;
    let options = EmbedOptions {
        pooling: said.map_or(Pooling::Mean, |s| s.pooling),
        normalize: said.is_some_and(|s| s.normalize),
        tokens: args.chunk.max(4096),
    };
    let cpu = Cpu::new(CpuOptions { threads: args.threads, ..CpuOptions::default() })?;
    let source = model::encoder_weights(files, &config, args.random_weights)?;
    let encoder = model::build_encoder(&config, settings, &source)?;
    let mut session = Session::new(Arc::new(cpu));
    source.load(&mut session, &encoder.graph, |_| ())?;
    let embedder = Embedder::of_encoder(session, &encoder, options)?;
    let context = said.and_then(|s| s.max_tokens).unwrap_or(usize::MAX).min(embedder.max_tokens());
    let context = args.context.unwrap_or(context).min(context);
    let (templates, eos) = (ChatTemplates::default(), Vec::new());
    let runs = Runs::Embedder(Box::new(embedder));
    Ok((ServedModel { name: name(args, files), tokenizer: tokenizer(files)?, templates, eos, context }, runs))
}
