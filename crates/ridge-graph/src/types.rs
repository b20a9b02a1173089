//! The type of a value: element type, shape, how it is stored, and whether it is linear state.

use std::fmt;

use crate::dim::{Bindings, Dim, UnboundSymbol};
use crate::dtype::DType;
use crate::format::FormatRef;
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

/// The type of a value of the graph.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Type {
    /// Logical element type.
    pub dtype: DType,
    /// Logical shape.
    pub shape: Shape,
    /// How the elements are stored; `None` is plain row-major storage of `dtype`.
    pub format: Option<FormatRef>,
    /// Linear state: each version is used until it is updated, and updated in place.
    pub state: bool,
}

impl Type {
    /// A plain tensor.
    pub fn tensor(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self { dtype, shape: shape.into(), format: None, state: false }
    }

    /// Linear state of this dtype and shape.
    pub fn state(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self { state: true, ..Self::tensor(dtype, shape) }
    }

    /// This type stored in `format`.
    #[must_use]
    pub fn stored_as(self, format: FormatRef) -> Self {
        Self { format: Some(format), ..self }
    }

    /// The plain tensor type of the same dtype and shape.
    #[must_use]
    pub fn plain(&self) -> Self {
        Self::tensor(self.dtype, self.shape.clone())
    }

    /// Is it a plain tensor: neither state nor block-quantised?
    pub fn is_plain(&self) -> bool {
        !self.state && self.format.is_none()
    }

    /// The same kind of value with another shape.
    #[must_use]
    pub fn with_shape(&self, shape: impl Into<Shape>) -> Self {
        Self { shape: shape.into(), ..self.clone() }
    }

    /// Bytes of storage, over all components of its format.
    pub fn bytes(&self) -> Poly {
        match &self.format {
            None => self.shape.elements() * self.dtype.size_bytes() as i128,
            Some(f) => f.components(&self.shape).iter().fold(Poly::zero(), |sum, c| sum + &c.ty.bytes()),
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.state {
            f.write_str("state ")?;
        }
        match &self.format {
            None => write!(f, "{}{}", self.dtype, self.shape),
            Some(format) => write!(f, "{}<{}>{}", format.name(), self.dtype, self.shape),
        }
    }
}

impl fmt::Debug for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
