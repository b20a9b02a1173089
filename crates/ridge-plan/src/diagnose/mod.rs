//! What a recorded step waited for: a trace of torch's profiler, of Perfetto or of `ridge bench --trace` in, a verdict
//! with its evidence and the next experiment out.
//!
//! The time of the busiest device is divided without rest: matrix products, attention, other kernels, copies and
//! communication that nothing hides, and nothing at all. The largest loss names the verdict; how far it is ahead of the
//! next says how sure it is. What is idle is told apart by the lengths of gaps and by what the host did in them.

mod event;
mod judge;
mod measure;
#[cfg(test)]
mod tests;
mod trace;

use std::fmt;
use std::io::Read;

use ridge_hw::roofline::Roofline;
use serde::Serialize;

pub use measure::{Measured, Named};

use crate::error::PlanError;

/// What a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Arithmetic of matrix products and attention.
    Compute,
    /// Bytes to and from the device's memory.
    Memory,
    /// Other devices.
    Communication,
    /// Launches of kernels that are shorter than they take to launch.
    Launch,
    /// The host's own work between launches, or its waiting.
    Host,
    /// The server's scheduler between steps.
    Scheduler,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Compute => "compute-bound",
            Self::Memory => "memory-bound",
            Self::Communication => "communication-bound",
            Self::Launch => "launch-bound",
            Self::Host => "host-bound",
            Self::Scheduler => "scheduler-bound",
        })
    }
}

/// How sure a verdict is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Sure {
    /// Twice the next loss, and the trace tells what is needed.
    High,
    /// Ahead of the next by a quarter.
    Medium,
    /// Nearly as much is lost elsewhere, or the trace lacks what would tell.
    Low,
}

impl fmt::Display for Sure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::High => "high",
            Self::Medium => "medium",
            Self::Low => "low",
        })
    }
}

/// What a trace says.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// What the step waits for.
    pub verdict: Verdict,
    /// How sure.
    pub sure: Sure,
    /// Why it is so sure, or not.
    pub because: String,
    /// Sentences with numbers.
    pub evidence: Vec<String>,
    /// What to try.
    pub experiment: String,
    /// What that would show.
    pub shows: String,
    /// The numbers.
    pub measured: Measured,
}

/// Reads a trace and judges it; `roofline` is the device's, where the caller knows it and the trace does not.
///
/// # Errors
/// [`PlanError::Trace`] where it is no trace, is cut off, or has nothing that takes time.
pub fn diagnose(reader: impl Read, roofline: Option<Roofline>) -> Result<Diagnosis, PlanError> {
    judge::judge(Measured::of(trace::Trace::read(reader)?, roofline)?)
}
