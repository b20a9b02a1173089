//! The error type of the crate.

use std::fmt;
use std::path::PathBuf;

/// The result of reading or writing a file of a model.
pub type Result<T, E = FilesError> = std::result::Result<T, E>;

/// Why a file could not be read or written. Every message names the file, the item in it, its value and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FilesError {
    /// The operating system refused an operation.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, continuing "cannot".
        action: &'static str,
        /// The operating system's answer.
        cause: std::io::Error,
    },

    /// A path, folder or archive is not what is needed.
    #[error("{}: {problem}; {remedy}", path.display())]
    Path {
        /// The path as it was given.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        remedy: String,
    },

    /// A file that should be JSON is not, or names a key twice.
    #[error("{file}: it is not valid JSON: {detail}; download the file again or fix it")]
    Json {
        /// The file.
        file: String,
        /// What the parser found, with line and column.
        detail: String,
    },

    /// A GGUF file breaks the format, or holds what is not supported.
    #[error("{file}: {problem}; {remedy}")]
    Gguf {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        remedy: String,
    },

    /// A safetensors file or its index breaks the format or is not supported.
    #[error("{file}: {problem}; {remedy}")]
    Safetensors {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        remedy: String,
    },

    /// The tensors of a checkpoint are not those of the model.
    #[error("{0}")]
    Tensors(Box<TensorMismatch>),
}

/// How many entries of a list an error message shows.
const SHOWN: usize = 10;

/// How the tensors of a checkpoint differ from those that a model expects. The lists are complete and in the order of
/// the model (`extra`: by name); the message shows up to ten of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorMismatch {
    /// The checkpoint, as a path or a name.
    pub checkpoint: String,
    /// Expected, but not there: name and expected shape.
    pub missing: Vec<(String, Vec<usize>)>,
    /// There, but neither expected nor ignorable: name and shape.
    pub extra: Vec<(String, Vec<usize>)>,
    /// There with another shape: name, expected shape, shape in the checkpoint.
    pub misshapen: Vec<(String, Vec<usize>, Vec<usize>)>,
}

impl TensorMismatch {
    /// Do the tensors agree after all?
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.extra.is_empty() && self.misshapen.is_empty()
    }
}

impl fmt::Display for TensorMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: the tensors are not those of the model", self.checkpoint)?;
        section(f, "missing", &self.missing, |(name, shape)| format!("{name} {shape:?}"))?;
        section(f, "not in the model", &self.extra, |(name, shape)| format!("{name} {shape:?}"))?;
        section(f, "of another shape", &self.misshapen, |(name, want, is)| {
            format!("{name} is {is:?}, expected {want:?}")
        })?;
        write!(f, "\ncheck that config.json belongs to this checkpoint and that every shard was downloaded")
    }
}

fn section<T>(f: &mut fmt::Formatter<'_>, title: &str, items: &[T], show: impl Fn(&T) -> String) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    write!(f, "\n{} {title}:", items.len())?;
    for item in items.iter().take(SHOWN) {
        write!(f, "\n  {}", show(item))?;
    }
    if items.len() > SHOWN {
        write!(f, "\n  and {} more", items.len() - SHOWN)?;
    }
    Ok(())
}
