//! The gradient of a norm as one op, with what a backward pass does with its result.

use super::linear_gradient::SumRows;
use super::norm_gradient::{NormInputGradient, NormWeightGradient};
use super::require::takes;
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// [`NormInputGradient`] and [`NormWeightGradient`] of one `x` and `dy`, with the sums over rows that biases get.
///
/// `x`: `[.., hidden]` of a float dtype, `weight`: `[hidden]` of any float dtype, `dy` and if `added` `r`: of the type of `x`.
/// Gives the cotangent of `x`, plus `r` if `added`, of the type of `x`; the cotangent `[hidden]` of the weight; and those of
/// the sums over rows that are wanted, each `[hidden]`, in f32 and rounded once: of `dy`, of the first output, and of `r`.
#[derive(Clone, Copy, Debug)]
pub struct NormGradients {
    /// As in the norm.
    pub eps: f64,
    /// Is the mean taken away first?
    pub centred: bool,
    /// Is the cotangent of `x` added to another?
    pub added: bool,
    /// The dtype of the weight's cotangent.
    pub weight: DType,
    /// The dtype of the sum of `dy`, if it is wanted: the cotangent of the norm's bias.
    pub bias: Option<DType>,
    /// The dtype of the sum of the first output, if it is wanted.
    pub sum: Option<DType>,
    /// The dtype of the sum of `r`, if it is wanted; only if `added`.
    pub sum_added: Option<DType>,
}

eq_by_bits!(NormGradients { eps; centred, added, weight, bias, sum, sum_added });

impl NormGradients {
    fn input_gradient(&self) -> NormInputGradient {
        NormInputGradient { eps: self.eps, centred: self.centred }
    }

    fn weight_gradient(&self) -> NormWeightGradient {
        NormWeightGradient { eps: self.eps, centred: self.centred, dtype: self.weight }
    }
}

impl Composite for NormGradients {
    fn name(&self) -> &'static str {
        if self.centred { "layer_norm_gradients" } else { "rms_norm_gradients" }
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let (x, weight, dy, r) = match (inputs, self.added) {
            ([x, weight, dy], false) => (x, weight, dy, None),
            ([x, weight, dy, r], true) => (x, weight, dy, Some(r)),
            (_, false) => return Err(takes("x, weight and dy", inputs)),
            (_, true) => return Err(takes("x, weight, dy and r", inputs)),
        };
        let mut all = self.input_gradient().infer(&[x.clone(), weight.clone(), dy.clone()])?;
        all.extend(self.weight_gradient().infer(&[x.clone(), dy.clone()])?);
        if let Some(r) = r
            && r != x
        {
            return Err(format!("r must be {x} like x, got {r}"));
        }
        if self.sum_added.is_some() && !self.added {
            return Err("the sum of r needs an r".into());
        }
        for dtype in [self.bias, self.sum, self.sum_added].into_iter().flatten() {
            all.extend(SumRows { dtype }.infer(std::slice::from_ref(x))?);
        }
        Ok(all)
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (x, weight, dy) = (inputs[0], inputs[1], inputs[2]);
        let mut dx = g.composite(self.input_gradient(), &[x, weight, dy])?[0];
        let dw = g.composite(self.weight_gradient(), &[x, dy])?[0];
        if let Some(r) = inputs.get(3) {
            dx = g.add(*r, dx)?;
        }
        let mut all = vec![dx, dw];
        let r = inputs.last().copied().unwrap_or(x);
        for (dtype, of) in [(self.bias, dy), (self.sum, dx), (self.sum_added, r)] {
            if let Some(dtype) = dtype {
                all.push(g.composite(SumRows { dtype }, &[of])?[0]);
            }
        }
        Ok(all)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let each = 14 + i128::from(self.added) + outputs.len().saturating_sub(2) as i128;
        Cost { vector_flops: inputs[0].shape.elements() * each, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], outputs: &[Type]) -> Vec<ShardingRule> {
        let axes = 0..inputs[0].shape.rank().saturating_sub(1);
        let rows = |axis| {
            let cut = Placement::shard(axis);
            let mut of_inputs = vec![cut; inputs.len()];
            of_inputs[1] = Placement::Replicate;
            let mut of_outputs = vec![Placement::Partial; outputs.len()];
            of_outputs[0] = cut;
            ShardingRule { inputs: of_inputs, outputs: of_outputs }
        };
        axes.map(rows).collect()
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType, centred: bool) -> Vec<Sample> {
    let cases: [(&[usize], bool, [bool; 3]); 8] = [
        (&[0, 8], true, [true, true, true]),
        (&[1, 3], false, [false, false, false]),
        (&[3, 7], true, [true, false, true]),
        (&[5, 64], true, [false, true, false]),
        (&[2, 3, 32], true, [true, true, true]),
        (&[17, 1000], false, [true, true, false]),
        (&[70, 24], true, [false, false, true]),
        (&[4, 1056], true, [true, true, false]),
    ];
    let sample = |(i, (shape, added, sums)): (usize, (&[usize], bool, [bool; 3]))| {
        // Sums may be finer than rows.
        let to = if i % 2 == 0 { dtype } else { DType::F32 };
        let [bias, sum, sum_added] = sums.map(|wanted| wanted.then_some(to));
        let op = NormGradients { eps: 1e-5, centred, added, weight: to, bias, sum, sum_added };
        let hidden = shape[shape.len() - 1];
        let sample = Sample::new(op).input(rng.normal(dtype, shape)).input(rng.normal(DType::F32, &[hidden]));
        let rows = 1 + usize::from(added);
        (0..rows).fold(sample, |sample, _| sample.input(rng.normal(dtype, shape)))
    };
    cases.into_iter().enumerate().map(sample).collect()
}
