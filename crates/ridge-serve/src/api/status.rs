//! What the server is and how it does: `/v1/models`, `/health`, `/ready`, `/metrics`, `/version`, `/live`.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use crate::app::{App, Device};
use crate::error::{ApiError, ApiResult, json_response};
use crate::metrics::Gauge;
use crate::wire::sampling::check_model;
use crate::worker::{Health, Snapshot};

fn card(app: &App) -> Value {
    json!({
        "id": app.name, "object": "model", "created": app.created, "owned_by": "ridge",
        "max_model_len": app.context, "root": app.name, "parent": null,
    })
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Response<Body> {
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [card(&app)] }))
}

pub(super) async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> ApiResult<Response<Body>> {
    check_model(Some(&name), &app.name)?;
    Ok(json_response(StatusCode::OK, &card(&app)))
}

pub(super) async fn version() -> Response<Body> {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

fn check_health(app: &App) -> ApiResult<()> {
    let dead = || ApiError::unavailable("the engine has stopped; start the server again");
    match &app.worker {
        Device::Engine(worker) => match worker.health(app.options.stall) {
            Health::Well => Ok(()),
            Health::Stalled(since) => {
                let seconds = since.as_secs();
                Err(ApiError::unavailable(format!("there is work, and no step has ended for {seconds} seconds")))
            }
            Health::Dead => Err(dead()),
        },
        Device::Embedder(worker) => {
            if worker.dead() {
                Err(dead())
            } else {
                Ok(())
            }
        }
    }
}

/// Does the engine make progress?
pub(super) async fn health(State(app): State<Arc<App>>) -> ApiResult<Response<Body>> {
    check_health(&app)?;
    Ok(json_response(StatusCode::OK, &json!({ "status": "ok" })))
}

/// Are requests taken?
pub(super) async fn ready(State(app): State<Arc<App>>) -> ApiResult<Response<Body>> {
    check_health(&app)?;
    if app.draining.load(Relaxed) {
        return Err(ApiError::unavailable("the server is ending"));
    }
    Ok(json_response(StatusCode::OK, &json!({ "status": "ready", "model": app.name })))
}

fn gauges(snapshot: &Snapshot) -> Vec<Gauge> {
    let used = snapshot.blocks_total - snapshot.blocks_free;
    let gauge = |name, help, value| Gauge { name, help, counter: false, value };
    let counter = |name, help, value| Gauge { name, help, counter: true, value };
    vec![
        gauge("ridge:num_requests_running", "Answers that run.", snapshot.running as f64),
        gauge("ridge:num_requests_waiting", "Answers that wait.", snapshot.waiting as f64),
        gauge(
            "ridge:kv_cache_usage_perc",
            "Share of the cache's blocks in use, 0 to 1.",
            used as f64 / snapshot.blocks_total.max(1) as f64,
        ),
        counter("ridge:steps_total", "Steps of the engine.", snapshot.steps as f64),
    ]
}

/// Prometheus' text format.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response<Body> {
    let gauges = match &app.worker {
        Device::Engine(worker) => gauges(&worker.snapshot()),
        Device::Embedder(worker) => {
            let help = "Requests that run or wait.";
            vec![Gauge { name: "ridge:num_requests_running", help, counter: false, value: worker.jobs() as f64 }]
        }
    };
    let mut response = Response::new(Body::from(app.metrics.text(&app.name, &gauges)));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// What the engine does at this moment, for the page.
pub(super) async fn live(State(app): State<Arc<App>>) -> Response<Body> {
    let state = match &app.worker {
        Device::Engine(worker) => {
            let s = worker.snapshot();
            json!({
                "running": s.running, "waiting": s.waiting, "steps": s.steps,
                "blocks": { "total": s.blocks_total, "free": s.blocks_free },
            })
        }
        Device::Embedder(worker) => json!({ "running": worker.jobs() }),
    };
    json_response(StatusCode::OK, &json!({ "model": app.name, "engine": state }))
}
