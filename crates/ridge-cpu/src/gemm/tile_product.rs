//! Products of tiles that a thread packs by itself: both operands in panels, and a result of whole panels.

use std::ops::Range;

use ridge_graph::DType;

use super::exact;
use super::micro::{Ahead, Micro, vectors_of_pairs};
use super::pack::{self, Lines, Part};
use super::words::PanelOfB;
use super::words::Words;
use crate::simd::Element;

/// Products of tiles of one dtype: of pairs, where it is bf16 and there are vector instructions for them, and otherwise of f32.
#[derive(Clone, Copy)]
pub(crate) struct TileProduct(Micro);

impl TileProduct {
    /// Of operands of `dtype`.
    pub(crate) fn new(dtype: DType) -> Self {
        let pairs = dtype == DType::BF16 && vectors_of_pairs();
        Self(Micro::in_vectors(if pairs { Words::Pairs } else { Words::F32 }))
    }

    /// `rows` rounded up to whole panels of A.
    pub(crate) fn rows(self, rows: usize) -> usize {
        rows.next_multiple_of(self.0.rows)
    }

    /// `rows` rounded down to whole panels of A.
    pub(crate) fn whole_rows(self, rows: usize) -> usize {
        rows / self.0.rows * self.0.rows
    }

    /// `columns` rounded up to whole panels of B.
    pub(crate) fn columns(self, columns: usize) -> usize {
        columns.next_multiple_of(self.0.columns)
    }

    /// Packs rows of A of `inner` elements.
    pub(crate) fn pack_a<T: Element>(self, from: &[T], of: Lines, inner: usize, to: &mut [u32]) {
        self.pack(from, of, self.0.rows, inner, to);
    }

    /// Packs rows of A that are computed in f32, `stride` apart: rounded to bf16 where pairs are multiplied.
    pub(crate) fn pack_computed(self, from: &[f32], rows: usize, stride: usize, inner: usize, to: &mut [u32]) {
        let of = Lines { lines: rows, line_stride: stride, step_stride: 1 };
        self.each_panel(of, self.0.rows, inner, to, |first, to| {
            let part = Part { from, of, first, width: self.0.rows, steps: 0..inner };
            match self.0.words {
                Words::F32 => pack::pack_f32(&part, to),
                Words::Pairs => pack::pack_rounded(&part, to),
            }
        });
    }

    /// Packs columns of B of `inner` elements.
    pub(crate) fn pack_b<T: Element>(self, from: &[T], of: Lines, inner: usize, to: &mut [u32]) {
        self.pack(from, of, self.0.columns, inner, to);
    }

    fn pack<T: Element>(self, from: &[T], of: Lines, width: usize, inner: usize, to: &mut [u32]) {
        self.each_panel(of, width, inner, to, |first, to| match (self.0.words, T::as_bf16(from)) {
            (Words::Pairs, Some(from)) => pack::pack_pairs(&Part { from, of, first, width, steps: 0..inner }, to),
            (Words::Pairs, None) => unreachable!("pairs are of bf16"),
            (Words::F32, _) => pack::pack_f32(&Part { from, of, first, width, steps: 0..inner }, to),
        });
    }

    fn each_panel(self, of: Lines, width: usize, inner: usize, to: &mut [u32], pack: impl Fn(usize, &mut [u32])) {
        if inner > 0 {
            let panels = to.chunks_exact_mut(width * self.0.words_of(inner)).take(of.lines.div_ceil(width));
            panels.enumerate().for_each(|(panel, to)| pack(panel * width, to));
        }
    }

    /// `c`, whose rows are `stride` elements apart, from or with the product added of rows `rows` of A, of which the first begins a
    /// panel, by `columns` columns of B.
    pub(crate) fn multiply(
        self,
        inner: usize,
        [a, b]: [&[u32]; 2],
        (rows, columns): (Range<usize>, usize),
        c: &mut [f32],
        stride: usize,
        add: bool,
    ) {
        let (session, words) = (self.0.begin(), self.0.words_of(inner));
        for j in (0..columns).step_by(self.0.columns) {
            for i in rows.clone().step_by(self.0.rows) {
                let c = &mut c[i * stride + j..];
                assert!(c.len() >= (self.0.rows - 1) * stride + self.0.columns, "tiles are whole");
                let (a, b) = (&a[i * words..], PanelOfB { words: &b[j * words..], apart: 0 });
                // SAFETY: the tile is as large as asserted.
                unsafe { self.0.multiply(&session, words, a, b, c.as_mut_ptr(), stride, add, Ahead::NOTHING) };
            }
        }
    }

    /// The same with products of f32, times `factor`, summed in f64 and rounded once.
    pub(crate) fn multiply_exactly(
        self,
        inner: usize,
        [a, b]: [&[u32]; 2],
        (rows, columns): (Range<usize>, usize),
        c: &mut [f32],
        stride: usize,
        factor: f32,
    ) {
        assert!(self.0.words == Words::F32, "exact products are of f32");
        for j in (0..columns).step_by(self.0.columns) {
            for i in rows.clone().step_by(self.0.rows) {
                let (c, panels) = (&mut c[i * stride + j..], [&a[i * inner..], &b[j * inner..]]);
                exact::multiply(inner, panels, [self.0.rows, self.0.columns], c, stride, factor);
            }
        }
    }
}
