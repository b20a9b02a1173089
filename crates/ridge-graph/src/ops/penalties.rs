//! Penalties on what a sequence has said: repetition (Keskar et al. 2019, "CTRL", section 4.1), frequency and presence
//! (OpenAI's API reference), as vLLM applies them, in that order.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

use super::history::{History, flat_logits, places, want_rows};

/// Logits after penalties.
///
/// `logits`: `[sequences, vocab]` of any float dtype; `history`: the state of tokens, i32 `[blocks, block_size]`; `block_table`: i32
/// `[sequences, blocks]`; `lengths`: i32 `[sequences]`, tokens of each sequence; `prompt_lengths`: i32 `[sequences]`, how
/// many of them are the prompt; `repetition`, `frequency`, `presence`: f32 `[sequences]`. Gives f32
/// `[sequences, vocab]`.
///
/// A token that is in the prompt or the answer has its logit divided by `repetition` if it is above 0, else multiplied
/// by it. Then a token that is `n` times in the answer loses `n * frequency`, and `presence` if `n` is 1 or more.
/// 1, 0 and 0 change no bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Penalties;

const SETTINGS: [&str; 3] = ["repetition", "frequency", "presence"];

impl Composite for Penalties {
    fn name(&self) -> &'static str {
        "penalties"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [logits, history, table, lengths, prompts, settings @ ..] = inputs else {
            return Err(takes("logits, a history's inputs and three settings", inputs));
        };
        if settings.len() != SETTINGS.len() {
            return Err(takes("logits, a history's inputs and three settings", inputs));
        }
        let (rows, vocab) = want_rows(logits, history, table, lengths)?;
        want("prompt_lengths", prompts, DType::I32, [rows])?;
        for (name, ty) in SETTINGS.iter().zip(settings) {
            want(name, ty, DType::F32, [rows])?;
        }
        Ok(vec![Type::tensor(DType::F32, [rows, &vocab])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let shape = g.ty(inputs[0])?.shape.clone();
        let (rows, vocab) = (shape.0[0].clone(), shape.last());
        let column = Shape(vec![rows.clone(), 1.into()]);
        let logits = g.cast(inputs[0], DType::F32)?;
        let history = History::read(g, inputs[1], inputs[2], inputs[3])?;
        let flat = flat_logits(g, &rows, &vocab)?;
        let zero = g.constant(DType::I32, 0.0)?;
        let one = g.constant(DType::I32, 1.0)?;
        let ones = g.broadcast(one, history.shape.clone())?;
        let empty = g.broadcast(zero, Shape(vec![flat]))?;
        let count = |g: &mut Builder, keep: Var| -> Result<Var> {
            let places = places(g, history.ids, Some(keep), &history.shape, &vocab)?;
            let counts = g.scatter_add(empty, places, ones, 0)?;
            g.reshape(counts, shape.clone())
        };
        let anywhere = g.ge(history.positions, zero)?;
        let said = count(g, anywhere)?;
        let prompts = g.reshape(inputs[4], column.clone())?;
        let answered = g.ge(history.positions, prompts)?;
        let answered = count(g, answered)?;

        let repetition = g.reshape(inputs[5], column.clone())?;
        let frequency = g.reshape(inputs[6], column.clone())?;
        let presence = g.reshape(inputs[7], column)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let positive = g.gt(logits, nothing)?;
        let divided = g.div(logits, repetition)?;
        let multiplied = g.mul(logits, repetition)?;
        let repeated = g.select(positive, divided, multiplied)?;
        let said = g.gt(said, zero)?;
        let logits = g.select(said, repeated, logits)?;
        let present = g.gt(answered, zero)?;
        let times = g.cast(answered, DType::F32)?;
        let by_times = g.mul(times, frequency)?;
        let after = g.sub(logits, by_times)?;
        let after = g.sub(after, presence)?;
        Ok(vec![g.select(present, after, logits)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let history = inputs[2].shape.elements() * inputs[1].shape.last().as_const().unwrap_or(1) as i128;
        let moved = Cost::moving(&[inputs[0].clone()], outputs);
        Cost {
            vector_flops: outputs[0].shape.elements() * 4,
            bytes_read: moved.bytes_read.clone() + &(history * 4),
            ..moved
        }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // By sequences, of which each rank has the whole history.
        let mut places = vec![Placement::shard(0); inputs.len()];
        places[1] = Placement::Replicate;
        vec![ShardingRule { inputs: places, outputs: vec![Placement::shard(0)] }]
    }
}

impl Builder {
    /// Logits after penalties; `rows` is the history, the block table, the lengths and the prompts' lengths, `settings`
    /// repetition, frequency and presence; see [`Penalties`].
    ///
    /// # Errors
    /// When an input is not of the dtype and shape described there.
    pub fn penalties(&mut self, logits: Var, rows: [Var; 4], settings: [Var; 3]) -> Result<Var> {
        let inputs: Vec<Var> = std::iter::once(logits).chain(rows).chain(settings).collect();
        Ok(self.composite(Penalties, &inputs)?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (sequences, vocab) in [(&[][..], 7), (&[1][..], 1), (&[0, 9, 30, 17][..], 33), (&[64, 5][..], 500)] {
        let rows = sequences.len();
        let [history, table, lengths] = super::history::sampled(rng, sequences, vocab);
        let prompts = sequences.iter().map(|n| (n / 2) as i64).collect();
        let each = |of: [f64; 4]| Tensor::float(DType::F32, &[rows], (0..rows).map(|i| of[i % 4]).collect()).rounded();
        samples.push(
            Sample::new(Penalties)
                .input(rng.normal(dtype, &[rows, vocab]))
                .state(history)
                .input(table)
                .input(lengths)
                .input(Tensor::int(DType::I32, &[rows], prompts))
                .input(each([1.3, 1.0, 0.7, 1.1]))
                .input(each([0.5, 0.0, -0.25, 1.5]))
                .input(each([0.0, 0.0, 1.0, -0.5])),
        );
    }
    samples
}
