//! Requests to the Hub.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ridge_files::hub::HubModel;
use ureq::config::ConfigBuilder;
use ureq::http::{Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::typestate::{AgentScope, WithoutBody};
use ureq::{Agent, Body, RequestBuilder};

use crate::error::{HubError, Result};
use crate::settings::HubSettings;

/// How often the list of files is asked for: someone waits for it.
const ATTEMPTS: u32 = 3;
/// A server may ask for a longer wait than this; it is not granted.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The list of a repository's files takes some 200 bytes for each.
const MAX_LIST: u64 = 64 << 20;

/// The server and how it is asked.
pub(crate) struct Client {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// A response to a request for the content of a file.
pub(crate) struct Content {
    /// The position in the file at which it begins.
    pub(crate) start: u64,
    pub(crate) body: Body,
}

/// Why an attempt failed.
pub(crate) enum Failure {
    /// Another one may succeed, after this wait if the server names one.
    Passing {
        problem: String,
        wait: Option<Duration>,
    },
    Lasting(HubError),
}

impl Client {
    pub(crate) fn new(settings: &HubSettings) -> Result<Self> {
        let config = configuration(settings.timeout, settings.authorities.as_deref())?
            // Storage on other hosts has signed addresses and must not see the token; ureq sends it to the same host alone.
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .build();
        let (endpoint, token) = (settings.endpoint.clone(), settings.token.clone());
        Ok(Self { agent: config.new_agent(), endpoint, token })
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.endpoint)
    }

    fn request(&self, path: &str) -> RequestBuilder<WithoutBody> {
        self.request_url(&self.url(path))
    }

    /// A request for a URL of any server. The token is sent to the endpoint alone.
    pub(crate) fn request_url(&self, url: &str) -> RequestBuilder<WithoutBody> {
        let request = self.agent.get(url);
        let is_endpoint = url.strip_prefix(&self.endpoint).is_some_and(|path| path.starts_with('/'));
        match &self.token {
            Some(token) if is_endpoint => request.header("authorization", format!("Bearer {token}")),
            _ => request,
        }
    }

    /// The text at `path`, asked for again where that may help.
    pub(crate) fn text(&self, model: &HubModel, path: &str) -> Result<String> {
        let mut attempts = Attempts::of(ATTEMPTS);
        loop {
            let problem = match self.try_text(model, path) {
                Ok(text) => return Ok(text),
                Err(failure) => failure,
            };
            attempts.wait(problem, || self.url(path))?;
        }
    }

    fn try_text(&self, model: &HubModel, path: &str) -> Result<String, Failure> {
        let response = self.request(path).call().map_err(Failure::of)?;
        let mut response = self.check(model, path, response)?;
        let text = response.body_mut().with_config().limit(MAX_LIST).read_to_string();
        text.map_err(Failure::of)
    }

    /// The content of a file of the model from this position on, or from its beginning if the server sends no parts.
    pub(crate) fn content(&self, model: &HubModel, path: &str, start: u64) -> Result<Content, Failure> {
        let request = self.request(path);
        let request = if start > 0 { request.header("range", format!("bytes={start}-")) } else { request };
        let response = self.check(model, path, request.call().map_err(Failure::of)?)?;
        let start = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let said = response.headers().get("content-range").and_then(|v| v.to_str().ok());
                let at = said.and_then(|v| v.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
                if at != Some(start) {
                    let problem =
                        format!("bytes from {start} on were requested, but the response has the range {said:?}");
                    return Err(Failure::Lasting(HubError::Answer { url: self.url(path), problem }));
                }
                start
            }
            _ => 0,
        };
        Ok(Content { start, body: response.into_body() })
    }

    /// The response of any server, if it is a success.
    pub(crate) fn checked(url: &str, response: Response<Body>) -> Result<Response<Body>, Failure> {
        let status = response.status();
        let problem = format!("the server responded with {status}");
        match status {
            _ if status.is_success() => Ok(response),
            _ if is_passing(status) => Err(Failure::Passing { problem, wait: retry_after(&response) }),
            _ => Err(Failure::Lasting(HubError::Request { url: url.to_owned(), problem })),
        }
    }

    /// The response, if it is a success.
    fn check(&self, model: &HubModel, path: &str, response: Response<Body>) -> Result<Response<Body>, Failure> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let (model, endpoint, with_token) = (model.id(), self.endpoint.clone(), self.token.is_some());
        let code = header("x-error-code").unwrap_or_default();
        // The Hub answers 401 for what is private or is not there, so as not to tell which.
        let lasting = match (status.as_u16(), code) {
            (401 | 403, "GatedRepo") => HubError::Gated { model, endpoint },
            (401, _) if with_token && code.is_empty() => HubError::Token { endpoint },
            (401, _) | (404, "RepoNotFound" | "") => HubError::NoModel { model, endpoint, with_token },
            (404, "RevisionNotFound") => {
                let revision = path.rsplit('/').next().unwrap_or_default();
                let revision = revision.trim_end_matches("?blobs=true").replace("%2F", "/");
                HubError::NoRevision { model, revision, endpoint }
            }
            _ if is_passing(status) => {
                let problem = format!("the server responded with {status}");
                return Err(Failure::Passing { problem, wait: retry_after(&response) });
            }
            _ => {
                let said = header("x-error-message").map(|said| format!(": {said}")).unwrap_or_default();
                let problem = format!("the server responded with {status}{said}");
                HubError::Request { url: self.url(path), problem }
            }
        };
        Err(Failure::Lasting(lasting))
    }
}

impl Failure {
    pub(crate) fn of(error: ureq::Error) -> Self {
        Self::Passing { problem: error.to_string(), wait: None }
    }
}

/// Counts attempts and waits between them, at first for one second, then twice as long each time.
pub(crate) struct Attempts {
    failed: u32,
    max: u32,
}

impl Attempts {
    pub(crate) fn of(max: u32) -> Self {
        Self { failed: 0, max }
    }

    /// Something arrived: what fails after it fails for the first time.
    pub(crate) fn progressed(&mut self) {
        self.failed = 0;
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// When there is to be none.
    pub(crate) fn wait(&mut self, failure: Failure, url: impl FnOnce() -> String) -> Result<()> {
        let (problem, wait) = match failure {
            Failure::Lasting(error) => return Err(error),
            Failure::Passing { problem, wait } => (problem, wait),
        };
        self.failed += 1;
        if self.failed >= self.max {
            return Err(HubError::Request { url: url(), problem: format!("{problem} ({} attempts)", self.max) });
        }
        let wait = wait.unwrap_or(Duration::from_secs(1 << (self.failed - 1)));
        std::thread::sleep(wait.min(MAX_WAIT));
        Ok(())
    }
}

/// What all requests have in common: a server may be silent for `timeout`, and its certificate is of one of the `authorities` in a
/// file, or of Mozilla's. A status that is no success is a response, not an error.
pub(crate) fn configuration(timeout: Duration, authorities: Option<&Path>) -> Result<ConfigBuilder<AgentScope>> {
    let roots = authorities.map_or(Ok(RootCerts::WebPki), certificates)?;
    let timeout = Some(timeout);
    Ok(Agent::config_builder()
        .user_agent(concat!("ridge/", env!("CARGO_PKG_VERSION")))
        .http_status_as_error(false)
        .tls_config(TlsConfig::builder().root_certs(roots).build())
        .timeout_connect(timeout)
        .timeout_recv_response(timeout)
        .timeout_per_read(timeout))
}

/// The wait that a response asks for.
pub(crate) fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let value = response.headers().get("retry-after")?.to_str().ok()?;
    value.parse().ok().map(Duration::from_secs)
}

/// Whether the same request may succeed later.
pub(crate) fn is_passing(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 425 | 429 | 500..=599)
}

/// The certificates in a file.
fn certificates(file: &Path) -> Result<RootCerts> {
    let unusable = |why: String| HubError::Setting { name: "SSL_CERT_FILE", value: file.display().to_string(), why };
    let text = std::fs::read(file).map_err(|error| unusable(format!("cannot be read: {error}")))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| unusable(error.to_string()))? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        return Err(unusable("contains no PEM certificate".to_owned()));
    }
    Ok(RootCerts::Specific(Arc::new(certificates)))
}
