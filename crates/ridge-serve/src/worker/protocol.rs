//! What requests send to the engine's thread, and what comes back.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ridge_engine::Logprobs;
use ridge_engine::service::{BlockUse, Request};
use tokio::sync::{mpsc, oneshot};

use crate::error::{ApiError, ApiResult};

/// Tells what a step over sequences of `(tokens in the cache, tokens of the step)` takes at least.
pub type Floor = Box<dyn FnMut(&[(usize, usize)]) -> Option<Duration> + Send>;

/// What comes of a job.
#[derive(Debug)]
pub(crate) enum JobEvent {
    Token {
        choice: usize,
        id: u32,
        logprobs: Option<Logprobs>,
    },
    /// An answer has ended, perhaps by a token that the client named.
    End {
        choice: usize,
        reason: &'static str,
        by: Option<u32>,
    },
    Failed(ApiError),
    /// Tokens of the prompt that were in the cache. The last event of a job, but for `Failed`.
    Cached(usize),
    /// The log-probabilities of the prompt's tokens from the second on, for choices `first` to `first + n`.
    Prompt {
        first: usize,
        n: usize,
        logprobs: Vec<Logprobs>,
    },
}

/// Events of one request that wait for its client at most. A client that reads as fast as the engine writes never has
/// more than a few.
pub(crate) const MAX_PENDING_EVENTS: usize = 1024;

pub(super) enum EngineCommand {
    Submit(Box<JobSubmission>),
    Cancel {
        job: u64,
        choice: Option<usize>,
    },
    /// Tell what each block of the cache is used for.
    Look(oneshot::Sender<Vec<BlockUse>>),
    /// End when nothing runs any more.
    Drain,
    #[cfg(test)]
    Panic,
}

pub(super) struct JobSubmission {
    pub(super) job: Request,
    pub(super) id: u64,
    /// The first of the request's choices that the job answers.
    pub(super) first: usize,
    pub(super) came: Instant,
    pub(super) events: mpsc::Sender<JobEvent>,
    pub(super) cut: Arc<OnceLock<ApiError>>,
    pub(super) reply: oneshot::Sender<ApiResult<()>>,
}
