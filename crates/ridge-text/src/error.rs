//! The error type of the crate.

use ridge_files::FilesError;

/// The result of reading or using a tokenizer or chat template.
pub type Result<T, E = TextError> = std::result::Result<T, E>;

/// Why a tokenizer or chat template could not be read or used. Every message names the file, the item in it and what to
/// do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file could not be read.
    #[error(transparent)]
    Files(#[from] FilesError),

    /// A key of a JSON file has a value that is impossible, contradictory or not supported.
    #[error("{file}: {key} = {value} {problem}; {remedy}")]
    Value {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The value as JSON, shortened if it is long.
        value: String,
        /// What is wrong with it, continuing the sentence.
        problem: String,
        /// What to do about it.
        remedy: &'static str,
    },

    /// A tokenizer file cannot be used, or a text cannot be encoded or decoded.
    #[error("{file}: {problem}; {remedy}")]
    Tokenizer {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
        /// What to do about it.
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
        /// What to do about it.
        remedy: String,
    },

    /// A chat template refuses a conversation by `raise_exception`, for example because of the order of its roles.
    #[error("{file}{}: the chat template rejects this conversation: {message}", at_line(*line))]
    TemplateRefusal {
        /// The file.
        file: String,
        /// The line of the template, counted from 1, where it is known.
        line: Option<u32>,
        /// The message that the template gives.
        message: String,
    },
}

fn at_line(line: Option<u32>) -> String {
    line.map_or_else(String::new, |line| format!(" line {line}"))
}
