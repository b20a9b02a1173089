//! Products of two matrices of many rows, columns and terms, as training has them: packed, blocked for the caches
//! (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"; Van Zee and van de Geijn 2015,
//! "BLIS").
//!
//! All threads pack both operands once, then each computes blocks of the result. An element is a sum over the inner extent
//! in order, in f32, of which each block of [`DEPTH`] words stays in a register; so its bits depend on its row of A and its
//! column of B alone.
//!
//! Read `gemm/micro.rs` for the innermost product, then `gemm/pack.rs`.

mod exact;
mod micro;
mod pack;
mod words;

pub(crate) use pack::Lines;

use std::ops::Range;

use half::bf16;
use ridge_graph::DType;

use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::simd;
use micro::{Micro, pairs_available};
use words::Words;

/// Words of the inner extent that a panel of B covers while it is in L1.
const DEPTH: usize = 256;

/// Rows and columns of a block of the result, which is in L2 beside the panels of A.
const BLOCK_ROWS: usize = 216;
const BLOCK_COLUMNS: usize = 192;

/// An operand: input `input` of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub(crate) input: usize,
    pub(crate) dtype: DType,
    pub(crate) lines: Lines,
}

impl Operand {
    /// `[lines, inner]`, row by row.
    pub(crate) fn by_line(input: usize, dtype: DType, lines: usize, inner: usize) -> Self {
        Self { input, dtype, lines: Lines { lines, line_stride: inner, step_stride: 1 } }
    }

    /// `[inner, lines]`, row by row.
    pub(crate) fn by_step(input: usize, dtype: DType, lines: usize) -> Self {
        Self { input, dtype, lines: Lines { lines, line_stride: 1, step_stride: lines } }
    }
}

/// Sums of products, `C_s = sum of A_t B_st` over the terms `t`: lines of A are rows of every C, lines of `B_st` columns of
/// `C_s`. A term is packed once for all results, and all terms of an element are one sum.
pub(crate) struct Gemm {
    terms: Vec<Term>,
    /// The columns of each result.
    columns: Vec<usize>,
    micro: Micro,
}

/// A part of the inner extent: some of A, and of the B of each result.
pub(crate) struct Term {
    pub(crate) inner: usize,
    pub(crate) a: Operand,
    pub(crate) b: Vec<Operand>,
}

/// A block of the result.
pub(crate) struct Block<'a> {
    /// Which result.
    pub(crate) result: usize,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
    /// Its elements, rows of `stride`.
    sums: &'a mut [f32],
    stride: usize,
}

impl Block<'_> {
    /// Its row `row`.
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        &mut self.sums[(row - self.rows.start) * self.stride..][..self.columns.len()]
    }
}

/// Into how many blocks an extent is cut, each a multiple of `unit` and of about `most`.
#[derive(Clone, Copy)]
struct Cut {
    extent: usize,
    size: usize,
}

impl Cut {
    fn new(extent: usize, unit: usize, most: usize) -> Self {
        let size = extent.div_ceil(extent.div_ceil(most).max(1)).next_multiple_of(unit);
        Self { extent, size: size.max(unit) }
    }

    fn count(self) -> usize {
        self.extent.div_ceil(self.size)
    }

    fn range(self, nth: usize) -> Range<usize> {
        nth * self.size..((nth + 1) * self.size).min(self.extent)
    }
}

impl Gemm {
    /// One product.
    pub(crate) fn new(a: Operand, b: Operand, inner: usize) -> Self {
        Self::of(vec![Term { inner, a, b: vec![b] }])
    }

    /// Terms of as many rows and results, one or more.
    pub(crate) fn of(terms: Vec<Term>) -> Self {
        let narrow = |operand: &Operand| operand.dtype == DType::BF16;
        let all = terms.iter().all(|term| narrow(&term.a) && term.b.iter().all(narrow));
        let words = if all && pairs_available() { Words::Pairs } else { Words::F32 };
        let columns = terms[0].b.iter().map(|b| b.lines.lines).collect();
        Self { terms, columns, micro: Micro::new(words) }
    }

    fn rows(&self) -> usize {
        self.terms[0].a.lines.lines
    }

    fn steps_of(&self, term: &Term) -> usize {
        pack::words_of(self.micro.words, term.inner)
    }

    fn steps(&self) -> usize {
        self.terms.iter().map(|term| self.steps_of(term)).sum()
    }

    fn panels_of_a(&self) -> usize {
        self.rows().div_ceil(self.micro.rows)
    }

    /// Panels of B before result `result`.
    fn panels_before(&self, result: usize) -> usize {
        self.columns[..result].iter().map(|columns| columns.div_ceil(self.micro.columns)).sum()
    }

    fn packed_a(&self) -> usize {
        self.panels_of_a() * self.micro.rows * self.steps()
    }

    fn panels_of_b(&self) -> usize {
        self.panels_before(self.columns.len())
    }

    fn packed_bytes(&self) -> usize {
        (self.packed_a() + self.panels_of_b() * self.micro.columns * self.steps()) * size_of::<u32>()
    }

    /// The packing of all operands, of a panel each piece.
    pub(crate) fn preparation(&self) -> Preparation {
        Preparation {
            bytes: self.packed_bytes(),
            pieces: self.panels_of_a() + self.panels_of_b(),
            nanos_per_piece: 50.0 + (self.steps() * self.micro.columns) as f64 * 0.3,
        }
    }

    /// Packs panels `pieces` into the room.
    pub(crate) fn pack(&self, io: &KernelIo<'_>, pieces: Range<usize>) {
        let (of_a, steps) = (self.panels_of_a(), self.steps());
        for piece in pieces {
            let (result, width, base, panel) = match piece.checked_sub(of_a) {
                None => (None, self.micro.rows, 0, piece),
                Some(panel) => {
                    let result = (1..self.columns.len()).rev().find(|r| self.panels_before(*r) <= panel).unwrap_or(0);
                    let base = self.packed_a() + self.panels_before(result) * self.micro.columns * steps;
                    (Some(result), self.micro.columns, base, panel - self.panels_before(result))
                }
            };
            let mut at = base + panel * width * steps;
            for term in &self.terms {
                let operand = result.map_or(&term.a, |result| &term.b[result]);
                let words = width * self.steps_of(term);
                // SAFETY: this panel is this piece's alone.
                let to = unsafe { io.room::<u32>().part(at..at + words) };
                at += words;
                match self.micro.words {
                    Words::Pairs => {
                        let from = io.input::<bf16>(operand.input);
                        pack::pack_pairs(from, operand.lines, panel * width, width, term.inner, to);
                    }
                    Words::F32 => simd::with_element!(operand.dtype, T => {
                        let from = io.input::<T>(operand.input);
                        pack::pack_f32(from, operand.lines, panel * width, width, term.inner, to);
                    }),
                }
            }
        }
    }

    fn row_cut(&self) -> Cut {
        Cut::new(self.rows(), self.micro.rows, BLOCK_ROWS)
    }

    fn column_cuts(&self) -> impl Iterator<Item = Cut> {
        self.columns.iter().map(|columns| Cut::new(*columns, self.micro.columns, BLOCK_COLUMNS))
    }

    /// Blocks of all results.
    pub(crate) fn blocks(&self) -> usize {
        self.row_cut().count() * self.column_cuts().map(Cut::count).sum::<usize>()
    }

    pub(crate) fn block_nanos(&self) -> f64 {
        200.0 + (self.block_room() * self.steps()) as f64 * 0.02
    }

    /// Elements of the memory that [`Gemm::block`] works in.
    pub(crate) fn block_room(&self) -> usize {
        self.row_cut().size * self.block_columns()
    }

    /// Columns of a block at most.
    pub(crate) fn block_columns(&self) -> usize {
        self.column_cuts().map(|cut| cut.size).max().unwrap_or(0)
    }

    /// Computes block `nth` from the packed operands: blocks of one range of columns follow each other.
    pub(crate) fn block<'a>(&self, io: &KernelIo<'_>, nth: usize, sums: &'a mut [f32]) -> Block<'a> {
        let rows = self.row_cut();
        let (mut column, row) = (nth / rows.count(), nth % rows.count());
        let (mut result, mut cut) = (0, rows);
        for (i, columns) in self.column_cuts().enumerate() {
            (result, cut) = (i, columns);
            if column < columns.count() {
                break;
            }
            column -= columns.count();
        }
        let stride = cut.size;
        let (rows, columns) = (rows.range(row), cut.range(column));
        let steps = self.steps();
        let packed = io.prepared::<u32>();
        let (a, b) = packed.split_at(self.packed_a());
        let b = &b[self.panels_before(result) * self.micro.columns * steps..];
        if steps == 0 {
            sums.fill(0.0);
        }
        for from in (0..steps).step_by(DEPTH) {
            let depth = DEPTH.min(steps - from);
            for j in (columns.start..columns.end).step_by(self.micro.columns) {
                let b = &b[j * steps + from * self.micro.columns..][..depth * self.micro.columns];
                for i in (rows.start..rows.end).step_by(self.micro.rows) {
                    let a = &a[i * steps + from * self.micro.rows..][..depth * self.micro.rows];
                    let c = &mut sums[(i - rows.start) * stride + j - columns.start..];
                    self.micro.multiply(depth, [a, b], c, stride, from > 0);
                }
            }
        }
        Block { result, rows, columns, sums, stride }
    }
}

/// Products of f32 tiles that a thread packs by itself: both operands in panels, and a result of whole panels.
#[derive(Clone, Copy)]
pub(crate) struct TileProduct(Micro);

impl TileProduct {
    pub(crate) fn new() -> Self {
        Self(Micro::new(Words::F32))
    }

    /// `rows` rounded up to whole panels of A.
    pub(crate) fn rows(self, rows: usize) -> usize {
        rows.next_multiple_of(self.0.rows)
    }

    /// `columns` rounded up to whole panels of B.
    pub(crate) fn columns(self, columns: usize) -> usize {
        columns.next_multiple_of(self.0.columns)
    }

    /// Packs rows of A of `inner` elements.
    pub(crate) fn pack_a<T: simd::Element>(self, from: &[T], of: Lines, inner: usize, to: &mut [u32]) {
        Self::pack(from, of, self.0.rows, inner, to);
    }

    /// Packs columns of B of `inner` elements.
    pub(crate) fn pack_b<T: simd::Element>(self, from: &[T], of: Lines, inner: usize, to: &mut [u32]) {
        Self::pack(from, of, self.0.columns, inner, to);
    }

    fn pack<T: simd::Element>(from: &[T], of: Lines, width: usize, inner: usize, to: &mut [u32]) {
        if inner > 0 {
            for (panel, to) in to.chunks_exact_mut(width * inner).take(of.lines.div_ceil(width)).enumerate() {
                pack::pack_f32(from, of, panel * width, width, inner, to);
            }
        }
    }

    /// `c`, whose rows are `stride` elements apart, from or with the product added of `rows` rows of A by `columns` columns
    /// of B.
    pub(crate) fn multiply(
        self,
        inner: usize,
        [a, b]: [&[u32]; 2],
        [rows, columns]: [usize; 2],
        c: &mut [f32],
        stride: usize,
        add: bool,
    ) {
        for j in (0..columns).step_by(self.0.columns) {
            for i in (0..rows).step_by(self.0.rows) {
                let c = &mut c[i * stride + j..];
                self.0.multiply(inner, [&a[i * inner..], &b[j * inner..]], c, stride, add);
            }
        }
    }

    /// `c`, whose rows are `stride` elements apart, is `factor` times the product, summed in f64 and rounded once.
    pub(crate) fn multiply_exactly(
        self,
        inner: usize,
        [a, b]: [&[u32]; 2],
        [rows, columns]: [usize; 2],
        c: &mut [f32],
        stride: usize,
        factor: f32,
    ) {
        for j in (0..columns).step_by(self.0.columns) {
            for i in (0..rows).step_by(self.0.rows) {
                let (c, b) = (&mut c[i * stride + j..], &b[j * inner..][..self.0.columns * inner]);
                let a = &a[i * inner..][..self.0.rows * inner];
                exact::multiply(inner, a, self.0.rows, b, self.0.columns, c, stride, factor);
            }
        }
    }
}
