//! The type of a value: element type, shape, how it is stored, and whether it is linear state.

use std::fmt;

use crate::dtype::DType;
use crate::format::{FormatComponent, FormatRef};
use crate::poly::Poly;
use crate::shape::Shape;

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
            Some(f) => f.components(&self.shape).iter().fold(Poly::zero(), |sum, c| sum + &c.ty().bytes()),
        }
    }
}

impl FormatComponent {
    /// Its type: a plain tensor.
    pub fn ty(&self) -> Type {
        Type::tensor(self.dtype, self.shape.clone())
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
