//! A linear of many rows in training, the products of its gradient, and sums of rows.
//!
//! Floor: `2 M N K` operations, both operands read and the result written once.

use std::ops::Range;

use ridge_graph::{DType, Function};

use crate::gemm::{Gemm, Operand};
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, Preparation};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 5] {
    [
        KernelEntry::new("linear_forward", "linear_forward(x, w)", plain, linear_forward),
        KernelEntry::new("linear_forward_bias", "linear_forward(x, w, b)", plain, linear_forward),
        KernelEntry::new("linear_input_gradient", "linear_input_gradient(dy, w)", plain, input_gradient),
        KernelEntry::new("linear_weight_gradient", "linear_weight_gradient(dy, x)", plain, weight_gradient),
        KernelEntry::new("sum_rows", "sum_rows(x)", |_| true, sum_rows),
    ]
}

fn plain(body: &Function) -> bool {
    body.args.iter().all(|arg| arg.ty.format.is_none())
}

/// A product, rounded to the dtype of the output.
struct Product {
    gemm: Gemm,
    columns: usize,
    dtype: DType,
    /// Dtype of input 2, if it is added to each row.
    bias: Option<DType>,
}

/// `x`, `[rows, K]`, by `w`, `[N, K]`, transposed.
fn linear_forward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [x, w, bias @ ..] = &spec.inputs[..] else { return Err("takes x and w".into()) };
    let (columns, inner) = (w.shape[0], w.shape[1]);
    let (a, b) = (Operand::by_line(0, x.dtype, x.rows(), inner), Operand::by_line(1, w.dtype, columns, inner));
    let bias = bias.first().map(|bias| bias.dtype);
    Ok(Box::new(Product { gemm: Gemm::new(a, b, inner), columns, dtype: spec.outputs[0].dtype, bias }))
}

/// `dy`, `[rows, N]`, by `w`, `[N, K]`.
fn input_gradient(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [dy, w] = &spec.inputs[..] else { return Err("takes dy and w".into()) };
    let (inner, columns) = (w.shape[0], w.shape[1]);
    let a = Operand::by_line(0, dy.dtype, dy.rows(), inner);
    let b = Operand::by_step(1, w.dtype, columns);
    Ok(Box::new(Product { gemm: Gemm::new(a, b, inner), columns, dtype: spec.outputs[0].dtype, bias: None }))
}

/// `dy`, `[rows, N]`, transposed, by `x`, `[rows, K]`.
fn weight_gradient(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [dy, x] = &spec.inputs[..] else { return Err("takes dy and x".into()) };
    let columns = x.last();
    let (a, b) = (Operand::by_step(0, dy.dtype, dy.last()), Operand::by_step(1, x.dtype, columns));
    Ok(Box::new(Product { gemm: Gemm::new(a, b, dy.rows()), columns, dtype: spec.outputs[0].dtype, bias: None }))
}

impl CpuKernel for Product {
    fn pieces(&self) -> usize {
        self.gemm.blocks()
    }

    fn nanos_per_piece(&self) -> f64 {
        self.gemm.block_nanos()
    }

    fn preparation(&self) -> Option<Preparation> {
        Some(self.gemm.preparation())
    }

    fn prepare(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        self.gemm.pack(io, pieces);
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let [sums, bias] = scratch.slices::<f32, 2>([self.gemm.block_room(), self.gemm.block_columns()]);
        for piece in pieces {
            let mut block = self.gemm.block(io, piece, sums);
            let first = block.columns.start;
            let bias = self.bias.map(|dtype| simd::view(io, 2, dtype, first, &mut bias[..block.columns.len()]));
            for row in block.rows.clone() {
                let values = block.row(row);
                if let Some(bias) = bias {
                    simd::add(values, bias);
                }
                // SAFETY: this block of the result is this piece's alone.
                unsafe { simd::store(io, 0, self.dtype, row * self.columns + first, values) };
            }
        }
    }
}

/// Columns of a piece: whole cache lines of every dtype.
const COLUMNS: usize = 128;

struct SumRows {
    rows: usize,
    columns: usize,
    dtype: DType,
    out: DType,
}

fn sum_rows(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let x = &spec.inputs[0];
    Ok(Box::new(SumRows { rows: x.rows(), columns: x.last(), dtype: x.dtype, out: spec.outputs[0].dtype }))
}

impl CpuKernel for SumRows {
    fn pieces(&self) -> usize {
        self.columns.div_ceil(COLUMNS)
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.rows as f64 * 8.0
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        for piece in pieces {
            let first = piece * COLUMNS;
            let count = COLUMNS.min(self.columns - first);
            // In chains of rows, so that the error of a sum grows with their length alone.
            let (mut sums, mut chain, mut row) = ([0f32; COLUMNS], [0f32; COLUMNS], [0f32; COLUMNS]);
            for begin in (0..self.rows).step_by(CHAIN) {
                chain[..count].fill(0.0);
                for at in begin..(begin + CHAIN).min(self.rows) {
                    let x = simd::view(io, 0, self.dtype, at * self.columns + first, &mut row[..count]);
                    simd::add(&mut chain[..count], x);
                }
                simd::add(&mut sums[..count], &chain[..count]);
            }
            // SAFETY: these columns are this piece's alone.
            unsafe { simd::store(io, 0, self.out, first, &sums[..count]) };
        }
    }
}

/// Rows that are summed before they join the others.
const CHAIN: usize = 64;
