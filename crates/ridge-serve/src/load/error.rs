//! Why a load cannot be made.

use std::io;

/// Why a load cannot be made or a server not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file of requests or of text.
    #[error("cannot read {path}; check the path and its permissions")]
    Read {
        /// The file.
        path: String,
        /// The system's answer.
        #[source]
        cause: io::Error,
    },
    /// What a file holds.
    #[error("{place}: {problem}")]
    Data {
        /// The file, and the line of it.
        place: String,
        /// What is wrong, and the way out.
        problem: String,
    },
    /// The address of a server.
    #[error("{url}: {problem}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong, and the way out.
        problem: String,
    },
    /// The server did not answer the request that goes ahead of the others.
    #[error("the initial request to {url} failed ({kind}): {message}")]
    NotServing {
        /// The server.
        url: String,
        /// The kind of failure, as in reports.
        kind: String,
        /// What it said.
        message: String,
    },
    /// The system refused threads.
    #[error("cannot start to send requests: {0}")]
    System(#[from] io::Error),
    /// A tokenizer that cannot be used.
    #[error(transparent)]
    Text(#[from] ridge_text::TextError),
}
