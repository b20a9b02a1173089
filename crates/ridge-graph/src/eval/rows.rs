//! Moving whole rows along an axis: slices, joins, padding, gathers and scatters.

use super::elements::to_int;
use super::precision::Precision;
use super::reduce::{float_step, int_step};
use super::views::around;
use crate::prim::Combine;
use crate::tensor::{Data, Tensor};

/// `len` rows from `start`.
pub(super) fn slice(x: &Tensor, axis: usize, start: usize, len: usize) -> Data {
    picked(x, axis, &(start..start + len).map(Some).collect::<Vec<_>>(), 0.0)
}

/// Rows around `x` up to `total`, `before` of them in front.
pub(super) fn pad(x: &Tensor, axis: usize, before: usize, total: usize, value: f64) -> Data {
    let extent = x.shape[axis];
    let row = |i: usize| i.checked_sub(before).filter(|&r| r < extent);
    picked(x, axis, &(0..total).map(row).collect::<Vec<_>>(), value)
}

/// Rows by index; zeros where it is out of range.
pub(super) fn gather(x: &Tensor, indices: &Tensor, axis: usize) -> Data {
    let rows: Vec<_> = indices.ints().iter().map(|&i| in_range(i, x.shape[axis])).collect();
    picked(x, axis, &rows, 0.0)
}

fn in_range(index: i64, extent: usize) -> Option<usize> {
    usize::try_from(index).ok().filter(|&i| i < extent)
}

fn picked(x: &Tensor, axis: usize, rows: &[Option<usize>], fill: f64) -> Data {
    fn run<T: Copy>(v: &[T], (outer, extent, inner): (usize, usize, usize), rows: &[Option<usize>], fill: T) -> Vec<T> {
        let mut out = Vec::with_capacity(outer * rows.len() * inner);
        for o in 0..outer {
            for row in rows {
                match row {
                    Some(r) => out.extend_from_slice(&v[(o * extent + r) * inner..][..inner]),
                    None => out.extend(std::iter::repeat_n(fill, inner)),
                }
            }
        }
        out
    }
    let split = around(&x.shape, axis);
    match &x.data {
        Data::Float(v) => Data::Float(run(v, split, rows, fill)),
        Data::Int(v) => Data::Int(run(v, split, rows, to_int(x.dtype, fill))),
    }
}

/// Tensors one after another along `axis`.
pub(super) fn concat(parts: &[&Tensor], axis: usize) -> Data {
    fn run<'a, T: Copy + 'a>(parts: &[&'a Tensor], axis: usize, of: impl Fn(&'a Tensor) -> &'a [T]) -> Vec<T> {
        let (outer, _, inner) = around(&parts[0].shape, axis);
        let mut out = Vec::with_capacity(parts.iter().map(|t| t.len()).sum());
        for o in 0..outer {
            for part in parts {
                let span = part.shape[axis] * inner;
                out.extend_from_slice(&of(part)[o * span..][..span]);
            }
        }
        out
    }
    match &parts[0].data {
        Data::Float(_) => Data::Float(run(parts, axis, Tensor::floats)),
        Data::Int(_) => Data::Int(run(parts, axis, Tensor::ints)),
    }
}

/// `x` with rows replaced by or added to from `updates`; an index out of range is dropped.
pub(super) fn scatter(
    x: &Tensor,
    indices: &Tensor,
    updates: &Tensor,
    axis: usize,
    add: bool,
    precision: Precision,
) -> Data {
    fn run<T: Copy>(
        v: &[T],
        updates: &[T],
        (outer, extent, inner): (usize, usize, usize),
        indices: &[i64],
        step: impl Fn(T, T) -> T,
    ) -> Vec<T> {
        let mut out = v.to_vec();
        for o in 0..outer {
            for (i, &index) in indices.iter().enumerate() {
                let Some(row) = in_range(index, extent) else { continue };
                let to = &mut out[(o * extent + row) * inner..][..inner];
                let from = &updates[(o * indices.len() + i) * inner..][..inner];
                for (to, from) in to.iter_mut().zip(from) {
                    *to = step(*to, *from);
                }
            }
        }
        out
    }
    let split = around(&x.shape, axis);
    let indices = indices.ints();
    match &x.data {
        Data::Float(v) => {
            let step = if add { float_step(Combine::Sum, precision) } else { |_, new| new };
            Data::Float(run(v, updates.floats(), split, indices, step))
        }
        Data::Int(v) => {
            let step = if add { int_step(Combine::Sum) } else { |_, new| new };
            Data::Int(run(v, updates.ints(), split, indices, step))
        }
    }
}
