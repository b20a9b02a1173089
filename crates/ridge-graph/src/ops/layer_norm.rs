//! Layer normalisation (Ba, Kiros and Hinton 2016, "Layer Normalization", eq. 3 and 4).

use super::norm_gradient::NormBackward;
use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{ShardingRule, rowwise_rules};
use crate::types::Type;
use crate::why::Why;

/// `(x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * weight + bias` over the last axis, computed in f32.
///
/// `x`: `[.., hidden]`, `weight` and `bias`: `[hidden]`, each of any float dtype; gives `[.., hidden]` of the dtype of
/// `x`.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

eq_by_bits!(LayerNorm { eps });

impl Composite for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, weight, bias] = inputs else { return Err(takes("x, weight and bias", inputs)) };
        want_float("x", x)?;
        for (name, row) in [("weight", weight), ("bias", bias)] {
            want_float(name, row)?;
            if x.shape.rank() == 0 || row.shape.rank() != 1 || row.shape.last() != x.shape.last() {
                return Err(format!("{name} must be [{}], got {row}", x.shape.last()));
            }
        }
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let last = ty.shape.rank() - 1;
        let hidden = ty.shape.last();
        let x = g.cast(inputs[0], DType::F32)?;
        let sum = g.reduce_sum(x, last)?;
        let mean = g.div_by_dim(sum, &hidden)?;
        // In two passes: a difference of squares would cancel where the mean is large.
        let centred = g.sub(x, mean)?;
        let square = g.mul(centred, centred)?;
        let sum = g.reduce_sum(square, last)?;
        let variance = g.div_by_dim(sum, &hidden)?;
        let eps = g.constant_like(variance, self.eps)?;
        let variance = g.add(variance, eps)?;
        let scale = g.rsqrt(variance)?;
        let normed = g.mul(centred, scale)?;
        let weight = g.cast(inputs[1], DType::F32)?;
        let scaled = g.mul(normed, weight)?;
        let bias = g.cast(inputs[2], DType::F32)?;
        let y = g.add(scaled, bias)?;
        Ok(vec![g.cast(y, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // For each element two sums, a difference, a square, two products and the bias.
        let vector_flops = inputs[0].shape.elements() * 7;
        Cost { vector_flops, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Input(0), Saved::Input(1), Saved::Input(2)],
            backward: CompositeRef::new(NormBackward { eps: self.eps, centred: true }),
            wrt: vec![0, 1, 2],
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Any axis but the one that is normalised.
        rowwise_rules(&inputs[0].shape, inputs.len(), 1)
    }
}

impl Builder {
    /// Layer normalisation over the last axis; see [`LayerNorm`].
    ///
    /// # Errors
    /// When `weight` or `bias` is not `[hidden]`, or an input is not float.
    pub fn layer_norm(&mut self, x: Var, weight: Var, bias: Var, eps: f64) -> Result<Var> {
        Ok(self.composite(LayerNorm { eps }, &[x, weight, bias])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let shapes: [&[usize]; 6] = [&[0, 8], &[1, 1], &[3, 7], &[5, 64], &[2, 3, 33], &[17, 1000]];
    shapes
        .into_iter()
        .map(|shape| {
            let hidden = shape[shape.len() - 1];
            Sample::new(LayerNorm { eps: 1e-5 })
                .input(rng.normal(dtype, shape))
                .input(rng.normal(dtype, &[hidden]))
                .input(rng.normal(dtype, &[hidden]))
        })
        .collect()
}
