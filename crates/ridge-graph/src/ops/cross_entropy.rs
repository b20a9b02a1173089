//! Negative log likelihood of target tokens, and its gradient as two ops that keep one number a token instead of the
//! probabilities: the log of the sum of exponentials.

use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `logsumexp(logits[t]) - logits[t, targets[t]]` for each token, computed in f32.
///
/// `logits`: `[tokens, vocab]` of any float dtype, `targets`: i32 `[tokens]`; gives the loss, f32 `[tokens]`. A target
/// outside the vocabulary, negative by custom, is ignored: its loss is 0, and so is its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropy;

/// [`CrossEntropy`] that gives `(loss, logsumexp)`, both f32 `[tokens]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropySaving;

/// Gradient of [`CrossEntropy`]: `(softmax(logits) - onehot(targets)) * dloss`, 0 where the target is ignored.
///
/// `logits`, `targets` as there, `lse`: f32 `[tokens]` from [`CrossEntropySaving`], `dloss`: f32 `[tokens]`; gives
/// the type of `logits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropyBackward;

fn check(logits: &Type, targets: &Type) -> Result<Type, Why> {
    want_floats("logits", logits, 2, "[tokens, vocab]")?;
    want("targets", targets, DType::I32, [&logits.shape.0[0]])?;
    Ok(Type::tensor(DType::F32, [&logits.shape.0[0]]))
}

/// Where the target is: bool `[tokens, vocab]`, and whether it is anywhere: bool `[tokens, 1]`.
fn hits(g: &mut Builder, shape: &Shape, targets: Var) -> Result<(Var, Var)> {
    let column = Shape(vec![shape.0[0].clone(), 1.into()]);
    let targets = g.reshape(targets, column)?;
    let id = g.iota(shape.clone(), 1, DType::I32)?;
    let hit = g.eq(id, targets)?;
    let count = g.cast(hit, DType::F32)?;
    let count = g.reduce_sum(count, 1)?;
    let zero = g.constant(DType::F32, 0.0)?;
    Ok((hit, g.gt(count, zero)?))
}

fn rows(inputs: usize, outputs: usize) -> Vec<ShardingRule> {
    vec![ShardingRule { inputs: vec![Placement::shard(0); inputs], outputs: vec![Placement::shard(0); outputs] }]
}

fn arithmetic(inputs: &[Type], outputs: &[Type]) -> Cost {
    let elements = inputs[0].shape.elements();
    Cost { vector_flops: elements.clone() * 4, special_flops: elements, ..Cost::moving(inputs, outputs) }
}

impl Composite for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [logits, targets] = inputs else { return Err(takes("logits and targets", inputs)) };
        Ok(vec![check(logits, targets)?])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        Ok(vec![g.composite(CrossEntropySaving, inputs)?[0]])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        arithmetic(inputs, outputs)
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(CrossEntropySaving),
            saved: vec![Saved::Input(0), Saved::Input(1), Saved::Output(1)],
            backward: CompositeRef::new(CrossEntropyBackward),
            wrt: vec![0],
        }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rows(2, 1)
    }
}

impl Composite for CrossEntropySaving {
    fn name(&self) -> &'static str {
        "cross_entropy_saving"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [logits, targets] = inputs else { return Err(takes("logits and targets", inputs)) };
        Ok(vec![check(logits, targets)?; 2])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let shape = g.ty(inputs[0])?.shape.clone();
        let tokens = Shape(vec![shape.0[0].clone()]);
        let logits = g.cast(inputs[0], DType::F32)?;
        let largest = g.reduce_max(logits, 1)?;
        let shifted = g.sub(logits, largest)?;
        let weight = g.exp(shifted)?;
        let total = g.reduce_sum(weight, 1)?;
        let log = g.log(total)?;
        let lse = g.add(log, largest)?;

        let (hit, known) = hits(g, &shape, inputs[1])?;
        let zero = g.constant(DType::F32, 0.0)?;
        let target = g.select(hit, logits, zero)?;
        let target = g.reduce_sum(target, 1)?;
        let loss = g.sub(lse, target)?;
        let loss = g.select(known, loss, zero)?;
        Ok(vec![g.reshape(loss, tokens.clone())?, g.reshape(lse, tokens)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        arithmetic(inputs, outputs)
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rows(2, 2)
    }
}

impl Composite for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        "cross_entropy_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [logits, targets, lse, dloss] = inputs else {
            return Err(takes("logits, targets, lse and dloss", inputs));
        };
        let tokens = check(logits, targets)?.shape;
        want("lse", lse, DType::F32, tokens.clone())?;
        want("dloss", dloss, DType::F32, tokens)?;
        Ok(vec![logits.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let column = Shape(vec![ty.shape.0[0].clone(), 1.into()]);
        let logits = g.cast(inputs[0], DType::F32)?;
        let lse = g.reshape(inputs[2], column.clone())?;
        let shifted = g.sub(logits, lse)?;
        let probability = g.exp(shifted)?;
        let (hit, known) = hits(g, &ty.shape, inputs[1])?;
        let onehot = g.cast(hit, DType::F32)?;
        let slope = g.sub(probability, onehot)?;
        let dloss = g.reshape(inputs[3], column)?;
        let zero = g.constant(DType::F32, 0.0)?;
        let dloss = g.select(known, dloss, zero)?;
        let dlogits = g.mul(slope, dloss)?;
        Ok(vec![g.cast(dlogits, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        arithmetic(inputs, outputs)
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rows(4, 1)
    }
}

impl Builder {
    /// Loss of each token; see [`CrossEntropy`].
    ///
    /// # Errors
    /// When `logits` is not a float matrix, or `targets` is not i32 with one for each of its rows.
    pub fn cross_entropy(&mut self, logits: Var, targets: Var) -> Result<Var> {
        Ok(self.composite(CrossEntropy, &[logits, targets])?[0])
    }
}

/// Logits and targets; one target in three or so is ignored.
fn instances(rng: &mut Rng, dtype: DType) -> Vec<(Tensor, Tensor)> {
    let cases = [(0, 8), (1, 1), (3, 2), (7, 33), (17, 1000), (2, 5000)];
    let mut all: Vec<(Tensor, Tensor)> = cases
        .into_iter()
        .map(|(tokens, vocab)| {
            let low = -(vocab as i64 / 2);
            (rng.normal(dtype, &[tokens, vocab]), rng.integers(DType::I32, &[tokens], low, vocab as i64))
        })
        .collect();
    // Far from zero, where an unshifted exponential would overflow.
    let far = (0..12).map(|i| 300.0 + f64::from(i % 5)).collect();
    let targets = Tensor::int(DType::I32, &[3], vec![0, 3, -100]);
    all.push((Tensor::float(dtype, &[3, 4], far).rounded(), targets));
    all
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |(logits, targets)| Sample::new(CrossEntropy).input(logits).input(targets);
    instances(rng, dtype).into_iter().map(sample).collect()
}

pub(super) fn samples_saving(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |(logits, targets)| Sample::new(CrossEntropySaving).input(logits).input(targets);
    instances(rng, dtype).into_iter().map(sample).collect()
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (logits, targets) in instances(rng, dtype) {
        let lse = logits.floats().chunks(logits.shape[1]).map(|row| {
            let largest = row.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
            largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
        });
        let tokens = [logits.shape[0]];
        let lse = Tensor::float(DType::F32, &tokens, lse.collect()).rounded();
        let dloss = rng.normal(DType::F32, &tokens);
        samples.push(Sample::new(CrossEntropyBackward).input(logits).input(targets).input(lse).input(dloss));
    }
    samples
}
