//! Products of few rows by parts of a stack of matrices: `kernels/head_products.cu`.

use ridge_graph::ops::Rope;
use ridge_graph::{DType, Function, Op, Prim, Var};

use super::body::{maker, slice_of_arg, swapped, uncast};
use super::entry::CudaKernelEntry;
use super::rope;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, flag, grid, name, numbers,
};

/// The matrices are prefetched; see [`DeviceAction::Launch`].
pub(super) const HEADS: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/angles.cuh"), include_str!("../../kernels/head_products.cu")))
        .early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let plain = CudaKernelEntry::new("head_products", "matmul(x, slice(w))", supports, make);
    // What attention over latents gives, to the values of heads side by side.
    let of_tokens = "cast(reshape(transpose(matmul(transpose(cast(slice(x))), slice(w)))))";
    let of_tokens = CudaKernelEntry::new("head_products_of_tokens", of_tokens, supports_tokens, make_of_tokens);
    vec![
        plain.where_it_pays(|spec| few_rows(spec, 1)).numerics_by_extents(),
        of_tokens.where_it_pays(|spec| few_rows(spec, 0)).numerics_by_extents(),
    ]
}

/// Rows up to which weights are streamed.
const ROWS: usize = 16;
/// Elements that a thread takes at a time, as the text has them.
const WIDE: usize = 8;
const WARPS: usize = 8;
/// Columns of a block where they are not those of a warp, and where blocks would be few.
const ACROSS: usize = 128;
const ACROSS_OF_FEW: usize = 64;

/// What a product takes of its operands, as the ops of a group say it.
#[derive(Clone, Copy)]
pub(super) struct HeadProduct {
    /// The matrices' first row of the part.
    first_row: usize,
    /// Are their rows columns of the product?
    transposed: bool,
    /// The first element of each row of x, where tokens are the outer axis of x.
    first_element: Option<usize>,
    /// What the product is, before another order of its axes.
    product: Var,
}

impl HeadProduct {
    /// The product of a group that has one.
    pub(super) fn read(body: &Function) -> Option<Self> {
        let at = body.nodes.iter().position(|node| matches!(node.op, Op::Prim(Prim::MatMul { .. })))?;
        let node = &body.nodes[at];
        let Op::Prim(Prim::MatMul { trans_a: false, trans_b, .. }) = node.op else { return None };
        let (first_row, ..) = slice_of_arg(body, node.inputs[1], 1)?;
        let first_element = match swapped(body, node.inputs[0]) {
            Some(x) => Some(slice_of_arg(body, uncast(body, x), 2)?.0),
            None => None,
        };
        Some(Self { first_row, transposed: trans_b, first_element, product: body.var(at, 0) })
    }

    /// What the product is.
    pub(super) fn product(&self) -> Var {
        self.product
    }

    /// Are the matrices' rows columns of the product?
    pub(super) fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// Are the matrices, of whole vectors, of a type that the kernel takes?
    pub(super) fn takes(&self, body: &Function, w: usize) -> bool {
        let w = &body.args[w].ty;
        let whole = |n: usize| n.is_multiple_of(WIDE);
        w.shape.rank() == 3
            && w.shape.as_const().is_some()
            && w.format.is_none()
            && !w.state
            && matches!(w.dtype, DType::BF16 | DType::F16)
            && w.shape.last().as_const().is_some_and(|inner| inner > 0 && whole(inner))
            && self.first_element.is_none_or(whole)
    }
}

fn is_plain(body: &Function, var: Var) -> bool {
    let ty = body.ty(var);
    ty.format.is_none() && !ty.state && matches!(ty.dtype, DType::F32 | DType::BF16 | DType::F16)
}

fn supports(body: &Function) -> bool {
    HeadProduct::read(body).is_some_and(|product| product.first_element.is_none() && product.takes(body, 1))
        && body.args[0].ty.shape.rank() == 3
        && is_plain(body, body.var(0, 0))
        && is_plain(body, body.outputs[0].var)
}

/// Tokens, then heads, then elements of which a part is taken; the product has heads side by side.
fn supports_tokens(body: &Function) -> bool {
    let Some(product) = HeadProduct::read(body) else { return false };
    let (x, y) = (&body.args[0].ty.shape, &body.ty(body.outputs[0].var).shape);
    let ordered = body.nodes.iter().enumerate().any(|(i, _)| swapped(body, body.var(i, 0)) == Some(product.product));
    product.first_element.is_some()
        && product.takes(body, 1)
        && ordered
        && x.rank() == 3
        && x.last().as_const().is_some_and(|width| width.is_multiple_of(WIDE))
        && y.rank() == 2
        && is_plain(body, body.var(0, 0))
        && is_plain(body, body.outputs[0].var)
}

/// Are there few along this axis of x, the first input, which are rows?
pub(super) fn few_rows(spec: &CudaKernelSpec<'_>, axis: usize) -> bool {
    let x = &spec.inputs[0];
    // The matrices may be an axis of the grid.
    let matrices = x.shape[1 - axis] <= usize::from(u16::MAX);
    matrices && (1..=ROWS).contains(&x.shape[axis]) && spec.outputs[0].len() > 0 && x.len() > 0
}

/// Elements between rows, and between matrices.
#[derive(Clone, Copy)]
struct Distances {
    rows: usize,
    matrices: usize,
}

/// The part of rows that is rotated and goes ahead of the product: elements of input 0.
pub(super) struct Turned<'a> {
    pub(super) rope: &'a Rope,
    /// Are the elements of a pair neighbours?
    pub(super) interleaved: bool,
    /// Its first element within a row of x.
    pub(super) first: usize,
    /// The input of positions.
    pub(super) positions: usize,
}

/// A launch: what it computes, of which operands.
struct Launch<'a> {
    product: &'a HeadProduct,
    /// Matrices, rows, columns, depth.
    extents: [usize; 4],
    dtypes: [DType; 2],
    x: Distances,
    w: usize,
    out: (OperandSlot, usize, Distances),
    turned: Option<Turned<'a>>,
}

impl Launch<'_> {
    fn kernel(self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        let ([matrices, rows, columns, depth], [x_dtype, out_dtype]) = (self.extents, self.dtypes);
        let w = &spec.inputs[self.w];
        let (inner, size) = (w.shape[2], x_dtype.size_bytes());
        let transposed = self.product.transposed;
        // A block for every other multiprocessor of a full GPU is few.
        let across = if matrices * columns.div_ceil(ACROSS) >= 96 { ACROSS } else { ACROSS_OF_FEW };
        let rotation = rope::rotation(self.turned.as_ref().map(|turned| turned.rope));
        let [rows_text, across_text] = [rows.next_power_of_two(), across].map(|n| n.to_string());
        let mut defines = vec![
            ("A", name(x_dtype)),
            ("B", name(w.dtype)),
            ("OUT", name(out_dtype)),
            ("TRANSPOSED", flag(transposed)),
            ("ROWS", &*rows_text),
            ("ACROSS", &*across_text),
            ("INTERLEAVED", flag(self.turned.as_ref().is_some_and(|turned| turned.interleaved))),
        ];
        defines.extend(rotation.iter().map(|(name, value)| (*name, &**value)));
        let first = self.product.first_element.unwrap_or(0);
        let (out, out_first, of_out) = self.out;
        let weights =
            LaunchArg::Pointer(OperandSlot::Input(self.w), self.product.first_row * inner * w.dtype.size_bytes());
        let mut args = vec![
            LaunchArg::Pointer(OperandSlot::Input(0), first * size),
            weights,
            LaunchArg::Pointer(out, out_first * out_dtype.size_bytes()),
        ];
        if let Some(turned) = &self.turned {
            args.push(LaunchArg::Pointer(OperandSlot::Input(0), turned.first * size));
            args.push(LaunchArg::Pointer(OperandSlot::Input(turned.positions), 0));
        }
        let stride = w.shape[1] * inner;
        let Distances { rows: x_rows, matrices: x_matrices } = self.x;
        args.push(numbers(&[matrices, rows, columns, depth, stride, x_rows, x_matrices, of_out.rows, of_out.matrices]));
        let blocks = match transposed {
            true => [(matrices * columns).div_ceil(WARPS), 1, 1],
            false => [columns.div_ceil(across) + usize::from(self.turned.is_some()), matrices, 1],
        };
        Ok(grid(CudaSource::new("head_products", &defines, &HEADS), blocks, 256, args)?.prefetching([self.w]))
    }
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let product = HeadProduct::read(spec.body).ok_or("no part of a stack in the group")?;
    let (x, y) = (&spec.inputs[0], &spec.outputs[0]);
    let [matrices, rows, columns] = y.shape[..] else { return Err("the product must have three axes".into()) };
    let depth = x.shape[2];
    let launch = Launch {
        product: &product,
        extents: [matrices, rows, columns, depth],
        dtypes: [x.dtype, y.dtype],
        x: Distances { rows: depth, matrices: rows * depth },
        w: 1,
        out: (OperandSlot::Output(0), 0, Distances { rows: columns, matrices: rows * columns }),
        turned: None,
    };
    launch.kernel(spec)
}

/// Rows and columns of a matrix's part, as the product has them: its depth and its columns.
fn depth_and_columns(body: &Function, product: &HeadProduct, inner: usize) -> Option<[usize; 2]> {
    let node = maker(body, product.product);
    let part = slice_of_arg(body, node.inputs[1], 1)?.1;
    Some(if product.transposed { [inner, part] } else { [part, inner] })
}

fn make_of_tokens(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let product = HeadProduct::read(spec.body).ok_or("no part of a stack in the group")?;
    let (x, y) = (&spec.inputs[0], &spec.outputs[0]);
    let [tokens, heads, width] = x.shape[..] else { return Err("x must have three axes".into()) };
    let [depth, columns] =
        depth_and_columns(spec.body, &product, spec.inputs[1].shape[2]).ok_or("no part of a stack")?;
    let launch = Launch {
        product: &product,
        extents: [heads, tokens, columns, depth],
        dtypes: [x.dtype, y.dtype],
        x: Distances { rows: heads * width, matrices: width },
        w: 1,
        out: (OperandSlot::Output(0), 0, Distances { rows: heads * columns, matrices: columns }),
        turned: None,
    };
    launch.kernel(spec)
}

/// Queries of latents, `[tokens, heads, 2 * pairs + columns]` at `out`: of each head of x, input 0, the part that is rotated, and behind it the
/// product of another by its part of w, input 2.
pub(super) fn latent_queries(
    spec: &CudaKernelSpec<'_>,
    product: &HeadProduct,
    turned: Turned<'_>,
    out: OperandSlot,
) -> Result<CudaKernel, String> {
    let x = &spec.inputs[0];
    let [tokens, heads, width] = x.shape[..] else { return Err("x must have three axes".into()) };
    let [depth, columns] =
        depth_and_columns(spec.body, product, spec.inputs[2].shape[2]).ok_or("no part of a stack")?;
    let ahead = 2 * turned.rope.inv_freq.len();
    let row = ahead + columns;
    let launch = Launch {
        product,
        extents: [heads, tokens, columns, depth],
        dtypes: [x.dtype, x.dtype],
        x: Distances { rows: heads * width, matrices: width },
        w: 2,
        out: (out, ahead, Distances { rows: heads * row, matrices: row }),
        turned: Some(turned),
    };
    launch.kernel(spec)
}
