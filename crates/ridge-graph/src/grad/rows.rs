//! Gradients of the primitives that move rows by index, and of running sums.

use super::sweep::SweptNode;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Var};
use crate::shape::Shape;
use crate::types::Type;

/// Sorted values whose gradient is found by comparing every kept index with every position.
const MAX_KEPT: usize = 64;

/// The cotangent of a prefix sum: sums from each element to the end.
pub(super) fn reverse_scan_sum(g: &mut Builder, c: Var, axis: usize) -> Result<Var> {
    let flipped = flip(g, c, axis)?;
    let sums = g.scan_sum(flipped, axis)?;
    flip(g, sums, axis)
}

fn flip(g: &mut Builder, x: Var, axis: usize) -> Result<Var> {
    let extent = g.ty(x)?.shape.0[axis].clone();
    let index = g.iota([extent.clone()], 0, DType::I64)?;
    let one = g.constant(DType::I64, 1.0)?;
    let index = g.add(index, one)?;
    let count = g.dim_value(&extent)?;
    let backwards = g.sub(count, index)?;
    g.gather(x, backwards, axis)
}

/// Rows that were read several times sum their cotangents, in f32.
pub(super) fn gather(at: &mut SweptNode<'_, '_>, axis: usize, c: Var) -> Result<()> {
    let indices = at.input(1)?;
    let ty = at.ty(0).clone();
    let zeros = at.sweep.zeros(&Type::tensor(DType::F32, ty.shape))?;
    let g = at.g();
    let wide = g.cast(c, DType::F32)?;
    let sums = g.scatter_add(zeros, indices, wide, axis)?;
    let dx = g.cast(sums, ty.dtype)?;
    at.give(0, dx)
}

pub(super) fn scatter(at: &mut SweptNode<'_, '_>, axis: usize, add: bool, c: Var) -> Result<()> {
    let indices = at.input(1)?;
    if at.wants(0) {
        let kept = if add {
            c
        } else {
            let updates = at.ty(2).clone();
            let zeros = at.sweep.zeros(&updates)?;
            at.g().scatter(c, indices, zeros, axis)?
        };
        at.give(0, kept)?;
    }
    if at.wants(2) {
        let mut rows = at.g().gather(c, indices, axis)?;
        if !add {
            let extent = at.ty(0).shape.0[axis].clone();
            let trailing = at.ty(0).shape.rank() - axis - 1;
            let g = at.g();
            let last = is_last(g, indices, &extent)?;
            let mut shape = g.ty(last)?.shape.clone();
            shape.0.extend((0..trailing).map(|_| Dim::from(1)));
            let last = g.reshape(last, shape)?;
            let zero = g.constant_like(rows, 0.0)?;
            rows = g.select(last, rows, zero)?;
        }
        at.give(2, rows)?;
    }
    Ok(())
}

/// Which of `indices` into `extent` rows are the last of their value: those whose row stays.
fn is_last(g: &mut Builder, indices: Var, extent: &Dim) -> Result<Var> {
    let shape = g.ty(indices)?.shape.clone();
    let mut order = g.constant(DType::I64, 0.0)?;
    order = g.broadcast(order, shape.clone())?;
    for (axis, dim) in shape.0.iter().enumerate() {
        let (count, index) = (g.dim_value(dim)?, g.iota(shape.clone(), axis, DType::I64)?);
        let scaled = g.mul(order, count)?;
        order = g.add(scaled, index)?;
    }
    let none = g.constant(DType::I64, -1.0)?;
    let none = g.broadcast(none, Shape(vec![extent.clone()]))?;
    let winners = g.scatter(none, indices, order, 0)?;
    let winner = g.gather(winners, indices, 0)?;
    g.eq(winner, order)
}

/// Each kept value's cotangent goes to where the value came from.
pub(super) fn sort(at: &mut SweptNode<'_, '_>, axis: usize, keep: &Dim, c: Var) -> Result<()> {
    if keep.as_const().is_none_or(|n| n > MAX_KEPT) {
        return Err(at.error(format!("the gradient of more than {MAX_KEPT} sorted values is not defined; keep fewer")));
    }
    let from = at.output(1)?;
    let shape = at.ty(0).shape.clone();
    let mut apart = at.node.outputs[0].shape.clone();
    apart.0.insert(axis + 1, Dim::from(1));
    let mut pairs = apart.clone();
    pairs.0[axis + 1] = shape.0[axis].clone();
    let g = at.g();
    let position = g.iota(pairs, axis + 1, DType::I32)?;
    let from = g.reshape(from, apart.clone())?;
    let hit = g.eq(from, position)?;
    let c = g.reshape(c, apart)?;
    let zero = g.constant_like(c, 0.0)?;
    let placed = g.select(hit, c, zero)?;
    let sum = g.reduce_sum(placed, axis)?;
    let dx = g.reshape(sum, shape)?;
    at.give(0, dx)
}
