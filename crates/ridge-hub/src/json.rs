//! JSON over HTTP with any server.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use crate::client::{configuration, is_passing, retry_after};
use crate::error::Result;
use crate::settings::authorities;

/// A response is read up to here.
const MAX_BYTES: u64 = 4 << 20;
/// So much of what a server says goes into a message.
const MAX_SAID: usize = 300;

/// Shorter secrets are not looked for in what a server says: they are in every other word.
const MIN_SECRET: usize = 4;

/// On whose behalf a server is asked. It has no `Debug`: what it holds is shown nowhere.
pub enum Credentials {
    /// On nobody's.
    None,
    /// A user and a password (RFC 7617).
    Basic {
        /// The user.
        user: String,
        /// The password.
        password: String,
    },
    /// A token (RFC 6750).
    Bearer(String),
}

/// Sends JSON to a server, and reads JSON from it. Redirections are not followed: what is sent, and for whom, is meant for the
/// server that was named. Certificate authorities are those of `SSL_CERT_FILE`, or Mozilla's; proxies are those of `HTTPS_PROXY` and
/// its like.
pub struct JsonClient {
    agent: Agent,
    authorization: Option<String>,
    /// What no message may show.
    secrets: Vec<String>,
}

/// Why a request failed. No part of it has the client's password or token, but for one of fewer than four characters.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub struct JsonError {
    /// What happened, in words.
    pub problem: String,
    /// Whether the same request may succeed later.
    pub passing: bool,
    /// How long the server asks to wait until then.
    pub wait: Option<Duration>,
    /// Of the response, if there was one.
    pub status: Option<u16>,
    /// The body of the response, if it is JSON, or null.
    pub body: Value,
}

impl JsonClient {
    /// A client that waits for a response for at most `timeout`.
    ///
    /// # Errors
    /// When the file of certificate authorities cannot be used.
    pub fn new(credentials: Credentials, timeout: Duration) -> Result<Self> {
        let config = configuration(timeout, authorities().as_deref())?
            .timeout_global(Some(timeout))
            .max_redirects(0)
            .max_redirects_will_error(false)
            .build();
        let (authorization, mut secrets) = match credentials {
            Credentials::None => (None, Vec::new()),
            Credentials::Basic { user, password } => {
                let encoded = STANDARD.encode(format!("{user}:{password}"));
                (Some(format!("Basic {encoded}")), vec![encoded, password])
            }
            Credentials::Bearer(token) => (Some(format!("Bearer {token}")), vec![token]),
        };
        secrets.retain(|secret| secret.len() >= MIN_SECRET);
        Ok(Self { agent: config.new_agent(), authorization, secrets })
    }

    /// What `url` has.
    ///
    /// # Errors
    /// When the server does not answer, or answers with a status that is no success or with other than JSON.
    pub fn get(&self, url: &str) -> Result<Value, JsonError> {
        let request = self.agent.get(url);
        let request = match &self.authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        };
        self.answer(request.call())
    }

    /// Sends `body` to `url`.
    ///
    /// # Errors
    /// As with [`JsonClient::get`].
    pub fn post(&self, url: &str, body: &Value) -> Result<Value, JsonError> {
        let request = self.agent.post(url).header("content-type", "application/json");
        let request = match &self.authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        };
        self.answer(request.send(body.to_string()))
    }

    /// The error of an answer that says no in another way than by its status.
    pub fn refusal(&self, problem: &str) -> JsonError {
        let problem = self.hidden(problem);
        JsonError { problem, passing: false, wait: None, status: None, body: Value::Null }
    }

    fn answer(&self, response: Result<Response<Body>, ureq::Error>) -> Result<Value, JsonError> {
        let failed = |error: ureq::Error| {
            // What a client cannot send, it cannot send later either.
            let passing = !matches!(error, ureq::Error::BadUri(_) | ureq::Error::Http(_));
            JsonError { problem: self.hidden(&error.to_string()), passing, wait: None, status: None, body: Value::Null }
        };
        let mut response = response.map_err(failed)?;
        let (status, wait) = (response.status(), retry_after(&response));
        let moved = response.headers().get("location").and_then(|to| to.to_str().ok()).map(str::to_owned);
        let text = response.body_mut().with_config().limit(MAX_BYTES).read_to_string().map_err(failed)?;
        let body: Option<Value> = serde_json::from_str(&text).ok();
        // Before it is shortened, which could leave a part of a secret.
        let body = if status.is_success() { body } else { body.map(|body| self.hidden_in(body)) };
        let problem = match (status, &body) {
            (status, Some(_)) if status.is_success() => return Ok(body.unwrap_or_default()),
            (status, None) if status.is_success() && text.trim().is_empty() => return Ok(Value::Null),
            (status, None) if status.is_success() => "the server's answer is not JSON; check its address".to_owned(),
            _ => {
                let moved = moved.map(|to| format!(", moved to {to}; give that address")).unwrap_or_default();
                format!("the server responded with {status}{moved}{}", said(body.as_ref()))
            }
        };
        let passing = is_passing(status);
        let problem = self.hidden(&problem);
        Err(JsonError { problem, passing, wait, status: Some(status.as_u16()), body: body.unwrap_or_default() })
    }

    /// The text without the secrets, which a server or a proxy may repeat.
    fn hidden(&self, text: &str) -> String {
        self.secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret, "***"))
    }

    /// The value without the secrets in its texts.
    fn hidden_in(&self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.hidden(&text)),
            Value::Array(values) => values.into_iter().map(|value| self.hidden_in(value)).collect(),
            Value::Object(pairs) => {
                pairs.into_iter().map(|(key, value)| (self.hidden(&key), self.hidden_in(value))).collect()
            }
            other => other,
        }
    }
}

/// What a server says about a refusal, ahead of which stands a colon.
fn said(body: Option<&Value>) -> String {
    let text = body.and_then(|body| ["message", "error", "detail"].iter().find_map(|key| body.get(key)?.as_str()));
    let Some(text) = text else { return String::new() };
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_SAID).collect();
    format!(": {line}")
}

/// The host of an `http://` or `https://` URL in lower case, of an IPv6 address without brackets, or `None` of other texts.
pub fn host_of(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    matches!(uri.scheme_str(), Some("http" | "https")).then_some(())?;
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    (!host.is_empty()).then_some(host)
}

/// `text` as one segment of a URL's path (RFC 3986, section 2.3).
pub fn path_segment(text: &str) -> String {
    let encoded = |byte: u8| match byte {
        b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encoded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_those_of_urls() {
        for (url, host) in [
            ("https://api.wandb.ai", Some("api.wandb.ai")),
            ("http://user:p@Own:8080/a@b/c", Some("own")),
            ("HTTP://[::1]:8080", Some("::1")),
            ("own:8080", None),
            ("ftp://own", None),
            ("https://", None),
            ("https:///x", None),
        ] {
            assert_eq!(host_of(url).as_deref(), host, "{url}");
        }
    }

    #[test]
    fn segments_of_a_path_keep_unreserved_characters_alone() {
        assert_eq!(path_segment("a-b_c.d~e"), "a-b_c.d~e");
        assert_eq!(path_segment("my team/ä"), "my%20team%2F%C3%A4");
    }

    #[test]
    fn no_part_of_an_error_has_a_secret() {
        let client = |password: &str| {
            let credentials = Credentials::Basic { user: "me".to_owned(), password: password.to_owned() };
            JsonClient::new(credentials, Duration::from_secs(5)).expect("is made")
        };
        let refused = |client: &JsonClient, body: String| {
            let response = Response::builder().status(401).body(Body::builder().data(body)).expect("is made");
            client.answer(Ok(response)).expect_err("is refused")
        };
        let body = r#"{ "message": "not pass\"word", "seen": ["pass\"word", { "pass\"word": 1 }] }"#;
        let error = refused(&client("pass\"word"), body.to_owned());
        assert_eq!(error.problem, "the server responded with 401 Unauthorized: not ***");
        assert_eq!(error.body, serde_json::json!({ "message": "not ***", "seen": ["***", { "***": 1 }] }));
        // A text is not cut within a secret.
        let long = serde_json::json!({ "message": format!("{}password", "-".repeat(MAX_SAID - 4)) }).to_string();
        assert!(refused(&client("password"), long).problem.ends_with("-***"));
        // A letter is no secret, the header's echo is.
        let body = serde_json::json!({ "message": "a header Basic bWU6YQ==" }).to_string();
        assert_eq!(refused(&client("a"), body).body, serde_json::json!({ "message": "a header Basic ***" }));
    }
}
