//! What a user adds to the logits of some tokens (OpenAI's API reference, `logit_bias`).

use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

use super::history::{flat_logits, places};

/// Logits with `values[s, i]` added to that of token `ids[s, i]`.
///
/// `logits`: `[sequences, vocab]` of any float dtype; `ids`: i32, `values`: f32, both `[sequences, biases]`; ids that are
/// no tokens, such as the -1 of padding, are dropped. Gives f32 `[sequences, vocab]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitBias;

impl Composite for LogitBias {
    fn name(&self) -> &'static str {
        "logit_bias"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [logits, ids, values] = inputs else { return Err(takes("logits, ids and values", inputs)) };
        want_floats("logits", logits, 2, "[sequences, vocab]")?;
        let (rows, biases) = (&logits.shape.0[0], ids.shape.last());
        want("ids", ids, DType::I32, [rows, &biases])?;
        want("values", values, DType::F32, [rows, &biases])?;
        Ok(vec![Type::tensor(DType::F32, logits.shape.clone())])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let shape = g.ty(inputs[0])?.shape.clone();
        let ids = g.ty(inputs[1])?.shape.clone();
        let flat = flat_logits(g, &shape.0[0], &shape.last())?;
        let logits = g.cast(inputs[0], DType::F32)?;
        let logits = g.reshape(logits, Shape(vec![flat]))?;
        let places = places(g, inputs[1], None, &ids, &shape.last())?;
        let logits = g.scatter_add(logits, places, inputs[2], 0)?;
        Ok(vec![g.reshape(logits, shape)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[1].shape.elements(), ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        vec![ShardingRule { inputs: vec![Placement::shard(0); inputs.len()], outputs: vec![Placement::shard(0)] }]
    }
}

impl Builder {
    /// Logits with biases; see [`LogitBias`].
    ///
    /// # Errors
    /// When an input is not of the dtype and shape described there.
    pub fn logit_bias(&mut self, logits: Var, ids: Var, values: Var) -> Result<Var> {
        Ok(self.composite(LogitBias, &[logits, ids, values])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (rows, vocab, biases) in [(0, 8, 1), (1, 1, 0), (3, 33, 5), (5, 500, 17)] {
        samples.push(
            Sample::new(LogitBias)
                .input(rng.normal(dtype, &[rows, vocab]))
                .input(rng.integers(DType::I32, &[rows, biases], -2, vocab as i64 + 1))
                .input(rng.normal(DType::F32, &[rows, biases])),
        );
    }
    samples
}
