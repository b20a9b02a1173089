//! The page at `/`: a chat, and a live view of the engine.

use axum::Router;

/// The routes of the page and of its assets, which need no key and no state of the server. The page reads `/live` and
/// calls `/v1/chat/completions` as any client does.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
}
