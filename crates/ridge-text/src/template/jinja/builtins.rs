//! The names of the functions that every template has; `functions.rs` runs them.

/// A function that every template has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    Lipsum,
    RaiseException,
    StrftimeNow,
}

impl Function {
    /// The function called `name`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "range" => Self::Range,
            "dict" => Self::Dict,
            "namespace" => Self::Namespace,
            "cycler" => Self::Cycler,
            "joiner" => Self::Joiner,
            "lipsum" => Self::Lipsum,
            "raise_exception" => Self::RaiseException,
            "strftime_now" => Self::StrftimeNow,
            _ => return None,
        })
    }
}
