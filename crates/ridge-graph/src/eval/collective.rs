//! Collectives within one group of ranks.

use super::elements::{as_given, settle};
use super::precision::Precision;
use super::reduce::{float_step, int_step};
use super::rows::{concat, slice};
use crate::prim::{CollectiveKind, Combine};
use crate::tensor::{Data, Tensor};
use crate::why::Why;

/// What each rank of a group gets, given what each has.
pub(super) fn apply(
    kind: CollectiveKind,
    ranks: &[&Tensor],
    shape: &[usize],
    precision: Precision,
) -> Result<Vec<Tensor>, Why> {
    let dtype = ranks[0].dtype;
    match kind {
        CollectiveKind::AllReduce => Ok(vec![sum(ranks, precision)?; ranks.len()]),
        CollectiveKind::AllGather(axis) => Ok(vec![as_given(dtype, shape, concat(ranks, axis))?; ranks.len()]),
        CollectiveKind::ReduceScatter(axis) => {
            let whole = sum(ranks, precision)?;
            let len = shape[axis];
            (0..ranks.len()).map(|rank| as_given(dtype, shape, slice(&whole, axis, rank * len, len))).collect()
        }
        CollectiveKind::AllToAll { split, concat: joined } => {
            // Along each axis the extent of what a rank has, before and after.
            let len = ranks[0].shape[split] / ranks.len();
            let of_rank = |to: usize| -> Result<Tensor, Why> {
                let mut part_shape = shape.to_vec();
                part_shape[joined] /= ranks.len();
                let cut = |from: &&Tensor| as_given(dtype, &part_shape, slice(from, split, to * len, len));
                let parts = ranks.iter().map(cut).collect::<Result<Vec<_>, _>>()?;
                as_given(dtype, shape, concat(&parts.iter().collect::<Vec<_>>(), joined))
            };
            (0..ranks.len()).map(of_rank).collect()
        }
        CollectiveKind::Broadcast(root) => Ok(vec![ranks[root].clone(); ranks.len()]),
        CollectiveKind::Reduce(root) => Ok(alone(sum(ranks, precision)?, root, ranks.len())),
        CollectiveKind::Send { from, to } => Ok(alone(ranks[from].clone(), to, ranks.len())),
        CollectiveKind::Split(axis) => {
            let len = shape[axis];
            let own = ranks.iter().enumerate();
            own.map(|(rank, whole)| as_given(dtype, shape, slice(whole, axis, rank * len, len))).collect()
        }
    }
}

/// `value` on one rank, zeros on the others.
fn alone(value: Tensor, rank: usize, ranks: usize) -> Vec<Tensor> {
    let mut given = vec![Tensor::zeros(value.dtype, &value.shape); ranks];
    given[rank] = value;
    given
}

/// The sum in the order of ranks.
fn sum(ranks: &[&Tensor], precision: Precision) -> Result<Tensor, Why> {
    fn add<T: Copy>(total: &mut [T], part: &[T], step: impl Fn(T, T) -> T) {
        total.iter_mut().zip(part).for_each(|(t, p)| *t = step(*t, *p));
    }
    let mut total = ranks[0].data.clone();
    for part in &ranks[1..] {
        match &mut total {
            Data::Float(t) => add(t, part.floats(), float_step(Combine::Sum, precision)),
            Data::Int(t) => add(t, part.ints(), int_step(Combine::Sum)),
        }
    }
    settle(ranks[0].dtype, &ranks[0].shape, total, precision)
}
