//! The type of each primitive's outputs, or why its inputs are not accepted.

use super::{Binary, CollectiveKind, Prim, Unary};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::format::FormatComponent;
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;

impl Prim {
    /// Types of the outputs for `inputs`.
    ///
    /// # Errors
    /// Says which input is wrong and what would be accepted.
    pub fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.check_inputs(inputs)?;
        Ok(vec![match self {
            Self::Const(literal) => Type::tensor(
                literal.dtype,
                if literal.vector { Shape::from([literal.values.len()]) } else { Shape::default() },
            ),
            Self::Iota { shape, axis, dtype } => {
                axis_of(shape, *axis)?;
                Type::tensor(*dtype, shape.clone())
            }
            Self::Unary(op) => {
                let wanted = match op {
                    Unary::Not => inputs[0].dtype == DType::Bool,
                    Unary::Neg | Unary::Abs => inputs[0].dtype != DType::Bool,
                    _ => inputs[0].dtype.is_float(),
                };
                require(wanted, || format!("not defined on {}", inputs[0].dtype))?;
                inputs[0].clone()
            }
            Self::Binary(op) => {
                same(&inputs[0], &inputs[1])?;
                let boolean = matches!(op, Binary::And | Binary::Or);
                let wanted = match op {
                    Binary::Pow => inputs[0].dtype.is_float(),
                    _ => (inputs[0].dtype == DType::Bool) == boolean,
                };
                require(wanted, || format!("not defined on {}", inputs[0].dtype))?;
                inputs[0].clone()
            }
            Self::Compare(_) => {
                same(&inputs[0], &inputs[1])?;
                Type::tensor(DType::Bool, inputs[0].shape.clone())
            }
            Self::Select => {
                require(inputs[0].dtype == DType::Bool, || "the first input must be bool".into())?;
                same(&inputs[1], &inputs[2])?;
                same_shape(&inputs[0], &inputs[1])?;
                inputs[1].clone()
            }
            Self::Cast(dtype) => Type::tensor(*dtype, inputs[0].shape.clone()),
            Self::Reduce { axis, .. } => with_axis(&inputs[0], *axis, Dim::from(1))?,
            Self::ArgMax { axis } => Type { dtype: DType::I32, ..with_axis(&inputs[0], *axis, Dim::from(1))? },
            Self::Scan { axis, .. } => {
                axis_of(&inputs[0].shape, *axis)?;
                inputs[0].clone()
            }
            Self::MatMul { trans_a, trans_b, out } => {
                let (a, b) = (&inputs[0].shape, &inputs[1].shape);
                require(a.rank() >= 2 && a.rank() == b.rank(), || {
                    format!("operands need equal rank of 2 or more, got {a} and {b}")
                })?;
                let batch = a.rank() - 2;
                require(a.0[..batch] == b.0[..batch], || format!("batch extents of {a} and {b} differ"))?;
                let (m, ka) = ends(&a.0[batch..], *trans_a);
                let (kb, n) = ends(&b.0[batch..], *trans_b);
                require(ka == kb, || format!("inner extents {ka} and {kb} differ"))?;
                let mut dims = a.0[..batch].to_vec();
                dims.extend([m, n]);
                Type::tensor(*out, Shape(dims))
            }
            Self::Gather { axis } => picked(&inputs[0], *axis, &inputs[1])?,
            Self::Scatter { axis, .. } => {
                let rows = picked(&inputs[0], *axis, &inputs[1])?;
                require(rows == inputs[2], || format!("updates must be {rows}"))?;
                inputs[0].clone()
            }
            Self::Slice { axis, start, len } => {
                let extent = axis_of(&inputs[0].shape, *axis)?;
                if let (Some(s), Some(l), Some(e)) = (start.as_const(), len.as_const(), extent.as_const()) {
                    require(s + l <= e, || format!("slice {s}..{} of an extent of {e}", s + l))?;
                }
                with_axis(&inputs[0], *axis, len.clone())?
            }
            Self::Concat { axis } => {
                require(!inputs.is_empty(), || "needs at least one input".into())?;
                let mut total = Dim::from(0);
                for t in inputs {
                    let aligned = with_axis(t, *axis, Dim::from(1))?;
                    require(aligned == with_axis(&inputs[0], *axis, Dim::from(1))?, || {
                        format!("{t} and {} differ away from axis {axis}", inputs[0])
                    })?;
                    total = &total + &t.shape.0[*axis];
                }
                with_axis(&inputs[0], *axis, total)?
            }
            Self::Pad { axis, before, after, .. } => {
                let extent = axis_of(&inputs[0].shape, *axis)?;
                with_axis(&inputs[0], *axis, &(&extent + before) + after)?
            }
            Self::Reshape(shape) => {
                require(shape.elements() == inputs[0].shape.elements(), || {
                    format!("{shape} has another number of elements")
                })?;
                Type::tensor(inputs[0].dtype, shape.clone())
            }
            Self::Transpose(perm) => {
                let mut sorted = perm.clone();
                sorted.sort_unstable();
                require(sorted.into_iter().eq(0..inputs[0].shape.rank()), || {
                    format!("{perm:?} is not a permutation of its axes")
                })?;
                Type::tensor(inputs[0].dtype, Shape(perm.iter().map(|&a| inputs[0].shape.0[a].clone()).collect()))
            }
            Self::Broadcast(shape) => {
                let from = &inputs[0].shape;
                let fits = from.rank() <= shape.rank()
                    && from.0.iter().rev().zip(shape.0.iter().rev()).all(|(f, t)| f == t || f.is_one());
                require(fits, || format!("{from} does not broadcast to {shape}"))?;
                Type::tensor(inputs[0].dtype, shape.clone())
            }
            Self::Random { .. } => {
                for t in inputs {
                    same(t, &inputs[0])?;
                }
                require(inputs[0].dtype == DType::I64, || "keys must be i64".into())?;
                Type::tensor(DType::F32, inputs[0].shape.clone())
            }
            Self::Sort { axis, keep, .. } => {
                let values = with_axis(&inputs[0], *axis, keep.clone())?;
                return Ok(vec![values.clone(), Type { dtype: DType::I32, ..values }]);
            }
            Self::LinearRecurrence { .. } => return recurrence(inputs),
            Self::LinearRecurrenceGradient { .. } => return recurrence_gradient(inputs),
            Self::Move(_) | Self::Fetch(_) => inputs[0].clone(),
            Self::StateRead => inputs[0].plain(),
            Self::StateWrite => {
                require(inputs[1] == inputs[0].plain(), || format!("the new value must be {}", inputs[0].plain()))?;
                inputs[0].clone()
            }
            Self::Component(index) => {
                let format = inputs[0].format.as_ref().ok_or("input has no format")?;
                let components = format.components(&inputs[0].shape);
                let component = components
                    .get(*index)
                    .ok_or_else(|| format!("{} has {} components", format.name(), components.len()))?;
                component.ty()
            }
            Self::Assemble { format, dtype, shape } => {
                format.check(shape)?;
                let wanted: Vec<Type> = format.components(shape).iter().map(FormatComponent::ty).collect();
                require(inputs == wanted, || {
                    format!("the components of {} {shape} must be {wanted:?}", format.name())
                })?;
                Type::tensor(*dtype, shape.clone()).stored_as(format.clone())
            }
            Self::Collective { kind, ranks, mesh } => {
                let longer = |ty: &Type, axis: usize| with_axis(ty, axis, axis_of(&ty.shape, axis)? * *ranks as i64);
                let shorter = |ty: &Type, axis: usize| {
                    let extent = axis_of(&ty.shape, axis)?;
                    let part = extent.div_exact(*ranks as i64);
                    with_axis(
                        ty,
                        axis,
                        part.ok_or_else(|| format!("extent {extent} does not divide over {ranks} ranks"))?,
                    )
                };
                if let Some(rank) = kind.names_rank().filter(|rank| rank >= ranks) {
                    return Err(format!("there is no rank {rank} among the {ranks} of `{mesh}`"));
                }
                match *kind {
                    CollectiveKind::AllReduce
                    | CollectiveKind::Broadcast(_)
                    | CollectiveKind::Reduce(_)
                    | CollectiveKind::Send { .. } => inputs[0].clone(),
                    CollectiveKind::AllGather(axis) => longer(&inputs[0], axis)?,
                    CollectiveKind::ReduceScatter(axis) | CollectiveKind::Split(axis) => shorter(&inputs[0], axis)?,
                    CollectiveKind::AllToAll { split, concat } => longer(&shorter(&inputs[0], split)?, concat)?,
                }
            }
        }])
    }

    /// Number of inputs, and which of them may be state or stored in a format.
    fn check_inputs(&self, inputs: &[Type]) -> Result<(), Why> {
        let wanted = match self {
            Self::Const(_) | Self::Iota { .. } => 0,
            Self::Binary(_) | Self::Compare(_) | Self::MatMul { .. } | Self::Gather { .. } | Self::StateWrite => 2,
            Self::Select | Self::Scatter { .. } => 3,
            Self::Random { .. } => 4,
            Self::LinearRecurrence { low_rank } => 6 + if *low_rank { 2 } else { 0 },
            Self::LinearRecurrenceGradient { low_rank } => 8 + if *low_rank { 2 } else { 0 },
            Self::Concat { .. } | Self::Assemble { .. } => inputs.len(),
            _ => 1,
        };
        require(inputs.len() == wanted, || format!("takes {wanted} inputs, got {}", inputs.len()))?;
        for (i, ty) in inputs.iter().enumerate() {
            let wants_state = i == 0 && matches!(self, Self::StateRead | Self::StateWrite);
            let wants_format = i == 0 && matches!(self, Self::Component(_) | Self::Fetch(_));
            require(ty.state == wants_state, || {
                let (is, wants) = if ty.state { ("state", "a tensor") } else { ("a tensor", "state") };
                format!("input {i} is {is}, needs {wants}")
            })?;
            require(ty.format.is_none() || wants_format, || format!("input {i} is stored as {ty}; decode it first"))?;
        }
        Ok(())
    }
}

/// The types of `y` and the state of [`Prim::LinearRecurrence`].
fn recurrence(inputs: &[Type]) -> Result<Vec<Type>, Why> {
    let [q, k, v, decay, state, starts, low_rank @ ..] = inputs else { return Err("takes six inputs or eight".into()) };
    let floats = [("q", q, 3), ("k", k, 3), ("v", v, 3), ("log_decay", decay, 3), ("state", state, 4)];
    for (name, ty, rank) in floats.into_iter().chain(low_rank.iter().map(|ty| ("erase and write", ty, 3))) {
        require(ty.dtype == DType::F32 && ty.shape.rank() == rank, || {
            format!("{name} must be f32 of rank {rank}, got {ty}")
        })?;
    }
    let (tokens, groups, key) = (&q.shape.0[0], &q.shape.0[1], &q.shape.0[2]);
    let (heads, value) = (&v.shape.0[1], &v.shape.0[2]);
    let per_head = |width: &Dim| Type::tensor(DType::F32, [tokens, heads, width]);
    let one = Dim::from(1);
    let (Some(of_heads), Some(of_groups)) = (heads.as_const(), groups.as_const()) else {
        return Err(format!("heads must be numbers, got {heads} and {groups}"));
    };
    require(of_groups > 0 && of_heads.is_multiple_of(of_groups), || {
        format!("{of_groups} groups of q and k do not divide {of_heads} heads of v")
    })?;
    require(k == q, || format!("k must be {q} as q is, got {k}"))?;
    require(*v == per_head(value), || format!("v must have the tokens of q, got {v} beside {q}"))?;
    require(*decay == per_head(key) || *decay == per_head(&one), || {
        format!("log_decay must be {} or {}, got {decay}", per_head(key), per_head(&one))
    })?;
    for ty in low_rank {
        require(*ty == per_head(key), || format!("erase and write must be {}, got {ty}", per_head(key)))?;
    }
    let wanted = Type::tensor(DType::F32, [&state.shape.0[0], heads, key, value]);
    require(*state == wanted, || format!("state must be {wanted}, got {state}"))?;
    let rows = Type::tensor(DType::I32, Shape(vec![state.shape.0[0].clone() + 1]));
    require(*starts == rows, || format!("query_start must be {rows}, got {starts}"))?;
    Ok(vec![v.clone(), state.clone()])
}

/// The types of the cotangents of [`Prim::LinearRecurrenceGradient`].
fn recurrence_gradient(inputs: &[Type]) -> Result<Vec<Type>, Why> {
    let (forward, cotangents) = inputs.split_at(inputs.len() - 2);
    let outputs = recurrence(forward)?;
    for ((name, ty), wanted) in [("dy", &cotangents[0]), ("dstate", &cotangents[1])].into_iter().zip(&outputs) {
        require(ty == wanted, || format!("{name} must be {wanted}, got {ty}"))?;
    }
    let [q, _, v, decay, state, _, low_rank @ ..] = forward else { return Err("takes eight inputs or ten".into()) };
    let of_head = Type::tensor(DType::F32, [&v.shape.0[0], &v.shape.0[1], &q.shape.0[2]]);
    let first = [of_head.clone(), of_head, v.clone(), decay.clone(), state.clone()];
    Ok(first.into_iter().chain(low_rank.iter().cloned()).collect())
}

fn require(holds: bool, why: impl FnOnce() -> Why) -> Result<(), Why> {
    if holds { Ok(()) } else { Err(why()) }
}

fn same(a: &Type, b: &Type) -> Result<(), Why> {
    require(a == b, || format!("{a} and {b} must be the same"))
}

fn same_shape(a: &Type, b: &Type) -> Result<(), Why> {
    require(a.shape == b.shape, || format!("shapes {} and {} must be the same", a.shape, b.shape))
}

fn axis_of(shape: &Shape, axis: usize) -> Result<Dim, Why> {
    shape.0.get(axis).cloned().ok_or_else(|| format!("{shape} has no axis {axis}"))
}

fn with_axis(ty: &Type, axis: usize, extent: Dim) -> Result<Type, Why> {
    axis_of(&ty.shape, axis)?;
    let mut dims = ty.shape.0.clone();
    dims[axis] = extent;
    Ok(Type::tensor(ty.dtype, Shape(dims)))
}

/// `data` with its `axis` replaced by the axes of `indices`.
fn picked(data: &Type, axis: usize, indices: &Type) -> Result<Type, Why> {
    require(matches!(indices.dtype, DType::I32 | DType::I64), || format!("indices must be i32 or i64, got {indices}"))?;
    axis_of(&data.shape, axis)?;
    let mut dims = data.shape.0.clone();
    dims.splice(axis..=axis, indices.shape.0.iter().cloned());
    Ok(Type::tensor(data.dtype, Shape(dims)))
}

/// The two extents of a matrix, outer first, after an optional transposition.
fn ends(matrix: &[Dim], transposed: bool) -> (Dim, Dim) {
    let (rows, cols) = (matrix[0].clone(), matrix[1].clone());
    if transposed { (cols, rows) } else { (rows, cols) }
}
