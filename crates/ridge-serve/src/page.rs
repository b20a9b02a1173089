//! The page at `/`: a chat, and a live view of the engine.
//!
//! Its files are those of `page/`, embedded unchanged. It reads the engine's state from `/live` and calls
//! `/v1/chat/completions` and `/v1/completions` like any client.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Response, header};
use axum::routing::get;

/// Only the server's own files may be executed, displayed or requested, and no other page may embed this one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) const HTML: &str = "text/html; charset=utf-8";
pub(crate) const SCRIPT: &str = "text/javascript; charset=utf-8";
pub(crate) const STYLE: &str = "text/css; charset=utf-8";

/// Path, type and content.
const FILES: [(&str, &str, &str); 12] = [
    ("/", HTML, include_str!("../page/index.html")),
    ("/page/icon.svg", "image/svg+xml", include_str!("../page/icon.svg")),
    ("/page/style.css", STYLE, include_str!("../page/style.css")),
    ("/page/main.js", SCRIPT, include_str!("../page/main.js")),
    ("/page/chat.js", SCRIPT, include_str!("../page/chat.js")),
    ("/page/turns.js", SCRIPT, include_str!("../page/turns.js")),
    ("/page/store.js", SCRIPT, include_str!("../page/store.js")),
    ("/page/markdown.js", SCRIPT, include_str!("../page/markdown.js")),
    ("/page/tokens.js", SCRIPT, include_str!("../page/tokens.js")),
    ("/page/stream.js", SCRIPT, include_str!("../page/stream.js")),
    ("/page/live.js", SCRIPT, include_str!("../page/live.js")),
    ("/page/chart.js", SCRIPT, include_str!("../page/chart.js")),
];

/// The routes of the page and of its files, which need no key and no state of the server.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    files(&FILES)
}

/// Routes of files: path, type and content.
pub(crate) fn files<S: Clone + Send + Sync + 'static>(files: &'static [(&str, &str, &str)]) -> Router<S> {
    files.iter().fold(Router::new(), |router, (path, kind, content)| {
        router.route(path, get(move || async move { file(kind, content) }))
    })
}

fn file(kind: &'static str, content: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(content));
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // The binary may be updated.
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
