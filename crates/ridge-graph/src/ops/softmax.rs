//! Softmax over the last axis, shifted by the largest element so that no exponential overflows.

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{ShardingRule, rowwise_rules};
use crate::types::Type;
use crate::why::Why;

/// `exp(x - max(x)) / sum(exp(x - max(x)))` over the last axis, computed in f32.
///
/// `x`: `[.., N]` of any float dtype; gives the same type. A row needs one finite element, unless it is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Softmax;

impl Composite for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
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
        let y = g.div(weight, total)?;
        Ok(vec![g.cast(y, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        // Maximum, difference, sum and scaling; one exponential.
        Cost { vector_flops: elements.clone() * 4, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rowwise_rules(&inputs[0].shape, 1, 1)
    }
}

impl Builder {
    /// Softmax over the last axis; see [`Softmax`].
    ///
    /// # Errors
    /// When `x` is not float or has no axis.
    pub fn softmax(&mut self, x: Var) -> Result<Var> {
        Ok(self.composite(Softmax, &[x])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let shapes: [&[usize]; 7] = [&[0, 8], &[3, 0], &[1, 1], &[7], &[5, 64], &[2, 3, 33], &[17, 1000]];
    let mut samples: Vec<Sample> =
        shapes.into_iter().map(|shape| Sample::new(Softmax).input(rng.normal(dtype, shape))).collect();
    // Far from zero, where an unshifted exponential would overflow or vanish.
    let far = |sign: f64| {
        let values = (0..12).map(|i| sign * (200.0 + f64::from(i % 4))).collect();
        Sample::new(Softmax).input(crate::Tensor::float(dtype, &[3, 4], values).rounded())
    };
    samples.extend([far(1.0), far(-1.0)]);
    samples
}
