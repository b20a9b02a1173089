//! The one error type of the crate.

use std::fmt;
use std::path::PathBuf;

/// The result of reading something of a model.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Why a model could not be read. Every message names the file, the thing in it, its value, and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A graph could not be built, or a device refused something.
    #[error(transparent)]
    Runtime(ridge_runtime::RuntimeError),

    /// The operating system refused something.
    #[error("{}: cannot {action}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as in "cannot ...".
        action: &'static str,
        /// The operating system's answer.
        cause: std::io::Error,
    },

    /// A path, folder or archive is not what a model needs.
    #[error("{}: {problem}; {remedy}", path.display())]
    Files {
        /// The path as it was given.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What would mend it.
        remedy: String,
    },

    /// A file that should be JSON is not, or names a key twice.
    #[error("{file}: it is not valid JSON: {detail}; download the file again or mend it")]
    Json {
        /// The file.
        file: String,
        /// What the parser met, with line and column.
        detail: String,
    },

    /// A key of a JSON file has a value that is impossible, contradictory or not supported.
    #[error("{file}: {key} = {value} {problem}; {remedy}")]
    Value {
        /// The file.
        file: String,
        /// The key, with the keys of the objects around it: `rope_scaling.factor`.
        key: String,
        /// The value as JSON, shortened if it is long.
        value: String,
        /// What is wrong with it, continuing the sentence.
        problem: String,
        /// What would mend it.
        remedy: String,
    },

    /// A key that the model cannot be built without is absent or null.
    #[error("{file}: {key} is missing; it must be {expected}: check that the download is complete")]
    Missing {
        /// The file.
        file: String,
        /// The key, with the keys of the objects around it.
        key: String,
        /// The kind of value it needs.
        expected: &'static str,
    },

    /// Keys that this version does not know, so that it cannot tell whether they change the model.
    #[error(
        "{file}: unknown {}; Ridge cannot tell whether that changes what the model computes: \
         remove what certainly does not, or choose a checkpoint without it",
        key_list(keys)
    )]
    UnknownKeys {
        /// The file.
        file: String,
        /// The keys with their values as JSON, shortened if they are long.
        keys: Vec<(String, String)>,
    },

    /// A GGUF file breaks the format, or holds what is not supported.
    #[error("{file}: {problem}; {remedy}")]
    Gguf {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
        /// What would mend it.
        remedy: String,
    },

    /// A safetensors file or its index breaks the format or is not supported.
    #[error("{file}: {problem}; {remedy}")]
    Safetensors {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
        /// What would mend it.
        remedy: String,
    },

    /// The tensors of a checkpoint are not those of the model.
    #[error("{0}")]
    Tensors(Box<TensorMismatch>),

    /// A tokenizer file cannot be used, or a text cannot be turned into tokens or back.
    #[error("{file}: {problem}; {remedy}")]
    Tokenizer {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
        /// What would mend it.
        remedy: String,
    },

    /// A chat template cannot be compiled or rendered.
    #[error("{file}{}: {problem}; {remedy}", at_line(*line))]
    Template {
        /// The file.
        file: String,
        /// The line of the template, counted from 1, where it is known.
        line: Option<u32>,
        /// What is wrong.
        problem: String,
        /// What would mend it.
        remedy: String,
    },

    /// A chat template refuses a conversation by `raise_exception`: roles in the wrong order, a system message that the
    /// model does not know.
    #[error("{file}{}: the chat template refuses this conversation: {message}", at_line(*line))]
    TemplateRefusal {
        /// The file.
        file: String,
        /// The line of the template, counted from 1, where it is known.
        line: Option<u32>,
        /// The template's own words.
        message: String,
    },
}

fn at_line(line: Option<u32>) -> String {
    line.map_or_else(String::new, |line| format!(" line {line}"))
}

fn key_list(keys: &[(String, String)]) -> String {
    let shown: Vec<String> = keys.iter().take(SHOWN).map(|(key, value)| format!("{key} = {value}")).collect();
    let more = match keys.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let noun = if keys.len() == 1 { "key" } else { "keys" };
    format!("{noun} {}{more}", shown.join(", "))
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
            format!("{name} is {is:?}, the model has {want:?}")
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
