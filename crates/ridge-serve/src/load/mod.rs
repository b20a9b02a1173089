//! Load for any server that speaks OpenAI's API, and what it makes of it.
//!
//! `arrivals` says when requests come and `trace` reads when they came elsewhere; `prompts` makes their texts. `client` is
//! one request over HTTP, its stream read by `events`; `driver` sends many of them. `report` counts what came, by
//! `stats`, and `sweep` looks for the highest rate that keeps an objective.

mod arrivals;
mod client;
mod driver;
mod error;
mod events;
mod prompts;
mod report;
mod stats;
mod sweep;
mod trace;
mod usage;
mod workload;

pub use arrivals::Arrivals;
pub use client::{Api, Client, RequestFailure, ServerTarget, TimedResponse};
pub use driver::{LoadRun, RequestOutcome, drive, preflight};
pub use error::LoadError;
pub use prompts::{GeneratedPrompt, PromptGenerator, PromptSource};
pub use report::{LoadReport, Objective, Steadiness};
pub use stats::SampleSummary;
pub use sweep::{RateSweep, SweepTrial, sweep};
pub use trace::{TRACE_BLOCK, TraceRequest, read_trace};
pub use usage::ServerUsage;
pub use workload::{LoadWorkload, Pace, RequestShape};
