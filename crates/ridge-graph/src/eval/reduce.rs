//! Reductions and scans along an axis.

use super::elementwise::{float_max, float_min};
use super::precision::Precision;
use super::views::around;
use crate::dtype::DType;
use crate::prim::Combine;
use crate::tensor::{Data, Tensor};

/// Combines along `axis`. Of no elements: 0 for a sum, the lowest number for a maximum, the highest for a minimum.
pub(super) fn reduce(op: Combine, x: &Tensor, axis: usize, precision: Precision) -> Data {
    fn run<T: Copy>(
        v: &[T],
        (outer, extent, inner): (usize, usize, usize),
        start: T,
        order: impl Iterator<Item = usize> + Clone,
        step: impl Fn(T, T) -> T,
    ) -> Vec<T> {
        let mut out = vec![start; outer * inner];
        for o in 0..outer {
            let totals = &mut out[o * inner..][..inner];
            for k in order.clone() {
                let row = &v[(o * extent + k) * inner..][..inner];
                totals.iter_mut().zip(row).for_each(|(total, x)| *total = step(*total, *x));
            }
        }
        out
    }
    let split = around(&x.shape, axis);
    let order = precision.order(split.1);
    match &x.data {
        Data::Float(v) => Data::Float(run(v, split, float_start(op), order, float_step(op, precision))),
        Data::Int(v) => Data::Int(run(v, split, int_start(op, x.dtype), order, int_step(op))),
    }
}

/// Inclusive prefix combination along `axis`.
pub(super) fn scan(op: Combine, x: &Tensor, axis: usize, precision: Precision) -> Data {
    let (outer, extent, inner) = around(&x.shape, axis);
    fn run<T: Copy>(values: &[T], outer: usize, extent: usize, inner: usize, step: impl Fn(T, T) -> T) -> Vec<T> {
        let mut out = values.to_vec();
        for block in 0..outer {
            let base = block * extent * inner;
            for i in base + inner..base + (extent * inner).max(inner) {
                out[i] = step(out[i - inner], values[i]);
            }
        }
        out
    }
    match &x.data {
        // The running total stays in f32; only what is stored is rounded to the dtype, by the caller.
        Data::Float(v) => Data::Float(run(v, outer, extent, inner, float_step(op, precision))),
        Data::Int(v) => Data::Int(run(v, outer, extent, inner, int_step(op))),
    }
}

/// One step of an accumulation of floats.
pub(super) fn float_step(op: Combine, precision: Precision) -> fn(f64, f64) -> f64 {
    match (op, precision) {
        (Combine::Sum, Precision::Exact) => |a, b| a + b,
        (Combine::Sum, Precision::Rounded | Precision::Reordered(_)) => |a, b| f64::from(a as f32 + b as f32),
        (Combine::Max, _) => float_max,
        (Combine::Min, _) => float_min,
    }
}

/// One step of an accumulation of integers.
pub(super) fn int_step(op: Combine) -> fn(i64, i64) -> i64 {
    match op {
        Combine::Sum => i64::wrapping_add,
        Combine::Max => i64::max,
        Combine::Min => i64::min,
    }
}

fn float_start(op: Combine) -> f64 {
    match op {
        Combine::Sum => 0.0,
        Combine::Max => f64::NEG_INFINITY,
        Combine::Min => f64::INFINITY,
    }
}

fn int_start(op: Combine, dtype: DType) -> i64 {
    let (low, high) = match dtype {
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::Bool => (0, 1),
        _ => (i64::MIN, i64::MAX),
    };
    match op {
        Combine::Sum => 0,
        Combine::Max => low,
        Combine::Min => high,
    }
}
