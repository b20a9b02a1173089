//! The routes and the middleware of every request: id, API key, bounded body, access log.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::IntoResponse as _;
use axum::routing::{MethodRouter, get, post};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::caller::Caller;
use super::{chat, completions, embeddings, rerank, status, tokens};
use crate::app::{App, new_id};
use crate::error::{ApiError, ApiResult};
use crate::keys::Holder;
use crate::page;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// An endpoint with a request body.
macro_rules! takes_body {
    ($handler:expr) => {
        post(|State(app): State<Arc<App>>, request: Request| async move {
            check_content_type(request.headers())?;
            let caller = request.extensions().get::<Caller>().cloned().ok_or_else(|| ApiError::internal("no caller"))?;
            let body = read_body(&app, request).await?;
            if app.options.log_prompts {
                tracing::info!(id = caller.id, body = %String::from_utf8_lossy(&body), "request body");
            }
            $handler(&app, &caller, body).await
        })
    };
}

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    let wrong_method = |methods: MethodRouter<Arc<App>>| methods.fallback(no_such_method);
    let guarded = Router::new()
        .route("/v1/completions", wrong_method(takes_body!(completions::completions)))
        .route("/v1/chat/completions", wrong_method(takes_body!(chat::chat)))
        .route(
            "/v1/embeddings",
            wrong_method(takes_body!(async |app, _: &Caller, body| embeddings::embeddings(app, body).await)),
        )
        .route("/v1/rerank", wrong_method(takes_body!(async |app, _: &Caller, body| rerank::rerank(app, body).await)))
        .route("/v2/rerank", wrong_method(takes_body!(async |app, _: &Caller, body| rerank::rerank(app, body).await)))
        .route("/rerank", wrong_method(takes_body!(async |app, _: &Caller, body| rerank::rerank(app, body).await)))
        .route("/v1/score", wrong_method(takes_body!(async |app, _: &Caller, body| rerank::score(app, body).await)))
        .route("/score", wrong_method(takes_body!(async |app, _: &Caller, body| rerank::score(app, body).await)))
        .route("/tokenize", wrong_method(takes_body!(async |app, _: &Caller, body| tokens::tokenize(app, body).await)))
        .route(
            "/detokenize",
            wrong_method(takes_body!(async |app, _: &Caller, body| tokens::detokenize(app, body).await)),
        )
        .route("/v1/models", wrong_method(get(status::models)))
        .route("/v1/models/{*name}", wrong_method(get(status::model)))
        .layer(from_fn_with_state(Arc::clone(&app), with_key));
    let open = Router::new()
        .route("/health", wrong_method(get(status::health)))
        .route("/ready", wrong_method(get(status::ready)))
        .route("/metrics", wrong_method(get(status::metrics)))
        .route("/version", wrong_method(get(status::version)))
        .route("/live", wrong_method(get(status::live)))
        .merge(page::routes());
    let routes = guarded.merge(open).fallback(no_such_path);
    let routes = routes.layer(from_fn_with_state(Arc::clone(&app), observed));
    let routes = match cors(&app.options.cors) {
        Some(layer) => routes.layer(layer),
        None => routes,
    };
    routes.with_state(app)
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST])
        // SDKs send additional headers; the option restricts origins, not headers.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID]);
    match origins {
        [] => None,
        [any] if any == "*" => Some(layer.allow_origin(AllowOrigin::any())),
        origins => {
            Some(layer.allow_origin(AllowOrigin::list(origins.iter().filter_map(|o| HeaderValue::from_str(o).ok()))))
        }
    }
}

async fn no_such_path(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(100).collect();
    ApiError::not_found("not_found", format!("{path} does not exist; the API is under /v1"))
}

async fn no_such_method(request: Request) -> ApiError {
    let message = format!("{} does not support {}", request.uri().path(), request.method());
    ApiError { status: StatusCode::METHOD_NOT_ALLOWED, ..ApiError::not_found("method_not_allowed", message) }
}

/// Checks the API key, and rejects requests during shutdown.
async fn with_key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response<Body> {
    match app.options.keys.holder(request.headers()) {
        Ok(holder) => {
            if app.draining.load(Relaxed) && request.method() == Method::POST {
                return ApiError::unavailable("the server is shutting down; retry on another server").into_response();
            }
            if let Some(caller) = request.extensions_mut().get_mut::<Caller>() {
                caller.holder = holder.clone();
            }
            let mut response = next.run(request).await;
            response.extensions_mut().insert(holder);
            response
        }
        Err(error) => error.into_response(),
    }
}

/// Assigns a request id and logs a line when the response starts.
async fn observed(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response<Body> {
    let came = Instant::now();
    let id = id_of(request.headers()).unwrap_or_else(|| new_id("req-"));
    request.extensions_mut().insert(Caller { id: id.clone(), holder: Holder::default() });
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    app.metrics.responded(status);
    let key = response.extensions().get::<Holder>().map_or("-", |holder| &*holder.0);
    let seconds = came.elapsed().as_secs_f64();
    let quiet = matches!(path.as_str(), "/health" | "/ready" | "/metrics" | "/live");
    if quiet {
        tracing::debug!(id, %method, path, status, seconds, "request");
    } else {
        tracing::info!(id, %method, path, status, key, seconds, "request");
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// Rejects cross-origin bodies without a JSON content type, which browsers send without a CORS preflight.
fn check_content_type(headers: &HeaderMap) -> ApiResult<()> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let Some(origin) = text(header::ORIGIN) else { return Ok(()) };
    let own = origin.split_once("://").is_some_and(|(_, authority)| Some(authority) == text(header::HOST));
    let kind = text(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
    if own || kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "a cross-origin request must have the header Content-Type: application/json";
    Err(ApiError { status: StatusCode::UNSUPPORTED_MEDIA_TYPE, ..ApiError::bad(message) })
}

/// The client's request id, if it is safe to log.
fn id_of(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':');
    ((1..=128).contains(&id.len()) && id.bytes().all(good)).then(|| id.to_owned())
}

/// Reads the body of a request, within the size and time limits.
async fn read_body(app: &App, request: Request) -> ApiResult<Bytes> {
    let most = app.options.max_body;
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|l| l.to_str().ok()).and_then(|l| l.parse::<u64>().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(ApiError::too_large(most));
    }
    let kib = length.map_or(most, |length| length as usize).div_ceil(1024).max(1);
    let budget = app.body_budget.acquire_many(kib as u32);
    let read = async {
        let _budget = budget.await;
        Limited::new(request.into_body(), most).collect().await
    };
    let late = || {
        let message = format!("the request body was not received within {:?}", app.options.read_timeout);
        ApiError::timeout(StatusCode::REQUEST_TIMEOUT, message)
    };
    match tokio::time::timeout(app.options.read_timeout, read).await {
        Err(_) => Err(late()),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::too_large(most)),
        Ok(Err(_)) => Err(ApiError::bad("the request body is incomplete")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_other_origins_send_json() {
        let with = |origin: &'static str, kind: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static("127.0.0.1:8000"));
            headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            check_content_type(&headers).is_ok()
        };
        assert!(with("http://127.0.0.1:8000", "text/plain"), "the server's own page");
        assert!(with("http://evil.example", "application/json; charset=utf-8"));
        assert!(!with("http://evil.example", "text/plain") && !with("null", ""));
        assert!(check_content_type(&HeaderMap::new()).is_ok(), "no browser");
    }

    #[test]
    fn ids_that_could_forge_a_log_are_replaced() {
        let with = |id: &str| id_of(&HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_str(id).unwrap())]));
        assert_eq!(with("abc-1.2:3_4").as_deref(), Some("abc-1.2:3_4"));
        for bad in ["", "a b", "a\"b", "{}", &"x".repeat(129)] {
            assert_eq!(with(bad), None, "{bad:?}");
        }
    }
}
