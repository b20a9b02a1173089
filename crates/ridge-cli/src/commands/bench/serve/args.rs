//! Arguments of `ridge bench serve`, the settings that they resolve to, and the workload that the settings describe.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use ridge_graph::sample::Rng;
use ridge_serve::KEY_VARIABLE;
use ridge_serve::load::{
    Api, Arrivals, LoadWorkload, Objective, Pace, PromptGenerator, PromptSource, RequestShape, ServerTarget,
    TRACE_BLOCK, TraceRequest, read_trace,
};
use ridge_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::args::{MAX_COUNT, whole};
use crate::error::{Result, refused};

/// Load-test a server
///
/// Sends requests to any OpenAI-compatible server and reports TTFT, TPOT, ITL, throughput and the share of requests that
/// met an objective. Prompts are synthetic, with the given number of tokens.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge bench serve                               concurrency 16
  ridge bench serve --rate 4 --requests 200       Poisson arrivals at 4 requests/s
  ridge bench serve --rate 4 --burst 3            bursty arrivals
  ridge bench serve --trace azure_2023_conv.csv --speed 10 --duration 60 --json
  ridge bench serve --trace mooncake_conversation.jsonl --shrink 64
  ridge bench serve --slo ttft=200ms,tpot=50ms --sweep
  ridge bench serve --chat --corpus book.txt --tokenizer DIR --plot out.svg

Latencies are measured from the start of a request, including its connection: TTFT to the first token, TPOT per \
following token of each response, ITL between events with tokens over all responses, e2e to the end of the response. \
Failed requests are counted by kind and excluded from latencies. With --rate or the arrival times of a trace (open loop), \
requests are sent on schedule regardless of responses; `sent late` shows the deviation. The same seed sends the same \
requests at the same times.

The variable RIDGE_API_KEY can hold an API key for the server.
Exit codes: 0 done, 1 failed or no request succeeded, 2 usage error.")]
pub(crate) struct ServeBenchArgs {
    /// URL of the server, over HTTP
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000", help_heading = "Server")]
    url: String,

    /// Model name [default: the first that the server lists]
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    model: Option<String>,

    /// Use /v1/chat/completions instead of /v1/completions
    #[arg(long, help_heading = "Server")]
    chat: bool,

    /// Let the model end its responses, and do not send `ignore_eos`, which not every server supports
    #[arg(long, help_heading = "Server")]
    stop_at_eos: bool,

    /// Add the fields of this JSON object to every request
    #[arg(long, value_name = "JSON", help_heading = "Server")]
    extra: Option<String>,

    /// Timeout of a request in seconds
    #[arg(
        long, value_name = "SECONDS", value_parser = whole::<u64, 1, 86_400>, allow_negative_numbers = true,
        default_value_t = 600, help_heading = "Server"
    )]
    timeout: u64,

    /// Closed loop: keep N requests in flight [default without --rate: 16, or all requests of a trace without arrival times]
    #[arg(
        short, long, value_name = "N", value_parser = whole::<usize, 1, 100_000>, allow_negative_numbers = true,
        conflicts_with_all = ["rate", "sweep"], help_heading = "Load"
    )]
    concurrency: Option<usize>,

    /// Poisson arrivals at this mean rate, in requests per second; with --sweep, the first rate to try
    #[arg(short, long, value_name = "R", value_parser = above_zero, allow_negative_numbers = true, help_heading = "Load")]
    rate: Option<f64>,

    /// Coefficient of variation of the inter-arrival time: 1 is Poisson, more is burstier, 0 is uniform
    #[arg(
        long, value_name = "CV", value_parser = variation, allow_negative_numbers = true, default_value_t = 1.0,
        help_heading = "Load"
    )]
    burst: f64,

    /// Use the lengths, arrival times and shared prefixes of this trace: Azure CSV or Mooncake JSON Lines
    #[arg(long, value_name = "FILE", help_heading = "Load")]
    trace: Option<PathBuf>,

    /// Speed up a trace's arrival times by this factor
    #[arg(
        long, value_name = "X", value_parser = above_zero, allow_negative_numbers = true, default_value_t = 1.0,
        requires = "trace", conflicts_with_all = ["rate", "concurrency", "sweep"], help_heading = "Load"
    )]
    speed: f64,

    /// Divide all lengths of a trace by this factor, for a small model
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, 512>, allow_negative_numbers = true,
        default_value_t = 1, requires = "trace", help_heading = "Load"
    )]
    shrink: usize,

    /// Requests to send; with --sweep, the minimum at each rate [default: 100, or the length of the trace, or as many as
    /// --duration allows]
    #[arg(
        short = 'N', long, value_name = "N", value_parser = whole::<usize, 1, 10_000_000>,
        allow_negative_numbers = true, help_heading = "Load"
    )]
    requests: Option<usize>,

    /// Stop sending after this many seconds; with --sweep, run each rate at least this long [default with --sweep: 10]
    #[arg(short, long, value_name = "SECONDS", value_parser = above_zero, allow_negative_numbers = true, help_heading = "Load")]
    duration: Option<f64>,

    /// Warm-up requests, sent concurrently and not measured
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 0, 10_000>, allow_negative_numbers = true,
        default_value_t = 0, help_heading = "Load"
    )]
    warmup: usize,

    /// Seed of arrival times and prompts
    #[arg(
        long, value_name = "N", value_parser = whole::<u64, 0, MAX_COUNT>, allow_negative_numbers = true,
        default_value_t = 0, help_heading = "Load"
    )]
    seed: u64,

    /// Tokens per prompt, or a range such as 64..1024 to draw from
    #[arg(
        short, long, value_name = "N", value_parser = range, default_value = "128", conflicts_with = "trace",
        help_heading = "Prompts"
    )]
    prompt: (usize, usize),

    /// Tokens per response, or a range to draw from
    #[arg(
        short = 'n', long, value_name = "N", value_parser = range, default_value = "128", conflicts_with = "trace",
        help_heading = "Prompts"
    )]
    generate: (usize, usize),

    /// Length of a prefix shared by all prompts, in tokens
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 0, 10_000_000>, allow_negative_numbers = true,
        default_value_t = 0, help_heading = "Prompts"
    )]
    shared_prefix: usize,

    /// Draw prompt token ids below this number
    #[arg(
        long, value_name = "N", value_parser = whole::<u32, 4, 4_000_000>, allow_negative_numbers = true,
        default_value_t = 512, conflicts_with_all = ["chat", "corpus"], help_heading = "Prompts"
    )]
    vocab: u32,

    /// Take prompts from this text [default: random token ids; common words with --chat]
    #[arg(long, value_name = "FILE", help_heading = "Prompts")]
    corpus: Option<PathBuf>,

    /// Folder with the model's tokenizer.json, for prompts of exactly the given lengths [default: count words instead]
    #[arg(long, value_name = "DIR", help_heading = "Prompts")]
    tokenizer: Option<PathBuf>,

    /// Latency objective, such as ttft=200ms,tpot=50ms,e2e=5s
    #[arg(long, value_name = "LIMITS", value_parser = Objective::parse, help_heading = "Objective")]
    slo: Option<Objective>,

    /// Find the highest rate at which throughput reaches 95 % of the load and a share --attain of requests meets --slo
    #[arg(long, requires = "slo", help_heading = "Objective")]
    sweep: bool,

    /// Share of requests that must meet the objective
    #[arg(
        long, value_name = "SHARE", value_parser = share, allow_negative_numbers = true, default_value_t = 0.9,
        requires = "sweep", help_heading = "Objective"
    )]
    attain: f64,

    /// Print one JSON object, with times in seconds
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Plot the latencies of all responses, or the rates of a sweep
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    plot: Option<PathBuf>,
}

fn number(typed: &str, what: &str, good: impl Fn(f64) -> bool) -> Result<f64, String> {
    typed.parse().ok().filter(|n: &f64| n.is_finite() && good(*n)).ok_or_else(|| format!("must be {what}"))
}

fn above_zero(typed: &str) -> Result<f64, String> {
    number(typed, "a number from 0.0001 to 1000000", |n| (1e-4..=1e6).contains(&n))
}

fn variation(typed: &str) -> Result<f64, String> {
    number(typed, "0, or a number from 0.05 to 20", |n| n == 0.0 || (0.05..=20.0).contains(&n))
}

fn share(typed: &str) -> Result<f64, String> {
    number(typed, "a share above 0, at most 1", |n| n > 0.0 && n <= 1.0)
}

fn range(typed: &str) -> Result<(usize, usize), String> {
    let (low, high) = typed.split_once("..").unwrap_or((typed, typed));
    let read = |n: &str| n.parse::<usize>().ok().filter(|n| (1..=10_000_000).contains(n));
    let ends = read(low).zip(read(high)).filter(|(low, high)| low <= high);
    ends.ok_or_else(|| "must be a whole number from 1 to 10000000, or a range such as 64..1024".to_owned())
}

/// The source of request lengths.
pub(super) enum RequestLengths {
    Drawn { prompt: (usize, usize), generate: (usize, usize) },
    Trace(Vec<TraceRequest>),
}

/// The arrival process.
#[derive(Clone, Copy)]
pub(super) enum ArrivalMode {
    Concurrent(usize),
    Random { rate: f64 },
    Trace { speed: f64 },
}

/// The load, its target, and how results are shown.
pub(super) struct ServeBenchSettings {
    pub(super) target: ServerTarget,
    pub(super) prompts: Arc<PromptGenerator>,
    pub(super) lengths: RequestLengths,
    pub(super) when: ArrivalMode,
    pub(super) burst: f64,
    pub(super) shrink: usize,
    pub(super) requests: Option<usize>,
    pub(super) duration: Option<f64>,
    pub(super) warmup: usize,
    pub(super) seed: u64,
    pub(super) objective: Option<Objective>,
    pub(super) attain: Option<f64>,
    pub(super) json: bool,
    pub(super) plot: Option<PathBuf>,
}

const REQUESTS: usize = 100;
/// Minimum duration of each rate of a sweep, in seconds.
const HOLD: f64 = 10.0;
const CONCURRENT: usize = 16;
/// Maximum number of requests with --duration, bounded by memory.
pub(super) const MAX_REQUESTS: usize = 10_000_000;

impl ServeBenchArgs {
    pub(super) fn resolve(self) -> Result<ServeBenchSettings> {
        let mut target = ServerTarget::new(&self.url, if self.chat { Api::Chat } else { Api::Completions })?;
        target.model = self.model.unwrap_or_default();
        target.key = std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
        target.timeout = Duration::from_secs(self.timeout);
        target.more.insert("temperature".to_owned(), json!(0));
        if !self.stop_at_eos {
            target.more.insert("ignore_eos".to_owned(), json!(true));
        }
        if let Some(extra) = &self.extra {
            let object: Result<Map<String, Value>, _> = serde_json::from_str(extra);
            target
                .more
                .extend(object.map_err(|why| refused("--extra", extra, &format!("is not a JSON object: {why}")))?);
        }
        let tokenizer = self.tokenizer.map(|folder| Tokenizer::from_file(folder.join("tokenizer.json"))).transpose()?;
        let words = match &self.corpus {
            Some(path) => PromptGenerator::corpus(path)?,
            None if self.chat => PromptSource::Common,
            None => PromptSource::Ids(self.vocab),
        };
        let block = TRACE_BLOCK / self.shrink;
        let prompts = PromptGenerator::new(words, tokenizer, self.seed, self.shared_prefix, block)?;
        let prompts = Arc::new(prompts);
        let lengths = match &self.trace {
            Some(path) => RequestLengths::Trace(read_trace(path)?),
            None => RequestLengths::Drawn { prompt: self.prompt, generate: self.generate },
        };
        let when = match (self.concurrency, self.rate, &lengths) {
            (Some(concurrency), ..) => ArrivalMode::Concurrent(concurrency),
            (None, Some(rate), _) => ArrivalMode::Random { rate },
            (None, None, _) if self.sweep => ArrivalMode::Random { rate: 1.0 },
            (None, None, RequestLengths::Trace(trace)) if trace.iter().all(|r| r.at.is_some()) => {
                ArrivalMode::Trace { speed: self.speed }
            }
            // Without times, all are sent at once.
            (None, None, RequestLengths::Trace(trace)) => ArrivalMode::Concurrent(trace.len()),
            (None, None, RequestLengths::Drawn { .. }) => ArrivalMode::Concurrent(CONCURRENT),
        };
        Ok(ServeBenchSettings {
            target,
            prompts,
            lengths,
            when,
            burst: self.burst,
            shrink: self.shrink,
            requests: self.requests,
            duration: self.duration,
            warmup: self.warmup,
            seed: self.seed,
            objective: self.slo,
            attain: self.sweep.then_some(self.attain),
            json: self.json,
            plot: self.plot,
        })
    }
}

impl ServeBenchSettings {
    /// The workload with the arrival process `when`.
    pub(super) fn workload(&self, when: ArrivalMode) -> LoadWorkload {
        let of_trace = match &self.lengths {
            RequestLengths::Trace(requests) => requests.len(),
            RequestLengths::Drawn { .. } => usize::MAX,
        };
        let default = match (&self.lengths, when) {
            (RequestLengths::Trace(_), ArrivalMode::Trace { .. }) => of_trace,
            _ if self.duration.is_some() => MAX_REQUESTS,
            (RequestLengths::Trace(_), _) => of_trace,
            (RequestLengths::Drawn { .. }, _) => REQUESTS,
        };
        let requests = self.requests.unwrap_or(default);
        let mut rng = Rng::new(self.seed ^ 0x6c65_6e67_7468);
        let mut draw = |(low, high): (usize, usize)| low + rng.below(high - low + 1);
        let mut shape = |number: usize, at: Option<f64>| match &self.lengths {
            RequestLengths::Drawn { prompt, generate } => {
                RequestShape { prompt_tokens: draw(*prompt), output_tokens: draw(*generate), blocks: Vec::new(), at }
            }
            RequestLengths::Trace(requests) => {
                let of = &requests[number % requests.len()];
                RequestShape {
                    prompt_tokens: (of.prompt_tokens / self.shrink).max(1),
                    output_tokens: (of.output_tokens / self.shrink).max(1),
                    blocks: of.blocks.clone(),
                    at,
                }
            }
        };
        let (shapes, pace): (Vec<RequestShape>, Pace) = match (when, &self.lengths) {
            (ArrivalMode::Trace { speed }, RequestLengths::Trace(trace)) => {
                let times = trace.iter().map(|r| r.at.map(|at| at / speed)).take(requests);
                (times.enumerate().map(|(i, at)| shape(i, at)).collect(), Pace::AtTheirTimes)
            }
            (ArrivalMode::Random { rate }, _) => {
                let arrivals = Arrivals::new(rate, self.burst, self.seed);
                let times: Vec<f64> = match self.attain {
                    // A rate runs until both limits are reached.
                    Some(_) => {
                        let (least, end) = (self.requests.unwrap_or(REQUESTS), self.duration.unwrap_or(HOLD));
                        let held = arrivals.enumerate().take_while(|(i, at)| *i < least || *at < end);
                        held.map(|(_, at)| at).take(MAX_REQUESTS).collect()
                    }
                    None => {
                        let end = self.duration.unwrap_or(f64::INFINITY);
                        arrivals.take_while(|at| *at < end).take(requests).collect()
                    }
                };
                (times.into_iter().enumerate().map(|(i, at)| shape(i, Some(at))).collect(), Pace::AtTheirTimes)
            }
            (when, _) => {
                let most = if let ArrivalMode::Concurrent(most) = when { most } else { CONCURRENT };
                // The drawn requests repeat after this many.
                let shapes = (0..requests.min(of_trace).min(100_000)).map(|i| shape(i, None)).collect();
                (shapes, Pace::Concurrent(most))
            }
        };
        LoadWorkload { shapes, requests, pace, duration: self.duration.map(Duration::from_secs_f64), first_number: 0 }
    }
}
