//! The log: one line per event on standard error.

use tracing::Level;

/// Line format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text.
    Text,
    /// One JSON object per line.
    Json,
}

/// Starts the log of the process, up to `level`. Prompts are logged only with
/// [`ServeOptions::log_prompts`](crate::ServeOptions::log_prompts).
pub fn start_log(format: LogFormat, level: Level) {
    // A line that cannot be written is lost: the subscriber would report that on standard error too, and panic.
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).log_internal_errors(false);
    let log = log.with_max_level(level).with_target(false);
    // An existing subscriber stays in place.
    let _ = match format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
}
