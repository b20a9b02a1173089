//! Tokens that a grammar does not allow next (Willard and Louf 2023, "Efficient Guided Generation for Large Language
//! Models", section 3).

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

/// Logits with minus infinity for the tokens forbidden.
///
/// `logits`: `[sequences, vocab]` of any float dtype; `forbidden`: i32 `[sequences, words]`, of which bit `i % 32` of word
/// `i / 32` forbids token `i`. Words beyond the vocabulary say nothing, and a token without a word is allowed, so
/// without columns all are. Gives f32 `[sequences, vocab]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForbidTokens;

impl Composite for ForbidTokens {
    fn name(&self) -> &'static str {
        "forbid_tokens"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [logits, forbidden] = inputs else { return Err(takes("logits and forbidden", inputs)) };
        want_floats("logits", logits, 2, "[sequences, vocab]")?;
        want("forbidden", forbidden, DType::I32, [&logits.shape.0[0], &forbidden.shape.last()])?;
        Ok(vec![Type::tensor(DType::F32, logits.shape.clone())])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let logits = g.cast(inputs[0], DType::F32)?;
        let vocab = Shape(vec![g.ty(logits)?.shape.last()]);
        let token = g.iota(vocab, 0, DType::I32)?;
        let bits = g.constant(DType::I32, 32.0)?;
        let nth = g.div(token, bits)?;
        let words = g.gather(inputs[1], nth, 1)?;
        // Division rounds down, so it shifts negative words too; in 64 bits, of which 2^31 is one.
        let words = g.cast(words, DType::I64)?;
        let powers: Vec<f64> = (0..32).map(|bit| 2f64.powi(bit)).collect();
        let powers = g.table(DType::I64, &powers)?;
        let bit = g.rem(token, bits)?;
        let power = g.gather(powers, bit, 0)?;
        let shifted = g.div(words, power)?;
        let two = g.constant(DType::I64, 2.0)?;
        let bit = g.rem(shifted, two)?;
        let zero = g.constant(DType::I64, 0.0)?;
        let allowed = g.eq(bit, zero)?;
        let none = g.constant(DType::F32, f64::NEG_INFINITY)?;
        Ok(vec![g.select(allowed, logits, none)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: outputs[0].shape.elements(), ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        vec![ShardingRule { inputs: vec![Placement::shard(0); inputs.len()], outputs: vec![Placement::shard(0)] }]
    }
}

impl Builder {
    /// Logits with minus infinity for forbidden tokens; see [`ForbidTokens`].
    ///
    /// # Errors
    /// When an input is not of the dtype and shape described there.
    pub fn forbid_tokens(&mut self, logits: Var, forbidden: Var) -> Result<Var> {
        Ok(self.composite(ForbidTokens, &[logits, forbidden])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (rows, vocab, words) in [(0, 8, 1), (1, 1, 0), (2, 40, 2), (3, 33, 0), (3, 65, 1), (5, 500, 16), (2, 31, 3)] {
        samples.push(Sample::new(ForbidTokens).input(rng.normal(dtype, &[rows, vocab])).input(rng.integers(
            DType::I32,
            &[rows, words],
            i64::from(i32::MIN),
            i64::from(i32::MAX) + 1,
        )));
    }
    samples
}
