//! The gate of gpt-oss (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2: "an unconventional SwiGLU").

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// `g * sigmoid(alpha * g) * (1 + u)` where `g = min(gate, limit)` and `u = max(-limit, min(up, limit))`, computed in f32.
/// `gate` and `up` have one float type, which the result has too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedSwiglu {
    /// Steepness of the sigmoid.
    pub alpha: f64,
    /// The largest value of both, and of `up` the largest magnitude.
    pub limit: f64,
}

impl Composite for ClampedSwiglu {
    fn name(&self) -> &'static str {
        "clamped_swiglu"
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
        let (gate, up) = (g.cast(inputs[0], DType::F32)?, g.cast(inputs[1], DType::F32)?);
        let [least, most, alpha, one] = [-self.limit, self.limit, self.alpha, 1.0].map(|n| g.constant(DType::F32, n));
        let (least, most, alpha, one) = (least?, most?, alpha?, one?);
        let gate = g.min(gate, most)?;
        let up = g.max(up, least)?;
        let up = g.min(up, most)?;
        let steep = g.mul(gate, alpha)?;
        let open = g.sigmoid(steep)?;
        let open = g.mul(gate, open)?;
        let up = g.add(up, one)?;
        let y = g.mul(up, open)?;
        Ok(vec![g.cast(y, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        Cost { vector_flops: elements.clone() * 7, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Elementwise: the last axis first, since that is how a tensor-parallel MLP is cut.
        let axes = (0..inputs[0].shape.rank()).rev().map(Placement::shard);
        axes.map(|cut| ShardingRule { inputs: vec![cut; 2], outputs: vec![cut] }).collect()
    }
}

impl Builder {
    /// What a clamped gate lets through; see [`ClampedSwiglu`].
    ///
    /// # Errors
    /// When `gate` and `up` are not of one float type.
    pub fn clamped_swiglu(&mut self, gate: Var, up: Var, how: ClampedSwiglu) -> Result<Var> {
        Ok(self.composite(how, &[gate, up])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // A limit that some values pass, and one that few do.
    let cases: [(f64, f64, &[usize]); 4] =
        [(1.702, 7.0, &[0, 8]), (1.702, 0.5, &[7]), (1.0, 1.0, &[5, 64]), (1.702, 7.0, &[2, 3, 33])];
    let sample = |(alpha, limit, shape): (f64, f64, &[usize])| {
        Sample::new(ClampedSwiglu { alpha, limit }).input(rng.normal(dtype, shape)).input(rng.normal(dtype, shape))
    };
    cases.into_iter().map(sample).collect()
}
