//! What brings a value from one placement to another, and what that costs.

use super::local::local_op;
use super::placement::{MeshAxis, Placement, ShardingRule};
use crate::dim::Bindings;
use crate::error::Result;
use crate::graph::{Builder, Op, Role, Var};
use crate::passes::respecialise::Frame;
use crate::prim::{CollectiveKind, Prim};
use crate::shard::local::share;

/// A way to have a value placed as a rule wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conversion {
    /// The form of this index is placed so already.
    Keep(usize),
    /// It is whole on every rank and the same all along the axis: its share is computed instead.
    Repeat(usize),
    /// It is zero, which is the sum of zeros.
    Zero,
    /// Communication of the value as it was computed.
    Collect(CollectiveKind),
}

/// What stands for an extent of unknown size where conversions are compared.
const NOMINAL_EXTENT: usize = 1024;

impl Conversion {
    /// Times that the value goes around the ranks, by its `bytes`: a sum goes around twice.
    pub(super) fn cost(self, bytes: i128) -> i128 {
        match self {
            Self::Keep(_) | Self::Repeat(_) | Self::Zero | Self::Collect(CollectiveKind::Split(_)) => 0,
            Self::Collect(CollectiveKind::AllReduce) => 2 * bytes,
            Self::Collect(_) => bytes,
        }
    }
}

/// The size of `var` where every symbol is [`NOMINAL_EXTENT`].
pub(super) fn nominal_bytes(frame: &Frame<'_, Placement>, var: Var) -> i128 {
    let bytes = frame.function.ty(var).bytes();
    let symbols: Vec<_> = bytes.symbols().collect();
    let bindings = symbols.iter().fold(Bindings::new(), |b, s| b.with(s.name(), NOMINAL_EXTENT));
    bytes.eval(&bindings).unwrap_or(i128::from(i64::MAX))
}

/// How `var` can come to be placed as `want`. Parameters and state are never moved: they are placed where they are
/// used, or gathered by an explicit rewrite. Sums are scattered, and whole values split, only where `anchored`: some
/// other input is cut already as the rule wants it, so that no cut begins by itself.
pub(super) fn step(
    frame: &Frame<'_, Placement>,
    var: Var,
    want: Placement,
    anchored: bool,
    axis: &MeshAxis,
) -> Option<Conversion> {
    let ty = frame.function.ty(var);
    let divides = match want {
        Placement::Shard { dim, multiple } => share(ty.shape.0.get(dim)?, multiple, axis.ranks).is_some(),
        _ => true,
    };
    if !divides {
        return None;
    }
    if let Some(form) = frame.forms(var).iter().position(|(_, p)| same(*p, want)) {
        return Some(Conversion::Keep(form));
    }
    let moves = ty.is_plain() && frame.arg_of(var).is_none_or(|a| a.role != Role::Weight);
    match (frame.value(var).1, want) {
        (Placement::Replicate, Placement::Shard { dim, .. }) if repeats(frame, var, dim) => {
            Some(Conversion::Repeat(dim))
        }
        (Placement::Replicate, Placement::Partial) => is_zero(frame, var).then_some(Conversion::Zero),
        _ if !moves => None,
        (Placement::Replicate, Placement::Shard { dim, .. }) if anchored => {
            Some(Conversion::Collect(CollectiveKind::Split(dim)))
        }
        (Placement::Shard { dim, .. }, Placement::Replicate) => {
            Some(Conversion::Collect(CollectiveKind::AllGather(dim)))
        }
        (Placement::Partial, Placement::Replicate) => Some(Conversion::Collect(CollectiveKind::AllReduce)),
        (Placement::Partial, Placement::Shard { dim, .. }) if anchored => {
            Some(Conversion::Collect(CollectiveKind::ReduceScatter(dim)))
        }
        _ => None,
    }
}

/// Equal but for the multiple.
pub(super) fn same(a: Placement, b: Placement) -> bool {
    match (a, b) {
        (Placement::Shard { dim: x, .. }, Placement::Shard { dim: y, .. }) => x == y,
        _ => a == b,
    }
}

/// Takes `step` and gives the value so placed, which the frame remembers.
pub(super) fn convert(
    g: &mut Builder,
    frame: &mut Frame<'_, Placement>,
    var: Var,
    want: Placement,
    step: Conversion,
    axis: &MeshAxis,
) -> Result<(Var, Placement)> {
    let value = frame.value(var).0;
    let converted = match step {
        Conversion::Keep(form) => return Ok(frame.forms(var)[form]),
        Conversion::Repeat(dim) => return repeat(g, frame, var, dim, axis).map(|v| (v, want)),
        Conversion::Zero => value,
        Conversion::Collect(kind) => {
            let mesh = axis.name.clone();
            g.prim(Prim::Collective { kind, mesh, ranks: axis.ranks }, &[value])?[0]
        }
    };
    frame.add_form(var, converted, want);
    Ok((converted, want))
}

/// The inputs of the node of `var`, each with the axis of it that axis `dim` of `var` is made from, where the node's
/// share along `dim` is computed from theirs; none where it needs nothing cut.
fn sources(frame: &Frame<'_, Placement>, var: Var, dim: usize) -> Option<Vec<(Var, usize)>> {
    let node = &frame.function.nodes[var.index()];
    let Op::Prim(prim) = &node.op else { return None };
    match prim {
        Prim::Iota { axis, .. } => (*axis != dim).then(Vec::new),
        Prim::Broadcast(shape) => {
            let from = &frame.function.ty(node.inputs[0]).shape;
            let lead = shape.rank() - from.rank();
            match dim.checked_sub(lead) {
                Some(d) if !from.0[d].is_one() => Some(vec![(node.inputs[0], d)]),
                _ => Some(Vec::new()),
            }
        }
        Prim::Transpose(perm) => Some(vec![(node.inputs[0], perm[dim])]),
        _ if prim.is_elementwise() => Some(node.inputs.iter().map(|v| (*v, dim)).collect()),
        _ => None,
    }
}

fn whole_form(frame: &Frame<'_, Placement>, var: Var) -> Option<Var> {
    frame.forms(var).iter().find(|(_, p)| *p == Placement::Replicate).map(|(v, _)| *v)
}

/// Is `var`, whole on every rank, the same all along `dim`, so that each rank can compute its share?
fn repeats(frame: &Frame<'_, Placement>, var: Var, dim: usize) -> bool {
    let Some(sources) = sources(frame, var, dim) else { return false };
    let inputs = &frame.function.nodes[var.index()].inputs;
    if sources.is_empty() {
        return inputs.iter().all(|v| whole_form(frame, *v).is_some());
    }
    sources.iter().all(|(v, d)| repeats(frame, *v, *d))
}

fn repeat(g: &mut Builder, frame: &mut Frame<'_, Placement>, var: Var, dim: usize, axis: &MeshAxis) -> Result<Var> {
    let cut = Placement::shard(dim);
    if let Some((known, _)) = frame.forms(var).iter().find(|(_, p)| same(*p, cut)) {
        return Ok(*known);
    }
    let node = &frame.function.nodes[var.index()];
    let sources = sources(frame, var, dim).unwrap_or_default();
    let inputs = if sources.is_empty() {
        node.inputs.iter().filter_map(|v| whole_form(frame, *v)).collect()
    } else {
        sources.iter().map(|(v, d)| repeat(g, frame, *v, *d, axis)).collect::<Result<Vec<_>>>()?
    };
    let rule = ShardingRule { inputs: Vec::new(), outputs: vec![cut] };
    let op = local_op(&node.op, &rule, axis.ranks).unwrap_or_else(|| node.op.clone());
    let share = g.emit(op, &inputs)?[0];
    frame.add_form(var, share, cut);
    Ok(share)
}

/// Is `var` zero everywhere?
fn is_zero(frame: &Frame<'_, Placement>, var: Var) -> bool {
    let node = &frame.function.nodes[var.index()];
    match &node.op {
        Op::Prim(Prim::Const(literal)) => literal.values.iter().all(|v| *v == 0.0),
        Op::Prim(Prim::Broadcast(_) | Prim::Reshape(_) | Prim::Transpose(_) | Prim::Cast(_)) => {
            is_zero(frame, node.inputs[0])
        }
        _ => false,
    }
}
