//! What the optimisers' ops have in common: they take a parameter, its gradient and states of f32, and scalars.

use super::require::want;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Var};
use crate::sample::Rng;
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::{Data, Tensor};
use crate::types::Type;
use crate::why::Why;

/// Requires tensors of f32 in the shape of the first.
pub(super) fn want_alike(names: &[&str], inputs: &[Type]) -> Result<(), Why> {
    names.iter().zip(inputs).try_for_each(|(name, ty)| want(name, ty, DType::F32, inputs[0].shape.clone()))
}

/// Requires scalars of f32.
pub(super) fn want_scalars(names: &[&str], inputs: &[Type]) -> Result<(), Why> {
    names.iter().zip(inputs).try_for_each(|(name, ty)| want(name, ty, DType::F32, Shape::default()))
}

/// Requires decays in `[0, 1)`.
pub(super) fn want_decays(decays: &[(&str, f64)]) -> Result<(), Why> {
    match decays.iter().find(|(_, decay)| !(0.0..1.0).contains(decay)) {
        Some((name, decay)) => Err(format!("{name} must be at least 0 and below 1, got {decay}")),
        None => Ok(()),
    }
}

/// Rules of an elementwise op: any axis may be cut, of `tensors` inputs and all outputs; scalars repeat.
pub(super) fn elementwise_rules(shape: &Shape, [tensors, scalars, outputs]: [usize; 3]) -> Vec<ShardingRule> {
    let rule = |dim| {
        let mut inputs = vec![Placement::shard(dim); tensors];
        inputs.extend(vec![Placement::Replicate; scalars]);
        ShardingRule { inputs, outputs: vec![Placement::shard(dim); outputs] }
    };
    (0..shape.rank()).map(rule).collect()
}

/// `decay old + (1 - decay) new`.
pub(super) fn decayed(g: &mut Builder, decay: f64, old: Var, new: Var) -> Result<Var> {
    let keep = g.constant(DType::F32, decay)?;
    let take = g.constant(DType::F32, 1.0 - decay)?;
    let (kept, taken) = (g.mul(old, keep)?, g.mul(new, take)?);
    g.add(kept, taken)
}

/// `param (1 - lr weight_decay)`.
pub(super) fn with_decay(g: &mut Builder, param: Var, lr: Var, weight_decay: f64) -> Result<Var> {
    if weight_decay == 0.0 {
        return Ok(param);
    }
    let decay = g.constant(DType::F32, weight_decay)?;
    let decay = g.mul(lr, decay)?;
    let one = g.constant(DType::F32, 1.0)?;
    let keep = g.sub(one, decay)?;
    g.mul(param, keep)
}

/// The sum of all elements: f32, of rank 0.
pub(super) fn sum_of_all(g: &mut Builder, x: Var) -> Result<Var> {
    let rank = g.ty(x)?.shape.rank();
    let sum = (0..rank).rev().try_fold(x, |x, axis| g.reduce_sum(x, axis))?;
    g.reshape(sum, Shape::default())
}

/// The sum of all squares: f32, of rank 0.
pub(super) fn sum_of_squares(g: &mut Builder, x: Var) -> Result<Var> {
    let square = g.mul(x, x)?;
    sum_of_all(g, square)
}

/// A learning rate for samples.
pub(super) fn sample_rate() -> Tensor {
    Tensor::float(DType::F32, &[], vec![3e-4]).rounded()
}

/// A sample's second moment.
pub(super) fn sample_variance(rng: &mut Rng, shape: &[usize]) -> Tensor {
    let mut v = rng.normal(DType::F32, shape);
    if let Data::Float(values) = &mut v.data {
        values.iter_mut().for_each(|x| *x = x.abs());
    }
    v
}
