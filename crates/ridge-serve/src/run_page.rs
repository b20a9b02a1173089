//! A live web page of a training run, on a thread of its own: what it shows are the events that it is given, as JSON.

use std::net::TcpListener;
use std::sync::{Arc, PoisonError, RwLock};

use axum::extract::{RawQuery, State};
use axum::http::{Response, header};
use axum::routing::get;
use tokio::runtime::Builder;

use crate::error::ServeError;
use crate::page::{self, HTML, SCRIPT, STYLE};

/// Path, type and content.
const FILES: [(&str, &str, &str); 5] = [
    ("/", HTML, include_str!("../page_of_run/index.html")),
    ("/page/icon.svg", "image/svg+xml", include_str!("../page/icon.svg")),
    ("/page/style.css", STYLE, include_str!("../page/style.css")),
    ("/page/run.js", SCRIPT, include_str!("../page_of_run/run.js")),
    ("/page/chart.js", SCRIPT, include_str!("../page/chart.js")),
];

/// Events of one answer at most.
const MAX_EVENTS: usize = 5000;

/// A page that is served until the process ends.
#[derive(Clone, Debug, Default)]
pub struct RunPage {
    events: Arc<RwLock<Vec<String>>>,
}

impl RunPage {
    /// Serves a page at `listener` that has no events yet.
    ///
    /// # Errors
    /// When the system refuses the thread or the socket.
    pub fn start(listener: TcpListener) -> Result<Self, ServeError> {
        let page = Self::default();
        let router = page::files(&FILES).route("/events", get(events)).with_state(page.clone());
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("run page".into()).spawn(move || {
            runtime.block_on(async {
                match tokio::net::TcpListener::from_std(listener) {
                    Ok(listener) => axum::serve(listener, router).await,
                    Err(error) => Err(error),
                }
            })
        })?;
        Ok(page)
    }

    /// Adds an event: a JSON object.
    pub fn add(&self, event: String) {
        self.events.write().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

/// `/events?from=N`: the events from the one of that number on, and the number of the one behind them.
async fn events(State(page): State<RunPage>, RawQuery(query): RawQuery) -> Response<String> {
    let from = query.as_deref().and_then(|query| query.strip_prefix("from="));
    let from: usize = from.and_then(|from| from.parse().ok()).unwrap_or(0);
    let body = {
        let events = page.events.read().unwrap_or_else(PoisonError::into_inner);
        let from = from.min(events.len());
        let end = events.len().min(from + MAX_EVENTS);
        format!("{{\"events\":[{}],\"next\":{end}}}", events[from..end].join(","))
    };
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}
