//! Computed elements as a tensor of a dtype.

use super::precision::Precision;
use crate::dtype::DType;
use crate::tensor::{Data, Tensor};
use crate::why::Why;

/// A tensor of computed elements: rounded to `dtype` if the precision asks for it, integers wrapped into its range.
pub(super) fn settle(dtype: DType, shape: &[usize], mut data: Data, precision: Precision) -> Result<Tensor, Why> {
    match &mut data {
        Data::Float(v) if precision != Precision::Exact => v.iter_mut().for_each(|x| *x = dtype.round(*x)),
        Data::Float(_) => {}
        Data::Int(v) => v.iter_mut().for_each(|x| *x = wrap(dtype, *x)),
    }
    as_given(dtype, shape, data)
}

/// A tensor of moved elements.
pub(super) fn as_given(dtype: DType, shape: &[usize], data: Data) -> Result<Tensor, Why> {
    let (len, float) = match &data {
        Data::Float(v) => (v.len(), true),
        Data::Int(v) => (v.len(), false),
    };
    if len != shape.iter().product::<usize>() || float != dtype.is_float() {
        return Err(format!("gave {len} elements for {dtype}{shape:?}"));
    }
    Ok(Tensor { dtype, shape: shape.to_vec(), data })
}

/// `value` in the range of an integer dtype, modulo its size; of `Bool`, whether it is not zero.
fn wrap(dtype: DType, value: i64) -> i64 {
    match dtype {
        DType::I8 => i64::from(value as i8),
        DType::U8 => i64::from(value as u8),
        DType::I32 => i64::from(value as i32),
        DType::Bool => i64::from(value != 0),
        _ => value,
    }
}

/// A float as an integer: towards zero, saturating, NaN to zero; as a `Bool`, whether it is not zero.
pub(super) fn to_int(dtype: DType, value: f64) -> i64 {
    match dtype {
        DType::I64 => value as i64,
        _ => dtype.round(value) as i64,
    }
}
