//! One step of stochastic gradient descent with momentum, as `torch.optim.SGD` has it without dampening (Sutskever et al.
//! 2013, "On the importance of initialization and momentum in deep learning").

use super::optimizer::{elementwise_rules, sample_rate, want_alike, want_decays, want_scalars};
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

/// The next parameter and velocity:
///
/// ```text
/// g = grad + weight_decay param        velocity' = momentum velocity + g
/// param' = param - lr velocity'        or, by Nesterov, param - lr (g + momentum velocity')
/// ```
///
/// `param`, `grad`, `velocity`: f32 of one shape; `lr`: f32 scalar; gives `(param', velocity')`.
#[derive(Clone, Copy, Debug)]
pub struct Sgd {
    /// Decay of the velocity.
    pub momentum: f64,
    /// Whether the step looks ahead by the momentum.
    pub nesterov: bool,
    /// Added to the gradient, times the parameter.
    pub weight_decay: f64,
}

eq_by_bits!(Sgd { momentum, weight_decay; nesterov });

impl Composite for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [param, _, velocity, _] = inputs else { return Err(takes("param, grad, velocity and lr", inputs)) };
        want_alike(&["param", "grad", "velocity"], inputs)?;
        want_scalars(&["lr"], &inputs[3..])?;
        want_decays(&[("momentum", self.momentum)])?;
        Ok(vec![param.clone(), velocity.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [param, grad, velocity, lr] = inputs else { unreachable!("infer has counted the inputs") };
        let mut gradient = *grad;
        if self.weight_decay != 0.0 {
            let decay = g.constant(DType::F32, self.weight_decay)?;
            let pull = g.mul(*param, decay)?;
            gradient = g.add(gradient, pull)?;
        }
        let momentum = g.constant(DType::F32, self.momentum)?;
        let kept = g.mul(*velocity, momentum)?;
        let velocity = g.add(kept, gradient)?;
        let mut direction = velocity;
        if self.nesterov {
            let ahead = g.mul(velocity, momentum)?;
            direction = g.add(gradient, ahead)?;
        }
        let change = g.mul(direction, *lr)?;
        Ok(vec![g.sub(*param, change)?, velocity])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 8, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise_rules(&inputs[0].shape, [3, 1, 2])
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let plain = Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let usual = Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 };
    let ahead = Sgd { nesterov: true, ..usual };
    let cases: [(Sgd, &[usize]); 6] =
        [(usual, &[0, 3]), (plain, &[]), (ahead, &[1]), (usual, &[33, 7]), (ahead, &[5, 3, 2]), (plain, &[1000])];
    let mut sample = |(op, shape): (Sgd, &[usize])| {
        let tensors = [0; 3].map(|_| rng.normal(DType::F32, shape));
        tensors.into_iter().fold(Sample::new(op), Sample::input).input(sample_rate())
    };
    cases.into_iter().map(&mut sample).collect()
}
