//! Load generator for OpenAI-compatible servers.
//!
//! `arrivals` generates arrival times and `trace` reads recorded ones; `prompts` generates prompts. `client` sends one request
//! over HTTP and reads its stream with `events`; `driver` sends many. `report` aggregates the results with `stats`, and
//! `sweep` searches the highest rate that meets an objective.

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
