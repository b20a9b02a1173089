//! One step of the AdamW optimiser (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
//! algorithm 2, with the decay scaled by the learning rate as `torch.optim.AdamW` has it).

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::{Data, Tensor};
use crate::types::Type;
use crate::why::Why;

/// The next parameter and moments:
///
/// ```text
/// m' = beta1 m + (1 - beta1) grad        v' = beta2 v + (1 - beta2) grad^2
/// param' = param (1 - lr weight_decay) - lr (m' / (1 - beta1^step)) / (sqrt(v' / (1 - beta2^step)) + eps)
/// ```
///
/// `param`, `grad`, `m`, `v`: f32 of one shape; `lr`, `step`: f32 scalars, steps counted from 1; gives
/// `(param', m', v')`.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of the parameter, times the learning rate.
    pub weight_decay: f64,
}

eq_by_bits!(AdamW { beta1, beta2, eps, weight_decay });

impl AdamW {
    /// `1 - beta^step`. With `h = tanh(-step ln(beta) / 2)` it is `2 h / (1 + h)`, which loses no digits where `beta`
    /// is close to 1, as the difference would: four of f32's seven at step 1 of `beta` 0.999.
    fn correction(g: &mut Builder, beta: f64, step: Var) -> Result<Var> {
        let rate = g.constant(DType::F32, -0.5 * beta.ln())?;
        let half = g.mul(step, rate)?;
        let h = g.tanh(half)?;
        let twice = g.add(h, h)?;
        let one = g.constant(DType::F32, 1.0)?;
        let denominator = g.add(one, h)?;
        g.div(twice, denominator)
    }

    /// `beta old + (1 - beta) new`.
    fn decayed(g: &mut Builder, beta: f64, old: Var, new: Var) -> Result<Var> {
        let keep = g.constant(DType::F32, beta)?;
        let take = g.constant(DType::F32, 1.0 - beta)?;
        let kept = g.mul(old, keep)?;
        let taken = g.mul(new, take)?;
        g.add(kept, taken)
    }
}

impl Composite for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [param, grad, m, v, lr, step] = inputs else {
            return Err(takes("param, grad, m, v, lr and step", inputs));
        };
        for (name, ty) in [("param", param), ("grad", grad), ("m", m), ("v", v)] {
            want(name, ty, DType::F32, param.shape.clone())?;
        }
        for (name, ty) in [("lr", lr), ("step", step)] {
            want(name, ty, DType::F32, Shape::default())?;
        }
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(format!("{name} must be at least 0 and below 1, got {beta}"));
            }
        }
        Ok(vec![param.clone(), m.clone(), v.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [param, grad, m, v, lr, step] = inputs else { unreachable!("infer has counted the inputs") };
        let m = Self::decayed(g, self.beta1, *m, *grad)?;
        let square = g.mul(*grad, *grad)?;
        let v = Self::decayed(g, self.beta2, *v, square)?;
        let correction = Self::correction(g, self.beta1, *step)?;
        let mean = g.div(m, correction)?;
        let correction = Self::correction(g, self.beta2, *step)?;
        let variance = g.div(v, correction)?;
        let root = g.sqrt(variance)?;
        let eps = g.constant(DType::F32, self.eps)?;
        let root = g.add(root, eps)?;
        let direction = g.div(mean, root)?;
        let change = g.mul(direction, *lr)?;
        let decay = g.constant(DType::F32, self.weight_decay)?;
        let decay = g.mul(*lr, decay)?;
        let one = g.constant(DType::F32, 1.0)?;
        let keep = g.sub(one, decay)?;
        let kept = g.mul(*param, keep)?;
        Ok(vec![g.sub(kept, change)?, m, v])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        // Three for each moment and the square, five for the parameter; two quotients and a root.
        Cost { vector_flops: elements.clone() * 12, special_flops: elements * 3, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        (0..inputs[0].shape.rank())
            .map(|dim| {
                let mut places = vec![Placement::shard(dim); 4];
                places.extend([Placement::Replicate; 2]);
                ShardingRule { inputs: places, outputs: vec![Placement::shard(dim); 3] }
            })
            .collect()
    }
}

impl Builder {
    /// `(param', m', v')` after one step; see [`AdamW`].
    ///
    /// # Errors
    /// When the tensors are not f32 of one shape, `lr` and `step` are not f32 scalars, or a beta is not in `[0, 1)`.
    pub fn adamw(
        &mut self,
        param: Var,
        grad: Var,
        m: Var,
        v: Var,
        lr: Var,
        step: Var,
        op: AdamW,
    ) -> Result<(Var, Var, Var)> {
        let out = self.composite(op, &[param, grad, m, v, lr, step])?;
        Ok((out[0], out[1], out[2]))
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let usual = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let plain = AdamW { beta1: 0.0, beta2: 0.95, eps: 1e-6, weight_decay: 0.0 };
    let cases: [(AdamW, &[usize], f64); 7] = [
        (usual, &[0, 3], 1.0),
        (usual, &[], 2.0),
        (usual, &[1], 1.0),
        (usual, &[33, 7], 1.0),
        (plain, &[5, 3, 2], 3.0),
        (usual, &[1000], 1000.0),
        (plain, &[65], 100_000.0),
    ];
    let sample = |(op, shape, step): (AdamW, &[usize], f64)| {
        let mut v = rng.normal(DType::F32, shape);
        if let Data::Float(values) = &mut v.data {
            values.iter_mut().for_each(|x| *x = x.abs());
        }
        Sample::new(op)
            .input(rng.normal(DType::F32, shape))
            .input(rng.normal(DType::F32, shape))
            .input(rng.normal(DType::F32, shape))
            .input(v)
            .input(Tensor::float(DType::F32, &[], vec![3e-4]).rounded())
            .input(Tensor::float(DType::F32, &[], vec![step]))
    };
    cases.into_iter().map(sample).collect()
}
