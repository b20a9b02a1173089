//! The state shared by all handlers, and the server's options.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ridge_engine::Embedder;
use ridge_engine::service::{Policy, Service};
use ridge_text::{ChatTemplates, Tokenizer};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;

use crate::choice::Speller;
use crate::embedding::EmbedWorker;
use crate::error::{ApiError, ApiResult};
use crate::keys::Keys;
use crate::metrics::Metrics;
use crate::worker::{Floor, Worker};

/// The served model.
pub struct ServedModel {
    /// Its name for clients.
    pub name: String,
    /// Without a tokenizer, prompts and outputs are token ids.
    pub tokenizer: Option<Tokenizer>,
    /// The chat templates, if it has any; of a reranker that is a decoder, that of a query and a document.
    pub templates: ChatTemplates,
    /// Text in front of every text that is embedded or, of a reranker with a template, the instruction of requests without one.
    pub prompt: Option<String>,
    /// End tokens.
    pub eos: Vec<u32>,
    /// Context length: maximum tokens of prompt plus generated text.
    pub context: usize,
}

/// The backend of a model.
pub enum Runs {
    /// A generating engine, optionally with an estimator of the floor of a step.
    Engine(Box<Service>, Option<Floor>),
    /// An embedder.
    Embedder(Box<Embedder>),
}

/// Server options.
pub struct ServeOptions {
    /// Accepted API keys.
    pub keys: Keys,
    /// Allowed CORS origins; `*` for all, empty for same-origin only.
    pub cors: Vec<String>,
    /// Maximum size of a request, in bytes.
    pub max_body: usize,
    /// Maximum number of concurrent connections.
    pub max_connections: usize,
    /// The scheduling policy: which of a request's priority and latency targets are used.
    pub policy: Policy,
    /// Maximum number of running and waiting requests.
    pub max_requests: usize,
    /// Timeout for reading a request's header, and for its body.
    pub read_timeout: Duration,
    /// Timeout of a blocked write.
    pub write_timeout: Duration,
    /// Timeout of a request.
    pub request_timeout: Option<Duration>,
    /// Duration of a step after which the server reports itself unhealthy.
    pub stall: Duration,
    /// Time for running requests to finish on shutdown.
    pub drain: Duration,
    /// Log prompts and settings.
    pub log_prompts: bool,
    /// Share cached prefixes only between requests with the same API key.
    pub prefixes_by_key: bool,
    /// The notation of tool calls, one of [`tool_call_parsers`](crate::tool_call_parsers); `None` detects it from the chat
    /// template.
    pub tool_call_parser: Option<String>,
    /// Was the model placed to give the same bits whatever else runs? Only reported, in `system_fingerprint` and metrics.
    pub deterministic: bool,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            keys: Keys::default(),
            cors: Vec::new(),
            max_body: 16 << 20,
            max_connections: 4096,
            policy: Policy::FirstCome,
            max_requests: 2048,
            read_timeout: Duration::from_secs(15),
            write_timeout: Duration::from_secs(30),
            request_timeout: None,
            stall: Duration::from_secs(60),
            drain: Duration::from_secs(30),
            log_prompts: false,
            prefixes_by_key: false,
            tool_call_parser: None,
            deterministic: false,
        }
    }
}

/// State shared by the handlers.
pub(crate) struct App {
    pub(crate) model: ServedModel,
    /// When the server started, in Unix seconds.
    pub(crate) created: u64,
    pub(crate) speller: Speller,
    pub(crate) options: ServeOptions,
    pub(crate) worker: ModelWorker,
    pub(crate) metrics: Arc<Metrics>,
    /// Whether the server is shutting down.
    pub(crate) draining: AtomicBool,
    /// True once the drain timeout has passed and running requests are aborted.
    cutting: watch::Sender<bool>,
    /// Budget for concurrently held request bodies, in KiB.
    pub(crate) body_budget: Semaphore,
    /// Limits concurrent rendering and tokenisation.
    blocking: Semaphore,
    /// Text length above which no prompt can fit the context.
    longest_prompt: usize,
    /// A random secret from which per-key cache salts are derived.
    salts: RandomState,
}

/// The handle of the thread that owns the device.
pub(crate) enum ModelWorker {
    Engine(Worker),
    Embedder(EmbedWorker),
}

/// Budget for concurrently held request bodies, in KiB; a single larger body is allowed.
pub(crate) const BODY_BUDGET: usize = 256 << 10;
const BLOCKING: usize = 4;

impl App {
    pub(crate) fn new(model: ServedModel, options: ServeOptions, worker: ModelWorker, metrics: Arc<Metrics>) -> Self {
        let spelt =
            |t: &Tokenizer| (0..t.vocab_size() as u32).filter_map(|id| t.id_to_token(id)).map(|s| s.len()).max();
        let longest_token = model.tokenizer.as_ref().and_then(spelt).unwrap_or(1);
        let budget = BODY_BUDGET.max(options.max_body.div_ceil(1024));
        Self {
            speller: Speller::new(model.tokenizer.as_ref()),
            longest_prompt: model.context.saturating_mul(longest_token).saturating_mul(4).max(64 << 10),
            model,
            created: unix_now(),
            options,
            worker,
            metrics,
            draining: AtomicBool::new(false),
            cutting: watch::Sender::new(false),
            body_budget: Semaphore::new(budget),
            blocking: Semaphore::new(BLOCKING),
            salts: RandomState::new(),
        }
    }

    /// The cache salt of a request with this API `key` and `cache_salt`.
    pub(crate) fn salt(&self, salt: u64, key: &str) -> u64 {
        if self.options.prefixes_by_key { self.salts.hash_one((salt, key)) } else { salt }
    }

    /// Aborts all running requests.
    pub(crate) fn cut(&self) {
        self.cutting.send_replace(true);
    }

    /// Completes when running requests are aborted.
    pub(crate) fn cutting(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut cutting = self.cutting.subscribe();
        async move {
            // The sender is never dropped before the server.
            let _ = cutting.wait_for(|cut| *cut).await;
        }
    }

    /// Runs CPU-bound work outside the threads that serve connections.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let _permit = self.blocking.acquire().await.map_err(|_| ApiError::internal("the server is ending"))?;
        let app = Arc::clone(self);
        match spawn_blocking(move || work(&app)).await {
            Ok(outcome) => outcome,
            Err(error) => {
                tracing::error!(%error, "a request could not be tokenised or rendered");
                Err(ApiError::internal("the request could not be prepared; see the server's log"))
            }
        }
    }

    pub(crate) fn tokenizer(&self, param: &str) -> ApiResult<&Tokenizer> {
        let why = "the model has no tokenizer, so prompts must be token ids";
        self.model.tokenizer.as_ref().ok_or_else(|| ApiError::unsupported(param, why))
    }

    /// Refuses a text that is too long to be worth tokenising.
    pub(crate) fn check_length(&self, param: &str, text: &str) -> ApiResult<()> {
        if text.len() <= self.longest_prompt {
            return Ok(());
        }
        let message = format!("has {} bytes, which cannot fit a context of {} tokens", text.len(), self.model.context);
        Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::param(param, message) })
    }

    /// The tokens of a text.
    pub(crate) fn encode(&self, param: &str, text: &str, add_special: bool) -> ApiResult<Vec<u32>> {
        let tokenizer = self.tokenizer(param)?;
        self.check_length(param, text)?;
        let named = |error: ApiError| ApiError::param(param, error.message);
        tokenizer.encode(text, add_special).map_err(|error| named(error.into()))
    }

    pub(crate) fn engine(&self) -> ApiResult<&Worker> {
        match &self.worker {
            ModelWorker::Engine(worker) => Ok(worker),
            ModelWorker::Embedder(_) => {
                let message = format!(
                    "{} is served for embeddings or scores and does not generate text; use /v1/embeddings or /v1/rerank",
                    self.model.name
                );
                Err(ApiError::not_found("model_not_supported", message))
            }
        }
    }
}

pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A random id: `prefix` and 24 hexadecimal digits.
pub(crate) fn new_id(prefix: &str) -> String {
    let (a, b) = (crate::wire::sampling::random(), crate::wire::sampling::random());
    format!("{prefix}{a:016x}{:08x}", b as u32)
}
