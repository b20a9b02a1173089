//! Indices: how a shape splits around an axis, iota, and tensors read in another order.

use crate::dtype::DType;
use crate::tensor::{Data, Tensor};

/// Elements before, along and after `axis`: the element `(o, k, i)` is at `(o * extent + k) * inner + i`.
pub(super) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

/// Each element's index along `axis`.
pub(super) fn iota(shape: &[usize], axis: usize, dtype: DType) -> Data {
    let (outer, extent, inner) = around(shape, axis);
    let indices = (0..outer * extent * inner).map(|i| (i / inner % extent) as i64);
    if dtype.is_float() { Data::Float(indices.map(|i| i as f64).collect()) } else { Data::Int(indices.collect()) }
}

/// Axis `i` of the result is axis `perm[i]` of `x`.
pub(super) fn transpose(x: &Tensor, perm: &[usize]) -> Data {
    let strides = strides(&x.shape);
    let shape: Vec<usize> = perm.iter().map(|&a| x.shape[a]).collect();
    strided(&x.data, &shape, &perm.iter().map(|&a| strides[a]).collect::<Vec<_>>())
}

/// Extents of 1 and missing leading axes repeated up to `shape`.
pub(super) fn broadcast(x: &Tensor, shape: &[usize]) -> Data {
    let missing = shape.len() - x.shape.len();
    let mut steps = vec![0; missing];
    steps.extend(strides(&x.shape).iter().zip(&x.shape).map(|(&s, &extent)| if extent == 1 { 0 } else { s }));
    strided(&x.data, shape, &steps)
}

/// Elements between neighbours along each axis.
fn strides(shape: &[usize]) -> Vec<usize> {
    let mut out = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        out[axis] = out[axis + 1] * shape[axis + 1];
    }
    out
}

fn strided(data: &Data, shape: &[usize], strides: &[usize]) -> Data {
    match data {
        Data::Float(v) => Data::Float(walk(shape, strides, |at| v[at])),
        Data::Int(v) => Data::Int(walk(shape, strides, |at| v[at])),
    }
}

/// Reads every index of `shape` in row-major order.
fn walk<T>(shape: &[usize], strides: &[usize], read: impl Fn(usize) -> T) -> Vec<T> {
    let count: usize = shape.iter().product();
    let mut out = Vec::with_capacity(count);
    let mut index = vec![0; shape.len()];
    let mut at = 0;
    for _ in 0..count {
        out.push(read(at));
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            at += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            at -= strides[axis] * shape[axis];
            index[axis] = 0;
        }
    }
    out
}
