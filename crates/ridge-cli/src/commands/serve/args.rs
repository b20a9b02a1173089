//! Arguments of `ridge serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use ridge_engine::service::Policy;
use ridge_serve::{KEY_VARIABLE, Keys, LogFormat, ServeOptions};

use crate::args::{LimitedDeviceArgs, MAX_COUNT, NumberArgs, ParallelArgs, Speculate, speculate, whole};
use crate::error::{Result, refused};
use crate::input;

/// Serve a model over HTTP with an OpenAI-compatible API
///
/// Without a model, the embedded stories260K is used. A web page at the same address has a chat and live engine statistics.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge serve                        the embedded model
  ridge serve --model DIR --dtype bf16 --cache-dtype bf16
  ridge serve --model DIR --host 0.0.0.0 --api-keys keys.txt
  ridge serve --model DIR --dry-run  prints the memory it would allocate

Then: curl localhost:8000/v1/completions -d '{\"prompt\": \"Once\"}'

Endpoints: /v1/completions, /v1/chat/completions, /v1/embeddings (embedding models), /v1/rerank, /v1/score, /v1/models, /tokenize, /detokenize, \
/health, /ready, /metrics (Prometheus), /version, /live.

On SIGTERM or Ctrl-C the server finishes running requests and exits; a second signal exits immediately. The log goes to \
standard error.
Exit codes: 0 shut down, 1 failed, 2 usage error.")]
pub(crate) struct ServeArgs {
    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    /// [default: the embedded model]
    #[arg(short, long, value_name = "MODEL")]
    pub(super) model: Option<PathBuf>,

    /// Use random weights
    #[arg(long)]
    pub(super) random_weights: bool,

    /// Model name for clients [default: the name of its folder]
    #[arg(long, value_name = "NAME")]
    pub(super) served_model_name: Option<String>,

    /// Use the chat template in this file instead of the model's
    #[arg(long, value_name = "FILE")]
    pub(super) chat_template: Option<PathBuf>,

    /// Serve a decoder that was trained to answer yes or no as a reranker (/v1/rerank, /v1/score), as Qwen3-Reranker: a score
    /// is the probability of yes. Models whose files say so, and classifiers, need no flag. The chat template is that of
    /// messages with the roles query and document
    #[arg(long)]
    pub(super) rerank: bool,

    /// Notation of the model's tool calls [default: detected from its chat template]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(ridge_serve::tool_call_parsers()))]
    pub(super) tool_call_parser: Option<String>,

    /// Address to listen on; 0.0.0.0 means all IPv4 addresses of this machine; may be repeated
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS", help_heading = "Network")]
    pub(super) host: Vec<String>,

    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 8000, value_name = "PORT", help_heading = "Network")]
    pub(super) port: u16,

    /// Allow this CORS origin, `*` for any; may be repeated
    #[arg(long, value_name = "ORIGIN", help_heading = "Network")]
    pub(super) cors_origin: Vec<String>,

    /// Require an API key from this file: one per line, optionally preceded by a name. The variable RIDGE_API_KEY can hold
    /// another key. SIGHUP reloads the file
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub(super) api_keys: Option<PathBuf>,

    /// Context length: maximum tokens of prompt plus response [default: the model's maximum, at most 4096]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    pub(super) context: Option<usize>,

    /// Maximum number of concurrent sequences
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, 65536>,
        allow_negative_numbers = true, default_value_t = 32, help_heading = "Running"
    )]
    pub(super) sequences: usize,

    /// KV cache capacity in tokens, over all sequences, rounded up to whole blocks of 16; at least --context, whose default is at
    /// most that [default: enough for all sequences at full context]
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, help_heading = "Running"
    )]
    pub(super) cache_tokens: Option<usize>,

    /// Maximum tokens per step
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 512, help_heading = "Running"
    )]
    pub(super) chunk: usize,

    /// Scheduling order when not all tokens fit into a step: by arrival, by smallest `priority`, by deadline, or fair between
    /// API keys
    #[arg(long, value_enum, default_value = "first-come", help_heading = "Running")]
    pub(super) policy: PolicyArg,

    /// Do not reuse cached prompt prefixes
    #[arg(long, help_heading = "Running")]
    pub(super) no_prefix_cache: bool,

    /// Share cached prefixes only among requests with the same API key, so that timings reveal nothing about other clients'
    /// prompts
    #[arg(long, conflicts_with = "no_prefix_cache", help_heading = "Running")]
    pub(super) prefix_cache_by_key: bool,

    /// Speculative decoding: propose up to N tokens found earlier in the sequence (prompt lookup), or with mtp or mtp:N the
    /// next token or N tokens that the model's own multi-token prediction module drafts, and verify them in one step; the text
    /// does not change; 0 is off
    #[arg(
        long, value_name = "N|mtp[:N]", value_parser = speculate, allow_negative_numbers = true, default_value = "0",
        help_heading = "Running"
    )]
    pub(super) speculate: Speculate,

    /// Skip the roofline measurement, which takes half a second when the server is first idle and lets metrics compare step
    /// times with their floor
    #[arg(long, help_heading = "Running")]
    pub(super) no_roofline: bool,

    #[command(flatten)]
    pub(super) place: LimitedDeviceArgs,

    #[command(flatten)]
    pub(super) parallel: ParallelArgs,

    #[command(flatten)]
    pub(super) numbers: NumberArgs,

    /// Maximum number of requests that run or wait; more are rejected with status 429
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, default_value_t = 2048, help_heading = "Limits")]
    pub(super) max_requests: usize,

    /// Maximum number of concurrent connections
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>, default_value_t = 4096, help_heading = "Limits")]
    pub(super) max_connections: usize,

    /// Maximum size of a request, in MiB
    #[arg(long, value_name = "MIB", value_parser = whole::<usize, 1, 1024>, default_value_t = 16, help_heading = "Limits")]
    pub(super) max_body: usize,

    /// Timeout for reading a request's header, and for reading its body, in seconds
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, MAX_SECONDS>, default_value_t = 15, help_heading = "Limits")]
    pub(super) read_timeout: u64,

    /// Disconnect a client that reads nothing for this many seconds
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, MAX_SECONDS>, default_value_t = 30, help_heading = "Limits")]
    pub(super) write_timeout: u64,

    /// Maximum duration of a request in seconds [default: none]
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, MAX_SECONDS>, help_heading = "Limits")]
    pub(super) request_timeout: Option<u64>,

    /// Duration of a step after which /health reports a stall, in seconds
    #[arg(long, value_name = "S", value_parser = whole::<u64, 1, MAX_SECONDS>, default_value_t = 60, help_heading = "Limits")]
    pub(super) stall_timeout: u64,

    /// Time for running requests to finish on shutdown, in seconds
    #[arg(long, value_name = "S", value_parser = whole::<u64, 0, MAX_SECONDS>, default_value_t = 30, help_heading = "Limits")]
    pub(super) drain_timeout: u64,

    /// Format of the log
    #[arg(long, value_enum, default_value = "text", help_heading = "Log")]
    pub(super) log_format: LogFormatArg,

    /// Minimum log level
    #[arg(long, value_enum, default_value = "info", help_heading = "Log")]
    pub(super) log_level: LogLevelArg,

    /// Log requests with their prompts
    #[arg(long, help_heading = "Log")]
    pub(super) log_prompts: bool,

    /// Print what would be allocated, and exit
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// Maximum time limit: one day, in seconds.
const MAX_SECONDS: u64 = 86400;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PolicyArg {
    FirstCome,
    Priority,
    Deadline,
    Fair,
}

impl PolicyArg {
    pub(super) fn policy(self) -> Policy {
        match self {
            Self::FirstCome => Policy::FirstCome,
            Self::Priority => Policy::Priority,
            Self::Deadline => Policy::Deadline,
            Self::Fair => Policy::Fair,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormatArg {
    Text,
    Json,
}

impl LogFormatArg {
    pub(super) fn format(self) -> LogFormat {
        match self {
            Self::Text => LogFormat::Text,
            Self::Json => LogFormat::Json,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum LogLevelArg {
    Error,
    Warn,
    Info,
    Debug,
}

impl LogLevelArg {
    pub(super) fn level(self) -> tracing::Level {
        match self {
            Self::Error => tracing::Level::ERROR,
            Self::Warn => tracing::Level::WARN,
            Self::Info => tracing::Level::INFO,
            Self::Debug => tracing::Level::DEBUG,
        }
    }
}

impl ServeArgs {
    /// The template that `--chat-template` names, if any: name, file and text.
    pub(super) fn chat_template(&self) -> Result<Option<(String, String, String)>> {
        let read = |file: &PathBuf| Ok(("default".to_owned(), file.display().to_string(), input::file(file)?));
        self.chat_template.as_ref().map(read).transpose()
    }

    /// The settings of the server.
    ///
    /// # Errors
    /// When a setting is invalid, or the key file cannot be read.
    pub(super) fn options(&self) -> Result<ServeOptions> {
        let variable = match std::env::var(KEY_VARIABLE) {
            Ok(key) => Some(key),
            Err(std::env::VarError::NotPresent) => None,
            Err(std::env::VarError::NotUnicode(_)) => return Err(refused(KEY_VARIABLE, "", "must be UTF-8")),
        };
        if self.cors_origin.len() > 1 && self.cors_origin.iter().any(|o| o == "*") {
            return Err(refused("--cors-origin", "*", "allows any origin and cannot be combined with others"));
        }
        if let Some(bad) = self.cors_origin.iter().find(|o| *o != "*" && !o.starts_with("http")) {
            return Err(refused("--cors-origin", bad, "must be an origin such as https://example.org, or *"));
        }
        let seconds = Duration::from_secs;
        Ok(ServeOptions {
            keys: Keys::read(self.api_keys.as_deref(), variable.as_deref())?,
            cors: self.cors_origin.clone(),
            max_body: self.max_body << 20,
            max_connections: self.max_connections,
            policy: self.policy.policy(),
            max_requests: self.max_requests,
            read_timeout: seconds(self.read_timeout),
            write_timeout: seconds(self.write_timeout),
            request_timeout: self.request_timeout.map(seconds),
            stall: seconds(self.stall_timeout),
            drain: seconds(self.drain_timeout),
            log_prompts: self.log_prompts,
            prefixes_by_key: self.prefix_cache_by_key,
            tool_call_parser: self.tool_call_parser.clone(),
            deterministic: self.place.deterministic(),
        })
    }
}
