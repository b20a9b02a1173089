//! A number that knows where it comes from.

use std::fmt;

use serde::Serialize;

/// How a figure came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// Stated by the maker of the hardware, or by a source that its figure names.
    Specified,
    /// Measured on a machine.
    Measured,
    /// Computed from other figures by a formula.
    Modelled,
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Specified => "specified",
            Self::Measured => "measured",
            Self::Modelled => "modelled",
        })
    }
}

/// A value with its provenance, so that whatever shows it can say where it comes from.
///
/// ```
/// use ridge_hw::figure::Figure;
/// use ridge_hw::units::BytesPerSecond;
///
/// let bandwidth = Figure::specified(BytesPerSecond(3.35e12), "NVIDIA H100 data sheet");
/// assert_eq!(bandwidth.to_string(), "3.35 TB/s (specified)");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure<T> {
    /// The value, in the unit of its type.
    pub value: T,
    /// How it came about.
    pub provenance: Provenance,
    /// The document that states it, the command that measured it, or the formula that gave it.
    pub source: String,
}

impl<T> Figure<T> {
    /// A figure that the document `source` states.
    pub fn specified(value: T, source: impl Into<String>) -> Self {
        Self { value, provenance: Provenance::Specified, source: source.into() }
    }

    /// A figure that was measured by `method`.
    pub fn measured(value: T, method: impl Into<String>) -> Self {
        Self { value, provenance: Provenance::Measured, source: method.into() }
    }

    /// A figure that `formula` gave.
    pub fn modelled(value: T, formula: impl Into<String>) -> Self {
        Self { value, provenance: Provenance::Modelled, source: formula.into() }
    }
}

impl<T: fmt::Display> fmt::Display for Figure<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)?;
        write!(f, " ({})", self.provenance)
    }
}
