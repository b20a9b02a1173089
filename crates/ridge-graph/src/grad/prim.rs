//! The gradient of each primitive: cotangents of its outputs to cotangents of its inputs.

use super::sweep::SweptNode;
use super::{recurrence, rows};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Var};
use crate::prim::{Binary, Combine, Prim, Unary};
use crate::shape::Shape;

/// Gives the inputs of a primitive their cotangents, from those of its outputs.
pub(super) fn backward(at: &mut SweptNode<'_, '_>, prim: &Prim, cotangents: &[Option<Var>]) -> Result<()> {
    if !(0..at.node.inputs.len()).any(|i| at.wants(i)) {
        return Ok(());
    }
    if let Prim::LinearRecurrence { low_rank } = prim {
        return recurrence::backward(at, *low_rank, cotangents);
    }
    // Of the others only a sort has more outputs than one, and the second of those is an integer.
    let Some(c) = cotangents[0] else { return Ok(()) };
    match prim {
        Prim::Unary(op) => unary(at, *op, c),
        Prim::Binary(op) => binary(at, *op, c),
        Prim::Select => {
            let zero = at.g().full_like(c, 0.0)?;
            let cond = at.input(0)?;
            if at.wants(1) {
                let da = at.g().select(cond, c, zero)?;
                at.give(1, da)?;
            }
            if at.wants(2) {
                let db = at.g().select(cond, zero, c)?;
                at.give(2, db)?;
            }
            Ok(())
        }
        Prim::Cast(_) => {
            let dtype = at.ty(0).dtype;
            let dx = at.g().cast(c, dtype)?;
            at.give(0, dx)
        }
        Prim::Reduce { op, axis } => reduce(at, *op, *axis, c),
        Prim::Scan { op: Combine::Sum, axis } => {
            let dx = rows::reverse_scan_sum(at.g(), c, *axis)?;
            at.give(0, dx)
        }
        Prim::MatMul { trans_a, trans_b, .. } => matmul(at, *trans_a, *trans_b, c),
        Prim::Gather { axis } => rows::gather(at, *axis, c),
        Prim::Scatter { axis, add } => rows::scatter(at, *axis, *add, c),
        Prim::Sort { axis, keep, .. } => rows::sort(at, *axis, keep, c),
        Prim::Slice { axis, start, len } => {
            let extent = at.ty(0).shape.0[*axis].clone();
            let after = &(&extent - start) - len;
            let dx = at.g().pad(c, *axis, start, after, 0.0)?;
            at.give(0, dx)
        }
        Prim::Concat { axis } => {
            let mut start = Dim::from(0);
            for i in 0..at.node.inputs.len() {
                let len = at.ty(i).shape.0[*axis].clone();
                if at.wants(i) {
                    let dx = at.g().slice(c, *axis, &start, &len)?;
                    at.give(i, dx)?;
                }
                start = &start + &len;
            }
            Ok(())
        }
        Prim::Pad { axis, before, .. } => {
            let extent = at.ty(0).shape.0[*axis].clone();
            let dx = at.g().slice(c, *axis, before, extent)?;
            at.give(0, dx)
        }
        Prim::Reshape(_) => {
            let shape = at.ty(0).shape.clone();
            let dx = at.g().reshape(c, shape)?;
            at.give(0, dx)
        }
        Prim::Transpose(perm) => {
            let mut inverse = vec![0; perm.len()];
            perm.iter().enumerate().for_each(|(to, from)| inverse[*from] = to);
            let dx = at.g().transpose(c, &inverse)?;
            at.give(0, dx)
        }
        Prim::Broadcast(_) => {
            let shape = at.ty(0).shape.clone();
            let dx = sum_to(at.g(), c, &shape)?;
            at.give(0, dx)
        }
        // A cotangent is used at once.
        Prim::StateRead | Prim::Move(_) | Prim::Fetch(_) => at.give(0, c),
        // The old version is replaced whole.
        Prim::StateWrite => at.give(1, c),
        Prim::LinearRecurrence { .. } | Prim::LinearRecurrenceGradient { .. } => {
            Err(at.error("the gradient of the gradient of a linear recurrence is not defined"))
        }
        Prim::Scan { .. } => Err(at.error("the gradient of a running maximum or minimum is not defined")),
        Prim::Collective { kind, mesh, ranks } => {
            let Some(kind) = kind.transpose() else {
                return Err(at.error(
                    "how the gradient of a slice of what every rank has is shared among them is not known; shard after \
                     differentiating",
                ));
            };
            let dx = at.g().prim(Prim::Collective { kind, mesh: mesh.clone(), ranks: *ranks }, &[c])?[0];
            at.give(0, dx)
        }
        // No floating-point inputs, or outputs that do not vary smoothly with them.
        Prim::Const(_)
        | Prim::Iota { .. }
        | Prim::Compare(_)
        | Prim::ArgMax { .. }
        | Prim::Random { .. }
        | Prim::Component(_)
        | Prim::Assemble { .. } => Ok(()),
    }
}

fn unary(at: &mut SweptNode<'_, '_>, op: Unary, c: Var) -> Result<()> {
    let dx = match op {
        Unary::Neg => at.g().neg(c)?,
        Unary::Abs => {
            let x = at.input(0)?;
            let g = at.g();
            let zero = g.constant_like(x, 0.0)?;
            let (above, below, minus) = (g.gt(x, zero)?, g.lt(x, zero)?, g.neg(c)?);
            let otherwise = g.select(below, minus, zero)?;
            g.select(above, c, otherwise)?
        }
        Unary::Exp => {
            let y = at.output(0)?;
            at.g().mul(c, y)?
        }
        Unary::Log => {
            let x = at.input(0)?;
            at.g().div(c, x)?
        }
        Unary::Sqrt => {
            let y = at.output(0)?;
            let half = scaled(at.g(), c, 0.5)?;
            at.g().div(half, y)?
        }
        Unary::Rsqrt => {
            let y = at.output(0)?;
            let g = at.g();
            let square = g.mul(y, y)?;
            let cube = g.mul(square, y)?;
            let half = scaled(g, c, -0.5)?;
            g.mul(half, cube)?
        }
        Unary::Sin => {
            let x = at.input(0)?;
            let cos = at.g().cos(x)?;
            at.g().mul(c, cos)?
        }
        Unary::Cos => {
            let x = at.input(0)?;
            let sin = at.g().sin(x)?;
            let minus = at.g().neg(c)?;
            at.g().mul(minus, sin)?
        }
        Unary::Tanh => {
            let y = at.output(0)?;
            let g = at.g();
            let square = g.mul(y, y)?;
            let one = g.constant_like(y, 1.0)?;
            let slope = g.sub(one, square)?;
            g.mul(c, slope)?
        }
        Unary::Erf => {
            let x = at.input(0)?;
            let g = at.g();
            let square = g.mul(x, x)?;
            let minus = g.neg(square)?;
            let bell = g.exp(minus)?;
            let slope = scaled(g, bell, std::f64::consts::FRAC_2_SQRT_PI)?;
            g.mul(c, slope)?
        }
        Unary::Sigmoid => {
            let y = at.output(0)?;
            let g = at.g();
            let one = g.constant_like(y, 1.0)?;
            let rest = g.sub(one, y)?;
            let slope = g.mul(y, rest)?;
            g.mul(c, slope)?
        }
        Unary::Floor | Unary::Not => return Ok(()),
    };
    at.give(0, dx)
}

fn binary(at: &mut SweptNode<'_, '_>, op: Binary, c: Var) -> Result<()> {
    match op {
        Binary::Add => {
            at.give(0, c)?;
            at.give(1, c)
        }
        Binary::Sub => {
            at.give(0, c)?;
            if at.wants(1) {
                let minus = at.g().neg(c)?;
                at.give(1, minus)?;
            }
            Ok(())
        }
        Binary::Mul => {
            for (i, other) in [(0, 1), (1, 0)] {
                if at.wants(i) {
                    let factor = at.input(other)?;
                    let d = at.g().mul(c, factor)?;
                    at.give(i, d)?;
                }
            }
            Ok(())
        }
        Binary::Div => {
            let b = at.input(1)?;
            let da = at.g().div(c, b)?;
            at.give(0, da)?;
            if at.wants(1) {
                let y = at.output(0)?;
                let down = at.g().mul(da, y)?;
                let db = at.g().neg(down)?;
                at.give(1, db)?;
            }
            Ok(())
        }
        Binary::Rem => {
            at.give(0, c)?;
            if at.wants(1) {
                let (a, b, y) = (at.input(0)?, at.input(1)?, at.output(0)?);
                let g = at.g();
                // a = b * n + y, with n constant between the jumps.
                let whole = g.sub(y, a)?;
                let minus_n = g.div(whole, b)?;
                let db = g.mul(c, minus_n)?;
                at.give(1, db)?;
            }
            Ok(())
        }
        Binary::Pow => pow(at, c),
        Binary::Max | Binary::Min => {
            let (a, b) = (at.input(0)?, at.input(1)?);
            let g = at.g();
            let first = if op == Binary::Max { g.ge(a, b)? } else { g.le(a, b)? };
            let zero = g.full_like(c, 0.0)?;
            let (da, db) = (g.select(first, c, zero)?, g.select(first, zero, c)?);
            at.give(0, da)?;
            at.give(1, db)
        }
        Binary::And | Binary::Or => Ok(()),
    }
}

fn pow(at: &mut SweptNode<'_, '_>, c: Var) -> Result<()> {
    let (a, b) = (at.input(0)?, at.input(1)?);
    if at.wants(0) {
        let g = at.g();
        let (zero, one) = (g.full_like(b, 0.0)?, g.constant_like(b, 1.0)?);
        let less = g.sub(b, one)?;
        let power = g.pow(a, less)?;
        let slope = g.mul(b, power)?;
        // a^0 is constant, at a = 0 too.
        let flat = g.eq(b, zero)?;
        let slope = g.select(flat, zero, slope)?;
        let da = g.mul(c, slope)?;
        at.give(0, da)?;
    }
    if at.wants(1) {
        let y = at.output(0)?;
        let g = at.g();
        let (zero, one) = (g.full_like(a, 0.0)?, g.full_like(a, 1.0)?);
        // 0^b stays 0, and a negative base has no power beside the integers.
        let above = g.gt(a, zero)?;
        let safe = g.select(above, a, one)?;
        let log = g.log(safe)?;
        let slope = g.mul(y, log)?;
        let db = g.mul(c, slope)?;
        at.give(1, db)?;
    }
    Ok(())
}

fn reduce(at: &mut SweptNode<'_, '_>, op: Combine, axis: usize, c: Var) -> Result<()> {
    let shape = at.ty(0).shape.clone();
    if op == Combine::Sum {
        let dx = at.g().broadcast(c, shape)?;
        return at.give(0, dx);
    }
    // The elements that equal the result share alike.
    let (x, y) = (at.input(0)?, at.output(0)?);
    let dtype = at.ty(0).dtype;
    let g = at.g();
    let chosen = g.eq(x, y)?;
    let ones = g.cast(chosen, DType::F32)?;
    let count = g.reduce_sum(ones, axis)?;
    let wide = g.cast(c, DType::F32)?;
    let share = g.div(wide, count)?;
    let share = g.cast(share, dtype)?;
    let zero = g.constant_like(share, 0.0)?;
    let dx = g.select(chosen, share, zero)?;
    at.give(0, dx)
}

fn matmul(at: &mut SweptNode<'_, '_>, trans_a: bool, trans_b: bool, c: Var) -> Result<()> {
    let (ta, tb) = (at.ty(0).dtype, at.ty(1).dtype);
    if at.wants(0) {
        let b = at.input(1)?;
        let (c, b) = operands(at.g(), c, b)?;
        // With A and B as multiplied, dA = C B'; of a transposed A it is B C'.
        let da =
            if trans_a { at.g().matmul(b, c, trans_b, true, ta)? } else { at.g().matmul(c, b, false, !trans_b, ta)? };
        at.give(0, da)?;
    }
    if at.wants(1) {
        let a = at.input(0)?;
        let (c, a) = operands(at.g(), c, a)?;
        // dB = A' C; of a transposed B it is C' A.
        let db =
            if trans_b { at.g().matmul(c, a, true, trans_a, tb)? } else { at.g().matmul(a, c, !trans_a, false, tb)? };
        at.give(1, db)?;
    }
    Ok(())
}

/// A cotangent and the operand that it is multiplied by, in one dtype: the operand's, so that a product of narrow
/// tensors has a gradient of narrow products. 8-bit floats, too coarse for a cotangent, are widened.
fn operands(g: &mut Builder, c: Var, operand: Var) -> Result<(Var, Var)> {
    let dtype = match g.ty(operand)?.dtype {
        DType::F8E4M3 | DType::F8E5M2 => DType::BF16,
        dtype => dtype,
    };
    Ok((g.cast(c, dtype)?, g.cast(operand, dtype)?))
}

fn scaled(g: &mut Builder, x: Var, by: f64) -> Result<Var> {
    let by = g.constant_like(x, by)?;
    g.mul(x, by)
}

/// `x` summed to `shape`, which broadcasts to the shape of `x`. Sums of narrow floats are rounded once.
fn sum_to(g: &mut Builder, x: Var, shape: &Shape) -> Result<Var> {
    let ty = g.ty(x)?.clone();
    let missing = ty.shape.rank() - shape.rank();
    let stretched = |axis: &usize| *axis < missing || shape.0[axis - missing] != ty.shape.0[*axis];
    let mut sum = g.cast(x, DType::F32)?;
    for axis in (0..ty.shape.rank()).filter(stretched) {
        sum = g.reduce_sum(sum, axis)?;
    }
    let sum = g.cast(sum, ty.dtype)?;
    g.reshape(sum, shape.clone())
}
