//! What ops require of their inputs' types.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;

/// Requires a plain float tensor.
pub(super) fn want_float(name: &str, ty: &Type) -> Result<(), Why> {
    if ty.dtype.is_float() && ty.is_plain() {
        Ok(())
    } else {
        Err(format!("{name} must be a plain float tensor, got {ty}"))
    }
}

/// Requires a float parameter, plain or stored in a format, of the axes that `axes` names, such as `[N, K]`.
pub(super) fn want_weight(name: &str, ty: &Type, rank: usize, axes: &str) -> Result<(), Why> {
    if ty.dtype.is_float() && !ty.state && ty.shape.rank() == rank {
        Ok(())
    } else {
        Err(format!("{name} must be a float parameter {axes}, got {ty}"))
    }
}

/// Requires a plain float tensor of the axes that `axes` names, such as `[tokens, heads, dim]`.
pub(super) fn want_floats(name: &str, ty: &Type, rank: usize, axes: &str) -> Result<(), Why> {
    if ty.dtype.is_float() && ty.is_plain() && ty.shape.rank() == rank {
        Ok(())
    } else {
        Err(format!("{name} must be a plain float tensor {axes}, got {ty}"))
    }
}

/// Requires exactly this plain tensor.
pub(super) fn want(name: &str, ty: &Type, dtype: DType, shape: impl Into<Shape>) -> Result<(), Why> {
    let wanted = Type::tensor(dtype, shape);
    if *ty == wanted { Ok(()) } else { Err(format!("{name} must be {wanted}, got {ty}")) }
}

/// Why a wrong number of inputs is refused.
pub(super) fn takes(names: &str, inputs: &[Type]) -> Why {
    format!("takes {names}, got {} inputs", inputs.len())
}

/// The product of extents of which at most one is symbolic.
pub(super) fn flat(dims: &[Dim]) -> Result<Dim, Why> {
    dims.iter()
        .try_fold(Dim::from(1), |product, dim| product.times(dim))
        .ok_or_else(|| format!("axes {} cannot be taken as one, since more than one is symbolic", Shape(dims.to_vec())))
}
