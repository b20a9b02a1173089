//! Around the products of experts: `kernels/experts.cu`.

use ridge_graph::ops::{ExpertCombine, ExpertPermutation, MoeRouter};
use ridge_graph::{DType, Dim, Function, Op};

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, composite, flag, grid, input, name, numbers, output,
};

pub(super) const ROUTER: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/choose.cuh"), include_str!("../../kernels/experts.cu")))
        .early_launch();
pub(super) const EXPERTS: KernelText<'_> = KernelText::new(include_str!("../../kernels/experts.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("moe_router", "moe_router(logits)", supports, router),
        CudaKernelEntry::new("moe_router_biased", "moe_router(logits, bias)", supports, router),
        CudaKernelEntry::new("expert_permutation", "expert_permutation(ids, seq_ids)", |_| true, permutation),
        CudaKernelEntry::new("expert_combine", "expert_combine(y, places, weights)", |_| true, |s| combine(s, None)),
        CudaKernelEntry::new("expert_combine_add", "add(r, expert_combine(y, places, weights))", adds, |s| {
            combine(s, Some(0))
        }),
    ]
}

/// Experts of a token, their groups, and experts in all, that a warp has room for.
const MAX_TOP_K: usize = 32;
const MAX_GROUPS: usize = 32;
const MAX_EXPERTS: usize = 512;

/// Do the experts, and their groups, fit a warp?
pub(super) fn chooses(op: &MoeRouter, experts: usize) -> bool {
    op.groups.is_none_or(|by| by.count <= MAX_GROUPS) && op.top_k <= MAX_TOP_K && (1..=MAX_EXPERTS).contains(&experts)
}

fn supports(body: &Function) -> bool {
    let experts = body.args[0].ty.shape.0.last().and_then(Dim::as_const);
    composite::<MoeRouter>(body).zip(experts).is_some_and(|(op, experts)| chooses(op, experts))
}

/// What `kernels/choose.cuh` is told of a router that chooses among so many experts by a bias of `offset`.
pub(super) fn choice(op: &MoeRouter, experts: usize, offset: DType) -> [(&'static str, String); 9] {
    let (count, kept, best) = op.groups.map_or((1, 1, 1), |by| (by.count, by.kept, by.best.min(experts / by.count)));
    let flag = |on: bool| flag(on).to_owned();
    [
        ("EXPERTS", experts.to_string()),
        ("TOP_K", op.top_k.to_string()),
        ("SIGMOID", flag(op.sigmoid)),
        ("NORMALISE", flag(op.normalise)),
        ("BIAS", flag(op.bias)),
        ("OFFSET_TYPE", name(offset).to_owned()),
        ("EXPERT_GROUPS", count.to_string()),
        ("KEPT", kept.to_string()),
        ("BEST", best.to_string()),
    ]
}

fn router(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<MoeRouter>().ok_or("no moe_router in the group")?;
    let logits = &spec.inputs[0];
    let (tokens, experts) = (logits.shape[0], logits.shape[1]);
    // Where there is no bias, any address will do.
    let more = usize::from(op.bias);
    let choice = choice(op, experts, spec.inputs[more].dtype);
    let mut defines = vec![("ROUTER", "1"), ("D", name(logits.dtype))];
    defines.extend(choice.iter().map(|(name, value)| (*name, value.as_str())));
    let bias = input(more);
    let scale = LaunchArg::Float(op.scale as f32);
    let args = vec![input(0), bias, output(0), output(1), scale, numbers(&[tokens])];
    grid(CudaSource::new("moe_router", &defines, &ROUTER), [tokens.div_ceil(4), 1, 1], 128, args)
}

fn permutation(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<ExpertPermutation>().ok_or("no expert_permutation in the group")?;
    let ids = &spec.inputs[0];
    let args = vec![input(0), input(1), output(0), output(1), output(2), numbers(&[ids.len(), op.experts])];
    let top_k = ids.shape[1].max(1).to_string();
    let source = CudaSource::new("expert_permutation", &[("PERMUTATION", "1"), ("TOP_K", &top_k)], &EXPERTS);
    grid(source, [op.experts + 1, 1, 1], 256, args)
}

/// What is added is of the type of the sum, and stays so.
fn adds(body: &Function) -> bool {
    let r = &body.args[0].ty;
    let is_combine = |op: &Op| matches!(op, Op::Composite(op) if op.downcast::<ExpertCombine>().is_some());
    let combined = body.nodes.iter().find(|n| is_combine(&n.op));
    *r == *body.ty(body.outputs[0].var) && combined.is_some_and(|n| n.outputs[0] == *r)
}

/// Sums of experts, added to input `residual` if there is one.
fn combine(spec: &CudaKernelSpec<'_>, residual: Option<usize>) -> Result<CudaKernel, String> {
    let first = residual.map_or(0, |residual| residual + 1);
    let (y, places) = (&spec.inputs[first], &spec.inputs[first + 1]);
    let [tokens, top_k] = [places.shape[0], places.shape[1]];
    let vector = if (y.shape[1] * y.dtype.size_bytes()).is_multiple_of(16) { 16 / y.dtype.size_bytes() } else { 1 };
    let [top_k_text, vector_text] = [top_k, vector].map(|n| n.to_string());
    let defines =
        [("D", name(y.dtype)), ("TOP_K", &*top_k_text), ("VECTOR", &*vector_text), ("ADD", flag(residual.is_some()))];
    let [y_at, places_at, weights_at] = [first, first + 1, first + 2].map(input);
    // Where nothing is added, any address will do.
    let r = input(residual.unwrap_or(first));
    let args = vec![y_at, places_at, weights_at, r, output(0), numbers(&[y.shape[0], y.shape[1]])];
    let blocks = if y.shape[1] == 0 { 0 } else { tokens };
    // A thread a vector, as far as that goes.
    let threads = y.shape[1].div_ceil(vector).next_multiple_of(32).clamp(32, 256);
    grid(CudaSource::new("expert_combine", &defines, &EXPERTS), [blocks, 1, 1], threads as u32, args)
}
