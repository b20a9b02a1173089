//! What a rule reports.

/// How much a finding weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Failure,
    Warning,
}

/// One thing that is wrong in one place. `message` reads `what is wrong; what to do`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Finding {
    pub(super) path: String,
    /// Counted from 1.
    pub(super) line: usize,
    pub(super) level: Level,
    pub(super) message: String,
}

impl Finding {
    pub(super) fn failure(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, level: Level::Failure, message: message.into() }
    }

    pub(super) fn warning(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { level: Level::Warning, ..Self::failure(path, line, message) }
    }
}
