//! Gated activation of the MLP (Shazeer 2020, "GLU Variants Improve Transformer", section 2: the gate of SwiGLU).

use super::require::{takes, want_float};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// `gate * sigmoid(gate) * up`, computed in f32. `gate` and `up` have one float type, which the result has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swiglu;

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

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Elementwise: any axis, the last first, since that is how a tensor-parallel MLP is cut.
        let axes = (0..inputs[0].shape.rank()).rev();
        axes.map(|dim| ShardingRule { inputs: vec![Placement::shard(dim); 2], outputs: vec![Placement::shard(dim)] })
            .collect()
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

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let shapes: [&[usize]; 6] = [&[0, 8], &[1, 1], &[7], &[5, 64], &[2, 3, 33], &[17, 1000]];
    shapes
        .into_iter()
        .map(|shape| Sample::new(Swiglu).input(rng.normal(dtype, shape)).input(rng.normal(dtype, shape)))
        .collect()
}
