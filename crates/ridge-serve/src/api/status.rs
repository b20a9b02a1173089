//! Server status: `/v1/models`, `/health`, `/ready`, `/metrics`, `/version`, `/live`.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, Response, StatusCode, header};
use ridge_engine::service::{BlockUse, Stats};
use serde_json::{Value, json};

use crate::app::{App, ModelWorker};
use crate::error::{ApiError, ApiResult, json_response};
use crate::metrics::Gauge;
use crate::wire::sampling::check_model;
use crate::worker::EngineHealth;

fn card(app: &App) -> Value {
    json!({
        "id": app.model.name, "object": "model", "created": app.created, "owned_by": "ridge",
        "max_model_len": app.model.context, "root": app.model.name, "parent": null,
    })
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Response<Body> {
    json_response(StatusCode::OK, &json!({ "object": "list", "data": [card(&app)] }))
}

pub(super) async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> ApiResult<Response<Body>> {
    check_model(Some(&name), &app.model.name)?;
    Ok(json_response(StatusCode::OK, &card(&app)))
}

pub(super) async fn version() -> Response<Body> {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

fn check_health(app: &App) -> ApiResult<()> {
    let dead = || ApiError::unavailable("the engine has stopped; restart the server");
    match &app.worker {
        ModelWorker::Engine(worker) => match worker.health(app.options.stall) {
            EngineHealth::Well => Ok(()),
            EngineHealth::Stalled(since) => {
                let seconds = since.as_secs();
                Err(ApiError::unavailable(format!("there is work, but no step has completed for {seconds} seconds")))
            }
            EngineHealth::Dead => Err(dead()),
        },
        ModelWorker::Embedder(worker) => {
            if worker.dead() {
                Err(dead())
            } else {
                Ok(())
            }
        }
    }
}

/// Health: whether the engine makes progress.
pub(super) async fn health(State(app): State<Arc<App>>) -> ApiResult<Response<Body>> {
    check_health(&app)?;
    Ok(json_response(StatusCode::OK, &json!({ "status": "ok" })))
}

/// Readiness: whether requests are accepted.
pub(super) async fn ready(State(app): State<Arc<App>>) -> ApiResult<Response<Body>> {
    check_health(&app)?;
    if app.draining.load(Relaxed) {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    Ok(json_response(StatusCode::OK, &json!({ "status": "ready", "model": app.model.name })))
}

fn gauges(stats: &Stats) -> Vec<Gauge> {
    let usage = stats.blocks_used as f64 / stats.blocks.max(1) as f64;
    let unused = stats.positions_unused as f64 / stats.positions_owned.max(1) as f64;
    let gauge = |name, help, value| Gauge { name, help, counter: false, value };
    let counter = |name, help, value: u64| Gauge { name, help, counter: true, value: value as f64 };
    vec![
        gauge("ridge:num_requests_running", "Running sequences.", stats.running as f64),
        gauge("ridge:num_requests_waiting", "Waiting requests.", stats.waiting as f64),
        gauge("ridge:kv_cache_usage_perc", "Fraction of cache blocks in use, 0 to 1.", usage),
        gauge(
            "ridge:kv_cache_unused_perc",
            "Fraction of the capacity of used blocks that holds no token, 0 to 1.",
            unused,
        ),
        gauge("ridge:kv_cache_blocks", "Cache blocks.", stats.blocks as f64),
        gauge(
            "ridge:kv_cache_blocks_cached",
            "Blocks with a cached prefix that no sequence uses.",
            stats.blocks_cached as f64,
        ),
        counter("ridge:steps_total", "Engine steps.", stats.steps),
        counter("ridge:steps_failed_total", "Failed engine steps.", stats.failed_steps),
        counter("ridge:prompt_tokens_computed_total", "Prompt tokens computed.", stats.prompt_tokens),
        counter(
            "ridge:prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_queries,
        ),
        counter("ridge:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        counter(
            "ridge:spec_decode_num_draft_tokens_total",
            "Draft tokens proposed by speculative decoding.",
            stats.candidates,
        ),
        counter("ridge:spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", stats.accepted),
        counter("ridge:programs_compiled_total", "Programs compiled; constant while serving.", stats.made.compiled),
        counter("ridge:buckets_bound_total", "Step shapes bound; constant while serving.", stats.made.bound),
        counter("ridge:choices_timed_total", "Kernel choices made by timing.", stats.made.timed),
        counter("ridge:num_preemptions_total", "Preempted sequences.", stats.preemptions),
    ]
}

/// Prometheus' text format.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response<Body> {
    let mut gauges = match &app.worker {
        ModelWorker::Engine(worker) => gauges(&worker.stats()),
        ModelWorker::Embedder(worker) => {
            let help = "Running and waiting requests.";
            vec![Gauge { name: "ridge:num_requests_running", help, counter: false, value: worker.jobs() as f64 }]
        }
    };
    let help = "Whether the server was started with --deterministic, 0 or 1.";
    let value = f64::from(u8::from(app.options.deterministic));
    gauges.push(Gauge { name: "ridge:deterministic", help, counter: false, value });
    let mut response = Response::new(Body::from(app.metrics.text(&app.model.name, &gauges)));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// The engine's current state, for the page:
///
/// `model`, `context`, and `engine` with `running`, `waiting`, `steps`, `preemptions`, `prefix_queries`, `prefix_hits`,
/// `blocks` (`total`, `used`, `cached` and `map`: for each block 0 if it is free, -1 if it holds a prefix that nobody
/// uses, else how many sequences use it; null while the engine is busy), `recent_steps` (`at_s`, `ms`, `floor_ms` or
/// null, `sequences`, `tokens`) and `recent_answers` (`at_s`, `ttft_ms`, `tpot_ms` or null, `tokens`), oldest first.
/// `uptime_s` is the present on the clock of `at_s`.
pub(super) async fn live(State(app): State<Arc<App>>) -> Response<Body> {
    let state = match &app.worker {
        ModelWorker::Engine(worker) => {
            let map = worker.blocks().await.map(|blocks| blocks.iter().map(block).collect::<Vec<_>>());
            let s = worker.stats();
            let (recent_steps, recent_answers) = worker.shared.live.to_json();
            json!({
                "running": s.running, "waiting": s.waiting, "steps": s.steps, "preemptions": s.preemptions,
                "prefix_queries": s.prefix_queries, "prefix_hits": s.prefix_hits,
                "blocks": { "total": s.blocks, "used": s.blocks_used, "cached": s.blocks_cached, "map": map },
                "recent_steps": recent_steps, "recent_answers": recent_answers, "uptime_s": worker.uptime().as_secs_f64(),
            })
        }
        ModelWorker::Embedder(worker) => json!({ "running": worker.jobs() }),
    };
    json_response(StatusCode::OK, &json!({ "model": app.model.name, "context": app.model.context, "engine": state }))
}

fn block(block: &BlockUse) -> i64 {
    match block {
        BlockUse::Free => 0,
        BlockUse::Cached => -1,
        BlockUse::Used(by) => *by as i64,
    }
}
