//! Linears of many rows in training, alone and in groups that share their input, the products of their gradients, and sums of
//! rows.
//!
//! Floor: `2 M N K` operations, all operands read and the results written once.

use std::ops::Range;

use ridge_graph::ops::LinearGroupForward;
use ridge_graph::{DType, Function};

use crate::bytes::cast;
use crate::gemm::block::{Block, GemmRoom, Sums};
use crate::gemm::{Gemm, Operand, Term};
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, Preparation};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 7] {
    [
        KernelEntry::new("linear_forward", "linear_forward(x, w)", plain, linear_forward),
        KernelEntry::new("linear_forward_bias", "linear_forward(x, w, b)", plain, linear_forward),
        KernelEntry::new("linear_group_forward", "linear_group_forward(x, ...)", plain, linear_group_forward),
        KernelEntry::new("linear_group_input_gradient", "linear_group_input_gradient(dy, ...)", plain, input_gradient),
        KernelEntry::new("linear_input_gradient", "linear_input_gradient(dy, w)", plain, input_gradient),
        KernelEntry::new("linear_weight_gradient", "linear_weight_gradient(dy, x)", plain, weight_gradient),
        KernelEntry::new("sum_rows", "sum_rows(x)", |_| true, sum_rows),
    ]
}

fn plain(body: &Function) -> bool {
    body.args.iter().all(|arg| arg.ty.format.is_none())
}

/// Products, rounded to the dtype of the outputs.
struct Product {
    gemm: Gemm,
    outputs: Vec<ProductOutput>,
    dtype: DType,
}

struct ProductOutput {
    columns: usize,
    /// The input that is added to each row, if any, and its dtype.
    bias: Option<(usize, DType)>,
}

impl Product {
    fn boxed(spec: &KernelSpec<'_>, gemm: Gemm, outputs: Vec<ProductOutput>) -> Box<dyn CpuKernel> {
        Box::new(Self { gemm, outputs, dtype: spec.outputs[0].dtype })
    }
}

/// `x`, `[rows, K]`, by `w`, `[N, K]`, transposed.
fn linear_forward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    Ok(forward(spec, 1, spec.inputs.len() > 2))
}

/// `x` by each of several weights.
fn linear_group_forward(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let of = spec.composite::<LinearGroupForward>().ok_or("no linears in the group")?.0;
    Ok(forward(spec, of.count, of.biases))
}

/// `count` linears of input 0, by the weights and biases behind it.
fn forward(spec: &KernelSpec<'_>, count: usize, biases: bool) -> Box<dyn CpuKernel> {
    let x = &spec.inputs[0];
    let inner = x.last();
    let weight = |i: usize| Operand::by_line(1 + i, spec.inputs[1 + i].dtype, spec.inputs[1 + i].shape[0], inner);
    let a = Operand::by_line(0, x.dtype, x.rows(), inner);
    let output = |i: usize| ProductOutput {
        columns: spec.inputs[1 + i].shape[0],
        bias: biases.then(|| (1 + count + i, spec.inputs[1 + count + i].dtype)),
    };
    let gemm = Gemm::of(vec![Term { inner, a, b: (0..count).map(weight).collect() }]);
    Product::boxed(spec, gemm, (0..count).map(output).collect())
}

/// `dy`, `[rows, N]`, by `w`, `[N, K]`, summed over one linear or more: one product over the sum of their `N`.
fn input_gradient(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let count = spec.inputs.len() / 2;
    let columns = spec.inputs[count].shape[1];
    let term = |i: usize| {
        let (dy, w) = (&spec.inputs[i], &spec.inputs[count + i]);
        let inner = w.shape[0];
        let a = Operand::by_line(i, dy.dtype, dy.rows(), inner);
        Term { inner, a, b: vec![Operand::by_step(count + i, w.dtype, columns)] }
    };
    let gemm = Gemm::of((0..count).map(term).collect());
    Ok(Product::boxed(spec, gemm, vec![ProductOutput { columns, bias: None }]))
}

/// `dy`, `[rows, N]`, transposed, by `x`, `[rows, K]`.
fn weight_gradient(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let [dy, x] = &spec.inputs[..] else { return Err("takes dy and x".into()) };
    let columns = x.last();
    let (a, b) = (Operand::by_step(0, dy.dtype, dy.last()), Operand::by_step(1, x.dtype, columns));
    let gemm = Gemm::new(a, b, dy.rows());
    Ok(Product::boxed(spec, gemm, vec![ProductOutput { columns, bias: None }]))
}

impl CpuKernel for Product {
    fn pieces(&self) -> usize {
        self.gemm.pieces()
    }

    fn nanos_per_piece(&self) -> f64 {
        self.gemm.piece_nanos()
    }

    fn preparation(&self) -> Option<Preparation> {
        Some(self.gemm.preparation())
    }

    fn prepare(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        self.gemm.pack(io, pieces);
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let in_place = self.dtype == DType::F32;
        let [packed, sums] = self.gemm.room(in_place);
        let widest = self.outputs.iter().map(|output| output.columns).max().unwrap_or(0);
        let words = |count: usize| count * size_of::<u32>();
        let [packed, sums, bias] = scratch.slices::<u8, 3>([words(packed), words(sums), words(widest)]);
        let bias = cast::<f32>(bias);
        let mut room = GemmRoom { packed: cast(packed), sums: cast(sums) };
        let place = |block: &Block| {
            let columns = self.outputs[block.result].columns;
            let (first, size) =
                (block.rows.start * columns + block.columns.start, [block.rows.len(), block.columns.len()]);
            let out = io.output::<f32>(block.result);
            in_place.then(|| Sums { at: out.address(first, size, columns), stride: columns })
        };
        let finish = |block: &Block, sums: Sums| {
            let (first, output) = (block.columns.start, &self.outputs[block.result]);
            let bias = &mut bias[..block.columns.len()];
            let bias = output.bias.map(|(input, dtype)| simd::view(io, input, dtype, first, bias));
            for (nth, row) in block.rows.clone().enumerate() {
                // SAFETY: a row of sums, which are this piece's alone.
                let values = unsafe { sums.row(nth, block.columns.len()) };
                if let Some(bias) = bias {
                    simd::add(values, bias);
                }
                if !in_place {
                    // SAFETY: this block of the result is this piece's alone.
                    unsafe { simd::store(io, block.result, self.dtype, row * output.columns + first, values) };
                }
            }
        };
        // SAFETY: a place is the block's part of its output, which belongs to its pieces.
        unsafe { self.gemm.run(io, pieces, &mut room, place, finish) };
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
