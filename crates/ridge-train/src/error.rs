//! Why training could not begin or go on.

use std::path::{Path, PathBuf};

use ridge_engine::EngineError;
use ridge_files::FilesError;
use ridge_graph::GraphError;
use ridge_models::ModelError;
use ridge_runtime::RuntimeError;
use ridge_text::TextError;

use crate::shortage::MemoryShortage;

/// The result of what the crate does.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// Why training could not begin or go on. Every message names the thing, its value and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A setting that cannot be used.
    #[error("{key} = {value}: {why}")]
    Setting {
        /// The key, as `section.key`.
        key: String,
        /// Its value.
        value: String,
        /// Why it cannot be used, and what can.
        why: String,
    },

    /// A key that does not exist.
    #[error("{file}: unknown key {key}{}", suggestion(nearest.as_deref()))]
    UnknownKey {
        /// The file.
        file: String,
        /// The key, as `section.key`.
        key: String,
        /// The known key that is spelled most like it.
        nearest: Option<String>,
    },

    /// A file or folder that cannot be used.
    #[error("{}: {problem}; {remedy}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: String,
    },

    /// The run needs more memory than there is.
    #[error("{0}")]
    Memory(Box<MemoryShortage>),

    /// The run was asked to stop before its first step. [`train`](crate::train) ends with
    /// [`RunEnd::StoppedBeforeFirstStep`](crate::RunEnd) instead.
    #[error("the run was stopped before its first step")]
    Stopped,

    /// The loss or the weights are no numbers any more, or the loss does not come down from a spike.
    #[error("step {step}: {problem}; {remedy}")]
    Diverged {
        /// The step.
        step: u64,
        /// What happened.
        problem: String,
        /// What to do.
        remedy: String,
    },

    /// See [`ModelError`].
    #[error(transparent)]
    Model(#[from] ModelError),

    /// See [`FilesError`].
    #[error(transparent)]
    Files(#[from] FilesError),

    /// See [`TextError`].
    #[error(transparent)]
    Text(#[from] TextError),

    /// See [`EngineError`].
    #[error(transparent)]
    Engine(#[from] EngineError),

    /// See [`RuntimeError`].
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

impl From<GraphError> for TrainError {
    fn from(error: GraphError) -> Self {
        Self::Runtime(error.into())
    }
}

impl TrainError {
    /// A setting that cannot be used.
    pub fn setting(key: &str, value: impl ToString, why: impl Into<String>) -> Self {
        Self::Setting { key: key.to_owned(), value: value.to_string(), why: why.into() }
    }

    /// A path that cannot be used.
    pub fn path(path: impl Into<PathBuf>, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Path { path: path.into(), problem: problem.into(), remedy: remedy.into() }
    }
}

/// An operating system's refusal at `path`, while it was tried to `action`, with what helps.
pub(crate) fn io_error(path: &Path, action: &str, cause: &std::io::Error) -> TrainError {
    use std::io::ErrorKind as Kind;
    let remedy = match cause.kind() {
        Kind::StorageFull | Kind::QuotaExceeded => {
            "free space on the disk, or lower checkpoint.keep; the checkpoints that are complete stay as they are"
        }
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => {
            "give a folder that can be written, or change its permissions"
        }
        Kind::NotFound => "check the path",
        _ => "check the path and the disk",
    };
    TrainError::path(path, format!("cannot {action}: {cause}"), remedy)
}

fn suggestion(nearest: Option<&str>) -> String {
    match nearest {
        Some(nearest) => format!("; did you mean {nearest}?"),
        None => "; `ridge train --help` lists the keys".to_owned(),
    }
}
