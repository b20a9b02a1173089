//! The crate's error: what went wrong in which op, at which scope, on which types.

use crate::dim::UnboundSymbol;
use crate::types::Type;

/// A mistake found while a graph was built, rewritten, costed or evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// An op was given inputs that it does not accept.
    #[error("{at}: {op}({}): {why}", show(.inputs))]
    Op {
        /// Scope of the op, such as `model.layers.3.self_attn.q_proj`.
        at: String,
        /// The op's name.
        op: String,
        /// Types of the inputs given.
        inputs: Vec<Type>,
        /// What is wrong and what would be right.
        why: String,
    },
    /// A value was used where it is not visible, or a state version after it was replaced.
    #[error("{at}: {why}")]
    Use {
        /// Scope of the use.
        at: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// An extent that has no number.
    #[error(transparent)]
    Symbol(#[from] UnboundSymbol),
}

impl GraphError {
    pub(crate) fn usage(at: &str, why: impl Into<String>) -> Self {
        Self::Use { at: place(at), why: why.into() }
    }

    /// The same mistake seen from the caller of the function it is in: its place is below `scope`.
    pub(crate) fn within(mut self, scope: &str) -> Self {
        if let (false, Self::Op { at, .. } | Self::Use { at, .. }) = (scope.is_empty(), &mut self) {
            *at = if *at == place("") { scope.into() } else { format!("{scope}.{at}") };
        }
        self
    }
}

/// The scope as an error shows it: the top of the graph has no name of its own.
pub(crate) fn place(scope: &str) -> String {
    if scope.is_empty() { "graph".into() } else { scope.into() }
}

fn show(types: &[Type]) -> String {
    let shown: Vec<String> = types.iter().map(ToString::to_string).collect();
    shown.join(", ")
}

/// Results of this crate.
pub type Result<T, E = GraphError> = std::result::Result<T, E>;
