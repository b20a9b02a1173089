//! Shapes, formats and attributes of one rank's share.

use super::placement::{MeshAxis, Placement, ShardingRule};
use crate::dim::Dim;
use crate::format::FormatRef;
use crate::graph::Op;
use crate::prim::Prim;
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;

/// The type of one rank's share of a value of type `ty`.
pub(super) fn local_type(ty: &Type, placement: Placement, axis: &MeshAxis) -> Result<Type, Why> {
    let Placement::Shard { dim, multiple } = placement else { return Ok(ty.clone()) };
    let (name, ranks) = (&axis.name, axis.ranks);
    let Some(extent) = ty.shape.0.get(dim) else {
        return Err(format!("{ty} has no axis {dim} to cut over the {ranks} ranks of `{name}`"));
    };
    // What must stay together: the placement's unit, and the format's.
    let granule = ty.format.as_ref().map_or(1, |f| f.granularity(ty.shape.rank())[dim]);
    let unit = multiple / gcd(multiple, granule) * granule;
    let share =
        share(extent, unit, ranks).ok_or_else(|| does_not_divide(ty, dim, extent, (multiple, granule), axis))?;
    let mut dims = ty.shape.0.clone();
    dims[dim] = share;
    let local = ty.with_shape(Shape(dims));
    if let Some(format) = &local.format {
        format.check(&local.shape).map_err(|why| format!("a share of one of {ranks} ranks of `{name}`: {why}"))?;
    }
    Ok(local)
}

fn does_not_divide(ty: &Type, dim: usize, extent: &Dim, units: (usize, usize), axis: &MeshAxis) -> Why {
    let (multiple, granule) = units;
    let unit = multiple / gcd(multiple, granule) * granule;
    let (name, ranks) = (&axis.name, axis.ranks);
    let kept = if granule > 1 { format!(", since its format keeps {granule} together") } else { String::new() };
    let Some(n) = extent.as_const() else {
        let such = extent.clone() * (ranks * unit) as i64;
        return format!(
            "{ty}: axis {dim} does not cut over {ranks} ranks of `{name}` in multiples of {unit}{kept}, whatever its \
             symbols are; state its extent as a multiple, such as {such}, or replicate it"
        );
    };
    if unit == 0 || n % unit != 0 {
        return format!("{ty}: axis {dim} is not a multiple of {unit}{kept}, so it cannot be cut; replicate it");
    }
    let many = |n: usize, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
    let fits = match n / unit {
        1 => "replicate it".into(),
        pieces => format!("take a number of ranks that divides {pieces}, or replicate it"),
    };
    let (pieces, size) = (many(n / unit, "piece"), many(unit, "element"));
    format!("{ty}: axis {dim} is {pieces} of {size}{kept}, too few or uneven for {ranks} ranks of `{name}`; {fits}")
}

/// One of `ranks` equal parts of `extent`, if there are such parts and each is a multiple of `multiple`.
pub(super) fn share(extent: &Dim, multiple: usize, ranks: usize) -> Option<Dim> {
    let share = extent.div_exact(i64::try_from(ranks).ok()?)?;
    share.div_exact(i64::try_from(multiple).ok()?).map(|_| share)
}

/// `shape` with axis `dim` cut.
fn local_shape(shape: &Shape, dim: usize, ranks: usize) -> Option<Shape> {
    let mut dims = shape.0.clone();
    dims[dim] = share(dims.get(dim)?, 1, ranks)?;
    Some(Shape(dims))
}

/// How component `index` is placed where `shape`, stored in `format`, is cut along `dim` over `ranks` ranks; `None` where
/// the format does not cut so.
pub fn component_place(format: &FormatRef, shape: &Shape, dim: usize, ranks: usize, index: usize) -> Option<Placement> {
    let granule = *format.granularity(shape.rank()).get(dim)?;
    share(&shape.0[dim], granule, ranks)?;
    let part = local_shape(shape, dim, ranks)?;
    let (whole, part) = (format.components(shape), format.components(&part));
    let (whole, part) = (&whole.get(index)?.shape, &part.get(index)?.shape);
    let changed: Vec<usize> = (0..whole.rank().min(part.rank())).filter(|i| whole.0[*i] != part.0[*i]).collect();
    match changed[..] {
        [] => Some(Placement::Replicate),
        [axis] => (part.0[axis] == share(&whole.0[axis], 1, ranks)?).then_some(Placement::shard(axis)),
        _ => None,
    }
}

/// `op` for one rank's share under `rule`; `None` where its attributes cannot be cut so.
pub(super) fn local_op(op: &Op, rule: &ShardingRule, ranks: usize) -> Option<Op> {
    let cut = match rule.outputs.first() {
        Some(Placement::Shard { dim, .. }) => Some(*dim),
        _ => None,
    };
    Some(match (op, cut) {
        (Op::Prim(prim), Some(dim)) => Op::Prim(match prim {
            Prim::Reshape(shape) => Prim::Reshape(local_shape(shape, dim, ranks)?),
            Prim::Broadcast(shape) => Prim::Broadcast(local_shape(shape, dim, ranks)?),
            Prim::Iota { shape, axis, dtype } => {
                Prim::Iota { shape: local_shape(shape, dim, ranks)?, axis: *axis, dtype: *dtype }
            }
            Prim::Assemble { format, dtype, shape } => {
                Prim::Assemble { format: format.clone(), dtype: *dtype, shape: local_shape(shape, dim, ranks)? }
            }
            // Only the whole axis: see the rules.
            Prim::Slice { axis, start, len } if *axis == dim => {
                Prim::Slice { axis: *axis, start: start.clone(), len: share(len, 1, ranks)? }
            }
            _ => prim.clone(),
        }),
        _ => op.clone(),
    })
}

/// The greatest common divisor; `a` for `b` of 0.
pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
