//! The extents of a tensor.

use std::fmt;

use crate::dim::{Bindings, Dim, UnboundSymbol};
use crate::poly::Poly;

/// Extents of a tensor, outermost first. Rank 0 is a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(pub Vec<Dim>);

impl Shape {
    /// A shape from anything that converts to extents.
    pub fn new<D: Into<Dim>>(dims: impl IntoIterator<Item = D>) -> Self {
        Self(dims.into_iter().map(Into::into).collect())
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements.
    pub fn elements(&self) -> Poly {
        Poly::product(&self.0)
    }

    /// The innermost extent; 1 for a scalar.
    pub fn last(&self) -> Dim {
        self.0.last().cloned().unwrap_or_else(|| Dim::from(1))
    }

    /// The numbers under `bindings`.
    ///
    /// # Errors
    /// Names a symbol that is not bound.
    pub fn eval(&self, bindings: &Bindings) -> Result<Vec<usize>, UnboundSymbol> {
        self.0.iter().map(|d| d.eval(bindings)).collect()
    }

    /// The numbers, if no symbol takes part.
    pub fn as_const(&self) -> Option<Vec<usize>> {
        self.0.iter().map(Dim::as_const).collect()
    }
}

impl<D: Into<Dim> + Clone, const N: usize> From<[D; N]> for Shape {
    fn from(dims: [D; N]) -> Self {
        Self::new(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        write!(f, "[{}]", dims.join(", "))
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
