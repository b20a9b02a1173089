//! What can keep a command from running. Findings about the tree are not errors; they are the command's report.

use std::fmt;
use std::io;
use std::path::PathBuf;

#[derive(Debug)]
pub(crate) enum XtaskError {
    UnknownCommand {
        name: String,
        known: Vec<&'static str>,
    },
    UnexpectedArgument {
        command: String,
        argument: String,
    },
    MissingArgument {
        command: String,
        argument: &'static str,
    },
    /// Git could not be started.
    GitStart(io::Error),
    /// Git ran and refused; holds what it wrote on stderr.
    GitRefused(String),
    Read {
        path: PathBuf,
        source: io::Error,
    },
    /// Cargo could not be started.
    CargoStart(io::Error),
    /// The report did not come about; holds what was written on stderr.
    NoReport(String),
    Write {
        path: PathBuf,
        source: io::Error,
    },
    /// A program could not be started.
    Start {
        program: String,
        source: io::Error,
    },
    Print(io::Error),
}

impl fmt::Display for XtaskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownCommand { name, known } => {
                write!(f, "no command `{name}`; the commands are {}, see `cargo xtask help`", known.join(", "))
            }
            Self::UnexpectedArgument { command, argument } => {
                write!(f, "`{command}` takes no argument `{argument}`; see `cargo xtask {command} --help`")
            }
            Self::MissingArgument { command, argument } => {
                write!(f, "`{command}` needs {argument}; see `cargo xtask {command} --help`")
            }
            Self::GitStart(source) => {
                write!(f, "cannot run git: {source}; tidy asks git which files belong to the repository, so install it")
            }
            Self::GitRefused(stderr) => write!(f, "git ls-files failed: {}; tidy needs a git checkout", stderr.trim()),
            Self::Read { path, source } => write!(f, "cannot read {}: {source}", path.display()),
            Self::Write { path, source } => write!(f, "cannot write {}: {source}", path.display()),
            Self::Start { program, source } => write!(f, "cannot run {program}: {source}"),
            Self::CargoStart(source) => write!(f, "cannot run cargo: {source}"),
            Self::NoReport(stderr) => write!(f, "no report: {}", stderr.trim()),
            Self::Print(source) => write!(f, "cannot write the report: {source}"),
        }
    }
}

impl std::error::Error for XtaskError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::GitStart(source)
            | Self::CargoStart(source)
            | Self::Read { source, .. }
            | Self::Write { source, .. }
            | Self::Start { source, .. }
            | Self::Print(source) => Some(source),
            Self::UnknownCommand { .. }
            | Self::UnexpectedArgument { .. }
            | Self::MissingArgument { .. }
            | Self::GitRefused(_)
            | Self::NoReport(_) => None,
        }
    }
}
