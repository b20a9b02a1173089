//! Experts of few tokens: `kernels/experts_few.cu`.

use ridge_graph::ops::{ExpertCombine, ExpertPermutation, GroupedLinear, Linear, MoeRouter, RmsNorm};
use ridge_graph::{Composite, DType, Dim, Function, Op, Type};

use super::entry::CudaKernelEntry;
use super::experts::{choice, chooses};
use super::norm;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, SlotOffset, composite, flag, grid,
    input, name, numbers, output,
};

/// The router's weights are prefetched; see [`DeviceAction::Launch`].
pub(super) const ROUTE: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/choose.cuh"), include_str!("../../kernels/experts_few.cu")))
        .early_launch();
pub(super) const FEW: KernelText<'_> = KernelText::new(include_str!("../../kernels/experts_few.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let norm = "linear(*rms_norm(*add(x, r), w), g";
    let routers = [
        ("expert_route", format!("expert_permutation(*moe_router({norm})), seq_ids)"), 0),
        ("expert_route_biased", format!("expert_permutation(*moe_router({norm}), bias), seq_ids)"), 1),
        ("expert_route_offset", format!("expert_permutation(*moe_router({norm}, b)), seq_ids)"), 1),
    ];
    let routers = routers.into_iter().map(|(name, pattern, more)| {
        CudaKernelEntry::new(name, &pattern, routes, move |spec| route(spec, more)).where_it_pays(few_tokens)
    });
    let sums = [
        CudaKernelEntry::new(
            "expert_sum",
            "expert_combine(grouped_linear(x, w, offsets), places, weights)",
            adds_up,
            |spec| sum(spec, 0),
        ),
        CudaKernelEntry::new(
            "expert_sum_add",
            "add(r, expert_combine(grouped_linear(x, w, offsets), places, weights))",
            |body| adds_up(body) && stays(body, 1),
            |spec| sum(spec, 1),
        ),
        CudaKernelEntry::new(
            "expert_sum_add_twice",
            "add(r, add(s, expert_combine(grouped_linear(x, w, offsets), places, weights)))",
            |body| adds_up(body) && stays(body, 2),
            |spec| sum(spec, 2),
        ),
    ];
    let sums = sums.into_iter().map(|entry| entry.where_it_pays(few_pairs));
    // Few rows are summed in an order of their own.
    routers.chain(sums).map(CudaKernelEntry::numerics_by_extents).collect()
}

/// Tokens up to which these kernels are quicker than others.
pub(super) const TOKENS: usize = 16;
/// Rows of an expert, on average, up to which they are.
pub(super) const ROWS: usize = 2;
/// Elements of a row that a block holds in shared memory.
const MOST_HIDDEN: usize = 8192;

/// A matrix of a 16-bit float whose rows are whole vectors.
fn halves(ty: &Type) -> bool {
    matches!(ty.dtype, DType::BF16 | DType::F16) && ty.format.is_none() && constant(ty.shape.last()).is_multiple_of(8)
}

/// The extent, 1 where it is none that is known.
fn constant(dim: Dim) -> usize {
    dim.as_const().unwrap_or(1)
}

/// Inputs of the patterns of a router: x, what is added to it, the norm's weight, the router's; what there is more of; sequences.
fn routes(body: &Function) -> bool {
    let ty = |i: usize| &body.args[i].ty;
    let (x, w) = (ty(0), ty(3));
    let fits = *x == *ty(1)
        && x.shape.rank() == 2
        && halves(x)
        && halves(w)
        && x.dtype == w.dtype
        && norm::wide(x)
        && constant(x.shape.last()) <= MOST_HIDDEN;
    let plain = body.args.iter().all(|arg| arg.ty.format.is_none());
    let router = composite::<MoeRouter>(body);
    let experts = w.shape.0[0].as_const();
    // The pairs are sorted by all experts of the router, and no others.
    let sorts = composite::<ExpertPermutation>(body).is_some_and(|op| Some(op.experts) == experts);
    fits && plain && sorts && router.zip(experts).is_some_and(|(op, experts)| chooses(op, experts))
}

fn linear(body: &Function) -> Option<&Linear> {
    composite::<Linear>(body)
}

/// Inputs of a product of experts and of the sum of what they give: x, weights, offsets; places, shares.
const PRODUCT: usize = 5;

/// The inputs of the patterns of a product: of it x, w and offsets, behind what the sum is added to.
fn product(body: &Function) -> Option<(&Type, &Type)> {
    let first = body.args.len().checked_sub(PRODUCT)?;
    composite::<GroupedLinear>(body).map(|_| (&body.args[first].ty, &body.args[first + 1].ty))
}

fn adds_up(body: &Function) -> bool {
    product(body).is_some_and(|(x, w)| halves(x) && halves(w) && x.dtype == w.dtype)
}

/// The first inputs, which the sum is added to, are of its type, and stay so.
fn stays(body: &Function, added: usize) -> bool {
    let result = body.ty(body.outputs[0].var);
    let combined = body.nodes.iter().find(|n| is::<ExpertCombine>(&n.op));
    body.args[..added].iter().all(|arg| arg.ty == *result) && combined.is_some_and(|n| n.outputs[0] == *result)
}

fn is<T: Composite>(op: &Op) -> bool {
    matches!(op, Op::Composite(op) if op.downcast::<T>().is_some())
}

fn few_tokens(spec: &CudaKernelSpec<'_>) -> bool {
    (1..=TOKENS).contains(&spec.inputs[0].shape[0])
}

fn few_pairs(spec: &CudaKernelSpec<'_>) -> bool {
    let first = spec.inputs.len() - PRODUCT;
    let (rows, groups) = (spec.inputs[first].shape[0], spec.inputs[first + 1].shape[0]);
    let [tokens, top_k] = spec.inputs[first + 3].shape[..] else { return false };
    (1..=TOKENS).contains(&tokens)
        && rows == tokens * top_k
        && rows > 0
        && rows <= ROWS * groups
        && spec.outputs[0].len() > 0
}

/// The router of few tokens, with its norm, in one launch.
fn route(spec: &CudaKernelSpec<'_>, more: usize) -> Result<CudaKernel, String> {
    let router = spec.composite::<MoeRouter>().ok_or("no moe_router in the group")?;
    let norm = spec.composite::<RmsNorm>().ok_or("no rms_norm in the group")?;
    let offset = linear(spec.body).is_some_and(|linear| linear.bias);
    let (x, w) = (&spec.inputs[0], &spec.inputs[3]);
    let [tokens, hidden] = x.shape[..] else { return Err("x must have two axes".into()) };
    let experts = w.shape[0];
    let [hidden_text, tokens_text] = [hidden, tokens.next_power_of_two()].map(|n| n.to_string());
    // Where there is nothing more, any address will do.
    let more_at = 3 + more;
    let choice = choice(router, experts, spec.inputs[more_at].dtype);
    let mut defines = vec![
        ("ROUTE", "1"),
        ("D", name(x.dtype)),
        ("NORM_TYPE", name(spec.inputs[2].dtype)),
        ("HIDDEN", &*hidden_text),
        ("TOKENS", &*tokens_text),
        ("OFFSET", flag(offset)),
    ];
    defines.extend(choice.iter().map(|(name, value)| (*name, value.as_str())));
    let mut args: Vec<LaunchArg> = (0..4).chain([more_at, 4 + more]).map(input).collect();
    args.extend((0..7).map(output));
    let at = |slot: SlotOffset| LaunchArg::Pointer(slot.0, slot.1);
    args.extend([at((OperandSlot::Scratch, 0)), at((OperandSlot::Zeros, 0))]);
    args.extend([norm.eps, router.scale].map(|n| LaunchArg::Float(n as f32)));
    args.push(numbers(&[tokens]));
    let source = CudaSource::new("expert_route", &defines, &ROUTE);
    let kernel = grid(source, [experts.div_ceil(8), tokens, 1], 256, args)?.prefetching([3]);
    Ok(CudaKernel { scratch: tokens * experts * 4, ..kernel })
}

/// How the products of few rows divide their work: `WARPS`, `COLUMNS`, `AHEAD` and `BLOCKS` of the text.
#[derive(Clone, Copy)]
struct Division {
    warps: usize,
    columns: usize,
    ahead: usize,
    blocks: usize,
}

impl Division {
    fn defines(self) -> [(&'static str, String); 4] {
        let Self { warps, columns, ahead, blocks } = self;
        [("WARPS", warps), ("COLUMNS", columns), ("AHEAD", ahead), ("BLOCKS", blocks)].map(|(k, n)| (k, n.to_string()))
    }
}

/// Of gate and up of single rows, and of several; and of the last product. Found by trying (H200).
const OPEN_ONE: Division = Division { warps: 8, columns: 2, ahead: 3, blocks: 3 };
const OPEN: Division = Division { warps: 8, columns: 2, ahead: 2, blocks: 3 };
const SUM: Division = Division { warps: 8, columns: 8, ahead: 2, blocks: 2 };

/// Gate and up of experts, of rows `index` of x, where they have few: inputs x, gate, offsets, rows, and up in place `up`.
pub(super) fn open(spec: &CudaKernelSpec<'_>, up: usize) -> Result<CudaKernel, String> {
    let (x, w, y) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let [groups, columns, depth] = [0, 1, 2].map(|axis| w.shape[axis]);
    let tokens = x.shape[0];
    let division = if tokens == 1 { OPEN_ONE } else { OPEN };
    let mut defines = vec![("ROUTE", "0".to_owned()), ("OPEN", "1".into()), ("D", name(x.dtype).into())];
    defines.extend([("GROUPS", groups), ("MOST", tokens.min(2)), ("DEPTH", depth)].map(|(k, n)| (k, n.to_string())));
    let args =
        vec![input(0), input(1), input(up), input(2), input(3), output(0), numbers(&[y.shape[0], tokens, columns])];
    launch("expert_open", defines, division, columns, args)
}

/// The last product of experts with the sum of what they give, added to the first `added` inputs, to the last of them first.
fn sum(spec: &CudaKernelSpec<'_>, added: usize) -> Result<CudaKernel, String> {
    let first = added;
    let [x, w, _, places, _] = &spec.inputs[first..] else { return Err("a product has five inputs here".into()) };
    let [groups, columns, depth] = [0, 1, 2].map(|axis| w.shape[axis]);
    let [tokens, top_k] = places.shape[..] else { return Err("places have two axes".into()) };
    let mut defines = vec![("ROUTE", "0".to_owned()), ("OPEN", "0".into()), ("D", name(x.dtype).into())];
    let sizes = [("GROUPS", groups), ("TOP_K", top_k), ("TOKENS", tokens.next_power_of_two()), ("DEPTH", depth)];
    defines.extend(sizes.map(|(k, n)| (k, n.to_string())));
    defines.push(("ADD", added.to_string()));
    // Where nothing is added, any address will do.
    let mut args: Vec<LaunchArg> = (first..first + PRODUCT).chain([0, added.saturating_sub(1)]).map(input).collect();
    args.extend([output(0), numbers(&[tokens, columns, x.shape[0]])]);
    launch("expert_sum", defines, SUM, columns, args)
}

fn launch(
    entry: &str,
    mut defines: Vec<(&'static str, String)>,
    division: Division,
    columns: usize,
    args: Vec<LaunchArg>,
) -> Result<CudaKernel, String> {
    defines.extend(division.defines());
    let defines: Vec<(&str, &str)> = defines.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let source = CudaSource::new(entry, &defines, &FEW);
    grid(source, [columns.div_ceil(division.columns), 1, 1], 32 * division.warps as u32, args)
}
