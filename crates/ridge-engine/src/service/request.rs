//! Requests to a service, and its events.

use std::sync::Arc;
use std::time::Duration;

use crate::error::EngineError;
use crate::generate::Finish;
use crate::sampling::{Logprobs, Sampling};

/// A request of a service. That of one that is over is never taken for that of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// When tokens are wanted. Only [`Policy::Deadline`](crate::service::Policy::Deadline) reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// From arrival to the first token.
    pub ttft: Option<Duration>,
    /// From each token to the next.
    pub tpot: Option<Duration>,
}

/// What is to be generated, for whom, and how soon.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// How tokens are chosen, and whether their probabilities are told.
    pub sampling: Sampling,
    /// Answers. They share the prompt's cache blocks and differ in their random streams. Of `best_of` answers the
    /// caller keeps the best: the engine tells log-probabilities, and whoever reads stop strings knows what counts.
    pub n: usize,
    /// Tokens of each answer at most; what the context has room for is always a limit.
    pub max_tokens: usize,
    /// Tokens of each answer at least: none of `stop_tokens` comes before.
    pub min_tokens: usize,
    /// Tokens that end an answer, and are not part of it. To continue over the end of a text (`ignore_eos`), leave the
    /// model's end tokens out.
    pub stop_tokens: Arc<[u32]>,
    /// Smaller comes first, under [`Policy::Priority`](crate::service::Policy::Priority).
    pub priority: i32,
    /// When tokens are wanted.
    pub targets: Targets,
    /// Whose request it is (an API key): [`Policy::Fair`](crate::service::Policy::Fair) shares between these.
    pub tenant: Arc<str>,
    /// Requests share cached prefixes only if they have this in common: tell apart adapters, and tenants that may not
    /// learn from timing what others asked.
    pub salt: u64,
    /// What every answer must be.
    pub constraint: Option<Constraint>,
    /// Tell how probable each token of the prompt was (`echo` with `logprobs`), and which were the most likely, as many as
    /// [`Sampling::logprobs`] asks for.
    pub prompt_logprobs: bool,
}

impl Request {
    /// One answer to `prompt` of at most `max_tokens` tokens, with the most likely tokens.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            sampling: Sampling::GREEDY,
            n: 1,
            max_tokens,
            min_tokens: 0,
            stop_tokens: Arc::default(),
            priority: 0,
            targets: Targets::default(),
            tenant: Arc::default(),
            salt: 0,
            constraint: None,
            prompt_logprobs: false,
        }
    }
}

/// The language of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// JSON that this schema, as text, accepts, with at most one space between its parts.
    JsonSchema(String),
    /// A JSON object, written so.
    JsonObject,
    /// Text that this regular expression matches as a whole.
    Regex(String),
    /// One of these.
    Choice(Vec<String>),
    /// Text of this grammar, in the Lark variant of `llguidance`.
    Lark(String),
}

impl Constraint {
    /// The error that it cannot be met, with its text, shortened.
    pub(super) fn refused(&self, why: String) -> EngineError {
        const LONGEST: usize = 80;
        let (name, text) = match self {
            Self::JsonSchema(schema) => ("json_schema", schema.clone()),
            Self::JsonObject => ("json_object", String::new()),
            Self::Regex(regex) => ("regex", regex.clone()),
            Self::Choice(choices) => ("choice", choices.join("|")),
            // Further lines would stand between it and what is said of it.
            Self::Lark(lark) => ("grammar", lark.lines().next().unwrap_or_default().to_owned()),
        };
        let value = match text.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}...", &text[..end]),
            None => text,
        };
        EngineError::Setting { name, value, why }
    }
}

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// Too many wait; HTTP says 429 or 503.
    #[error("the queue of {limit} requests is full ({waiting} waiting); retry later")]
    Busy {
        /// Requests that wait.
        waiting: usize,
        /// How many may.
        limit: usize,
    },
    /// It can never run; HTTP says 400.
    #[error(transparent)]
    Invalid(#[from] EngineError),
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The request.
    pub id: RequestId,
    /// What happened.
    pub what: Happened,
}

/// What happened to a request. An answer has [`Token`](Self::Token)s and one [`Ended`](Self::Ended); when all have, the
/// request has [`Done`](Self::Done), its last event. [`Failed`](Self::Failed) and [`Stuck`](Self::Stuck) are last events too. A request that was
/// cancelled has no further events.
#[derive(Clone, Debug, PartialEq)]
pub enum Happened {
    /// How probable the prompt's tokens were from the second on, before any token.
    Prompt(Vec<Logprobs>),
    /// An answer has another token.
    Token {
        /// Which of the request's answers, from 0.
        choice: usize,
        /// The token.
        token: u32,
        /// Its probability, if that was asked for.
        logprobs: Option<Logprobs>,
    },
    /// An answer is complete.
    Ended {
        /// Which of the request's answers, from 0.
        choice: usize,
        /// Why.
        finish: Finish,
        /// The stop token that ended it, if one did.
        stop_token: Option<u32>,
    },
    /// All answers are complete.
    Done(Usage),
    /// It cannot continue, for logits that are not finite or because the device failed.
    Failed(String),
    /// It cannot continue because of its [`Constraint`]: that allows no token of the model, or takes too long to follow.
    /// HTTP says 400.
    Stuck(String),
}

/// What a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, how many were in the cache when it came to run first.
    pub cached_tokens: usize,
    /// Tokens of all answers.
    pub completion_tokens: usize,
    /// From arrival to its first step.
    pub queued: Duration,
}
