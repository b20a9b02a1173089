//! Single primitives, for any shape and dtype. What a fused group can do is a group of one.

mod moves;
mod order;

use ridge_graph::{DType, Prim};

use crate::cublaslt::Shape;
use crate::fused::combine;
use crate::gemm::{self, After};
use crate::kernel::{Action, Arg, At, Kernel, Slot, Source, Spec, blocks, each, input, name, numbers, output};
use crate::space::around;

const ALONG: &str = include_str!("../kernels/along.cu");
const MATMUL: &str = include_str!("../kernels/matmul.cu");
const MATMUL_ROWS: &str = include_str!("../kernels/matmul_rows.cu");

/// Bytes that a thread of `kernels/matmul_rows.cu` takes of the matrix at a time.
const VECTOR_BYTES: usize = 16;

/// Extent of the square that a block of the matrix product makes: `TILE` of `kernels/matmul.cu`.
const TILE: usize = 64;

/// The kernel of `prim`.
///
/// # Errors
/// Says what is not supported.
pub(crate) fn make(prim: &Prim, spec: &Spec<'_>) -> Result<Kernel, String> {
    let operand = |i: usize| &spec.inputs[i];
    Ok(match prim {
        Prim::Const(literal) => {
            let bytes = if literal.dtype == DType::I64 {
                literal.values.iter().flat_map(|v| (*v as i64).to_le_bytes()).collect()
            } else {
                literal.dtype.encode(literal.values.iter().copied())
            };
            Action::Constant { bytes, to: crate::kernel::Slot::Output(0) }.into()
        }
        Prim::Reduce { op, axis } => {
            let (outer, extent, inner) = around(&operand(0).shape, *axis);
            let defines = [("REDUCE", "1"), ("D", name(operand(0).dtype)), ("OP", combine(*op))];
            let args = vec![input(0), output(0), numbers(&[outer, extent, inner])];
            each(Source::new("reduce", &defines, ALONG), outer * inner, args)
        }
        Prim::Scan { op, axis } => {
            let (outer, extent, inner) = around(&operand(0).shape, *axis);
            let defines = [("SCAN", "1"), ("D", name(operand(0).dtype)), ("OP", combine(*op))];
            let args = vec![input(0), output(0), numbers(&[outer, extent, inner])];
            blocks(Source::new("scan", &defines, ALONG), outer * inner, 256, args)
        }
        Prim::ArgMax { axis } => order::argmax(spec, *axis),
        Prim::Sort { axis, descending, .. } => order::sort(spec, *axis, *descending)?,
        Prim::MatMul { trans_a, trans_b, .. } => matmul(spec, *trans_a, *trans_b),
        Prim::Gather { axis } => moves::gather(spec, *axis),
        Prim::Scatter { axis, add } => moves::scatter(spec, *axis, *add),
        Prim::Slice { axis, start, .. } => moves::slice(spec, *axis, start)?,
        Prim::Concat { axis } => moves::concat(spec, *axis),
        Prim::Pad { axis, before, value, .. } => moves::pad(spec, *axis, before, *value)?,
        Prim::Transpose(perm) => moves::transpose(spec, perm),
        Prim::Broadcast(_) => moves::broadcast_to(spec),
        Prim::StateRead | Prim::Collective { ranks: 1, .. } => moves::copy(spec, 0),
        Prim::StateWrite => moves::copy(spec, 1),
        Prim::Collective { mesh, ranks, .. } => {
            return Err(format!("{ranks} ranks of `{mesh}`: this backend runs on one GPU"));
        }
        Prim::Cast(dtype) if *dtype == operand(0).dtype => moves::copy(spec, 0),
        Prim::Iota { .. }
        | Prim::Unary(_)
        | Prim::Binary(_)
        | Prim::Compare(_)
        | Prim::Select
        | Prim::Cast(_)
        | Prim::Random { .. } => return Err("is fused, and never alone".into()),
        Prim::Reshape(_) | Prim::Component(_) => return Err("is another view of its input".into()),
    })
}

/// A product of matrices, or of batches of them: `[rows, depth] x [depth, columns]`.
pub(crate) struct Product {
    pub(crate) batches: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) a: (At, DType),
    pub(crate) b: (At, DType),
    pub(crate) out: (At, DType),
    /// Is the first stored by columns, the second by rows of its transpose?
    pub(crate) transposed: (bool, bool),
}

fn matmul(spec: &Spec<'_>, trans_a: bool, trans_b: bool) -> Kernel {
    let (a, b, out) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let rank = out.shape.len();
    let of = Product {
        batches: out.shape[..rank - 2].iter().product(),
        rows: out.shape[rank - 2],
        columns: out.shape[rank - 1],
        depth: a.shape[if trans_a { rank - 2 } else { rank - 1 }],
        a: ((Slot::Input(0), 0), a.dtype),
        b: ((Slot::Input(1), 0), b.dtype),
        out: ((Slot::Output(0), 0), out.dtype),
        transposed: (trans_a, trans_b),
    };
    of.fastest(After::Nothing, product(&of))
}

impl Product {
    /// The fastest of `kernel`, which makes the product and what follows, and of others that do.
    pub(crate) fn fastest(&self, after: After, kernel: Kernel) -> Kernel {
        let Self { batches, rows, columns, depth, a: (x, dtype), b: (w, other), out: (y, result), transposed } = *self;
        if batches != 1 || transposed != (false, true) || dtype != other || rows <= 16 {
            return kernel;
        }
        gemm::fastest(kernel, &gemm::Problem { rows, columns, depth, operands: dtype, result, x, w, y, after })
    }
}

/// The kernel of a product.
pub(crate) fn product(of: &Product) -> Kernel {
    let Product { batches, rows: m, columns: n, depth: k, a: (a, at), b: (b, bt), out: (out, ot), transposed } = *of;
    let (trans_a, trans_b) = transposed;
    let (a_row, a_depth) = if trans_a { (1, m) } else { (k, 1) };
    let (b_depth, b_column) = if trans_b { (1, k) } else { (n, 1) };
    let defines = [("A", name(at)), ("B", name(bt)), ("OUT", name(ot))];
    let mut args: Vec<Arg> = [a, b, out].into_iter().map(|(slot, offset)| Arg::Pointer(slot, offset)).collect();
    let streams = !trans_a && trans_b && (k * bt.size_bytes()).is_multiple_of(VECTOR_BYTES);
    if streams && m <= 16 && batches * n < 1 << 31 && at.is_float() && bt.is_float() {
        // Code for the next power of two of rows.
        let rows = m.next_power_of_two().to_string();
        let source = Source::new("matmul_rows", &[&defines[..], &[("ROWS", &rows)]].concat(), MATMUL_ROWS);
        args.push(numbers(&[batches, m, n, k]));
        return blocks(source, (batches * n).div_ceil(8), 256, args);
    }
    let shape = Shape { rows: m, columns: n, depth: k, operands: at, result: ot, added: false };
    let tensor_cores = at == bt && batches == 1 && transposed == (false, true) && shape.fits() && m > 0 && n > 0;
    args.push(numbers(&[batches, m, n, k, m * k, a_row, a_depth, k * n, b_depth, b_column]));
    let simple =
        blocks(Source::new("matmul", &defines, MATMUL), batches * m.div_ceil(TILE) * n.div_ceil(TILE), 256, args);
    if !tensor_cores {
        return simple;
    }
    Action::Product { shape, x: a, w: b, r: None, y: out, otherwise: simple.actions }.into()
}
