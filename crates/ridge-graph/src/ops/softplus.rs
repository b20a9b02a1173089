//! The softplus of a state-space model's time steps, accurate where it is small, and its gradient.

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `log(1 + exp(x))`, computed in f32 within a few roundings. `x`: any float tensor; gives the same type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Softplus;

/// Gradient of [`Softplus`]: `dy * sigmoid(x)`, computed in f32. `x` and `dy` have one float type, which the result has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftplusBackward;

/// Elementwise: any axis, the last first, since tensor parallelism cuts channels.
fn elementwise(inputs: &[Type]) -> Vec<ShardingRule> {
    let axes = (0..inputs[0].shape.rank()).rev().map(Placement::shard);
    axes.map(|cut| ShardingRule { inputs: vec![cut; inputs.len()], outputs: vec![cut] }).collect()
}

impl Composite for Softplus {
    fn name(&self) -> &'static str {
        "softplus"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x] = inputs else { return Err(takes("x", inputs)) };
        want_float("x", x)?;
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let x = g.cast(inputs[0], DType::F32)?;
        let (zero, one) = (g.constant_like(x, 0.0)?, g.constant_like(x, 1.0)?);
        // `max(x, 0) + log1p(e)` with `e = exp(-|x|)`. The logarithm of the rounded `1 + e` is that of another `e`, by whose
        // relative distance it is mended (Kahan; Goldberg 1991, "What Every Computer Scientist Should Know About
        // Floating-Point Arithmetic", theorem 4).
        let magnitude = g.abs(x)?;
        let below = g.neg(magnitude)?;
        let e = g.exp(below)?;
        let above_one = g.add(one, e)?;
        let rounded = g.sub(above_one, one)?;
        let vanished = g.eq(rounded, zero)?;
        let divisor = g.select(vanished, one, rounded)?;
        let log = g.log(above_one)?;
        let mended = g.mul(e, log)?;
        let mended = g.div(mended, divisor)?;
        let log = g.select(vanished, e, mended)?;
        let positive = g.max(x, zero)?;
        let y = g.add(positive, log)?;
        Ok(vec![g.cast(y, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        Cost { vector_flops: elements.clone() * 6, special_flops: elements * 2, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Input(0)],
            backward: CompositeRef::new(SoftplusBackward),
            wrt: vec![0],
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise(inputs)
    }
}

impl Composite for SoftplusBackward {
    fn name(&self) -> &'static str {
        "softplus_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, dy] = inputs else { return Err(takes("x and dy", inputs)) };
        want_float("x", x)?;
        if dy != x {
            return Err(format!("dy must have the type of x, {x}, got {dy}"));
        }
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let x = g.cast(inputs[0], DType::F32)?;
        let dy = g.cast(inputs[1], DType::F32)?;
        let slope = g.sigmoid(x)?;
        let dx = g.mul(dy, slope)?;
        Ok(vec![g.cast(dx, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        Cost { vector_flops: elements.clone(), special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise(inputs)
    }
}

impl Builder {
    /// `log(1 + exp(x))`; see [`Softplus`].
    ///
    /// # Errors
    /// When `x` is not float.
    pub fn softplus(&mut self, x: Var) -> Result<Var> {
        Ok(self.composite(Softplus, &[x])?[0])
    }
}

const SHAPES: [&[usize]; 5] = [&[0, 8], &[1, 1], &[7], &[2, 3, 33], &[17, 1000]];

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples: Vec<Sample> =
        SHAPES.into_iter().map(|shape| Sample::new(Softplus).input(rng.normal(dtype, shape))).collect();
    // Where `1 + exp(x)` rounds to 1, where the result is `x`, and where exponentials would overflow.
    for x in [-200.0, -40.0, -12.0, -7.0, 12.0, 100.0] {
        samples.push(Sample::new(Softplus).input(Tensor::float(dtype, &[1, 1], vec![x]).rounded()));
    }
    samples
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |shape: &[usize]| Sample::new(SoftplusBackward).input(rng.normal(dtype, shape));
    let samples: Vec<Sample> = SHAPES.into_iter().map(sample).collect();
    samples.into_iter().zip(SHAPES).map(|(sample, shape)| sample.input(rng.normal(dtype, shape))).collect()
}
