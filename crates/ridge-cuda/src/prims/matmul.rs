//! Matrix products: `kernels/matmul_rows.cu` for few rows, cuBLASLt or `kernels/matmul.cu` for many.

use ridge_graph::DType;

use crate::cublaslt::{GemmActivation, GemmScales, GemmShape};
use crate::gemm::{self, Epilogue, GemmProblem, GemmSide};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset, blocks, name,
    numbers,
};

pub(super) const MATMUL: KernelText<'_> = KernelText::new(include_str!("../../kernels/matmul.cu"));
pub(super) const MATMUL_ROWS: KernelText<'_> = KernelText::new(include_str!("../../kernels/matmul_rows.cu"));

/// Bytes that a thread of `kernels/matmul_rows.cu` takes of the matrix at a time.
const VECTOR_BYTES: usize = 16;

/// Extent of the square that a block of the matrix product makes: `TILE` of `kernels/matmul.cu`.
const TILE: usize = 64;

/// A product of matrices, or of batches of them: `[rows, depth] x [depth, columns]`.
#[derive(Clone, Copy)]
pub(crate) struct MatrixProduct {
    pub(crate) batches: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) a: (SlotOffset, DType),
    pub(crate) b: (SlotOffset, DType),
    pub(crate) out: (SlotOffset, DType),
    /// Is the first stored by columns, the second by rows of its transpose?
    pub(crate) transposed: (bool, bool),
    /// Is it added to what is in `out`?
    pub(crate) added: bool,
    /// Have the sums one order at all numbers of rows?
    pub(crate) deterministic: bool,
}

pub(super) fn matmul(spec: &CudaKernelSpec<'_>, trans_a: bool, trans_b: bool) -> CudaKernel {
    let (a, b, out) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let rank = out.shape.len();
    let of = MatrixProduct {
        batches: out.shape[..rank - 2].iter().product(),
        rows: out.shape[rank - 2],
        columns: out.shape[rank - 1],
        depth: a.shape[if trans_a { rank - 2 } else { rank - 1 }],
        a: ((OperandSlot::Input(0), 0), a.dtype),
        b: ((OperandSlot::Input(1), 0), b.dtype),
        out: ((OperandSlot::Output(0), 0), out.dtype),
        transposed: (trans_a, trans_b),
        added: false,
        deterministic: spec.deterministic,
    };
    let made = product(&of);
    MatrixProduct::fastest(&[of], Epilogue::Nothing, made)
}

impl MatrixProduct {
    /// The fastest of `kernel`, which makes these products of one left side and what follows, and of others that do.
    pub(crate) fn fastest(products: &[Self], after: Epilogue, kernel: CudaKernel) -> CudaKernel {
        let Some(first) = products.first() else { return kernel };
        let Self { rows, depth, a: (x, dtype), out: (_, result), .. } = *first;
        let takes = |of: &Self| {
            let same =
                of.rows == rows && of.depth == depth && of.a == (x, dtype) && of.b.1 == dtype && of.out.1 == result;
            same && of.batches == 1 && of.transposed == (false, true) && !of.added
        };
        let deterministic = first.deterministic;
        if (rows <= 16 && !deterministic) || !products.iter().all(takes) {
            return kernel;
        }
        let side = |of: &Self| GemmSide { columns: of.columns, w: of.b.0, y: of.out.0 };
        let sides = products.iter().map(side).collect();
        let problem =
            GemmProblem { rows, depth, operands: dtype, result, x, sides, after, scales: None, deterministic };
        if deterministic { gemm::fastest_on_hopper(kernel, &problem) } else { gemm::fastest(kernel, &problem) }
    }
}

/// The kernel of a product.
pub(crate) fn product(of: &MatrixProduct) -> CudaKernel {
    let MatrixProduct {
        batches,
        rows: m,
        columns: n,
        depth: k,
        a: (a, at),
        b: (b, bt),
        out: (out, ot),
        transposed,
        added,
        deterministic,
    } = *of;
    let (trans_a, trans_b) = transposed;
    let (a_row, a_depth) = if trans_a { (1, m) } else { (k, 1) };
    let (b_depth, b_column) = if trans_b { (1, k) } else { (n, 1) };
    let defines = [("A", name(at)), ("B", name(bt)), ("OUT", name(ot)), ("ADDED", if added { "1" } else { "0" })];
    let mut args: Vec<LaunchArg> =
        [a, b, out].into_iter().map(|(slot, offset)| LaunchArg::Pointer(slot, offset)).collect();
    let streams = !deterministic && !trans_a && trans_b && (k * bt.size_bytes()).is_multiple_of(VECTOR_BYTES);
    if streams && !added && m <= 16 && batches * n < 1 << 31 && at.is_float() && bt.is_float() {
        // Code for the next power of two of rows.
        let rows = m.next_power_of_two().to_string();
        let source = CudaSource::new("matmul_rows", &[&defines[..], &[("ROWS", &rows)]].concat(), &MATMUL_ROWS);
        args.push(numbers(&[batches, m, n, k]));
        return blocks(source, (batches * n).div_ceil(8), 256, args);
    }
    let shape = GemmShape {
        rows: m,
        columns: n,
        depth: k,
        operands: at,
        result: ot,
        added,
        biased: false,
        activation: GemmActivation::None,
        scales: GemmScales::None,
        by_depth: [trans_a, !trans_b],
    };
    let tensor_cores = !deterministic && at == bt && batches == 1 && shape.fits() && m > 0 && n > 0;
    args.push(numbers(&[batches, m, n, k, m * k, a_row, a_depth, k * n, b_depth, b_column]));
    let simple =
        blocks(CudaSource::new("matmul", &defines, &MATMUL), batches * m.div_ceil(TILE) * n.div_ceil(TILE), 256, args);
    if !tensor_cores {
        return simple;
    }
    DeviceAction::Product {
        shape,
        x: a,
        w: b,
        r: added.then_some(out),
        bias: None,
        aux: None,
        y: out,
        scales: None,
        otherwise: simple.actions,
    }
    .into()
}
