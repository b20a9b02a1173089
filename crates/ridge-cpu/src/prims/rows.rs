//! Rows by index: gathers and scatters along an axis.
//!
//! Floor of a gather: each row read and written once. A scatter also copies the rows that it leaves as they are, since
//! its output is a tensor of its own.

use std::ops::Range;

use ridge_graph::DType;

use crate::bytes::Pod;
use crate::fused::load;
use crate::fused::view::around;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, OperandType};
use crate::scratch::Scratch;

/// Rows of `data` (input 0) by the indices of input 1; zeros where an index is out of range.
pub(super) fn gather(inputs: &[OperandType], output: &OperandType, axis: usize) -> Box<dyn CpuKernel> {
    let (_, extent, inner) = around(&inputs[0].shape, axis);
    let (count, size) = (inputs[1].len(), output.dtype.size_bytes());
    let rows = output.len().checked_div(inner).unwrap_or(0);
    Box::new(Gather { rows, extent, count, row_bytes: inner * size, indices: inputs[1].dtype })
}

struct Gather {
    rows: usize,
    extent: usize,
    count: usize,
    row_bytes: usize,
    indices: DType,
}

/// The index at `at` of input 1, if it is in range.
fn index(io: &KernelIo<'_>, dtype: DType, at: usize, extent: usize) -> Option<usize> {
    let index = match dtype {
        DType::I32 => i64::from(io.input::<i32>(1)[at]),
        _ => io.input::<i64>(1)[at],
    };
    usize::try_from(index).ok().filter(|i| *i < extent)
}

impl CpuKernel for Gather {
    fn pieces(&self) -> usize {
        self.rows
    }

    fn nanos_per_piece(&self) -> f64 {
        5.0 + self.row_bytes as f64 * 0.1
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        let bytes = self.row_bytes;
        let from = io.input::<u8>(0);
        // SAFETY: these rows are our pieces.
        let to = unsafe { io.output::<u8>(0).part(pieces.start * bytes..pieces.end * bytes) };
        for (row, to) in pieces.zip(to.chunks_exact_mut(bytes)) {
            match index(io, self.indices, row % self.count, self.extent) {
                Some(i) => to.copy_from_slice(&from[(row / self.count * self.extent + i) * bytes..][..bytes]),
                None => to.fill(0),
            }
        }
    }
}

/// Elements of rows, and columns of them, that a piece of a scatter works on.
const BLOCK: usize = 8 << 10;

/// `data` (input 0) with rows at the indices of input 1 replaced by, or added to from, those of input 2.
pub(super) fn scatter(inputs: &[OperandType], axis: usize, add: bool) -> Box<dyn CpuKernel> {
    let (outer, extent, inner) = around(&inputs[0].shape, axis);
    let columns = inner.clamp(1, BLOCK);
    // Each block looks through all indices, which should cost less than the block itself.
    let rows = (BLOCK / columns).max(inputs[1].len().div_ceil(columns)).clamp(1, extent.max(1));
    Box::new(Scatter {
        outer,
        extent,
        inner,
        rows,
        columns,
        count: inputs[1].len(),
        add,
        dtype: inputs[0].dtype,
        indices: inputs[1].dtype,
    })
}

struct Scatter {
    outer: usize,
    extent: usize,
    inner: usize,
    /// Rows and columns of a block.
    rows: usize,
    columns: usize,
    count: usize,
    add: bool,
    dtype: DType,
    indices: DType,
}

/// Part of the rows and columns of the data, with the place of its first element.
struct RowBlock {
    outer: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Scatter {
    fn block(&self, piece: usize) -> RowBlock {
        let (across, down) = (self.inner.div_ceil(self.columns), self.extent.div_ceil(self.rows));
        let (column, row) = (piece % across * self.columns, piece / across % down * self.rows);
        RowBlock {
            outer: piece / across / down,
            rows: row..(row + self.rows).min(self.extent),
            columns: column..(column + self.columns).min(self.inner),
        }
    }

    /// Calls `each` with `(row, place of the update's columns)` for the updates that fall into the block, in order.
    fn updates(&self, io: &KernelIo<'_>, block: &RowBlock, mut each: impl FnMut(usize, usize)) {
        for i in 0..self.count {
            if let Some(row) = index(io, self.indices, i, self.extent)
                && block.rows.contains(&row)
            {
                each(row, (block.outer * self.count + i) * self.inner + block.columns.start);
            }
        }
    }

    /// The place of a row's columns of the block.
    fn place(&self, block: &RowBlock, row: usize) -> usize {
        (block.outer * self.extent + row) * self.inner + block.columns.start
    }

    fn run_block<T: Pod>(&self, io: &KernelIo<'_>, block: &RowBlock, step: impl Fn(&mut T, T)) {
        let (data, updates) = (io.input::<T>(0), io.input::<T>(2));
        let len = block.columns.len();
        // SAFETY: the block is one of our pieces, and no slice of it outlives its statement.
        let part = |row| unsafe { io.output::<T>(0).part(self.place(block, row)..self.place(block, row) + len) };
        for row in block.rows.clone() {
            part(row).copy_from_slice(&data[self.place(block, row)..][..len]);
        }
        self.updates(io, block, |row, from| {
            for (to, update) in part(row).iter_mut().zip(&updates[from..from + len]) {
                step(to, *update);
            }
        });
    }

    /// Adds in f32, and rounds once.
    fn add_floats(&self, io: &KernelIo<'_>, block: &RowBlock, scratch: &mut Scratch) {
        let len = block.columns.len();
        let [sums, update] = scratch.slices::<f32, 2>([block.rows.len() * len, len]);
        for (row, sums) in block.rows.clone().zip(sums.chunks_exact_mut(len)) {
            load::contiguous(io, 0, self.dtype, self.place(block, row), sums);
        }
        self.updates(io, block, |row, from| {
            load::contiguous(io, 2, self.dtype, from, update);
            crate::simd::add(&mut sums[(row - block.rows.start) * len..][..len], update);
        });
        for (row, sums) in block.rows.clone().zip(sums.chunks_exact(len)) {
            // SAFETY: the block is one of our pieces.
            unsafe { load::store_floats(io, 0, self.dtype, self.place(block, row), sums) };
        }
    }
}

impl CpuKernel for Scatter {
    fn pieces(&self) -> usize {
        self.outer * self.extent.div_ceil(self.rows) * self.inner.div_ceil(self.columns)
    }

    fn nanos_per_piece(&self) -> f64 {
        (self.rows * self.columns) as f64 * 0.5 + self.count as f64
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        for block in pieces.map(|piece| self.block(piece)) {
            match (self.add, self.dtype) {
                (false, dtype) => match dtype.size_bytes() {
                    1 => self.run_block::<u8>(io, &block, |to, x| *to = x),
                    2 => self.run_block::<u16>(io, &block, |to, x| *to = x),
                    4 => self.run_block::<u32>(io, &block, |to, x| *to = x),
                    _ => self.run_block::<u64>(io, &block, |to, x| *to = x),
                },
                (true, DType::I8 | DType::U8) => self.run_block::<u8>(io, &block, |to, x| *to = to.wrapping_add(x)),
                (true, DType::Bool) => self.run_block::<u8>(io, &block, |to, x| *to = u8::from((*to | x) != 0)),
                (true, DType::I32) => self.run_block::<i32>(io, &block, |to, x| *to = to.wrapping_add(x)),
                (true, DType::I64) => self.run_block::<i64>(io, &block, |to, x| *to = to.wrapping_add(x)),
                (true, _) => self.add_floats(io, &block, scratch),
            }
        }
    }
}
