//! Products of few rows by parts of a stack of matrices: `kernels/head_products.cu`.

use ridge_graph::{DType, Function, Op, Prim};

use super::entry::CudaKernelEntry;
use super::experts::flag;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, grid, input, name, numbers, output};

pub(super) const HEADS: KernelText<'_> = KernelText::new(include_str!("../../kernels/head_products.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entry = CudaKernelEntry::new("head_products", "matmul(x, slice(w))", supports, make);
    vec![entry.where_it_pays(few_rows).numerics_by_extents()]
}

/// Rows up to which weights are streamed.
const ROWS: usize = 16;
/// Elements that a thread takes at a time, and columns of a block, as the text has them.
const WIDE: usize = 8;
const ACROSS: usize = 128;
const WARPS: usize = 8;

/// The matrices' first row of the part, and whether their rows are columns of the product.
fn part(body: &Function) -> Option<(usize, bool)> {
    let prims = || body.nodes.iter().filter_map(|node| if let Op::Prim(prim) = &node.op { Some(prim) } else { None });
    let first = prims().find_map(|prim| match prim {
        Prim::Slice { axis: 1, start, .. } => start.as_const(),
        _ => None,
    })?;
    let transposed = prims().find_map(|prim| match prim {
        Prim::MatMul { trans_a: false, trans_b, .. } => Some(*trans_b),
        _ => None,
    })?;
    Some((first, transposed))
}

fn supports(body: &Function) -> bool {
    let (x, w, y) = (&body.args[0].ty, &body.args[1].ty, body.ty(body.outputs[0].var));
    let known = w.shape.rank() == 3 && x.shape.rank() == 3 && w.shape.as_const().is_some();
    known
        && [x, w, y].iter().all(|ty| ty.format.is_none() && !ty.state)
        && matches!(w.dtype, DType::BF16 | DType::F16)
        && [x.dtype, y.dtype].iter().all(|dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16))
        && w.shape.last().as_const().is_some_and(|inner| inner > 0 && inner.is_multiple_of(WIDE))
        && part(body).is_some()
}

fn few_rows(spec: &CudaKernelSpec<'_>) -> bool {
    // The matrices may be an axis of the grid.
    let matrices = spec.inputs[0].shape[0] <= usize::from(u16::MAX);
    matrices && (1..=ROWS).contains(&spec.inputs[0].shape[1]) && spec.outputs[0].len() > 0 && spec.inputs[0].len() > 0
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let (first, transposed) = part(spec.body).ok_or("no part of a stack in the group")?;
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let [matrices, rows, columns] = y.shape[..] else { return Err("the product must have three axes".into()) };
    let (depth, inner) = (x.shape[2], w.shape[2]);
    let rows_text = rows.next_power_of_two().to_string();
    let defines = [
        ("A", name(x.dtype)),
        ("B", name(w.dtype)),
        ("OUT", name(y.dtype)),
        ("TRANSPOSED", flag(transposed)),
        ("ROWS", &*rows_text),
    ];
    let extents = [matrices, rows, columns, depth, w.shape[1] * inner, first * inner];
    let args = vec![input(0), input(1), output(0), numbers(&extents)];
    let blocks = match transposed {
        true => [(matrices * columns).div_ceil(WARPS), 1, 1],
        false => [columns.div_ceil(ACROSS), matrices, 1],
    };
    grid(CudaSource::new("head_products", &defines, &HEADS), blocks, 256, args)
}
