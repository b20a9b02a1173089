//! Reductions along an axis that is not the innermost, and scans.
//!
//! Floor: each input element read once. The elements after the axis are independent sums, so a row at a time is added
//! to a row of totals, in the order of the axis.

use std::ops::Range;

use ridge_graph::{Combine, DType};

use crate::fused::load::{self, is_int};
use crate::fused::loops;
use crate::io::KernelIo;
use crate::kernel::CpuKernel;
use crate::scratch::Scratch;
use crate::simd::{self, vectorised};

/// Totals that a piece works on.
const COLUMNS: usize = 256;

/// Combines the middle axis of `[outer, extent, inner]`.
pub(super) fn reduce(op: Combine, dtype: DType, split: (usize, usize, usize)) -> Box<dyn CpuKernel> {
    Box::new(Along { op, dtype, split, prefixes: false })
}

/// Inclusive prefix combinations along the middle axis of `[outer, extent, inner]`.
pub(super) fn scan(op: Combine, dtype: DType, split: (usize, usize, usize)) -> Box<dyn CpuKernel> {
    Box::new(Along { op, dtype, split, prefixes: true })
}

struct Along {
    op: Combine,
    dtype: DType,
    split: (usize, usize, usize),
    /// Gives the totals after every element, not only the last.
    prefixes: bool,
}

vectorised! {
    fn max(totals: &mut [f32], row: &[f32]) {
        for (total, x) in totals.iter_mut().zip(row) {
            *total = loops::larger(*total, *x);
        }
    }
}

vectorised! {
    fn min(totals: &mut [f32], row: &[f32]) {
        for (total, x) in totals.iter_mut().zip(row) {
            *total = loops::smaller(*total, *x);
        }
    }
}

impl Along {
    /// The combination that this is for the dtype: of booleans, the sum is whether any is true.
    fn combine(&self) -> Combine {
        if self.dtype == DType::Bool && self.op == Combine::Sum { Combine::Max } else { self.op }
    }

    /// What a column starts from.
    fn start(&self) -> f32 {
        match (self.combine(), self.dtype) {
            (Combine::Sum, _) | (Combine::Max, DType::Bool) => 0.0,
            (Combine::Min, DType::Bool) => 1.0,
            (Combine::Max, _) => f32::NEG_INFINITY,
            (Combine::Min, _) => f32::INFINITY,
        }
    }

    fn floats(&self, io: &KernelIo<'_>, outer: usize, columns: Range<usize>, scratch: &mut Scratch) {
        let (_, extent, inner) = self.split;
        if self.prefixes && inner == 1 {
            return self.float_line(io, outer);
        }
        let [totals, row] = scratch.slices::<f32, 2>([columns.len(); 2]);
        totals.fill(self.start());
        for k in 0..extent {
            let at = (outer * extent + k) * inner + columns.start;
            load::contiguous(io, 0, self.dtype, at, row);
            match self.combine() {
                Combine::Sum => simd::add(totals, row),
                Combine::Max => max(totals, row),
                Combine::Min => min(totals, row),
            }
            if self.prefixes {
                // SAFETY: these columns are ours.
                unsafe { load::store_floats(io, 0, self.dtype, at, totals) };
            }
        }
        if !self.prefixes {
            // SAFETY: these columns are ours.
            unsafe { load::store_floats(io, 0, self.dtype, outer * inner + columns.start, totals) };
        }
    }

    /// A scan of contiguous elements.
    fn float_line(&self, io: &KernelIo<'_>, outer: usize) {
        let extent = self.split.1;
        let mut total = self.start();
        let mut part = [0f32; COLUMNS];
        for at in (0..extent).step_by(COLUMNS) {
            let part = &mut part[..COLUMNS.min(extent - at)];
            load::contiguous(io, 0, self.dtype, outer * extent + at, part);
            for x in &mut *part {
                total = match self.combine() {
                    Combine::Sum => total + *x,
                    Combine::Max => loops::larger(total, *x),
                    Combine::Min => loops::smaller(total, *x),
                };
                *x = total;
            }
            // SAFETY: this line is ours.
            unsafe { load::store_floats(io, 0, self.dtype, outer * extent + at, part) };
        }
    }

    fn ints(&self, io: &KernelIo<'_>, outer: usize, columns: Range<usize>, scratch: &mut Scratch) {
        let (_, extent, inner) = self.split;
        let [totals, row] = scratch.slices::<i64, 2>([columns.len(); 2]);
        totals.fill(loops::int_start(self.op, self.dtype));
        let step: fn(i64, i64) -> i64 = match self.op {
            Combine::Sum => i64::wrapping_add,
            Combine::Max => i64::max,
            Combine::Min => i64::min,
        };
        for k in 0..extent {
            let at = (outer * extent + k) * inner + columns.start;
            load::contiguous_ints(io, 0, self.dtype, at, 1, row);
            totals.iter_mut().zip(&*row).for_each(|(total, x)| *total = step(*total, *x));
            if self.prefixes {
                // SAFETY: these columns are ours.
                unsafe { load::store_ints(io, 0, self.dtype, at, totals) };
            }
        }
        if !self.prefixes {
            // SAFETY: these columns are ours.
            unsafe { load::store_ints(io, 0, self.dtype, outer * inner + columns.start, totals) };
        }
    }
}

impl CpuKernel for Along {
    fn pieces(&self) -> usize {
        let (outer, extent, inner) = self.split;
        let blocks = outer * inner.div_ceil(COLUMNS);
        if self.prefixes && extent == 0 { 0 } else { blocks }
    }

    fn nanos_per_piece(&self) -> f64 {
        let (_, extent, inner) = self.split;
        (extent * inner.min(COLUMNS)) as f64 * if inner == 1 || is_int(self.dtype) { 1.0 } else { 0.2 }
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let inner = self.split.2;
        let blocks = inner.div_ceil(COLUMNS);
        for piece in pieces {
            let column = piece % blocks * COLUMNS;
            let columns = column..(column + COLUMNS).min(inner);
            if is_int(self.dtype) {
                self.ints(io, piece / blocks, columns, scratch);
            } else {
                self.floats(io, piece / blocks, columns, scratch);
            }
        }
    }
}
