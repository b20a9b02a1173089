//! The one error type of the crate.

use ridge_files::FilesError;
use ridge_text::TextError;

/// The result of reading something of a model.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Why a model could not be read. Every message names the file, the thing in it, its value, and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A graph could not be built, or a device refused something.
    #[error(transparent)]
    Runtime(ridge_runtime::RuntimeError),

    /// The extents of a weight depend on a symbol, so that no checkpoint can supply it.
    #[error("the weight {name} has the shape {shape}, and its extents must be numbers; replace its symbols by numbers")]
    SymbolicWeight {
        /// The weight.
        name: String,
        /// Its shape.
        shape: String,
    },

    /// A weight cannot be cut over ranks as the model is.
    #[error("the weight {name} cannot be cut over ranks: {why}")]
    Share {
        /// The weight.
        name: String,
        /// Why.
        why: String,
    },

    /// A file could not be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),

    /// A tokenizer or chat template could not be read or used.
    #[error(transparent)]
    Text(#[from] TextError),

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
        /// What to do about it.
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
