//! The crate's error.

use ridge_graph::{GraphError, UnboundSymbol};

/// What goes wrong while a graph is compiled for a device or run on it.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A mistake in the graph itself.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// An extent without a number.
    #[error(transparent)]
    Symbol(#[from] UnboundSymbol),
    /// An op that the backend has no kernel for.
    #[error("{backend}: no kernel for {op} at {at}: {why}")]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// The op.
        op: String,
        /// Its scope.
        at: String,
        /// What is not supported.
        why: String,
    },
    /// A weight, state or input that does not fit its declaration, or is missing.
    #[error("{kind} `{name}`: {why}")]
    Argument {
        /// `weight`, `state`, `input` or `output`.
        kind: &'static str,
        /// Its name.
        name: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// More memory than there is.
    #[error("{what} needs {}, which could not be allocated; {remedy}", binary(*needed))]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Its size.
        needed: usize,
        /// What would help.
        remedy: &'static str,
    },
    /// A device that failed while running.
    #[error("{backend}: {why}")]
    Device {
        /// The backend's name.
        backend: &'static str,
        /// What happened.
        why: String,
    },
}

/// Bytes in the largest unit that they fill.
fn binary(bytes: usize) -> String {
    let unit = [(30, "GiB"), (20, "MiB"), (10, "KiB")].into_iter().find(|(power, _)| bytes >> power > 0);
    unit.map_or_else(
        || format!("{bytes} bytes"),
        |(power, name)| format!("{:.1} {name}", bytes as f64 / (1u64 << power) as f64),
    )
}

/// Results of this crate.
pub type Result<T, E = RuntimeError> = std::result::Result<T, E>;
