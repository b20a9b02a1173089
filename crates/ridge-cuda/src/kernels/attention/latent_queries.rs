//! Queries of latents: of each head a part that is rotated, and the product of the other by the head's part of a stack of matrices, from
//! keys to latents (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2).

use ridge_graph::ops::{PagedAttention, Rope};
use ridge_graph::{DType, Function, Op, Prim};

use crate::kernel::{CudaKernel, CudaKernelSpec, OperandSlot, composite};
use crate::kernels::body::{maker, slice_of_arg, swapped, uncast};
use crate::kernels::head_products::{self, HeadProduct, Turned, few_rows};

/// What queries are before attention, by the name of the kernel: as they are rotated, and with pairs of neighbours. Their inputs are x
/// twice, the matrices and positions.
pub(super) fn patterns() -> [(&'static str, String); 2] {
    let queries = "concat(slice(x), cast(transpose(matmul(transpose(cast(slice(x))), slice(w)))))";
    let neighbours = format!("concat(reshape(transpose(reshape(slice(q@{queries})))), slice(q))");
    [
        ("latent_attention", format!("rope({queries}, positions)")),
        ("interleaved_latent_attention", format!("rope({neighbours}, positions)")),
    ]
}

/// Inputs of such queries.
pub(super) const INPUTS: usize = 4;

/// How queries are made.
pub(super) struct LatentQueries {
    product: HeadProduct,
    /// The first element of a head that is rotated.
    turned: usize,
    interleaved: bool,
}

impl LatentQueries {
    /// Those of a group that makes them so.
    pub(super) fn read(body: &Function) -> Option<Self> {
        let product = HeadProduct::read(body).filter(|product| !product.is_transposed())?;
        let rope: &Rope = composite(body)?;
        let pairs = rope.inv_freq.len();
        // What is joined: a part of x, and the product, by tokens.
        let is_joined = |node: &&ridge_graph::Node| {
            matches!(node.op, Op::Prim(Prim::Concat { axis: 2 }))
                && node.inputs.len() == 2
                && swapped(body, uncast(body, node.inputs[1])) == Some(product.product())
        };
        let joined = body.nodes.iter().find(is_joined)?;
        let (turned, len, 0 | 1) = slice_of_arg(body, joined.inputs[0], 2)? else { return None };
        let rotated =
            body.nodes.iter().find(|node| matches!(&node.op, Op::Composite(op) if op.downcast::<Rope>().is_some()))?;
        let of_rope = maker(body, rotated.inputs[0]);
        let interleaved = !std::ptr::eq(of_rope, joined);
        if interleaved {
            // Neighbours of the first elements to two halves, and the others as they are.
            let halves = body.nodes.iter().find_map(|node| match &node.op {
                Op::Prim(Prim::Transpose(perm)) if **perm == [0, 1, 3, 2] => {
                    Some(body.ty(node.inputs[0]).shape.last().clone())
                }
                _ => None,
            });
            let first = |var| match &maker(body, var).op {
                Op::Prim(Prim::Slice { axis: 2, start, .. }) => start.as_const(),
                _ => None,
            };
            let others = first(of_rope.inputs[1]);
            if halves?.as_const() != Some(2) || others != Some(2 * pairs) {
                return None;
            }
        }
        (len == 2 * pairs && pairs > 0).then_some(Self { product, turned, interleaved })
    }

    /// Are queries made so, of types and for a cache that kernels take?
    pub(super) fn are_in(body: &Function) -> bool {
        let (x, kv) = (&body.args[0].ty, &body.args[INPUTS].ty);
        let plain = |op: &PagedAttention| op.window.is_none() && op.softcap.is_none() && !op.sinks;
        let one_sided = kv.shape.0[1].as_const() == Some(1) && kv.dtype == x.dtype;
        Self::read(body).is_some_and(|queries| queries.product.takes(body, 2))
            && composite::<PagedAttention>(body).is_some_and(plain)
            && one_sided
            && kv.shape.last().as_const().is_some_and(|dim| dim.is_multiple_of(64))
            && x.shape.rank() == 3
            && x.format.is_none()
            && matches!(x.dtype, DType::BF16 | DType::F16)
    }

    /// Are there few tokens?
    pub(super) fn are_few(spec: &CudaKernelSpec<'_>) -> bool {
        few_rows(spec, 0)
    }

    /// Makes them at `out`.
    pub(super) fn make(&self, spec: &CudaKernelSpec<'_>, rope: &Rope, out: OperandSlot) -> Result<CudaKernel, String> {
        let turned = Turned { rope, interleaved: self.interleaved, first: self.turned, positions: INPUTS - 1 };
        head_products::latent_queries(spec, &self.product, turned, out)
    }
}
