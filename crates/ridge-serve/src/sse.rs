//! Responses as a stream of server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use http_body::Frame;
use serde_json::Value;
use tokio::time::Interval;

use crate::answers::{Answers, TokenUsage};
use crate::choice::AnswerPiece;

/// Builds the chunks of a streamed response.
pub(crate) trait Chunks: Send + 'static {
    /// The chunks before all choices.
    fn first(&mut self) -> Vec<Value>;
    /// The chunk of a piece of choice `index`. `usage` covers all choices so far.
    fn piece(&mut self, index: usize, piece: AnswerPiece, usage: TokenUsage) -> Vec<Value>;
    /// The chunks after all choices.
    fn last(&mut self, usage: TokenUsage) -> Vec<Value>;
}

/// Interval of keep-alive comments, because proxies close silent connections.
const SILENCE: Duration = Duration::from_secs(15);

/// The response body. It is pull-based, so events are produced at the rate at which the client reads.
struct ChunkStream<C> {
    answers: Answers,
    chunks: C,
    ready: VecDeque<Bytes>,
    silence: Interval,
    state: SseState,
}

#[derive(PartialEq, Eq)]
enum SseState {
    Start,
    Running,
    Ended,
}

/// The response that streams `answers`.
pub(crate) fn response<C: Chunks + Unpin>(answers: Answers, chunks: C) -> Response<Body> {
    let mut silence = tokio::time::interval(SILENCE);
    silence.reset();
    let stream = ChunkStream { answers, chunks, ready: VecDeque::new(), silence, state: SseState::Start };
    let mut response = Response::new(Body::new(stream));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Disables buffering in nginx.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<C: Chunks> ChunkStream<C> {
    fn say(&mut self, values: impl IntoIterator<Item = Value>) {
        let event = |value: Value| Bytes::from(format!("data: {value}\n\n"));
        self.ready.extend(values.into_iter().map(event));
    }

    /// Makes something ready, or nothing if the stream has ended.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.state {
            SseState::Ended => return Poll::Ready(()),
            SseState::Start => {
                let first = self.chunks.first();
                self.say(first);
                self.state = SseState::Running;
            }
            SseState::Running => {}
        }
        while self.ready.is_empty() {
            match self.answers.poll_next(cx) {
                Poll::Ready(Some(Ok((index, piece)))) => {
                    let usage = self.answers.usage();
                    let values = self.chunks.piece(index, piece, usage);
                    self.say(values);
                }
                Poll::Ready(end) => {
                    let usage = self.answers.usage();
                    let values = match end {
                        Some(Err(error)) => vec![error.body()],
                        _ => self.chunks.last(usage),
                    };
                    self.say(values);
                    self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                    self.state = SseState::Ended;
                }
                Poll::Pending if self.silence.poll_tick(cx).is_ready() => {
                    self.ready.push_back(Bytes::from_static(b": still here\n\n"));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }
}

impl<C: Chunks + Unpin> http_body::Body for ChunkStream<C> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let stream = &mut *self;
        if stream.ready.is_empty() && stream.poll_more(cx).is_pending() {
            return Poll::Pending;
        }
        stream.silence.reset();
        Poll::Ready(stream.ready.pop_front().map(|bytes| Ok(Frame::data(bytes))))
    }
}
