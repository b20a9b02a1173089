//! What a recorded step waited for: a trace of torch's profiler, of Perfetto or of `ridge bench --trace` in, a verdict
//! with its evidence and the next experiment out.
//!
//! The time of the busiest device is divided without rest: matrix products, attention, other kernels, copies and
//! communication that nothing hides, and nothing at all. The largest loss names the verdict; how far it is ahead of the
//! next says how sure it is. What is idle is told apart by the lengths of gaps and by what the host did in them.

mod event;
mod judge;
mod load;
mod measure;
#[cfg(test)]
mod tests;
mod trace;
mod verdict;

use std::io::Read;

use ridge_hw::roofline::Roofline;

pub use load::{LoadDiagnosis, LoadVerdict, diagnose_load};
pub use measure::{Measured, NamedTime};
pub use verdict::{Confidence, Diagnosis, Verdict};

use crate::error::PlanError;

/// Reads a trace and judges it; `roofline` is the device's, where the caller knows it and the trace does not.
///
/// # Errors
/// [`PlanError::Trace`] where it is no trace, is cut off, or has nothing that takes time.
pub fn diagnose(reader: impl Read, roofline: Option<Roofline>) -> Result<Diagnosis, PlanError> {
    judge::judge(Measured::of(trace::Trace::read(reader)?, roofline)?)
}
