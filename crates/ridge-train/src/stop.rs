//! Whether a run that has not made a step yet is to stop.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Result, TrainError};

/// Looks at `stop`, often enough that a start ends within a second of its being set.
///
/// # Errors
/// [`TrainError::Stopped`] if it is set.
pub(crate) fn check_stop(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(TrainError::Stopped) } else { Ok(()) }
}
