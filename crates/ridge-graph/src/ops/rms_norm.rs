//! Root-mean-square normalisation (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4).

use super::norm_gradient::NormBackward;
use super::require::want_float;
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{ShardingRule, rowwise_rules};
use crate::types::Type;
use crate::why::Why;

/// `x * rsqrt(mean(x^2) + eps) * weight` over the last axis, computed in f32.
///
/// `x`: `[.., hidden]`, `weight`: `[hidden]` of any float dtype; gives `[.., hidden]` of the dtype of `x`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f64,
}

eq_by_bits!(RmsNorm { eps });

impl Composite for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, weight] = inputs else { return Err("takes x and weight".into()) };
        want_float("x", x)?;
        want_float("weight", weight)?;
        if x.shape.rank() == 0 || weight.shape.rank() != 1 || weight.shape.last() != x.shape.last() {
            return Err(format!("weight must be [{}], got {weight}", x.shape.last()));
        }
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let last = ty.shape.rank() - 1;
        let hidden = ty.shape.last();
        let x = g.cast(inputs[0], DType::F32)?;
        let square = g.mul(x, x)?;
        let sum = g.reduce_sum(square, last)?;
        let mean = g.div_by_dim(sum, &hidden)?;
        let eps = g.constant_like(mean, self.eps)?;
        let mean = g.add(mean, eps)?;
        let scale = g.rsqrt(mean)?;
        let normed = g.mul(x, scale)?;
        let weight = g.cast(inputs[1], DType::F32)?;
        let scaled = g.mul(normed, weight)?;
        Ok(vec![g.cast(scaled, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // A square and an add, then two products, for each element.
        let vector_flops = inputs[0].shape.elements() * 4;
        Cost { vector_flops, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Input(0), Saved::Input(1)],
            backward: CompositeRef::new(NormBackward { eps: self.eps, centred: false }),
            wrt: vec![0, 1],
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Any axis but the one that is normalised.
        rowwise_rules(&inputs[0].shape, inputs.len(), 1)
    }
}

impl Builder {
    /// Root-mean-square normalisation over the last axis; see [`RmsNorm`].
    ///
    /// # Errors
    /// When `weight` is not `[hidden]` or an input is not float.
    pub fn rms_norm(&mut self, x: Var, weight: Var, eps: f64) -> Result<Var> {
        Ok(self.composite(RmsNorm { eps }, &[x, weight])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let shapes: [&[usize]; 6] = [&[0, 8], &[1, 1], &[3, 7], &[5, 64], &[2, 3, 33], &[17, 1000]];
    shapes
        .into_iter()
        .map(|shape| {
            let hidden = shape[shape.len() - 1];
            Sample::new(RmsNorm { eps: 1e-5 }).input(rng.normal(dtype, shape)).input(rng.normal(dtype, &[hidden]))
        })
        .collect()
}
