//! Matrix products of any dtypes, transpositions and batches: what no hand-written kernel claims.
//!
//! Each element is an inner product of two contiguous f32 rows, converted or transposed into scratch where they are not
//! that already. An element's bits depend on its two rows alone. Floor: 2 m n k FLOPs; each fused multiply-add needs
//! one load here, half of what the vector units could do.

use std::ops::Range;

use ridge_graph::DType;

use crate::fused::load::{self, is_int};
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, OperandType};
use crate::scratch::Scratch;
use crate::simd::{self, LANES, fma, vectorised};

/// Rows of the left operand, and of the right one as if transposed, in a piece.
const BLOCK_M: usize = 32;
const BLOCK_N: usize = 32;

/// Columns that are transposed together: a cache line of each row.
const TURN: usize = 16;

/// The product of the last two axes, each operand's rows along the inner extent after its transposition.
pub(super) fn matmul(inputs: &[OperandType], output: &OperandType, trans_a: bool, trans_b: bool) -> Box<dyn CpuKernel> {
    let rank = output.shape.len();
    let (m, n) = (output.shape[rank - 2], output.shape[rank - 1]);
    let k = inputs[0].shape[rank - if trans_a { 2 } else { 1 }];
    let side = |i: usize, rows: usize, transposed: bool| {
        let steps = if transposed { (1, rows) } else { (k, 1) };
        Side { input: i, dtype: inputs[i].dtype, rows, steps }
    };
    Box::new(MatMul {
        a: side(0, m, trans_a),
        // As a matrix of n rows, the right operand is transposed unless it says that it is.
        b: side(1, n, !trans_b),
        batch: output.shape[..rank - 2].iter().product(),
        k,
        out: output.dtype,
    })
}

/// An operand as a matrix of `rows` rows of the inner extent.
struct Side {
    input: usize,
    dtype: DType,
    rows: usize,
    /// Elements between neighbouring rows, and within a row.
    steps: (usize, usize),
}

impl Side {
    /// Rows from `first` on of matrix `matrix`, as f32 in `out`, one after another.
    fn pack(&self, io: &KernelIo<'_>, matrix: usize, first: usize, k: usize, out: &mut [f32], columns: &mut [f32]) {
        let base = matrix * self.rows * k;
        if self.steps.1 == 1 {
            return load::contiguous(io, self.input, self.dtype, base + first * k, out);
        }
        // Columns are contiguous: read a few, and turn them into pieces of rows.
        let rows = out.len() / k.max(1);
        for l in (0..k).step_by(TURN) {
            let count = TURN.min(k - l);
            let columns = &mut columns[..count * rows];
            for (i, column) in columns.chunks_exact_mut(rows).enumerate() {
                load::contiguous(io, self.input, self.dtype, base + (l + i) * self.rows + first, column);
            }
            for (r, row) in out.chunks_exact_mut(k).enumerate() {
                row[l..l + count].iter_mut().zip(columns[r..].iter().step_by(rows)).for_each(|(to, x)| *to = *x);
            }
        }
    }

    /// Where rows can be read without packing.
    fn direct<'a>(&self, io: &KernelIo<'a>, matrix: usize, first: usize, count: usize, k: usize) -> Option<&'a [f32]> {
        let usable = self.dtype == DType::F32 && self.steps.1 == 1;
        usable.then(|| &io.input::<f32>(self.input)[(matrix * self.rows + first) * k..][..count * k])
    }
}

struct MatMul {
    a: Side,
    b: Side,
    batch: usize,
    k: usize,
    out: DType,
}

vectorised! {
    /// Inner products of `a` with four rows, each as `simd::dot` has it.
    fn dot4(a: &[f32], b: [&[f32]; 4]) -> [f32; 4] {
        let mut lanes = [[0f32; LANES]; 4];
        let (a_chunks, a_rest) = a.as_chunks::<LANES>();
        let b = b.map(|b| b[..a.len()].as_chunks::<LANES>());
        for (i, x) in a_chunks.iter().enumerate() {
            for (lanes, (b, _)) in lanes.iter_mut().zip(&b) {
                let y = &b[i];
                for l in 0..LANES {
                    lanes[l] = fma::<FMA>(x[l], y[l], lanes[l]);
                }
            }
        }
        for (lanes, (_, b)) in lanes.iter_mut().zip(&b) {
            for ((lane, x), y) in lanes.iter_mut().zip(a_rest).zip(*b) {
                *lane = fma::<FMA>(*x, *y, *lane);
            }
        }
        lanes.map(simd::sum_lanes)
    }
}

impl MatMul {
    /// `(matrix, first row of b, first row of a)` of a piece: neighbours share their rows of b.
    fn place(&self, piece: usize) -> (usize, usize, usize) {
        let (down, across) = (self.a.rows.div_ceil(BLOCK_M), self.b.rows.div_ceil(BLOCK_N));
        (piece / down / across, piece / down % across * BLOCK_N, piece % down * BLOCK_M)
    }

    fn floats(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let k = self.k;
        let [packed_a, packed_b, columns, sums] =
            scratch.slices::<f32, 4>([BLOCK_M * k, BLOCK_N * k, BLOCK_M.max(BLOCK_N) * TURN, BLOCK_N]);
        let mut held = None;
        for piece in pieces {
            let (matrix, first_b, first_a) = self.place(piece);
            let (count_a, count_b) = (BLOCK_M.min(self.a.rows - first_a), BLOCK_N.min(self.b.rows - first_b));
            let b = if let Some(b) = self.b.direct(io, matrix, first_b, count_b, k) {
                b
            } else {
                let b = &mut packed_b[..count_b * k];
                if held.replace((matrix, first_b)) != Some((matrix, first_b)) {
                    self.b.pack(io, matrix, first_b, k, b, columns);
                }
                b
            };
            let a = if let Some(a) = self.a.direct(io, matrix, first_a, count_a, k) {
                a
            } else {
                let a = &mut packed_a[..count_a * k];
                self.a.pack(io, matrix, first_a, k, a, columns);
                a
            };
            for i in 0..count_a {
                let sums = &mut sums[..count_b];
                products(&a[i * k..][..k], b, sums);
                let at = (matrix * self.a.rows + first_a + i) * self.b.rows + first_b;
                self.store(io, at, sums);
            }
        }
    }

    fn store(&self, io: &KernelIo<'_>, at: usize, sums: &[f32]) {
        if is_int(self.out) {
            let mut ints = [0i64; BLOCK_N];
            let ints = &mut ints[..sums.len()];
            ints.iter_mut().zip(sums).for_each(|(to, x)| *to = load::to_int(self.out, *x));
            // SAFETY: these elements are our pieces'.
            unsafe { load::store_ints(io, 0, self.out, at, ints) };
        } else {
            // SAFETY: these elements are our pieces'.
            unsafe { load::store_floats(io, 0, self.out, at, sums) };
        }
    }

    /// Sums of integers, in i64.
    fn ints(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let k = self.k;
        let [row_a, row_b] = scratch.slices::<i64, 2>([k; 2]);
        let row = |side: &Side, matrix: usize, row: usize, out: &mut [i64]| {
            if k > 0 {
                let at = matrix * side.rows * k + row * side.steps.0;
                load::contiguous_ints(io, side.input, side.dtype, at, side.steps.1, out);
            }
        };
        for piece in pieces {
            let (matrix, first_b, first_a) = self.place(piece);
            for j in first_b..(first_b + BLOCK_N).min(self.b.rows) {
                row(&self.b, matrix, j, row_b);
                for i in first_a..(first_a + BLOCK_M).min(self.a.rows) {
                    row(&self.a, matrix, i, row_a);
                    let pairs = row_a.iter().zip(&*row_b);
                    let sum = pairs.fold(0i64, |sum, (a, b)| sum.wrapping_add(a.wrapping_mul(*b)));
                    let at = (matrix * self.a.rows + i) * self.b.rows + j;
                    // SAFETY: this element is our pieces'.
                    unsafe {
                        if is_int(self.out) || self.out == DType::Bool {
                            load::store_ints(io, 0, self.out, at, &[sum]);
                        } else {
                            load::store_floats(io, 0, self.out, at, &[sum as f32]);
                        }
                    }
                }
            }
        }
    }
}

/// Inner products of `a` with the rows of `b`.
fn products(a: &[f32], b: &[f32], sums: &mut [f32]) {
    let k = a.len();
    let row = |j: usize| &b[j * k..][..k];
    let (fours, rest) = sums.as_chunks_mut::<4>();
    for (j, four) in fours.iter_mut().enumerate() {
        *four = dot4(a, [0, 1, 2, 3].map(|i| row(4 * j + i)));
    }
    let done = fours.len() * 4;
    for (j, sum) in rest.iter_mut().enumerate() {
        *sum = simd::dot(a, row(done + j));
    }
}

impl CpuKernel for MatMul {
    fn pieces(&self) -> usize {
        self.batch * self.a.rows.div_ceil(BLOCK_M) * self.b.rows.div_ceil(BLOCK_N)
    }

    fn nanos_per_piece(&self) -> f64 {
        (self.a.rows.min(BLOCK_M) * self.b.rows.min(BLOCK_N) * self.k) as f64 * 0.03 + 100.0
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let whole = |dtype: DType| !dtype.is_float();
        if whole(self.a.dtype) && whole(self.b.dtype) {
            self.ints(io, pieces, scratch);
        } else {
            self.floats(io, pieces, scratch);
        }
    }
}
