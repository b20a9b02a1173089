//! Dispatch of one primitive on one rank to its loop.

use super::elements::{as_given, settle, to_int};
use super::precision::Precision;
use super::{elementwise, matmul, order, philox, recurrence, reduce, rows, views};
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::prim::Prim;
use crate::tensor::{Data, Tensor, Value};
use crate::why::Why;

/// The outputs of `prim`, whose shapes are `shapes`.
pub(super) fn apply(
    prim: &Prim,
    inputs: &[&Value],
    shapes: &[Vec<usize>],
    bindings: &Bindings,
    precision: Precision,
) -> Result<Vec<Tensor>, Why> {
    let number = |dim: &crate::Dim| dim.eval(bindings).map_err(|e| e.to_string());
    if let Prim::Component(index) = prim {
        return match inputs[0] {
            Value::Stored { components, .. } => Ok(vec![components[*index].clone()]),
            Value::Plain(_) => Err("the value given is plain".into()),
        };
    }
    let tensors = inputs
        .iter()
        .map(|value| match value {
            Value::Plain(tensor) => Ok(tensor),
            Value::Stored { format, .. } => Err(format!("the value given is stored as {}", format.name())),
        })
        .collect::<Result<Vec<&Tensor>, Why>>()?;
    let shape = &shapes[0];
    let output = match prim {
        Prim::Const(literal) => {
            let data = if literal.dtype.is_float() {
                Data::Float(literal.values.to_vec())
            } else {
                Data::Int(literal.values.iter().map(|v| to_int(literal.dtype, *v)).collect())
            };
            settle(literal.dtype, shape, data, precision)?
        }
        Prim::Iota { axis, dtype, .. } => settle(*dtype, shape, views::iota(shape, *axis, *dtype), precision)?,
        Prim::Unary(op) => settle(tensors[0].dtype, shape, elementwise::unary(*op, tensors[0], precision), precision)?,
        Prim::Binary(op) => {
            let data = elementwise::binary(*op, tensors[0], tensors[1])?;
            settle(tensors[0].dtype, shape, data, precision)?
        }
        Prim::Compare(op) => settle(DType::Bool, shape, elementwise::compare(*op, tensors[0], tensors[1])?, precision)?,
        Prim::Select => {
            let data = elementwise::select(tensors[0], tensors[1], tensors[2])?;
            as_given(tensors[1].dtype, shape, data)?
        }
        Prim::Cast(dtype) => settle(*dtype, shape, cast(&tensors[0].data, *dtype), precision)?,
        Prim::Reduce { op, axis } => {
            settle(tensors[0].dtype, shape, reduce::reduce(*op, tensors[0], *axis, precision), precision)?
        }
        Prim::Scan { op, axis } => {
            settle(tensors[0].dtype, shape, reduce::scan(*op, tensors[0], *axis, precision), precision)?
        }
        Prim::ArgMax { axis } => as_given(DType::I32, shape, order::argmax(tensors[0], *axis))?,
        Prim::MatMul { trans_a, trans_b, out } => {
            let product = matmul::matmul(tensors[0], tensors[1], *trans_a, *trans_b, precision)?;
            settle(*out, shape, cast(&product, *out), precision)?
        }
        Prim::Gather { axis } => as_given(tensors[0].dtype, shape, rows::gather(tensors[0], tensors[1], *axis))?,
        Prim::Scatter { axis, add } => {
            let data = rows::scatter(tensors[0], tensors[1], tensors[2], *axis, *add, precision);
            let settle = if *add { settle } else { |d, s: &[usize], v, _| as_given(d, s, v) };
            settle(tensors[0].dtype, shape, data, precision)?
        }
        Prim::Slice { axis, start, .. } => {
            let (start, len, extent) = (number(start)?, shape[*axis], tensors[0].shape[*axis]);
            if start + len > extent {
                return Err(format!("slice {start}..{} of an extent of {extent}", start + len));
            }
            as_given(tensors[0].dtype, shape, rows::slice(tensors[0], *axis, start, len))?
        }
        Prim::Concat { axis } => as_given(tensors[0].dtype, shape, rows::concat(&tensors, *axis))?,
        Prim::Pad { axis, before, value, .. } => {
            let data = rows::pad(tensors[0], *axis, number(before)?, shape[*axis], *value);
            settle(tensors[0].dtype, shape, data, precision)?
        }
        Prim::Reshape(_) => as_given(tensors[0].dtype, shape, tensors[0].data.clone())?,
        Prim::Transpose(perm) => as_given(tensors[0].dtype, shape, views::transpose(tensors[0], perm))?,
        Prim::Broadcast(_) => as_given(tensors[0].dtype, shape, views::broadcast(tensors[0], shape))?,
        Prim::Random { stream } => {
            let [seed, sequence, position, index] = [0, 1, 2, 3].map(|i: usize| tensors[i].ints());
            let at = |i| f64::from(philox::uniform(seed[i], *stream, sequence[i], position[i], index[i]));
            as_given(DType::F32, shape, Data::Float((0..seed.len()).map(at).collect()))?
        }
        Prim::Sort { axis, descending, .. } => {
            let (keep, extent) = (shape[*axis], tensors[0].shape[*axis]);
            if keep > extent {
                return Err(format!("keeps {keep} of an extent of {extent}"));
            }
            let (values, indices) = order::sort(tensors[0], *axis, *descending, keep);
            let values = as_given(tensors[0].dtype, shape, values)?;
            return Ok(vec![values, as_given(DType::I32, shape, indices)?]);
        }
        Prim::LinearRecurrence { .. } => {
            let [y, state] = recurrence::run(&tensors, precision)?;
            let y = as_given(DType::F32, shape, y)?;
            return Ok(vec![y, as_given(DType::F32, &shapes[1], state)?]);
        }
        Prim::LinearRecurrenceGradient { .. } => {
            let all = recurrence::gradient(&tensors, precision)?;
            return all.into_iter().zip(shapes).map(|(data, shape)| as_given(DType::F32, shape, data)).collect();
        }
        Prim::StateRead | Prim::Move(_) => tensors[0].clone(),
        Prim::StateWrite => tensors[1].clone(),
        Prim::Component(_) | Prim::Assemble { .. } | Prim::Fetch(_) | Prim::Collective { .. } => {
            return Err("is not a loop over one rank's tensors".into());
        }
    };
    Ok(vec![output])
}

/// Elements as another dtype, floats unrounded.
fn cast(data: &Data, dtype: DType) -> Data {
    match (data, dtype.is_float()) {
        (Data::Float(v), true) => Data::Float(v.clone()),
        (Data::Float(v), false) => Data::Int(v.iter().map(|x| to_int(dtype, *x)).collect()),
        (Data::Int(v), true) => Data::Float(v.iter().map(|x| *x as f64).collect()),
        (Data::Int(v), false) => Data::Int(v.clone()),
    }
}
