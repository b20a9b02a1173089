//! One request over HTTP, and what came of it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;

use super::error::LoadError;
use super::events::SseEvents;
use super::prompts::GeneratedPrompt;

/// Bytes of an answer that is no stream at most, and characters of an error that are shown.
const MAX_BODY: usize = 16 << 20;
const MAX_SHOWN: usize = 300;

/// Which of a server's endpoints is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// The target server and the request options.
#[derive(Clone, Debug)]
pub struct ServerTarget {
    host: String,
    port: u16,
    /// Path prefix before `/v1`.
    base: String,
    /// Which endpoint.
    pub api: Api,
    /// Model name on the server.
    pub model: String,
    /// API key.
    pub key: Option<String>,
    /// Additional body fields of every request, such as `temperature`.
    pub more: Map<String, Value>,
    /// Timeout of a request.
    pub timeout: Duration,
}

impl ServerTarget {
    /// The server at `url`, with or without `/v1` at its end.
    ///
    /// # Errors
    /// What is no address of a server over HTTP.
    pub fn new(url: &str, api: Api) -> Result<Self, LoadError> {
        let wrong = |problem: &str| LoadError::Url { url: url.to_owned(), problem: problem.to_owned() };
        let full = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let uri: Uri = full.parse().map_err(|_| wrong("is not a valid URL; give one such as http://127.0.0.1:8000"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(wrong(
                    "TLS is not supported; connect to the server behind the TLS proxy over http, or use a tunnel",
                ));
            }
            _ => return Err(wrong("must begin with http://")),
        }
        if uri.query().is_some() {
            return Err(wrong("must not have a query"));
        }
        if uri.authority().is_some_and(|a| a.as_str().contains('@')) {
            return Err(wrong("must not have a user name or password; set the API key in the variable RIDGE_API_KEY"));
        }
        let host = uri.host().filter(|h| !h.is_empty()).ok_or_else(|| wrong("has no host"))?;
        let base = uri.path().trim_end_matches('/');
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(80),
            base: base.strip_suffix("/v1").unwrap_or(base).to_owned(),
            api,
            model: String::new(),
            key: None,
            more: Map::new(),
            timeout: Duration::from_secs(600),
        })
    }

    /// The server's address, for messages.
    pub fn url(&self) -> String {
        format!("http://{}{}", self.authority(), self.base)
    }

    fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The body of a request.
    pub(super) fn body(&self, prompt: &GeneratedPrompt, output_tokens: usize) -> Bytes {
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.model));
        match (self.api, prompt) {
            (Api::Completions, GeneratedPrompt::Ids(ids)) => body.insert("prompt".to_owned(), json!(ids)),
            (Api::Completions, GeneratedPrompt::Text(text)) => body.insert("prompt".to_owned(), json!(text)),
            (Api::Chat, prompt) => {
                let text = match prompt {
                    GeneratedPrompt::Text(text) => text.clone(),
                    GeneratedPrompt::Ids(ids) => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
                };
                body.insert("messages".to_owned(), json!([{ "role": "user", "content": text }]))
            }
        };
        body.insert("max_tokens".to_owned(), json!(output_tokens));
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({ "include_usage": true }));
        body.extend(self.more.clone());
        Bytes::from(Value::Object(body).to_string())
    }
}

/// An answer that came whole. Times in seconds from when its request was sent.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedResponse {
    /// To the first token.
    pub ttft: f64,
    /// To the last token.
    pub last: f64,
    /// To the end of the stream.
    pub e2e: f64,
    /// Between events that bring tokens.
    pub itl: Vec<f64>,
    /// Tokens of the prompt, as the server counts them.
    pub prompt_tokens: Option<usize>,
    /// Tokens of the answer: as the server counts them, else events.
    pub output_tokens: usize,
    /// Did the server count?
    pub counted: bool,
}

impl TimedResponse {
    /// Seconds a token after the first; `None` for one token.
    pub fn tpot(&self) -> Option<f64> {
        (self.output_tokens > 1).then(|| (self.last - self.ttft) / (self.output_tokens - 1) as f64)
    }
}

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFailure {
    /// `connect`, `timeout`, `closed`, `malformed`, `server` or `http 429` and the like: what reports count by.
    pub kind: String,
    /// What was said.
    pub message: String,
}

impl RequestFailure {
    fn new(kind: impl Into<String>, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self { kind: kind.into(), message: message.chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect() }
    }
}

/// Connections to a server.
#[derive(Debug)]
pub struct Client {
    /// Whom it asks.
    pub target: ServerTarget,
    /// Connections that wait for their next request.
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

/// How long a server may take to tell its metrics.
const METRICS_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

impl Client {
    /// Connects to nobody yet.
    pub fn new(target: ServerTarget) -> Self {
        Self { target, idle: Mutex::default() }
    }

    /// Sends a request of this body and reads the stream that it gets.
    pub(super) async fn ask(&self, body: Bytes) -> Result<TimedResponse, RequestFailure> {
        let sent = Instant::now();
        let path = match self.target.api {
            Api::Completions => "/v1/completions",
            Api::Chat => "/v1/chat/completions",
        };
        let asked = async {
            let (mut response, sender) = self.send(Method::POST, path, body).await?;
            if response.status() != StatusCode::OK {
                return Err(refusal(response).await);
            }
            let kind = response.headers().get(header::CONTENT_TYPE).and_then(|k| k.to_str().ok()).unwrap_or_default();
            if !kind.starts_with("text/event-stream") {
                return Err(RequestFailure::new("malformed", format!("the response is {kind:?}, not an event stream")));
            }
            let answer = read(&mut response, sent).await?;
            self.give_back(sender);
            Ok(answer)
        };
        let late = |_| {
            RequestFailure::new("timeout", format!("the response did not complete within {:?}", self.target.timeout))
        };
        tokio::time::timeout(self.target.timeout, asked).await.unwrap_or_else(|e| Err(late(e)))
    }

    /// What the server calls its first model.
    pub(super) async fn first_model(&self) -> Result<String, RequestFailure> {
        let asked = async {
            let (response, sender) = self.send(Method::GET, "/v1/models", Bytes::new()).await?;
            if response.status() != StatusCode::OK {
                return Err(refusal(response).await);
            }
            let body = whole(response).await?;
            self.give_back(sender);
            let models: Value = serde_json::from_slice(&body).unwrap_or_default();
            let name = models["data"][0]["id"].as_str().map(str::to_owned);
            name.ok_or_else(|| RequestFailure::new("malformed", "/v1/models lists no model; give one with --model"))
        };
        let late = |_| RequestFailure::new("timeout", "/v1/models did not respond");
        tokio::time::timeout(self.target.timeout, asked).await.unwrap_or_else(|e| Err(late(e)))
    }

    /// The text of the server's metrics, if it tells them.
    pub(super) async fn metrics(&self) -> Option<String> {
        let asked = async {
            let (response, sender) = self.send(Method::GET, "/metrics", Bytes::new()).await.ok()?;
            let told = response.status() == StatusCode::OK;
            let body = whole(response).await.ok()?;
            self.give_back(sender);
            told.then(|| String::from_utf8_lossy(&body).into_owned())
        };
        tokio::time::timeout(METRICS_TIMEOUT, asked).await.ok()?
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, SendRequest<Full<Bytes>>), RequestFailure> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let old = idle.is_some();
            let mut sender = match idle {
                Some(sender) => sender,
                None => self.connect().await?,
            };
            if sender.ready().await.is_err() && old {
                continue; // The server closed it while it waited.
            }
            match sender.send_request(self.request(&method, path, body.clone())?).await {
                Ok(response) => return Ok((response, sender)),
                // A connection that was closed as it was taken up again says nothing about the request.
                Err(error) if old && (error.is_canceled() || error.is_incomplete_message()) => {}
                Err(error) => return Err(RequestFailure::new("closed", format!("no response: {error}"))),
            }
        }
    }

    fn give_back(&self, sender: SendRequest<Full<Bytes>>) {
        if !sender.is_closed() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, RequestFailure> {
        let failed = |error: &dyn std::fmt::Display| RequestFailure::new("connect", error.to_string());
        let address = (self.target.host.as_str(), self.target.port);
        let stream = TcpStream::connect(address).await.map_err(|e| failed(&e))?;
        stream.set_nodelay(true).map_err(|e| failed(&e))?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
        // Its errors come to the request that is on it.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    fn request(&self, method: &Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, RequestFailure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.target.base))
            .header(header::HOST, self.target.authority())
            .header(header::USER_AGENT, concat!("ridge/", env!("CARGO_PKG_VERSION")))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.target.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        request.body(Full::new(body)).map_err(|error| RequestFailure::new("connect", error.to_string()))
    }
}

async fn whole(response: Response<Incoming>) -> Result<Bytes, RequestFailure> {
    let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
    body.map(http_body_util::Collected::to_bytes).map_err(|error| RequestFailure::new("closed", error.to_string()))
}

async fn refusal(response: Response<Incoming>) -> RequestFailure {
    let kind = format!("http {}", response.status().as_u16());
    match whole(response).await {
        Ok(body) => RequestFailure::new(kind, message(&body)),
        Err(failure) => RequestFailure::new(kind, failure.message),
    }
}

/// What an error in OpenAI's shape says, or whatever stands there.
fn message(body: &[u8]) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let said = value["error"]["message"].as_str().or(value["error"].as_str()).or(value["message"].as_str());
    said.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned)
}

/// What a stream says as it comes.
#[derive(Default)]
struct Heard {
    /// When each event with tokens came.
    tokens: Vec<f64>,
    /// When the first event of a choice came.
    choice: Option<f64>,
    finished: bool,
    done: bool,
    usage: Option<(Option<usize>, usize)>,
}

async fn read(response: &mut Response<Incoming>, sent: Instant) -> Result<TimedResponse, RequestFailure> {
    let (mut events, mut heard) = (SseEvents::default(), Heard::default());
    while let Some(frame) = response.frame().await {
        let frame = frame.map_err(|error| {
            RequestFailure::new("closed", format!("the connection was lost during the stream: {error}"))
        })?;
        let now = sent.elapsed().as_secs_f64();
        let mut told = None;
        let read = events.read(frame.data_ref().map_or(&[][..], |data| data), |data| {
            heard.event(data, now).map_err(|failure| {
                let message = failure.message.clone();
                told = Some(failure);
                message
            })
        });
        read.map_err(|message| told.unwrap_or_else(|| RequestFailure::new("malformed", message)))?;
    }
    let e2e = sent.elapsed().as_secs_f64();
    if !heard.done && !heard.finished {
        return Err(RequestFailure::new("closed", "the stream ended before the response was complete"));
    }
    if events.unfinished() {
        return Err(RequestFailure::new("malformed", "the stream ended within an event"));
    }
    heard.answer(e2e)
}

impl Heard {
    fn event(&mut self, data: &str, now: f64) -> Result<(), RequestFailure> {
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let value: Value = serde_json::from_str(data)
            .map_err(|error| RequestFailure::new("malformed", format!("an event is not JSON ({error}): {data}")))?;
        if value.get("error").is_some_and(|error| !error.is_null()) {
            return Err(RequestFailure::new("server", message(data.as_bytes())));
        }
        if let Some(count) = value["usage"]["completion_tokens"].as_u64() {
            let prompt = value["usage"]["prompt_tokens"].as_u64();
            self.usage = Some((prompt.map(|n| n as usize), count as usize));
        }
        let Some(choices) = value["choices"].as_array() else {
            let problem = format!("an event has neither choices nor an error: {data}");
            return Err(RequestFailure::new("malformed", problem));
        };
        for choice in choices {
            self.choice.get_or_insert(now);
            self.finished |= choice["finish_reason"].is_string();
            let delta = &choice["delta"];
            let texts = [&choice["text"], &delta["content"], &delta["reasoning_content"], &delta["reasoning"]];
            let says = texts.iter().any(|text| text.as_str().is_some_and(|t| !t.is_empty()))
                || [&delta["tool_calls"], &choice["token_ids"]]
                    .iter()
                    .any(|l| l.as_array().is_some_and(|l| !l.is_empty()));
            if says {
                self.tokens.push(now);
            }
        }
        Ok(())
    }

    fn answer(self, e2e: f64) -> Result<TimedResponse, RequestFailure> {
        let output_tokens = self.usage.map_or(self.tokens.len(), |(_, output)| output);
        // Tokens without a text of their own are seen by the choice that they are of.
        let first = self.tokens.first().copied().or(self.choice);
        let (Some(ttft), 1..) = (first, output_tokens) else {
            return Err(RequestFailure::new("empty", "the response has no tokens"));
        };
        Ok(TimedResponse {
            ttft,
            last: self.tokens.last().copied().unwrap_or(ttft),
            e2e,
            itl: self.tokens.windows(2).map(|w| w[1] - w[0]).collect(),
            prompt_tokens: self.usage.and_then(|(prompt, _)| prompt),
            output_tokens,
            counted: self.usage.is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_give_them() {
        for (given, url) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("localhost:9/v1/", "http://localhost:9"),
            ("http://host/proxy/v1", "http://host:80/proxy"),
            ("http://[::1]:8000/", "http://[::1]:8000"),
        ] {
            assert_eq!(ServerTarget::new(given, Api::Chat).unwrap().url(), url);
        }
        for (given, said) in [
            ("https://api.example.com", "TLS is not supported"),
            ("ftp://x", "must begin with http://"),
            ("http://x/?a", "not have a query"),
            ("http://me:secret@x", "user name or password"),
            ("http://", "is not a valid URL"),
            ("a b", "is not a valid URL"),
        ] {
            let error = ServerTarget::new(given, Api::Chat).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn tokens_are_timed_by_the_events_that_bring_them() {
        let mut heard = Heard::default();
        for (at, data) in [
            (0.5, r#"{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}"#),
            (1.0, r#"{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}"#),
            (1.5, r#"{"choices": [{"index": 0, "delta": {"content": "bc"}}], "usage": null}"#),
            (2.5, r#"{"choices": [{"index": 0, "delta": {"reasoning_content": "d"}}]}"#),
            (2.75, r#"{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}"#),
            (3.0, r#"{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}"#),
            (3.0, "[DONE]"),
        ] {
            heard.event(data, at).unwrap();
        }
        let answer = heard.answer(3.25).unwrap();
        assert_eq!((answer.ttft, answer.e2e, answer.tpot()), (1.0, 3.25, Some(0.5)));
        assert_eq!((answer.itl, answer.prompt_tokens, answer.output_tokens), (vec![0.5, 1.0], Some(7), 4));
    }
}
