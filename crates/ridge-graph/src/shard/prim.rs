//! The primitives' rules: on which placements of its inputs each can run, besides all replicated.

use super::local::component_place;
use super::placement::{MeshAxis, Placement, ShardingRule};
use super::reshape;
use crate::format::FormatRef;
use crate::prim::{Binary, CollectiveKind, Combine, Prim, Unary};
use crate::shape::Shape;
use crate::types::Type;

use Placement::{Partial, Replicate};

pub(super) fn rules(prim: &Prim, inputs: &[Type], outputs: &[Type], axis: &MeshAxis) -> Vec<ShardingRule> {
    let (n, m) = (inputs.len(), outputs.len());
    let rank = inputs.first().map_or(0, |t| t.shape.rank());
    // The same axis cut in every input and output, for every axis but one.
    let along_but =
        |except: Option<usize>| (0..rank).filter(move |d| Some(*d) != except).map(move |d| all(cut(d), n, m));
    let along = || along_but(None);
    let sums = || all(Partial, n, m);
    match prim {
        Prim::Const(_) | Prim::Iota { .. } => Vec::new(),
        Prim::Unary(Unary::Neg) | Prim::StateRead | Prim::StateWrite | Prim::Move(_) | Prim::Fetch(_) => {
            along().chain([sums()]).collect()
        }
        Prim::Unary(_) | Prim::Compare(_) | Prim::Random { .. } => along().collect(),
        Prim::Binary(op) => along().chain(binary_sums(*op, inputs)).collect(),
        Prim::Select => along().chain([rule(&[Replicate, Partial, Partial], Partial)]).collect(),
        Prim::Cast(to) => {
            // To a wider float nothing is rounded, so that the sum of the casts is the cast of the sum.
            let from = inputs[0].dtype;
            let exact = from.is_float() && to.is_float() && to.size_bytes() > from.size_bytes();
            along().chain(exact.then(sums)).collect()
        }
        Prim::Reduce { op: Combine::Sum, axis } => {
            along_but(Some(*axis)).chain([rule(&[cut(*axis)], Partial), sums()]).collect()
        }
        Prim::Scan { op: Combine::Sum, axis } | Prim::Concat { axis } => {
            along_but(Some(*axis)).chain([sums()]).collect()
        }
        Prim::Reduce { axis, .. } | Prim::Scan { axis, .. } | Prim::ArgMax { axis } | Prim::Sort { axis, .. } => {
            along_but(Some(*axis)).collect()
        }
        Prim::MatMul { trans_a, trans_b, .. } => matmul(rank, *trans_a, *trans_b),
        Prim::Gather { axis } => gather(*axis, rank, inputs[1].shape.rank()),
        Prim::Scatter { axis, add } => scatter(*axis, *add, rank, inputs[1].shape.rank()),
        Prim::Slice { axis, start, len } => {
            // A slice of all there is leaves the cut where it is.
            let whole = start.as_const() == Some(0) && inputs[0].shape.0.get(*axis) == Some(len);
            along_but((!whole).then_some(*axis)).chain([sums()]).collect()
        }
        Prim::Pad { axis, value, .. } => along_but(Some(*axis)).chain((*value == 0.0).then(sums)).collect(),
        Prim::Reshape(shape) => reshape::rules(&inputs[0].shape, shape).into_iter().chain([sums()]).collect(),
        Prim::Transpose(perm) => {
            let moved = perm.iter().enumerate().map(|(to, from)| rule(&[cut(*from)], cut(to)));
            moved.chain([sums()]).collect()
        }
        Prim::Broadcast(shape) => {
            // What is repeated cannot have been cut.
            let lead = shape.rank() - rank;
            (0..rank)
                .filter(|d| inputs[0].shape.0[*d] == shape.0[d + lead])
                .map(|d| rule(&[cut(d)], cut(d + lead)))
                .chain([sums()])
                .collect()
        }
        Prim::LinearRecurrence { low_rank } => recurrence(inputs, *low_rank),
        Prim::LinearRecurrenceGradient { low_rank } => recurrence_gradient(inputs, *low_rank),
        Prim::Component(index) => component(*index, &inputs[0], axis),
        Prim::Assemble { format, shape, .. } => assemble(format, shape, axis),
        Prim::Collective { kind, .. } => {
            let moved = match *kind {
                CollectiveKind::AllReduce
                | CollectiveKind::Broadcast(_)
                | CollectiveKind::Reduce(_)
                | CollectiveKind::Send { .. } => [None, None],
                CollectiveKind::AllGather(axis) | CollectiveKind::ReduceScatter(axis) | CollectiveKind::Split(axis) => {
                    [Some(axis), None]
                }
                CollectiveKind::AllToAll { split, concat } => [Some(split), Some(concat)],
            };
            let still = (0..rank).filter(|d| !moved.contains(&Some(*d)));
            still.map(|d| all(cut(d), n, m)).chain([sums()]).collect()
        }
    }
}

const fn cut(dim: usize) -> Placement {
    Placement::shard(dim)
}

fn rule(inputs: &[Placement], output: Placement) -> ShardingRule {
    ShardingRule { inputs: inputs.to_vec(), outputs: vec![output] }
}

fn all(placement: Placement, inputs: usize, outputs: usize) -> ShardingRule {
    ShardingRule { inputs: vec![placement; inputs], outputs: vec![placement; outputs] }
}

/// Where a function of two summed values is the sum of functions of summands.
fn binary_sums(op: Binary, inputs: &[Type]) -> Vec<ShardingRule> {
    match op {
        Binary::Add | Binary::Sub => vec![rule(&[Partial, Partial], Partial)],
        Binary::Mul => vec![rule(&[Partial, Replicate], Partial), rule(&[Replicate, Partial], Partial)],
        // On integers a division rounds.
        Binary::Div if inputs[0].dtype.is_float() => vec![rule(&[Partial, Replicate], Partial)],
        _ => Vec::new(),
    }
}

/// By heads, together with the groups of q and k that serve them, and by values alone.
fn recurrence(inputs: &[Type], low_rank: bool) -> Vec<ShardingRule> {
    let of_rank = if low_rank { 2 } else { 0 };
    let behind = |place| vec![place; of_rank];
    let heads = ShardingRule {
        inputs: [vec![cut(1); 5], vec![Replicate], behind(cut(1))].concat(),
        outputs: vec![cut(1), cut(1)],
    };
    let values = ShardingRule {
        inputs: [vec![Replicate, Replicate, cut(2), Replicate, cut(3), Replicate], behind(Replicate)].concat(),
        outputs: vec![cut(2), cut(3)],
    };
    let one_group = inputs[0].shape.0[1].is_one();
    let shared = ShardingRule {
        inputs: [vec![Replicate, Replicate, cut(1), cut(1), cut(1), Replicate], behind(cut(1))].concat(),
        outputs: vec![cut(1), cut(1)],
    };
    [heads].into_iter().filter(|_| !one_group).chain(one_group.then_some(shared)).chain([values]).collect()
}

/// As the recurrence; by values, what is summed over them stays in parts.
fn recurrence_gradient(inputs: &[Type], low_rank: bool) -> Vec<ShardingRule> {
    let of_rank = |place| vec![place; if low_rank { 2 } else { 0 }];
    let with_cotangents = |mut rule: ShardingRule| {
        let by_values = rule.outputs[0] == cut(2);
        rule.inputs.append(&mut rule.outputs);
        let over = if by_values { Partial } else { cut(1) };
        let own = if by_values { [cut(2), Partial, cut(3)] } else { [cut(1); 3] };
        rule.outputs = [vec![over; 2], own.to_vec(), of_rank(over)].concat();
        rule
    };
    recurrence(inputs, low_rank).into_iter().map(with_cotangents).collect()
}

fn matmul(rank: usize, trans_a: bool, trans_b: bool) -> Vec<ShardingRule> {
    let (outer, inner) = (rank - 2, rank - 1);
    let (m, ka) = if trans_a { (inner, outer) } else { (outer, inner) };
    let (kb, n) = if trans_b { (inner, outer) } else { (outer, inner) };
    let mut rules: Vec<ShardingRule> = (0..outer).map(|d| rule(&[cut(d), cut(d)], cut(d))).collect();
    rules.push(rule(&[cut(m), Replicate], cut(outer)));
    rules.push(rule(&[Replicate, cut(n)], cut(inner)));
    rules.push(rule(&[cut(ka), cut(kb)], Partial));
    rules
}

/// The axis of what a gather gives that axis `d` of its data becomes.
fn after(d: usize, axis: usize, index_rank: usize) -> usize {
    if d < axis { d } else { d + index_rank - 1 }
}

fn gather(axis: usize, rank: usize, index_rank: usize) -> Vec<ShardingRule> {
    let data = (0..rank).filter(|d| *d != axis);
    let data = data.map(|d| rule(&[cut(d), Replicate], cut(after(d, axis, index_rank))));
    let indices = (0..index_rank).map(|j| rule(&[Replicate, cut(j)], cut(axis + j)));
    data.chain(indices).chain([rule(&[Partial, Replicate], Partial)]).collect()
}

fn scatter(axis: usize, add: bool, rank: usize, index_rank: usize) -> Vec<ShardingRule> {
    let data = (0..rank).filter(|d| *d != axis);
    let mut rules: Vec<ShardingRule> =
        data.map(|d| rule(&[cut(d), Replicate, cut(after(d, axis, index_rank))], cut(d))).collect();
    rules.push(rule(&[Partial, Replicate, Partial], Partial));
    if add {
        // Every rank adds its own rows to its summand.
        rules.extend((0..index_rank).map(|j| rule(&[Partial, cut(j), cut(axis + j)], Partial)));
    }
    rules
}

fn assemble(format: &FormatRef, shape: &Shape, axis: &MeshAxis) -> Vec<ShardingRule> {
    let granules = format.granularity(shape.rank()).into_iter().enumerate();
    let cuts = granules.filter_map(|(dim, multiple)| {
        let places = (0..format.components(shape).len()).map(|i| component_place(format, shape, dim, axis.ranks, i));
        Some(rule(&places.collect::<Option<Vec<_>>>()?, Placement::Shard { dim, multiple }))
    });
    cuts.collect()
}

fn component(index: usize, stored: &Type, axis: &MeshAxis) -> Vec<ShardingRule> {
    let Some(format) = &stored.format else { return Vec::new() };
    let granules = format.granularity(stored.shape.rank());
    let cuts = granules.into_iter().enumerate().filter_map(|(dim, multiple)| {
        let output = component_place(format, &stored.shape, dim, axis.ranks, index)?;
        Some(rule(&[Placement::Shard { dim, multiple }], output))
    });
    cuts.collect()
}
