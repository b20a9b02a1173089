//! Rows of a weight as vectors of f32, from whatever they are stored in.
#![allow(clippy::inline_always)] // must compile with the instruction set of the tile

use crate::simd::{Element, LANES, Vector, widen_lanes};

pub(in crate::kernels) type Lanes = [f32; LANES];

/// Bytes of a line of the cache.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const LINE: usize = 64;

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

    /// Brings the line of the cache that begins about elements `LANES * at` of row `row` to it, where weights come from memory. The
    /// row need not be there.
    #[inline(always)]
    fn fetch(self, _row: usize, _at: usize) {}
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

/// As [`Plain`], from memory.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Streamed<'a, T>(pub(in crate::kernels) Plain<'a, T>);

impl<'a, T: Element> Source for Streamed<'a, T> {
    type Row = <Plain<'a, T> as Source>::Row;

    #[inline(always)]
    fn row(self, row: usize, vectors: usize) -> Self::Row {
        self.0.row(row, vectors)
    }

    #[inline(always)]
    fn lanes(row: Self::Row, at: usize) -> Vector {
        Plain::lanes(row, at)
    }

    #[inline(always)]
    fn rest(self, row: usize) -> Lanes {
        self.0.rest(row)
    }

    #[inline(always)]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn fetch(self, row: usize, at: usize) {
        if at.is_multiple_of(const { LINE / size_of::<[T; LANES]>() }) {
            let element = row.wrapping_mul(self.0.inner).wrapping_add(at * LANES);
            crate::simd::fetch_far(self.0.data.as_ptr().wrapping_add(element).cast(), LINE);
        }
    }
}
