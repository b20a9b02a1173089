//! The loss of an output projection whose logits nobody else needs: products, losses and the gradient of both operands from
//! one part of the logits after another, so that a kernel never holds all of them. Since the loss is one number, its
//! gradient is known but for a factor when the loss is computed.

use super::linear_gradient::{LinearInputGradient, LinearWeightGradient};
use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;

use super::linear::LinearForward;

/// The sum over tokens of `lse - logits[target] + z_loss lse^2`, where `logits = softcap tanh(x w^T / softcap)` without the
/// cap where there is none, and `lse` is the logarithm of the sum of their exponentials, in f32.
///
/// `x`: `[tokens, hidden]`, `w`: `[vocab, hidden]`, each of any float dtype, `targets`: i32 `[tokens]`; gives an f32 scalar.
/// Products are rounded to the dtype of `x`. A target outside the vocabulary, negative by custom, is ignored: its loss is 0,
/// and so is its gradient. The z-loss keeps logits small (Chowdhery et al. 2022, "PaLM", section 5).
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropy {
    /// Logits stay within this; above 0.
    pub softcap: Option<f64>,
    /// Factor of the z-loss; 0 for none.
    pub z_loss: f64,
}

/// [`LinearCrossEntropy`] that gives `(loss, dx, dw)`: the loss and its gradient, of the types of `x` and `w`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropySaving(pub LinearCrossEntropy);

/// `(dx, dw)` times the f32 scalar `dloss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearCrossEntropyBackward;

eq_by_bits!(LinearCrossEntropy { softcap, z_loss });

fn scalar() -> Type {
    Type::tensor(DType::F32, Shape::default())
}

impl LinearCrossEntropy {
    fn check(&self, inputs: &[Type]) -> Result<(), Why> {
        let [x, w, targets] = inputs else { return Err(takes("x, w and targets", inputs)) };
        want_floats("x", x, 2, "[tokens, hidden]")?;
        want_floats("w", w, 2, "[vocab, hidden]")?;
        if w.shape.0[1] != x.shape.0[1] {
            return Err(format!("w must be [vocab, {}] to follow x, got {w}", x.shape.0[1]));
        }
        want("targets", targets, DType::I32, [&x.shape.0[0]])?;
        match self.softcap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => Err(format!("softcap must be above 0, got {cap}")),
            _ => Ok(()),
        }
    }

    /// Products of the op and, with its gradient, of both cotangents.
    fn cost(inputs: &[Type], outputs: &[Type], products: i128) -> Cost {
        let logits = &Poly::from(&inputs[0].shape.0[0]) * &Poly::from(&inputs[1].shape.0[0]);
        Cost {
            matrix_flops: &logits * &(Poly::from(&inputs[0].shape.0[1]) * (2 * products)),
            vector_flops: logits.clone() * 4,
            special_flops: logits,
            ..Cost::moving(inputs, outputs)
        }
    }

    /// Loss and, if asked for, the cotangent of the products.
    fn losses(&self, g: &mut Builder, products: Var, targets: Var, saving: bool) -> Result<(Var, Option<Var>)> {
        let ty = g.ty(products)?.clone();
        let tokens = Shape(vec![ty.shape.0[0].clone()]);
        let total = |g: &mut Builder, losses: Var| {
            let sum = g.reduce_sum(losses, 0)?;
            g.reshape(sum, Shape::default())
        };
        if self.softcap.is_none() && self.z_loss == 0.0 {
            let both = g.composite(super::CrossEntropySaving, &[products, targets])?;
            let loss = total(g, both[0])?;
            let cotangent = match saving {
                true => {
                    let one = g.constant(DType::F32, 1.0)?;
                    let ones = g.broadcast(one, tokens)?;
                    Some(g.composite(super::CrossEntropyBackward, &[products, targets, both[1], ones])?[0])
                }
                false => None,
            };
            return Ok((loss, cotangent));
        }
        let column = Shape(vec![ty.shape.0[0].clone(), 1.into()]);
        let one = g.constant(DType::F32, 1.0)?;
        let zero = g.constant(DType::F32, 0.0)?;
        let mut logits = g.cast(products, DType::F32)?;
        let mut slope = None;
        if let Some(cap) = self.softcap {
            let inverse = g.constant(DType::F32, 1.0 / cap)?;
            let cap = g.constant(DType::F32, cap)?;
            let scaled = g.mul(logits, inverse)?;
            let bent = g.tanh(scaled)?;
            logits = g.mul(bent, cap)?;
            let square = g.mul(bent, bent)?;
            slope = Some(g.sub(one, square)?);
        }
        let largest = g.reduce_max(logits, 1)?;
        let shifted = g.sub(logits, largest)?;
        let weight = g.exp(shifted)?;
        let sum = g.reduce_sum(weight, 1)?;
        let log = g.log(sum)?;
        let lse = g.add(log, largest)?;
        let places = g.iota(ty.shape.clone(), 1, DType::I32)?;
        let targets = g.reshape(targets, column)?;
        let hit = g.eq(places, targets)?;
        let onehot = g.cast(hit, DType::F32)?;
        let known = g.reduce_sum(onehot, 1)?;
        let chosen = g.select(hit, logits, zero)?;
        let chosen = g.reduce_sum(chosen, 1)?;
        let loss = g.sub(lse, chosen)?;
        let z = g.constant(DType::F32, self.z_loss)?;
        let scaled = g.mul(lse, z)?;
        let added = g.mul(scaled, lse)?;
        let loss = g.add(loss, added)?;
        let loss = g.mul(loss, known)?;
        let loss = g.reshape(loss, tokens)?;
        let loss = total(g, loss)?;
        if !saving {
            return Ok((loss, None));
        }
        let below = g.sub(logits, lse)?;
        let share = g.exp(below)?;
        let twice = g.add(scaled, scaled)?;
        let factor = g.add(one, twice)?;
        let share = g.mul(share, factor)?;
        let change = g.sub(share, onehot)?;
        let mut change = g.mul(change, known)?;
        if let Some(slope) = slope {
            change = g.mul(change, slope)?;
        }
        Ok((loss, Some(g.cast(change, ty.dtype)?)))
    }
}

impl Composite for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.check(inputs)?;
        Ok(vec![scalar()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let products = g.composite(LinearForward { bias: false }, &inputs[..2])?[0];
        Ok(vec![self.losses(g, products, inputs[2], false)?.0])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Self::cost(inputs, outputs, 1)
    }

    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(LinearCrossEntropySaving(*self)),
            saved: vec![Saved::Output(1), Saved::Output(2)],
            backward: CompositeRef::new(LinearCrossEntropyBackward),
            wrt: vec![0, 1],
        }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (rows, whole) = (Placement::shard(0), Placement::Replicate);
        vec![ShardingRule { inputs: vec![rows, whole, rows], outputs: vec![Placement::Partial] }]
    }
}

impl Composite for LinearCrossEntropySaving {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_saving"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.0.check(inputs)?;
        Ok(vec![scalar(), inputs[0].clone(), inputs[1].clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [x, w, targets] = inputs else { unreachable!("infer has counted the inputs") };
        let products = g.composite(LinearForward { bias: false }, &[*x, *w])?[0];
        let (loss, cotangent) = self.0.losses(g, products, *targets, true)?;
        let cotangent = cotangent.unwrap_or(products);
        let dx = g.composite(LinearInputGradient, &[cotangent, *w])?[0];
        let dtype = g.ty(*w)?.dtype;
        let dw = g.composite(LinearWeightGradient { dtype }, &[cotangent, *x])?[0];
        Ok(vec![loss, dx, dw])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        LinearCrossEntropy::cost(inputs, outputs, 3)
    }

    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (rows, whole, sum) = (Placement::shard(0), Placement::Replicate, Placement::Partial);
        vec![ShardingRule { inputs: vec![rows, whole, rows], outputs: vec![sum, rows, sum] }]
    }
}

impl Composite for LinearCrossEntropyBackward {
    fn name(&self) -> &'static str {
        "linear_cross_entropy_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [dx, dw, dloss] = inputs else { return Err(takes("dx, dw and dloss", inputs)) };
        want_floats("dx", dx, 2, "[tokens, hidden]")?;
        want_floats("dw", dw, 2, "[vocab, hidden]")?;
        want("dloss", dloss, DType::F32, Shape::default())?;
        Ok(vec![dx.clone(), dw.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let scaled = |g: &mut Builder, x: Var| {
            let dtype = g.ty(x)?.dtype;
            let wide = g.cast(x, DType::F32)?;
            let wide = g.mul(wide, inputs[2])?;
            g.cast(wide, dtype)
        };
        Ok(vec![scaled(g, inputs[0])?, scaled(g, inputs[1])?])
    }

    fn is_shorthand(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements() + &inputs[1].shape.elements();
        Cost { vector_flops: elements, ..Cost::moving(inputs, outputs) }
    }
}

impl Builder {
    /// Loss of an output projection, summed over tokens; see [`LinearCrossEntropy`].
    ///
    /// # Errors
    /// When `w` does not follow `x`, `targets` is not i32 with one for each row of `x`, or the cap is not above 0.
    pub fn linear_cross_entropy(&mut self, x: Var, w: Var, targets: Var, op: LinearCrossEntropy) -> Result<Var> {
        Ok(self.composite(op, &[x, w, targets])?[0])
    }
}

fn instances(rng: &mut Rng, dtype: DType) -> Vec<(LinearCrossEntropy, [Tensor; 3])> {
    let plain = LinearCrossEntropy { softcap: None, z_loss: 0.0 };
    let cases = [
        (plain, 0, 8, 5),
        (plain, 1, 1, 2),
        (plain, 7, 24, 40),
        (plain, 70, 16, 33),
        (LinearCrossEntropy { z_loss: 0.01, ..plain }, 24, 16, 40),
        (LinearCrossEntropy { softcap: Some(3.0), ..plain }, 6, 8, 24),
        (LinearCrossEntropy { softcap: Some(5.0), z_loss: 0.001 }, 20, 32, 64),
    ];
    let instance = |(op, tokens, hidden, vocab): (LinearCrossEntropy, usize, usize, usize)| {
        let targets = rng.integers(DType::I32, &[tokens], -(vocab as i64 / 2), vocab as i64);
        (op, [rng.normal(dtype, &[tokens, hidden]), rng.normal(dtype, &[vocab, hidden]), targets])
    };
    cases.into_iter().map(instance).collect()
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample =
        |(op, inputs): (LinearCrossEntropy, [Tensor; 3])| inputs.into_iter().fold(Sample::new(op), Sample::input);
    instances(rng, dtype).into_iter().map(sample).collect()
}

pub(super) fn samples_saving(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |(op, inputs): (LinearCrossEntropy, [Tensor; 3])| {
        inputs.into_iter().fold(Sample::new(LinearCrossEntropySaving(op)), Sample::input)
    };
    instances(rng, dtype).into_iter().map(sample).collect()
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |[tokens, vocab, hidden]: [usize; 3]| {
        let sample = Sample::new(LinearCrossEntropyBackward).input(rng.normal(dtype, &[tokens, hidden]));
        sample.input(rng.normal(dtype, &[vocab, hidden])).input(rng.normal(DType::F32, &[]))
    };
    [[0, 3, 4], [1, 1, 1], [5, 40, 33]].into_iter().map(sample).collect()
}
