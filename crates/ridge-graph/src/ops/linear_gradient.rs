//! The gradient of a linear, as products of its own: training spends two thirds of its time in them.

use super::require::{flat, takes, want, want_weight};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;

/// Gradient of [`Linear`](super::Linear), from the ops below.
///
/// `x`: `[.., K]`, `w`: `[N, K]`, `bias`: `[N]` if there is one, as there; `dy`: `[.., N]` of the logical dtype of `x`.
/// Gives the cotangents of x, w and the bias, plain, of their logical dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearBackward {
    /// Is there a bias?
    pub bias: bool,
}

/// `dy w`, summed in f32 at least and rounded once: the cotangent of the input of a linear.
///
/// `dy`: `[.., N]` of any float dtype, `w`: `[N, K]` of any float dtype or stored in a format; gives `[.., K]` of the dtype
/// of `dy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearInputGradient;

/// `dy^T x` over all rows, summed in f32 at least and rounded once: the cotangent of the weight of a linear.
///
/// `dy`: `[.., N]` of any float dtype, `x`: `[.., K]` of as many rows, of any float dtype or in a format; gives `[N, K]` of
/// `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearWeightGradient {
    /// Of the result.
    pub dtype: DType,
}

/// The sum of all rows, in f32 and rounded once: the cotangent of a bias.
///
/// `x`: `[.., N]` of any float dtype; gives `[N]` of `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumRows {
    /// Of the result.
    pub dtype: DType,
}

/// A float value of one axis or more, plain or in a format.
fn want_rows(name: &str, ty: &Type) -> Result<(), Why> {
    if !ty.dtype.is_float() || ty.state || ty.shape.rank() == 0 {
        return Err(format!("{name} must be a float tensor of one axis or more, got {ty}"));
    }
    flat(&ty.shape.0[..ty.shape.rank() - 1]).map(|_| ()).map_err(|why| format!("{name} {ty}: {why}"))
}

fn leading(ty: &Type) -> &[crate::Dim] {
    &ty.shape.0[..ty.shape.rank() - 1]
}

/// `x` as f32 `[rows, last]`.
fn matrix(g: &mut Builder, x: Var) -> Result<Var> {
    let ty = g.ty(x)?.clone();
    let rows = flat(leading(&ty)).map_err(|why| GraphError::usage(g.scope(), why))?;
    let x = g.dequantize(x)?;
    let x = g.cast(x, DType::F32)?;
    g.reshape(x, Shape(vec![rows, ty.shape.last()]))
}

fn with_last(shape: &Shape, last: crate::Dim) -> Shape {
    let mut shape = shape.clone();
    if let Some(end) = shape.0.last_mut() {
        *end = last;
    }
    shape
}

/// Cost of a product whose result's elements sum `terms` terms.
fn product(inputs: &[Type], outputs: &[Type], terms: &Poly) -> Cost {
    Cost { matrix_flops: &outputs[0].shape.elements() * &(terms.clone() * 2), ..Cost::moving(inputs, outputs) }
}

impl Composite for LinearBackward {
    fn name(&self) -> &'static str {
        "linear_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let (x, w, bias, dy) = match (inputs, self.bias) {
            ([x, w, dy], false) => (x, w, None, dy),
            ([x, w, bias, dy], true) => (x, w, Some(bias), dy),
            (_, false) => return Err(takes("x, w and dy", inputs)),
            (_, true) => return Err(takes("x, w, bias and dy", inputs)),
        };
        want_rows("x", x)?;
        want_weight("w", w, 2, "[out, in]")?;
        if w.shape.0[1] != x.shape.last() {
            return Err(format!("w must be [out, {}] to follow x, got {w}", x.shape.last()));
        }
        want("dy", dy, x.dtype, with_last(&x.shape, w.shape.0[0].clone()))?;
        if let Some(bias) = bias {
            want("bias", bias, bias.dtype, [&w.shape.0[0]])?;
        }
        Ok([x, w].into_iter().chain(bias).map(Type::plain).collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dy = inputs[inputs.len() - 1];
        let dx = g.composite(LinearInputGradient, &[dy, inputs[1]])?[0];
        let dx = g.cast(dx, g.ty(inputs[0])?.dtype)?;
        let dtype = g.ty(inputs[1])?.dtype;
        let dw = g.composite(LinearWeightGradient { dtype }, &[dy, inputs[0]])?[0];
        let mut all = vec![dx, dw];
        if self.bias {
            let dtype = g.ty(inputs[2])?.dtype;
            all.push(g.composite(SumRows { dtype }, &[dy])?[0]);
        }
        Ok(all)
    }

    fn is_shorthand(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let products = inputs[0].shape.elements() * 4;
        let mut cost = Cost::moving(inputs, outputs);
        cost.matrix_flops += &(&products * &Poly::from(&inputs[1].shape.0[0]));
        if self.bias {
            cost.vector_flops += &inputs[inputs.len() - 1].shape.elements();
        }
        cost
    }

    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }
}

impl Composite for LinearInputGradient {
    fn name(&self) -> &'static str {
        "linear_input_gradient"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [dy, w] = inputs else { return Err(takes("dy and w", inputs)) };
        want_rows("dy", dy)?;
        want_weight("w", w, 2, "[out, in]")?;
        if w.shape.0[0] != dy.shape.last() || !dy.is_plain() {
            return Err(format!("w must be [{}, in] to follow a plain dy {dy}, got {w}", dy.shape.last()));
        }
        Ok(vec![Type::tensor(dy.dtype, with_last(&dy.shape, w.shape.0[1].clone()))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let dy = matrix(g, inputs[0])?;
        let w = g.decoded(inputs[1], DType::F32)?;
        let shape = with_last(&ty.shape, g.ty(w)?.shape.last());
        let dx = g.matmul(dy, w, false, false, DType::F32)?;
        let dx = g.cast(dx, ty.dtype)?;
        Ok(vec![g.reshape(dx, shape)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        product(inputs, outputs, &Poly::from(&inputs[1].shape.0[0]))
    }

    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (rank, whole, cut) = (inputs[0].shape.rank(), Placement::Replicate, Placement::shard);
        let rule = |dy, w, dx| ShardingRule { inputs: vec![dy, w], outputs: vec![dx] };
        let mut rules = vec![rule(cut(rank - 1), cut(0), Placement::Partial), rule(whole, cut(1), cut(rank - 1))];
        rules.extend((0..rank - 1).map(|axis| rule(cut(axis), whole, cut(axis))));
        rules
    }
}

impl Composite for LinearWeightGradient {
    fn name(&self) -> &'static str {
        "linear_weight_gradient"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [dy, x] = inputs else { return Err(takes("dy and x", inputs)) };
        want_rows("dy", dy)?;
        want_rows("x", x)?;
        if leading(dy) != leading(x) || !dy.is_plain() {
            return Err(format!("x must have the rows of a plain dy {dy}, got {x}"));
        }
        if !self.dtype.is_float() {
            return Err(format!("the result's dtype must be float, got {}", self.dtype));
        }
        Ok(vec![Type::tensor(self.dtype, Shape(vec![dy.shape.last(), x.shape.last()]))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (dy, x) = (matrix(g, inputs[0])?, matrix(g, inputs[1])?);
        let dw = g.matmul(dy, x, true, false, DType::F32)?;
        Ok(vec![g.cast(dw, self.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let rows = Shape(leading(&inputs[0]).to_vec());
        product(inputs, outputs, &rows.elements())
    }

    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (rank, whole, cut) = (inputs[0].shape.rank(), Placement::Replicate, Placement::shard);
        let rule = |dy, x, dw| ShardingRule { inputs: vec![dy, x], outputs: vec![dw] };
        let mut rules = vec![rule(cut(rank - 1), whole, cut(0)), rule(whole, cut(rank - 1), cut(1))];
        rules.extend((0..rank - 1).map(|axis| rule(cut(axis), cut(axis), Placement::Partial)));
        rules
    }
}

impl Composite for SumRows {
    fn name(&self) -> &'static str {
        "sum_rows"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x] = inputs else { return Err(takes("x", inputs)) };
        want_rows("x", x)?;
        if !x.is_plain() || !self.dtype.is_float() {
            return Err(format!("x must be plain and the result's dtype float, got {x} and {}", self.dtype));
        }
        Ok(vec![Type::tensor(self.dtype, Shape(vec![x.shape.last()]))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let x = matrix(g, inputs[0])?;
        let last = g.ty(x)?.shape.last();
        let sum = g.reduce_sum(x, 0)?;
        let sum = g.reshape(sum, Shape(vec![last]))?;
        Ok(vec![g.cast(sum, self.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements(), ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (rank, cut) = (inputs[0].shape.rank(), Placement::shard);
        let rule = |x, y| ShardingRule { inputs: vec![x], outputs: vec![y] };
        let mut rules = vec![rule(cut(rank - 1), cut(0))];
        rules.extend((0..rank - 1).map(|axis| rule(cut(axis), Placement::Partial)));
        rules
    }
}

/// Rows, K and N of instances.
const CASES: [(&[usize], usize, usize); 9] = [
    (&[0], 8, 5),
    (&[1], 1, 1),
    (&[3], 0, 2),
    (&[], 7, 3),
    (&[5], 33, 17),
    (&[2, 3], 64, 40),
    (&[65], 130, 70),
    (&[230], 13, 35),
    (&[3], 40, 300),
];

fn rows(leading: &[usize], last: usize) -> Vec<usize> {
    [leading, &[last]].concat()
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |(i, (leading, k, n)): (usize, (&[usize], usize, usize))| {
        let bias = i % 2 == 1;
        let sample = Sample::new(LinearBackward { bias });
        let sample = sample.input(rng.normal(dtype, &rows(leading, k))).input(rng.normal(dtype, &[n, k]));
        let sample = if bias { sample.input(rng.normal(DType::F32, &[n])) } else { sample };
        sample.input(rng.normal(dtype, &rows(leading, n)))
    };
    CASES.into_iter().enumerate().map(sample).collect()
}

pub(super) fn samples_input(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases = CASES.into_iter().chain([(&[9][..], 50, 20)]).enumerate();
    let sample = |(i, (leading, k, n)): (usize, (&[usize], usize, usize))| {
        let weight = if i == CASES.len() { DType::BF16 } else { dtype };
        let sample = Sample::new(LinearInputGradient).input(rng.normal(dtype, &rows(leading, n)));
        sample.input(rng.normal(weight, &[n, k]))
    };
    cases.map(sample).collect()
}

pub(super) fn samples_weight(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases = CASES.into_iter().chain([(&[9][..], 50, 20), (&[1030][..], 40, 20)]).enumerate();
    let sample = |(i, (leading, k, n)): (usize, (&[usize], usize, usize))| {
        let to = if i >= CASES.len() { DType::F32 } else { dtype };
        let sample = Sample::new(LinearWeightGradient { dtype: to }).input(rng.normal(dtype, &rows(leading, n)));
        sample.input(rng.normal(dtype, &rows(leading, k)))
    };
    cases.map(sample).collect()
}

pub(super) fn samples_sum(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let shapes: [&[usize]; 6] = [&[0, 3], &[7], &[1, 1], &[2, 3, 65], &[300, 33], &[17, 1000]];
    shapes.into_iter().map(|shape| Sample::new(SumRows { dtype }).input(rng.normal(dtype, shape))).collect()
}
