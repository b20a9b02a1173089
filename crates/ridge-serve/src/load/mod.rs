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

pub use arrivals::Arrivals;
pub use client::{Answer, Api, Client, Failure, Target};
pub use driver::{Outcome, Pace, Run, Shape, Workload, drive, preflight};
pub use error::LoadError;
pub use prompts::{Prompt, Prompts, Words};
pub use report::{Objective, Report};
pub use stats::Summary;
pub use sweep::{Sweep, Tried, sweep};
pub use trace::{TRACE_BLOCK, TraceRequest, read_trace};
