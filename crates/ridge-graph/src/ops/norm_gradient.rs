//! The gradients of the normalisations: what comes to the input, row by row, and what comes to the weight, over all rows.

use super::require::{takes, want, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

use super::linear_gradient::SumRows;
use super::require::flat;

/// Gradient of [`RmsNorm`](super::RmsNorm), or if `centred` of [`LayerNorm`](super::LayerNorm), from the ops below.
///
/// `x`, `weight` and if centred `bias`: the op's inputs; `dy`: of the type of `x`. Gives the cotangents of the inputs.
#[derive(Clone, Copy, Debug)]
pub struct NormBackward {
    /// As in the op.
    pub eps: f64,
    /// Is the mean taken away first, and a bias added?
    pub centred: bool,
}

/// With `n` the normalised `x` before weight and bias, `s` its scale and `g = dy * weight`:
/// `s (g - n mean(g n))`, or if `centred` `s (g - mean(g) - n mean(g n))`, over the last axis, computed in f32.
///
/// `x`: `[.., hidden]`, `weight`: `[hidden]` of any float dtype, `dy`: of the type of `x`, which the result has too.
#[derive(Clone, Copy, Debug)]
pub struct NormInputGradient {
    /// As in the op.
    pub eps: f64,
    /// Is the mean taken away first?
    pub centred: bool,
}

/// The sum over all rows of `dy` times the normalised `x` before weight and bias, in f32 and rounded once.
///
/// `x`, `dy`: `[.., hidden]` of one float type; gives `[hidden]` of `dtype`.
#[derive(Clone, Copy, Debug)]
pub struct NormWeightGradient {
    /// As in the op.
    pub eps: f64,
    /// Is the mean taken away first?
    pub centred: bool,
    /// Of the result.
    pub dtype: DType,
}

eq_by_bits!(NormBackward { eps; centred });
eq_by_bits!(NormInputGradient { eps; centred });
eq_by_bits!(NormWeightGradient { eps; centred, dtype });

/// `x` in f32, normalised, and its scale `[.., 1]`.
fn normalised(g: &mut Builder, x: Var, eps: f64, centred: bool) -> Result<(Var, Var)> {
    let ty = g.ty(x)?.clone();
    let (last, hidden) = (ty.shape.rank() - 1, ty.shape.last());
    let mut x = g.cast(x, DType::F32)?;
    if centred {
        let sum = g.reduce_sum(x, last)?;
        let mean = g.div_by_dim(sum, &hidden)?;
        x = g.sub(x, mean)?;
    }
    let square = g.mul(x, x)?;
    let sum = g.reduce_sum(square, last)?;
    let mean = g.div_by_dim(sum, &hidden)?;
    let eps = g.constant_like(mean, eps)?;
    let mean = g.add(mean, eps)?;
    let scale = g.rsqrt(mean)?;
    Ok((g.mul(x, scale)?, scale))
}

fn check_rows(x: &Type, dy: &Type) -> Result<(), Why> {
    want_float("x", x)?;
    if x.shape.rank() == 0 {
        return Err(format!("x must have an axis that is normalised, got {x}"));
    }
    want("dy", dy, x.dtype, x.shape.clone())
}

fn check_weight(name: &str, weight: &Type, x: &Type) -> Result<(), Why> {
    want_float(name, weight)?;
    want(name, weight, weight.dtype, [x.shape.last()])
}

impl Composite for NormBackward {
    fn name(&self) -> &'static str {
        if self.centred { "layer_norm_backward" } else { "rms_norm_backward" }
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let (x, weight, bias, dy) = match (inputs, self.centred) {
            ([x, weight, dy], false) => (x, weight, None, dy),
            ([x, weight, bias, dy], true) => (x, weight, Some(bias), dy),
            (_, false) => return Err(takes("x, weight and dy", inputs)),
            (_, true) => return Err(takes("x, weight, bias and dy", inputs)),
        };
        check_rows(x, dy)?;
        check_weight("weight", weight, x)?;
        bias.map_or(Ok(()), |bias| check_weight("bias", bias, x))?;
        Ok([x, weight].into_iter().chain(bias).cloned().collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (x, weight, dy) = (inputs[0], inputs[1], inputs[inputs.len() - 1]);
        let Self { eps, centred } = *self;
        let dx = g.composite(NormInputGradient { eps, centred }, &[x, weight, dy])?[0];
        let dtype = g.ty(weight)?.dtype;
        let dw = g.composite(NormWeightGradient { eps, centred, dtype }, &[x, dy])?[0];
        let mut all = vec![dx, dw];
        if centred {
            let dtype = g.ty(inputs[2])?.dtype;
            all.push(g.composite(SumRows { dtype }, &[dy])?[0]);
        }
        Ok(all)
    }

    fn is_shorthand(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 14, ..Cost::moving(inputs, outputs) }
    }
}

impl Composite for NormInputGradient {
    fn name(&self) -> &'static str {
        if self.centred { "layer_norm_input_gradient" } else { "rms_norm_input_gradient" }
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, weight, dy] = inputs else { return Err(takes("x, weight and dy", inputs)) };
        check_rows(x, dy)?;
        check_weight("weight", weight, x)?;
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let (last, hidden) = (ty.shape.rank() - 1, ty.shape.last());
        let (normed, scale) = normalised(g, inputs[0], self.eps, self.centred)?;
        let weight = g.cast(inputs[1], DType::F32)?;
        let dy = g.cast(inputs[2], DType::F32)?;
        let coming = g.mul(dy, weight)?;
        let along = g.mul(coming, normed)?;
        let along = g.reduce_sum(along, last)?;
        let along = g.div_by_dim(along, &hidden)?;
        let along = g.mul(normed, along)?;
        let mut dx = g.sub(coming, along)?;
        if self.centred {
            let sum = g.reduce_sum(coming, last)?;
            let mean = g.div_by_dim(sum, &hidden)?;
            dx = g.sub(dx, mean)?;
        }
        let dx = g.mul(dx, scale)?;
        Ok(vec![g.cast(dx, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 10, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let axes = 0..inputs[0].shape.rank().saturating_sub(1);
        let rows = |axis| {
            let cut = Placement::shard(axis);
            ShardingRule { inputs: vec![cut, Placement::Replicate, cut], outputs: vec![cut] }
        };
        axes.map(rows).collect()
    }
}

impl Composite for NormWeightGradient {
    fn name(&self) -> &'static str {
        if self.centred { "layer_norm_weight_gradient" } else { "rms_norm_weight_gradient" }
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, dy] = inputs else { return Err(takes("x and dy", inputs)) };
        check_rows(x, dy)?;
        flat(&x.shape.0[..x.shape.rank() - 1])?;
        if !self.dtype.is_float() {
            return Err(format!("the result's dtype must be float, got {}", self.dtype));
        }
        Ok(vec![Type::tensor(self.dtype, [x.shape.last()])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let (leading, last) = ty.shape.0.split_at(ty.shape.rank() - 1);
        let rows = flat(leading).map_err(|why| GraphError::usage(g.scope(), why))?;
        let (normed, _) = normalised(g, inputs[0], self.eps, self.centred)?;
        let dy = g.cast(inputs[1], DType::F32)?;
        let terms = g.mul(dy, normed)?;
        let terms = g.reshape(terms, Shape(vec![rows, last[0].clone()]))?;
        let sum = g.reduce_sum(terms, 0)?;
        let sum = g.reshape(sum, Shape(vec![last[0].clone()]))?;
        Ok(vec![g.cast(sum, self.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 6, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let axes = 0..inputs[0].shape.rank().saturating_sub(1);
        let rows = |axis| ShardingRule { inputs: vec![Placement::shard(axis); 2], outputs: vec![Placement::Partial] };
        axes.map(rows).collect()
    }
}

const SHAPES: [&[usize]; 7] = [&[0, 8], &[1, 3], &[3, 7], &[5, 64], &[2, 3, 33], &[17, 1000], &[70, 20]];

pub(super) fn samples(rng: &mut Rng, dtype: DType, centred: bool) -> Vec<Sample> {
    let weights = if centred { 2 } else { 1 };
    let sample = |shape: &[usize]| {
        let sample = Sample::new(NormBackward { eps: 1e-5, centred }).input(rng.normal(dtype, shape));
        let hidden = shape[shape.len() - 1];
        let sample = (0..weights).fold(sample, |sample, _| sample.input(rng.normal(dtype, &[hidden])));
        sample.input(rng.normal(dtype, shape))
    };
    SHAPES.into_iter().map(sample).collect()
}

pub(super) fn samples_input(rng: &mut Rng, dtype: DType, centred: bool) -> Vec<Sample> {
    let sample = |shape: &[usize]| {
        let sample = Sample::new(NormInputGradient { eps: 1e-5, centred }).input(rng.normal(dtype, shape));
        sample.input(rng.normal(DType::F32, &[shape[shape.len() - 1]])).input(rng.normal(dtype, shape))
    };
    SHAPES.into_iter().map(sample).collect()
}

pub(super) fn samples_weight(rng: &mut Rng, dtype: DType, centred: bool) -> Vec<Sample> {
    let sample = |shape: &[usize]| {
        let sample = Sample::new(NormWeightGradient { eps: 1e-5, centred, dtype });
        sample.input(rng.normal(dtype, shape)).input(rng.normal(dtype, shape))
    };
    SHAPES.into_iter().map(sample).collect()
}
