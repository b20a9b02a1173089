//! Shapes, dtypes and elements of the samples' operands.

use crate::dtype::DType;
use crate::sample::Rng;
use crate::tensor::Tensor;

/// Rank 0, no elements, one, a row off any tile, and inner axes of 1.
pub(super) const SHAPES: [&[usize]; 6] = [&[], &[0], &[1], &[1000], &[3, 37], &[2, 5, 1]];

/// Random elements of any dtype; integers of both signs where the dtype has them.
pub(super) fn any(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
    match dtype {
        DType::Bool => rng.integers(dtype, shape, 0, 2),
        DType::U8 => rng.integers(dtype, shape, 0, 200),
        _ if dtype.is_int() => rng.integers(dtype, shape, -100, 100),
        _ => rng.normal(dtype, shape),
    }
}

/// The float dtype asked for, and with F32 the others.
pub(super) fn with_others(dtype: DType) -> Vec<DType> {
    let mut all = vec![dtype];
    all.extend(once(dtype, &[DType::I8, DType::U8, DType::I32, DType::I64, DType::Bool]));
    all
}

/// `dtypes` with F32, none with other float dtypes.
pub(super) fn once(dtype: DType, dtypes: &[DType]) -> impl Iterator<Item = DType> {
    dtypes.iter().copied().filter(move |_| dtype == DType::F32)
}
