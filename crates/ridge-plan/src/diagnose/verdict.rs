//! What a diagnosis says.

use std::fmt;

use serde::Serialize;

use super::measure::Measured;

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
pub enum Confidence {
    /// Twice the next loss, and the trace tells what is needed.
    High,
    /// Ahead of the next by a quarter.
    Medium,
    /// Nearly as much is lost elsewhere, or the trace lacks what would tell.
    Low,
}

impl fmt::Display for Confidence {
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
    pub sure: Confidence,
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
