//! A step of AdamW in place: parameter and moments are states, read and written once.

use super::adamw::AdamW;
use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::{Data, Tensor};
use crate::types::Type;
use crate::why::Why;

/// [`AdamW`] by the gradient `grad * scale`, on states.
///
/// `param`, `m`, `v`: f32 states of one shape; `grad`: of that shape and any float dtype; `lr`, `step`, `scale`: f32 scalars,
/// where `scale` divides by what was accumulated or clips; with `copy` a fourth state of the shape behind them, of any float
/// dtype. Gives the next version of each state; that of the copy is the next parameter, rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWUpdate {
    /// Decays, epsilon and weight decay.
    pub adamw: AdamW,
    /// Is there a copy in another dtype?
    pub copy: bool,
}

impl Composite for AdamWUpdate {
    fn name(&self) -> &'static str {
        "adamw_update"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [param, m, v, grad, lr, step, scale, copy @ ..] = inputs else {
            return Err(takes("param, m, v, grad, lr, step, scale and perhaps a copy", inputs));
        };
        if copy.len() != usize::from(self.copy) {
            return Err(takes("a copy where it says so", inputs));
        }
        for (name, ty) in [("param", param), ("m", m), ("v", v)] {
            if !ty.state || ty.dtype != DType::F32 || ty.format.is_some() || ty.shape != param.shape {
                return Err(format!("{name} must be an f32 state of the shape {}, got {ty}", param.shape));
            }
        }
        for copy in copy {
            if !copy.state || !copy.dtype.is_float() || copy.format.is_some() || copy.shape != param.shape {
                return Err(format!("the copy must be a float state of the shape {}, got {copy}", param.shape));
            }
        }
        if !grad.dtype.is_float() {
            return Err(format!("grad must be a float tensor, got {grad}"));
        }
        want("grad", grad, grad.dtype, param.shape.clone())?;
        for (name, ty) in [("lr", lr), ("step", step), ("scale", scale)] {
            want(name, ty, DType::F32, Shape::default())?;
        }
        Ok([param, m, v].into_iter().chain(copy).cloned().collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [param, m, v, grad, lr, step, scale, copy @ ..] = inputs else {
            unreachable!("infer has counted the inputs")
        };
        let grad = g.cast(*grad, DType::F32)?;
        let grad = g.mul(grad, *scale)?;
        let read = [*param, *m, *v].map(|state| g.state_read(state));
        let [p, first, second] = read;
        let next = g.composite(self.adamw, &[p?, grad, first?, second?, *lr, *step])?;
        let mut all = Vec::new();
        for (state, value) in [*param, *m, *v].into_iter().zip(&next) {
            all.push(g.state_write(state, *value)?);
        }
        for copy in copy {
            let rounded = g.cast(next[0], g.ty(*copy)?.dtype)?;
            all.push(g.state_write(*copy, rounded)?);
        }
        Ok(all)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        Cost { vector_flops: elements.clone() * 13, special_flops: elements * 3, ..Cost::moving(&inputs[..7], outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], outputs: &[Type]) -> Vec<ShardingRule> {
        (0..inputs[0].shape.rank())
            .map(|dim| {
                let mut places = vec![Placement::shard(dim); inputs.len()];
                places[4..7].fill(Placement::Replicate);
                ShardingRule { inputs: places, outputs: vec![Placement::shard(dim); outputs.len()] }
            })
            .collect()
    }
}

impl Builder {
    /// A step of AdamW on the states `[param, m, v]` and perhaps a copy; see [`AdamWUpdate`]. Gives their next versions.
    ///
    /// # Errors
    /// When a state or the gradient has another type than described there, or a number is no f32 scalar.
    pub fn adamw_update(
        &mut self,
        states: [Var; 3],
        copy: Option<Var>,
        grad: Var,
        [lr, step, scale]: [Var; 3],
        adamw: AdamW,
    ) -> Result<Vec<Var>> {
        let [param, m, v] = states;
        let inputs: Vec<Var> = [param, m, v, grad, lr, step, scale].into_iter().chain(copy).collect();
        self.composite(AdamWUpdate { adamw, copy: copy.is_some() }, &inputs)
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let usual = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let plain = AdamW { beta1: 0.0, beta2: 0.95, eps: 1e-6, weight_decay: 0.0 };
    let cases: [(AdamW, &[usize], f64, bool); 6] = [
        (usual, &[0, 3], 1.0, false),
        (usual, &[1], 1.0, true),
        (usual, &[33, 7], 2.0, true),
        (plain, &[5, 3, 2], 3.0, false),
        (usual, &[1000], 1000.0, true),
        (plain, &[65], 100_000.0, true),
    ];
    let number = |x: f64| Tensor::float(DType::F32, &[], vec![x]).rounded();
    let sample = |(adamw, shape, step, copy): (AdamW, &[usize], f64, bool)| {
        let mut v = rng.normal(DType::F32, shape);
        if let Data::Float(values) = &mut v.data {
            values.iter_mut().for_each(|x| *x = x.abs());
        }
        let sample = Sample::new(AdamWUpdate { adamw, copy })
            .state(rng.normal(DType::F32, shape))
            .state(rng.normal(DType::F32, shape))
            .state(v)
            .input(rng.normal(dtype, shape))
            .input(number(3e-4))
            .input(number(step))
            .input(number(0.5));
        if copy { sample.state(rng.normal(dtype, shape)) } else { sample }
    };
    cases.into_iter().map(sample).collect()
}
