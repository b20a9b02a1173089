//! DRY ("don't repeat yourself"; p-e-w 2024, text-generation-webui pull request 5677): a token that would continue
//! what was said before is the less likely the longer the repetition is.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::prim::Combine;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

use super::history::{History, flat_logits, places, want_rows};

/// Logits less the penalties of repetition.
///
/// `logits`: `[sequences, vocab]` of any float dtype; `history`, `block_table`, `lengths` as [`super::Penalties`] takes
/// them; `multiplier`, `base`: f32, `allowed`, `range`: i32, all `[sequences]`; `breakers`: i32 `[sequences, breakers]`,
/// tokens that no repetition goes over, negative where there is none. Gives f32 `[sequences, vocab]`.
///
/// Of the last `range` tokens (0 or below: all), wherever what precedes a token `t` is the same as the end of the
/// sequence, over `n` tokens (counted to [`Dry::LONGEST`], none of them a breaker, nor `t`), and `n` is the largest such
/// for `t` and at least `allowed`, `t` loses `multiplier * base^(n - allowed)`. A multiplier of 0 or below changes no
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dry;

impl Dry {
    /// The longest repetition that counts.
    pub const LONGEST: usize = 50;
}

const SETTINGS: [(&str, DType); 4] =
    [("multiplier", DType::F32), ("base", DType::F32), ("allowed", DType::I32), ("range", DType::I32)];

impl Composite for Dry {
    fn name(&self) -> &'static str {
        "dry"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let names = "logits, history, block_table, lengths, four settings and breakers";
        let [logits, history, table, lengths, settings @ .., breakers] = inputs else {
            return Err(takes(names, inputs));
        };
        if settings.len() != SETTINGS.len() {
            return Err(takes(names, inputs));
        }
        let (rows, vocab) = want_rows(logits, history, table, lengths)?;
        for ((name, dtype), ty) in SETTINGS.iter().zip(settings) {
            want(name, ty, *dtype, [rows])?;
        }
        want("breakers", breakers, DType::I32, [rows.clone(), breakers.shape.last()])?;
        Ok(vec![Type::tensor(DType::F32, [rows, &vocab])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let shape = g.ty(inputs[0])?.shape.clone();
        let (rows, vocab) = (shape.0[0].clone(), shape.last());
        let column = Shape(vec![rows.clone(), 1.into()]);
        let logits = g.cast(inputs[0], DType::F32)?;
        let mut history = History::read(g, inputs[1], inputs[2], inputs[3])?;
        let multiplier = g.reshape(inputs[4], column.clone())?;
        let base = g.reshape(inputs[5], column.clone())?;
        let allowed = g.reshape(inputs[6], column.clone())?;
        let range = g.reshape(inputs[7], column.clone())?;
        let breakers = inputs[8];
        let count = g.ty(breakers)?.shape.last();
        let zero = g.constant(DType::I32, 0.0)?;
        let one = g.constant(DType::I32, 1.0)?;
        let none = g.constant(DType::I32, -1.0)?;

        // What is before the range is not there.
        let limited = g.gt(range, zero)?;
        let start = g.sub(history.lengths, range)?;
        let start = g.select(limited, start, zero)?;
        let recent = g.ge(history.positions, start)?;
        history.ids = g.select(recent, history.ids, none)?;
        let wide = history.shape.last();
        let last = g.sub(history.lengths, one)?;

        // Is each of `ids`, `[sequences, n]`, no breaker?
        let passes = |g: &mut Builder, ids: Var| -> Result<Var> {
            let n = g.ty(ids)?.shape.last();
            let ids = g.reshape(ids, Shape(vec![rows.clone(), n.clone(), 1.into()]))?;
            let breakers = g.reshape(breakers, Shape(vec![rows.clone(), 1.into(), count.clone()]))?;
            let same = g.eq(ids, breakers)?;
            let same = g.cast(same, DType::I32)?;
            let same = g.reduce_sum(same, 2)?;
            let same = g.reshape(same, Shape(vec![rows.clone(), n]))?;
            g.eq(same, zero)
        };
        let next = g.pad(history.ids, 1, 0, 1, -1.0)?;
        let next = g.slice(next, 1, 1, wide.clone())?;
        let before_last = g.lt(history.positions, last)?;
        let next_passes = passes(g, next)?;
        let candidate = g.and(before_last, next_passes)?;

        // `[sequences, back, position]`: the token `back` before each position beside that before the last.
        let longest = Dim::from(Self::LONGEST);
        let cube = Shape(vec![rows.clone(), longest.clone(), wide.clone()]);
        let shifts = Shape(vec![longest.clone(), wide.clone()]);
        let back = g.iota(shifts.clone(), 0, DType::I32)?;
        let position = g.iota(shifts, 1, DType::I32)?;
        let from = g.sub(position, back)?;
        let room = g.constant(DType::I32, Self::LONGEST as f64)?;
        let from = g.add(from, room)?;
        let earlier = g.pad(history.ids, 1, Self::LONGEST, 0, -1.0)?;
        let earlier = g.gather(earlier, from, 1)?;
        let last = g.reshape(last, Shape(vec![rows.clone(), 1.into(), 1.into()]))?;
        let back = g.iota(cube.clone(), 1, DType::I32)?;
        let ends = g.sub(last, back)?;
        let position = g.iota(cube.clone(), 2, DType::I32)?;
        let here = g.eq(position, ends)?;
        let flat_row = Shape(vec![rows.clone(), 1.into(), wide.clone()]);
        let ids = g.reshape(history.ids, flat_row.clone())?;
        let token = g.select(here, ids, zero)?;
        let token = g.reduce_sum(token, 2)?;
        let same = g.eq(earlier, token)?;
        let token = g.reshape(token, Shape(vec![rows.clone(), longest.clone()]))?;
        let goes_on = passes(g, token)?;
        let goes_on = g.reshape(goes_on, Shape(vec![rows.clone(), longest, 1.into()]))?;
        let same = g.and(same, goes_on)?;
        let candidate = g.reshape(candidate, flat_row.clone())?;
        let same = g.and(same, candidate)?;
        // Alive as long as nothing differed.
        let same = g.cast(same, DType::I32)?;
        let alive = g.scan(Combine::Min, same, 1)?;
        let alive = g.gt(alive, zero)?;
        // Of a token's lengths the largest comes last, and stays.
        let next = g.reshape(next, flat_row)?;
        let next = g.broadcast(next, cube.clone())?;
        let at = places(g, next, Some(alive), &cube, &vocab)?;
        let length = g.add(back, one)?;
        let empty = g.broadcast(zero, Shape(vec![flat_logits(g, &rows, &vocab)?]))?;
        let lengths = g.scatter(empty, at, length, 0)?;
        let lengths = g.reshape(lengths, shape)?;
        let beyond = g.sub(lengths, allowed)?;
        let repeats = g.gt(lengths, zero)?;
        let long = g.ge(beyond, zero)?;
        let penalised = g.and(repeats, long)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let asked = g.gt(multiplier, nothing)?;
        let penalised = g.and(penalised, asked)?;
        let beyond = g.cast(beyond, DType::F32)?;
        let power = g.pow(base, beyond)?;
        let penalty = g.mul(multiplier, power)?;
        let after = g.sub(logits, penalty)?;
        Ok(vec![g.select(penalised, after, logits)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let history = inputs[2].shape.elements() * inputs[1].shape.last().as_const().unwrap_or(1) as i128;
        let moved = Cost::moving(&[inputs[0].clone()], outputs);
        Cost { bytes_read: moved.bytes_read.clone() + &(history * 4), ..moved }
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
    /// Logits less the penalties of repetition; `rows` is the history, the block table and the lengths, `settings`
    /// multiplier, base, allowed length and range; see [`Dry`].
    ///
    /// # Errors
    /// When an input is not of the dtype and shape described there.
    pub fn dry(&mut self, logits: Var, rows: [Var; 3], settings: [Var; 4], breakers: Var) -> Result<Var> {
        let inputs: Vec<Var> = [logits].into_iter().chain(rows).chain(settings).chain([breakers]).collect();
        Ok(self.composite(Dry, &inputs)?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (sequences, vocab) in [(&[][..], 7), (&[1][..], 1), (&[0, 9, 40, 17][..], 11), (&[64, 5][..], 100)] {
        let rows = sequences.len();
        let [history, table, lengths] = super::history::sampled(rng, sequences, vocab);
        let each = |of: [f64; 4]| Tensor::float(DType::F32, &[rows], (0..rows).map(|i| of[i % 4]).collect()).rounded();
        let int = |of: [i64; 4]| Tensor::int(DType::I32, &[rows], (0..rows).map(|i| of[i % 4]).collect());
        samples.push(
            Sample::new(Dry)
                .input(rng.normal(dtype, &[rows, vocab]))
                .state(history)
                .input(table)
                .input(lengths)
                .input(each([0.8, 1.0, 0.5, 0.0]))
                .input(each([1.75, 1.1, 2.0, 1.5]))
                .input(int([2, 1, 3, 2]))
                .input(int([0, 8, 25, -1]))
                .input(rng.integers(DType::I32, &[rows, 2], -1, vocab as i64)),
        );
    }
    samples
}
