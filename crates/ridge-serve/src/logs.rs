//! The log: a line for each thing that happens, on standard error.

use tracing::Level;

/// How lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object each.
    Json,
}

/// Starts the log of the process, up to `level`. It has no prompts and no answers unless
/// [`ServeOptions::log_prompts`](crate::ServeOptions::log_prompts) says so.
pub fn start_log(format: LogFormat, level: Level) {
    // A line that cannot be written is lost: the subscriber would report that on standard error too, and panic.
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).log_internal_errors(false);
    let log = log.with_max_level(level).with_target(false);
    // A log that was started before continues.
    let _ = match format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
}
