//! Logarithm of softmax over the last axis, and its gradient as an op of its own: the derived gradient of `log(softmax(x))`
//! divides by probabilities, which underflow to 0 for logits far apart.

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule, rowwise_rules};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `x - max(x) - log(sum(exp(x - max(x))))` over the last axis, computed in f32.
///
/// `x`: `[.., N]` of any float dtype; gives the same type. A row needs one finite element, unless it is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSoftmax;

/// Gradient of [`LogSoftmax`]: `dy - exp(y) * sum(dy)` over the last axis, computed in f32.
///
/// `y`: `[.., N]` of any float dtype, the op's output; `dy`: of the same type; gives the same type. Finite for finite
/// `dy`, since no element of `y` is above 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSoftmaxBackward;

impl Composite for LogSoftmax {
    fn name(&self) -> &'static str {
        "log_softmax"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x] = inputs else { return Err(takes("x", inputs)) };
        want_float("x", x)?;
        if x.shape.rank() == 0 {
            return Err(format!("x must have an axis to normalise over, got {x}"));
        }
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let last = ty.shape.rank() - 1;
        let x = g.cast(inputs[0], DType::F32)?;
        let largest = g.reduce_max(x, last)?;
        let shifted = g.sub(x, largest)?;
        let weight = g.exp(shifted)?;
        let total = g.reduce_sum(weight, last)?;
        let log = g.log(total)?;
        let y = g.sub(shifted, log)?;
        Ok(vec![g.cast(y, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        // Maximum, two differences and the sum; one exponential.
        Cost { vector_flops: elements.clone() * 4, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Output(0)],
            backward: CompositeRef::new(LogSoftmaxBackward),
            wrt: vec![0],
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rowwise_rules(&inputs[0].shape, 1, 1)
    }
}

impl Composite for LogSoftmaxBackward {
    fn name(&self) -> &'static str {
        "log_softmax_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [y, dy] = inputs else { return Err(takes("y and dy", inputs)) };
        want_float("y", y)?;
        if y.shape.rank() == 0 {
            return Err(format!("y must have an axis to normalise over, got {y}"));
        }
        if dy != y {
            return Err(format!("dy must have the type of y, {y}, got {dy}"));
        }
        Ok(vec![y.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let y = g.cast(inputs[0], DType::F32)?;
        let dy = g.cast(inputs[1], DType::F32)?;
        let total = g.reduce_sum(dy, ty.shape.rank() - 1)?;
        let probability = g.exp(y)?;
        let share = g.mul(probability, total)?;
        let dx = g.sub(dy, share)?;
        Ok(vec![g.cast(dx, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        // Sum, product and difference; one exponential.
        Cost { vector_flops: elements.clone() * 3, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Rows on their own, by any axis but the last.
        let axes = 0..inputs[0].shape.rank().saturating_sub(1);
        axes.map(|dim| ShardingRule { inputs: vec![Placement::shard(dim); 2], outputs: vec![Placement::shard(dim)] })
            .collect()
    }
}

impl Builder {
    /// Logarithm of softmax over the last axis; see [`LogSoftmax`].
    ///
    /// # Errors
    /// When `x` is not float or has no axis.
    pub fn log_softmax(&mut self, x: Var) -> Result<Var> {
        Ok(self.composite(LogSoftmax, &[x])?[0])
    }
}

const SHAPES: [&[usize]; 7] = [&[0, 8], &[3, 0], &[1, 1], &[7], &[5, 64], &[2, 3, 33], &[17, 1000]];

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples: Vec<Sample> =
        SHAPES.into_iter().map(|shape| Sample::new(LogSoftmax).input(rng.normal(dtype, shape))).collect();
    // Far from zero and far apart, where exponentials overflow or vanish.
    for scale in [200.0, -200.0, 1e4] {
        let values = (0..12).map(|i| scale * (1.0 - f64::from(i % 3))).collect();
        samples.push(Sample::new(LogSoftmax).input(crate::Tensor::float(dtype, &[3, 4], values).rounded()));
    }
    samples
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |shape: &[usize]| {
        let x = rng.normal(dtype, shape);
        // Rows of log-probabilities, of which the exponentials have the sum that the gradient relies on.
        let columns = shape.last().copied().unwrap_or(1).max(1);
        let of_row = |row: &[f64]| {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| dtype.round(x - sum.ln())).collect::<Vec<f64>>()
        };
        let y = x.floats().chunks(columns).flat_map(of_row).collect();
        Sample::new(LogSoftmaxBackward).input(Tensor::float(dtype, shape, y)).input(rng.normal(dtype, shape))
    };
    SHAPES.into_iter().map(sample).collect()
}
