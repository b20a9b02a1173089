//! What every command of `cargo xtask` is: a name, its help, and a function of the repository's root.

use std::path::Path;

use crate::error::XtaskError;

/// The result of a command that ran: the text that it prints, and whether the tree passed.
pub(crate) struct TaskOutcome {
    pub(crate) report: String,
    pub(crate) passed: bool,
}

/// A command of `cargo xtask`.
pub(crate) struct Task {
    pub(crate) name: &'static str,
    /// One line, for the list of commands.
    pub(crate) summary: &'static str,
    /// What `cargo xtask <name> --help` prints.
    pub(crate) help: &'static str,
    pub(crate) run: TaskRun,
}

/// A function of the repository's root, and perhaps of one argument or of all.
pub(crate) enum TaskRun {
    Plain(fn(root: &Path) -> Result<TaskOutcome, XtaskError>),
    /// With what the argument is called.
    Of(&'static str, fn(root: &Path, argument: &str) -> Result<TaskOutcome, XtaskError>),
    All(fn(root: &Path, arguments: &[&str]) -> Result<TaskOutcome, XtaskError>),
}
