//! Gated activation of the MLP (Shazeer 2020, "GLU Variants Improve Transformer", section 2: the gate of SwiGLU).

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// `gate * sigmoid(gate) * up`, computed in f32. `gate` and `up` have one float type, which the result has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swiglu;

/// Gradient of [`Swiglu`], computed in f32: with `s = sigmoid(gate)`, `dy up s (1 + gate (1 - s))` for the gate and `dy gate s` for
/// `up`. `gate`, `up` and `dy` have one float type, which the results have too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwigluBackward;

/// Elementwise: any axis, the last first, since that is how a tensor-parallel MLP is cut.
fn elementwise(inputs: &[Type], outputs: usize) -> Vec<ShardingRule> {
    let axes = (0..inputs[0].shape.rank()).rev().map(Placement::shard);
    axes.map(|cut| ShardingRule { inputs: vec![cut; inputs.len()], outputs: vec![cut; outputs] }).collect()
}

impl Composite for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [gate, up] = inputs else { return Err(takes("gate and up", inputs)) };
        want_float("gate", gate)?;
        if up != gate {
            return Err(format!("up must be {gate} as gate is, got {up}"));
        }
        Ok(vec![gate.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let gate = g.cast(inputs[0], DType::F32)?;
        let up = g.cast(inputs[1], DType::F32)?;
        let open = g.sigmoid(gate)?;
        let silu = g.mul(gate, open)?;
        let y = g.mul(silu, up)?;
        Ok(vec![g.cast(y, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        Cost { vector_flops: elements.clone() * 2, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Input(0), Saved::Input(1)],
            backward: CompositeRef::new(SwigluBackward),
            wrt: vec![0, 1],
        }
    }

    fn shard(&self, inputs: &[Type], outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise(inputs, outputs.len())
    }
}

impl Composite for SwigluBackward {
    fn name(&self) -> &'static str {
        "swiglu_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [gate, up, dy] = inputs else { return Err(takes("gate, up and dy", inputs)) };
        want_float("gate", gate)?;
        for (name, ty) in [("up", up), ("dy", dy)] {
            if ty != gate {
                return Err(format!("{name} must be {gate} as gate is, got {ty}"));
            }
        }
        Ok(vec![gate.clone(), up.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let [gate, up, dy] = [inputs[0], inputs[1], inputs[2]].map(|x| g.cast(x, DType::F32));
        let (gate, up, dy) = (gate?, up?, dy?);
        let one = g.constant(DType::F32, 1.0)?;
        let open = g.sigmoid(gate)?;
        let silu = g.mul(gate, open)?;
        let dup = g.mul(dy, silu)?;
        // By the chain rule through `gate * sigmoid(gate)`.
        let of_silu = g.mul(dy, up)?;
        let straight = g.mul(of_silu, open)?;
        let of_open = g.mul(of_silu, gate)?;
        let closed = g.sub(one, open)?;
        let slope = g.mul(open, closed)?;
        let bent = g.mul(of_open, slope)?;
        let dgate = g.add(straight, bent)?;
        Ok(vec![g.cast(dgate, dtype)?, g.cast(dup, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        Cost { vector_flops: elements.clone() * 8, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], outputs: &[Type]) -> Vec<ShardingRule> {
        elementwise(inputs, outputs.len())
    }
}

impl Builder {
    /// `silu(gate) * up`; see [`Swiglu`].
    ///
    /// # Errors
    /// When `gate` and `up` are not of one float type.
    pub fn swiglu(&mut self, gate: Var, up: Var) -> Result<Var> {
        Ok(self.composite(Swiglu, &[gate, up])?[0])
    }
}

const SHAPES: [&[usize]; 6] = [&[0, 8], &[1, 1], &[7], &[5, 64], &[2, 3, 33], &[17, 1000]];

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |shape| Sample::new(Swiglu).input(rng.normal(dtype, shape)).input(rng.normal(dtype, shape));
    SHAPES.into_iter().map(sample).collect()
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |shape| (0..3).fold(Sample::new(SwigluBackward), |sample, _| sample.input(rng.normal(dtype, shape)));
    SHAPES.into_iter().map(sample).collect()
}
