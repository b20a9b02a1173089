//! One step of Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1).

use super::optimizer::{decayed, elementwise_rules, sample_rate, want_alike, want_decays, want_scalars, with_decay};
use super::require::takes;
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shard::ShardingRule;
use crate::types::Type;
use crate::why::Why;

/// The next parameter and moment:
///
/// ```text
/// param' = param (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) grad)
/// m' = beta2 m + (1 - beta2) grad
/// ```
///
/// The sign of 0 is 0. `param`, `grad`, `m`: f32 of one shape; `lr`: f32 scalar; gives `(param', m')`.
#[derive(Clone, Copy, Debug)]
pub struct Lion {
    /// Share of the moment in the direction.
    pub beta1: f64,
    /// Decay of the moment.
    pub beta2: f64,
    /// Decay of the parameter, times the learning rate.
    pub weight_decay: f64,
}

eq_by_bits!(Lion { beta1, beta2, weight_decay });

impl Composite for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [param, _, m, _] = inputs else { return Err(takes("param, grad, m and lr", inputs)) };
        want_alike(&["param", "grad", "m"], inputs)?;
        want_scalars(&["lr"], &inputs[3..])?;
        want_decays(&[("beta1", self.beta1), ("beta2", self.beta2)])?;
        Ok(vec![param.clone(), m.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [param, grad, m, lr] = inputs else { unreachable!("infer has counted the inputs") };
        let direction = decayed(g, self.beta1, *m, *grad)?;
        let zero = g.constant(DType::F32, 0.0)?;
        let (above, below) = (g.gt(direction, zero)?, g.lt(direction, zero)?);
        let (above, below) = (g.cast(above, DType::F32)?, g.cast(below, DType::F32)?);
        let sign = g.sub(above, below)?;
        let change = g.mul(sign, *lr)?;
        let kept = with_decay(g, *param, *lr, self.weight_decay)?;
        let next = g.sub(kept, change)?;
        Ok(vec![next, decayed(g, self.beta2, *m, *grad)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 12, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise_rules(&inputs[0].shape, [3, 1, 2])
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let usual = Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
    let plain = Lion { beta1: 0.0, beta2: 0.9, weight_decay: 0.0 };
    let cases: [(Lion, &[usize]); 5] =
        [(usual, &[0, 3]), (plain, &[]), (usual, &[33, 7]), (plain, &[5, 3, 2]), (usual, &[1000])];
    let mut sample = |(op, shape): (Lion, &[usize])| {
        let tensors = [0; 3].map(|_| rng.normal(DType::F32, shape));
        tensors.into_iter().fold(Sample::new(op), Sample::input).input(sample_rate())
    };
    cases.into_iter().map(&mut sample).collect()
}
