//! Sorting and the index of the largest.

use std::cmp::Ordering;

use super::views::around;
use crate::tensor::{Data, Tensor};

/// Index of the largest along `axis`, the first of equals; a NaN is larger than any number. 0 where there is none.
pub(super) fn argmax(x: &Tensor, axis: usize) -> Data {
    fn best<T: Copy>(v: &[T], lanes: Lanes, above: impl Fn(T, T) -> bool) -> Data {
        let largest = |lane: Vec<usize>| {
            let mut best = 0;
            for (i, &at) in lane.iter().enumerate() {
                if above(v[at], v[lane[best]]) {
                    best = i;
                }
            }
            best as i64
        };
        Data::Int(lanes.map(largest).collect())
    }
    let lanes = Lanes::new(&x.shape, axis);
    match &x.data {
        Data::Float(v) => best(v, lanes, |a, b| a > b || (a.is_nan() && !b.is_nan())),
        Data::Int(v) => best(v, lanes, |a, b| a > b),
    }
}

/// The first `keep` elements along `axis` in sorted order, and their indices; stable, NaN last.
pub(super) fn sort(x: &Tensor, axis: usize, descending: bool, keep: usize) -> (Data, Data) {
    let turned = |order: Ordering| if descending { order.reverse() } else { order };
    match &x.data {
        Data::Float(v) => {
            let order = |a: &f64, b: &f64| match (a.is_nan(), b.is_nan()) {
                (false, false) => turned(a.partial_cmp(b).unwrap_or(Ordering::Equal)),
                (a, b) => a.cmp(&b),
            };
            let (values, indices) = sorted(v, &x.shape, axis, keep, order);
            (Data::Float(values), Data::Int(indices))
        }
        Data::Int(v) => {
            let (values, indices) = sorted(v, &x.shape, axis, keep, |a, b| turned(a.cmp(b)));
            (Data::Int(values), Data::Int(indices))
        }
    }
}

fn sorted<T: Copy + Default>(
    v: &[T],
    shape: &[usize],
    axis: usize,
    keep: usize,
    order: impl Fn(&T, &T) -> Ordering,
) -> (Vec<T>, Vec<i64>) {
    let (outer, _, inner) = around(shape, axis);
    let mut values = vec![T::default(); outer * keep * inner];
    let mut indices = vec![0; values.len()];
    for (lane, elements) in Lanes::new(shape, axis).enumerate() {
        let mut ranked: Vec<usize> = (0..elements.len()).collect();
        ranked.sort_by(|&a, &b| order(&v[elements[a]], &v[elements[b]]));
        let (o, i) = (lane / inner, lane % inner);
        for (k, &from) in ranked[..keep].iter().enumerate() {
            let to = (o * keep + k) * inner + i;
            values[to] = v[elements[from]];
            indices[to] = from as i64;
        }
    }
    (values, indices)
}

/// The positions of the elements of each line along an axis.
struct Lanes {
    extent: usize,
    inner: usize,
    next: usize,
    count: usize,
}

impl Lanes {
    fn new(shape: &[usize], axis: usize) -> Self {
        let (outer, extent, inner) = around(shape, axis);
        Self { extent, inner, next: 0, count: outer * inner }
    }
}

impl Iterator for Lanes {
    type Item = Vec<usize>;

    fn next(&mut self) -> Option<Vec<usize>> {
        let lane = self.next;
        self.next += 1;
        (lane < self.count).then(|| {
            let first = lane / self.inner * self.extent * self.inner + lane % self.inner;
            (0..self.extent).map(|k| first + k * self.inner).collect()
        })
    }
}
