//! Gradients of linear recurrences.

use super::sweep::SweptNode;
use crate::dim::Dim;
use crate::error::Result;
use crate::graph::Var;
use crate::prim::Prim;

/// Gives the inputs of a linear recurrence their cotangents, by [`Prim::LinearRecurrenceGradient`].
pub(super) fn backward(at: &mut SweptNode<'_, '_>, low_rank: bool, cotangents: &[Option<Var>]) -> Result<()> {
    if cotangents.iter().all(Option::is_none) {
        return Ok(());
    }
    let mut inputs = (0..at.node.inputs.len()).map(|i| at.input(i)).collect::<Result<Vec<_>>>()?;
    inputs.extend(at.filled(cotangents, 0..2)?);
    let given = at.g().prim(Prim::LinearRecurrenceGradient { low_rank }, &inputs)?;
    for i in [0, 1] {
        if at.wants(i) {
            let of_groups = over_groups(at, i, given[i])?;
            at.give(i, of_groups)?;
        }
    }
    let behind = if low_rank { [6, 7].as_slice() } else { &[] };
    for (i, cotangent) in [2, 3, 4].iter().chain(behind).zip(&given[2..]) {
        at.give(*i, *cotangent)?;
    }
    Ok(())
}

/// The sum over the heads of each group of `x`, `[tokens, heads, key]`, as input `i`, `[tokens, groups, key]`.
fn over_groups(at: &mut SweptNode<'_, '_>, i: usize, x: Var) -> Result<Var> {
    let wanted = at.ty(i).shape.clone();
    let g = at.g();
    let heads = g.ty(x)?.shape.0[1].as_const().unwrap_or(1);
    let groups = wanted.0[1].as_const().unwrap_or(1);
    if heads == groups {
        return Ok(x);
    }
    let mut apart = wanted.clone();
    apart.0.insert(2, Dim::from(heads / groups));
    let apart = g.reshape(x, apart)?;
    let sum = g.reduce_sum(apart, 2)?;
    g.reshape(sum, wanted)
}
