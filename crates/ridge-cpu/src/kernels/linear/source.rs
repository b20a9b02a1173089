//! Rows of a weight as vectors of f32, from whatever they are stored in.
#![allow(clippy::inline_always)] // must compile with the instruction set of the tile

use crate::simd::{Element, LANES, Vector, widen_lanes};

pub(in crate::kernels) type Lanes = [f32; LANES];

/// A weight `[N, K]`.
pub(in crate::kernels) trait Source: Copy {
    /// One row of it.
    type Row: Copy;

    /// Row `row`, of which whole vectors `0..vectors` will be asked for.
    fn row(self, row: usize, vectors: usize) -> Self::Row;

    /// Elements `LANES * at..LANES * (at + 1)`.
    fn lanes(row: Self::Row, at: usize) -> Vector;

    /// The last `K % LANES` elements, where that is not 0: in the last lanes if `K > LANES`, otherwise in the first;
    /// the other lanes are 0.
    fn rest(self, row: usize) -> Lanes;
}

/// Stored as it is, row-major.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Plain<'a, T> {
    pub(in crate::kernels) data: &'a [T],
    pub(in crate::kernels) inner: usize,
}

/// The first elements of `data`, zeros where it has fewer.
#[inline(always)]
pub(in crate::kernels) fn start<T: Element>(data: &[T]) -> Lanes {
    match data.first_chunk::<LANES>() {
        Some(whole) => widen_lanes(whole),
        None => {
            let mut lanes = [0.0; LANES];
            for (lane, x) in lanes.iter_mut().zip(data) {
                *lane = x.widen();
            }
            lanes
        }
    }
}

/// Zero but for `kept`.
#[inline(always)]
fn masked(lanes: &Lanes, kept: std::ops::Range<usize>) -> Lanes {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = if i >= kept.start && i < kept.end { lanes[i] } else { 0.0 };
    }
    out
}

impl<'a, T: Element> Source for Plain<'a, T> {
    type Row = &'a [[T; LANES]];

    #[inline(always)]
    fn row(self, row: usize, vectors: usize) -> Self::Row {
        &self.data[row * self.inner..][..self.inner].as_chunks().0[..vectors]
    }

    #[inline(always)]
    fn lanes(row: Self::Row, at: usize) -> Vector {
        T::widen_to_vector(&row[at])
    }

    #[inline(always)]
    fn rest(self, row: usize) -> Lanes {
        let from = row * self.inner;
        if self.inner > LANES {
            let end = &self.data[from + self.inner - LANES..];
            return masked(&start(end), LANES - self.inner % LANES..LANES);
        }
        masked(&start(&self.data[from..]), 0..self.inner)
    }
}
