//! What every handler may use, and what the server was told.

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

/// The model that a server has.
pub struct ServedModel {
    /// What clients call it.
    pub name: String,
    /// Without one, prompts are ids of tokens and answers are ids, too.
    pub tokenizer: Option<Tokenizer>,
    /// The chat templates, if it has any.
    pub templates: ChatTemplates,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Tokens of prompt and answer together at most.
    pub context: usize,
}

/// What runs a model.
pub enum Runs {
    /// It generates; perhaps with what tells the floor of a step.
    Engine(Box<Service>, Option<Floor>),
    /// It makes vectors of texts.
    Embedder(Box<Embedder>),
}

/// What a server allows.
pub struct ServeOptions {
    /// Who may use it.
    pub keys: Keys,
    /// Origins whose pages may use it; `*` for all, none for those of the server alone.
    pub cors: Vec<String>,
    /// Bytes of a request at most.
    pub max_body: usize,
    /// Connections at a time at most.
    pub max_connections: usize,
    /// What the engine heeds of a request: its priority, or the times that it wants tokens in.
    pub policy: Policy,
    /// Requests that run or wait at most.
    pub max_requests: usize,
    /// How long a client may take to send the head of a request, and its body.
    pub read_timeout: Duration,
    /// How long a client may take nothing of its answer.
    pub write_timeout: Duration,
    /// How long an answer may take.
    pub request_timeout: Option<Duration>,
    /// How long a step may take before the server calls itself ill.
    pub stall: Duration,
    /// How long answers that run may continue when the server is to end.
    pub drain: Duration,
    /// Write prompts and answers' settings to the log.
    pub log_prompts: bool,
    /// Share cached prefixes only between requests with the same API key.
    pub prefixes_by_key: bool,
    /// How the model writes calls of tools, one of [`tool_call_parsers`](crate::tool_call_parsers), where its chat template
    /// does not tell.
    pub tool_call_parser: Option<String>,
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
        }
    }
}

/// What the handlers share.
pub(crate) struct App {
    pub(crate) model: ServedModel,
    /// When the server started, in Unix seconds.
    pub(crate) created: u64,
    pub(crate) speller: Speller,
    pub(crate) options: ServeOptions,
    pub(crate) worker: ModelWorker,
    pub(crate) metrics: Arc<Metrics>,
    /// Is the server about to end?
    pub(crate) draining: AtomicBool,
    /// Turns true when answers that still run are cut, since the time that the server had to end is over.
    cutting: watch::Sender<bool>,
    /// KiB of bodies that may be held at a time.
    pub(crate) body_budget: Semaphore,
    /// How much is rendered and tokenised at a time.
    blocking: Semaphore,
    /// Characters that no prompt that fits has.
    longest_prompt: usize,
    /// What makes the salts of keys unforeseeable.
    salts: RandomState,
}

/// The thread that has the device.
pub(crate) enum ModelWorker {
    Engine(Worker),
    Embedder(EmbedWorker),
}

/// KiB of bodies that may be held at a time, unless one alone has more.
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

    /// What requests of this `key` that name `salt` share cached prefixes by.
    pub(crate) fn salt(&self, salt: u64, key: &str) -> u64 {
        if self.options.prefixes_by_key { self.salts.hash_one((salt, key)) } else { salt }
    }

    /// Cuts all answers that still run.
    pub(crate) fn cut(&self) {
        self.cutting.send_replace(true);
    }

    /// Completes when answers that still run are cut.
    pub(crate) fn cutting(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut cutting = self.cutting.subscribe();
        async move {
            // The sender lives as long as the server.
            let _ = cutting.wait_for(|cut| *cut).await;
        }
    }

    /// Runs what takes long and does not wait, away from the threads that serve connections.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let _permit = self.blocking.acquire().await.map_err(|_| ApiError::internal("the server is ending"))?;
        let app = Arc::clone(self);
        match spawn_blocking(move || work(&app)).await {
            Ok(outcome) => outcome,
            Err(error) => {
                tracing::error!(%error, "a request could not be prepared");
                Err(ApiError::internal("the request could not be prepared; see the server's log"))
            }
        }
    }

    pub(crate) fn tokenizer(&self, param: &str) -> ApiResult<&Tokenizer> {
        let why = "the model has no tokenizer, so that prompts must be ids of tokens";
        self.model.tokenizer.as_ref().ok_or_else(|| ApiError::unsupported(param, why))
    }

    /// The tokens of a text.
    pub(crate) fn encode(&self, param: &str, text: &str, add_special: bool) -> ApiResult<Vec<u32>> {
        let tokenizer = self.tokenizer(param)?;
        if text.len() > self.longest_prompt {
            let message =
                format!("has {} bytes, which cannot fit a context of {} tokens", text.len(), self.model.context);
            return Err(ApiError { code: Some("context_length_exceeded"), ..ApiError::param(param, message) });
        }
        let named = |error: ApiError| ApiError::param(param, error.message);
        tokenizer.encode(text, add_special).map_err(|error| named(error.into()))
    }

    pub(crate) fn engine(&self) -> ApiResult<&Worker> {
        match &self.worker {
            ModelWorker::Engine(worker) => Ok(worker),
            ModelWorker::Embedder(_) => {
                let message = format!("{} makes vectors and does not generate; use /v1/embeddings", self.model.name);
                Err(ApiError::not_found("model_not_supported", message))
            }
        }
    }
}

pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A name for a request or a thing of one: `prefix` and 24 hexadecimal digits.
pub(crate) fn new_id(prefix: &str) -> String {
    let (a, b) = (crate::wire::sampling::random(), crate::wire::sampling::random());
    format!("{prefix}{a:016x}{:08x}", b as u32)
}
