//! The choices (completions) of one request, assembled from the engine's events.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tokio::sync::mpsc;
use tokio::time::Sleep;

use crate::choice::{AnswerChoice, AnswerPiece, Ending, TokenInfo};
use crate::error::{ApiError, ApiResult};
use crate::tools::ToolOutputPart;
use crate::worker::{JobEvent, JobTicket};

/// Token usage of a request, in OpenAI's terms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenUsage {
    pub(crate) prompt: usize,
    /// Prompt tokens found in the prefix cache.
    pub(crate) cached: usize,
    pub(crate) completion: usize,
}

/// The choices of one request. Dropping this cancels the running ones.
pub(crate) struct Answers {
    choices: Vec<AnswerChoice>,
    events: mpsc::Receiver<JobEvent>,
    /// The engine jobs that generate the choices.
    tickets: Vec<JobTicket>,
    prompt_tokens: usize,
    /// Stop tokens given by the client.
    own_stops: Vec<u32>,
    /// The client's parameter for the output constraint.
    form: Option<String>,
    cached_tokens: usize,
    /// Finished jobs.
    jobs_over: usize,
    deadline: Option<Pin<Box<Sleep>>>,
    /// Completes when the server shuts down before the choices are complete.
    cutting: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The first error.
    failed: bool,
    id: String,
    began: Instant,
}

impl Answers {
    pub(crate) fn new(
        id: String,
        choices: Vec<AnswerChoice>,
        events: mpsc::Receiver<JobEvent>,
        tickets: Vec<JobTicket>,
        (prompt_tokens, own_stops, form): (usize, Vec<u32>, Option<String>),
        limit: Option<Duration>,
        cutting: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let deadline = limit.map(|limit| Box::pin(tokio::time::sleep(limit)));
        Self {
            choices,
            events,
            tickets,
            prompt_tokens,
            own_stops,
            form,
            cached_tokens: 0,
            jobs_over: 0,
            deadline,
            cutting: Box::pin(cutting),
            failed: false,
            id,
            began: Instant::now(),
        }
    }

    pub(crate) fn usage(&self) -> TokenUsage {
        let completion = self.choices.iter().map(|c| c.tokens).sum();
        TokenUsage { prompt: self.prompt_tokens, cached: self.cached_tokens, completion }
    }

    /// Whether all choices have ended and all jobs have reported their usage.
    fn ended(&self) -> bool {
        self.failed || self.jobs_over == self.tickets.len() && self.choices.iter().all(|c| c.ended)
    }

    /// The next non-empty piece and the index of its choice; `None` when all have ended.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<ApiResult<(usize, AnswerPiece)>>> {
        let next = self.poll_piece(cx);
        if let Poll::Ready(Some(Err(_))) = next {
            self.failed = true;
            self.tickets.clear();
        }
        next
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<ApiResult<(usize, AnswerPiece)>>> {
        while !self.ended() {
            let event = match self.events.poll_recv(cx) {
                Poll::Ready(Some(event)) => event,
                Poll::Ready(None) => return Poll::Ready(Some(Err(self.broken_off()))),
                Poll::Pending if self.cutting.as_mut().poll(cx).is_ready() => {
                    let message = "the server shut down before the response was complete; retry the request";
                    return Poll::Ready(Some(Err(ApiError::unavailable(message))));
                }
                Poll::Pending => {
                    let late = self.deadline.as_mut().is_some_and(|d| d.as_mut().poll(cx).is_ready());
                    let message = "the request exceeds the server's time limit (--request-timeout)";
                    let error = || Some(Err(ApiError::timeout(StatusCode::GATEWAY_TIMEOUT, message)));
                    return if late { Poll::Ready(error()) } else { Poll::Pending };
                }
            };
            match self.take(event) {
                Ok(Some(piece)) => return Poll::Ready(Some(Ok(piece))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        Poll::Ready(None)
    }

    fn take(&mut self, event: JobEvent) -> ApiResult<Option<(usize, AnswerPiece)>> {
        let (index, piece, engine_knows) = match event {
            JobEvent::Token { choice, id, logprobs } => {
                (choice, self.choices[choice].token(id, logprobs.as_ref())?, false)
            }
            JobEvent::End { choice, reason, by } => {
                let by = by.filter(|id| self.own_stops.contains(id));
                (choice, self.choices[choice].end(reason, by)?, true)
            }
            JobEvent::Cached(tokens) => {
                self.cached_tokens += tokens;
                self.jobs_over += 1;
                return Ok(None);
            }
            JobEvent::Prompt { first, n, logprobs } => {
                self.choices[first..first + n].iter_mut().try_for_each(|choice| choice.prompt(&logprobs))?;
                return Ok(None);
            }
            JobEvent::Failed(error) => {
                return Err(match &self.form {
                    Some(form) if error.param.as_deref() == Some("constraint") => error.of_param(form),
                    _ => error,
                });
            }
        };
        if piece.ending.is_some() {
            self.tickets.iter_mut().for_each(|ticket| ticket.ended(index, engine_knows));
        }
        Ok(Some((index, piece)).filter(|(_, piece)| !piece.is_empty()))
    }

    /// The error for a closed event channel.
    fn broken_off(&self) -> ApiError {
        let cut = self.tickets.first().and_then(JobTicket::why_cut);
        cut.unwrap_or_else(crate::worker::stopped)
    }

    /// Waits for all choices.
    pub(crate) async fn whole(&mut self) -> ApiResult<Vec<WholeAnswer>> {
        let mut wholes: Vec<WholeAnswer> = self.choices.iter().map(|_| WholeAnswer::default()).collect();
        while let Some(next) = poll_fn(|cx| self.poll_next(cx)).await {
            let (index, piece) = next?;
            wholes[index].add(piece);
        }
        Ok(wholes)
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        let usage = self.usage();
        let outcome = if self.failed {
            "failed"
        } else if self.ended() {
            "done"
        } else {
            "cancelled"
        };
        tracing::info!(
            id = self.id,
            outcome,
            prompt_tokens = usage.prompt,
            cached_tokens = usage.cached,
            completion_tokens = usage.completion,
            seconds = self.began.elapsed().as_secs_f64(),
            "completed"
        );
    }
}

/// One complete choice.
#[derive(Debug, Default)]
pub(crate) struct WholeAnswer {
    pub(crate) text: String,
    pub(crate) reasoning: String,
    /// Names of tools and the arguments in JSON.
    pub(crate) calls: Vec<(String, String)>,
    pub(crate) logprobs: Vec<TokenInfo>,
    pub(crate) ids: Vec<u32>,
    pub(crate) ending: Option<Ending>,
}

impl WholeAnswer {
    fn add(&mut self, piece: AnswerPiece) {
        self.text += &piece.text;
        self.reasoning += &piece.reasoning;
        for part in piece.calls {
            match part {
                ToolOutputPart::Call { name, .. } => self.calls.push((name, String::new())),
                ToolOutputPart::Arguments { index, json } => {
                    if let Some((_, arguments)) = self.calls.get_mut(index) {
                        arguments.push_str(&json);
                    }
                }
                ToolOutputPart::Text(text) => self.text += &text,
            }
        }
        self.logprobs.extend(piece.logprobs);
        self.ids.extend(piece.ids);
        self.ending = self.ending.take().or(piece.ending);
    }

    /// Mean log-probability per token, by which `best_of` selects.
    pub(crate) fn mean_logprob(&self) -> f64 {
        let sum: f64 = self.logprobs.iter().map(|t| t.logprob.map_or(0.0, f64::from)).sum();
        sum / self.logprobs.len().max(1) as f64
    }
}
