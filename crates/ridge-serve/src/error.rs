//! Errors: those of a request, in OpenAI's shape, and those of the server's start.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use ridge_engine::EngineError;
use ridge_text::TextError;
use serde_json::{Value, json};

/// Why a server cannot start or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be listened at.
    #[error(
        "cannot listen on {address}: {cause}; choose another --port or --host, or stop the process that listens there"
    )]
    Listen {
        /// Host and port.
        address: String,
        /// The system's error.
        cause: std::io::Error,
    },
    /// A file of keys.
    #[error("{place}: {problem}")]
    Keys {
        /// The file or the variable.
        place: String,
        /// What is wrong, and how to fix it.
        problem: String,
    },
    /// The system refused threads or signals.
    #[error("cannot start the server: {0}")]
    System(#[from] std::io::Error),
}

/// An error response in OpenAI's format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// `invalid_request_error` and the like.
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    /// The invalid parameter.
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
}

/// The result of handling a request.
pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code }
    }

    /// An invalid request.
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", None, message)
    }

    /// An invalid parameter.
    pub(crate) fn param(param: impl Into<String>, message: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self { message: format!("{param}: {message}"), param: Some(param), ..Self::bad("") }
    }

    /// This error with its parameter renamed to the client's name.
    pub(crate) fn of_param(self, param: &str) -> Self {
        let message = match &self.param {
            Some(old) => self.message.replacen(old.as_str(), param, 1),
            None => self.message,
        };
        Self { message, param: Some(param.to_owned()), ..self }
    }

    /// A key that is missing or wrong.
    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", Some("invalid_api_key"), message)
    }

    /// A resource that does not exist.
    pub(crate) fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", Some(code), message)
    }

    /// A body that is too large.
    pub(crate) fn too_large(most: usize) -> Self {
        let message = format!("the request exceeds the server's limit of {most} bytes (--max-body)");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", Some("request_too_large"), message)
    }

    /// A request that was not received in time, or exceeds the time limit.
    pub(crate) fn timeout(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "timeout_error", Some("timeout"), message)
    }

    /// Too many requests.
    pub(crate) fn overloaded(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("server_overloaded"), message)
    }

    /// The server is shutting down, or its engine has stopped.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("unavailable"), message)
    }

    /// An internal error.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", None, message)
    }

    /// An unsupported parameter or value.
    pub(crate) fn unsupported(param: impl Into<String>, why: impl std::fmt::Display) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::param(param, why) }
    }

    pub(crate) fn body(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.param, "code": self.code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = json_response(self.status, &self.body());
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // A client that sends too slowly must not keep the connection.
        if self.status == StatusCode::REQUEST_TIMEOUT || self.status == StatusCode::PAYLOAD_TOO_LARGE {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Errors that the engine or a model reports about a request are client errors; all others are internal errors.
impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Setting { name, value, why } if value.is_empty() => Self::param(name, why),
            EngineError::Setting { name, value, why } => Self::param(name, format!("{value}: {why}")),
            EngineError::EmptyPrompt | EngineError::UnknownToken { .. } => Self::param("prompt", error),
            EngineError::PromptTooLong { .. } => {
                Self { code: Some("context_length_exceeded"), ..Self::param("prompt", error) }
            }
            EngineError::Text(error) => error.into(),
            error => Self::internal(error.to_string()),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        // Clients must not see the server's paths.
        match error {
            // The template's message for the sender of the conversation.
            TextError::TemplateRefusal { message, .. } => Self::param("messages", message),
            TextError::Template { line, problem, .. } => {
                let line = line.map_or_else(String::new, |line| format!(" (line {line})"));
                Self::param("messages", format!("the model's chat template{line} cannot render them: {problem}"))
            }
            TextError::Tokenizer { problem, .. } => Self::bad(format!("the model's tokenizer: {problem}")),
            error => {
                tracing::error!(%error, "a text could not be tokenised or rendered");
                Self::internal("the text could not be prepared; see the server's log")
            }
        }
    }
}

/// A value as a response.
pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_openais_shape() {
        let error = ApiError::param("top_p", "2 is above 1");
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        let body = json!({ "error": {
            "message": "top_p: 2 is above 1", "type": "invalid_request_error", "param": "top_p", "code": null,
        } });
        assert_eq!(error.body(), body);
    }

    #[test]
    fn the_engines_refusals_name_their_parameter() {
        let error =
            ApiError::from(EngineError::Setting { name: "min_p", value: "7".into(), why: "must be low".into() });
        assert_eq!((error.param.as_deref(), &*error.message), (Some("min_p"), "min_p: 7: must be low"));
        let file = "/models/secret/chat_template.jinja".to_owned();
        let error = ApiError::from(TextError::Template {
            file,
            line: Some(3),
            problem: "'dict object' has no attribute 'x'".into(),
            remedy: String::new(),
        });
        assert_eq!(
            error.message,
            "messages: the model's chat template (line 3) cannot render them: 'dict object' has no attribute 'x'"
        );
        let error = ApiError::from(EngineError::PromptTooLong { prompt: 9, context: 4 });
        assert_eq!(error.code, Some("context_length_exceeded"));
        assert_eq!(ApiError::from(EngineError::NotFinite { position: 1 }).status, StatusCode::INTERNAL_SERVER_ERROR);
    }
}
