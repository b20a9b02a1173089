//! A linear recurrence whose states are lines of a table, as a server keeps those of its sequences.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::prim::Prim;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// [`Prim::LinearRecurrence`] over rows whose states before the step are lines of `table` and are written to other lines.
///
/// `q`, `k`, `v`, `log_decay`, `query_start`, and `erase` and `write` if it has a part of low rank, are those of the
/// recurrence; `table`: state f32 `[lines, heads * key * value]`; `lines`: i32 `[rows, 2]`, the line that a row reads, zeros
/// where there is none of that number, and the line that it writes, none where there is none. A row may write the line that it
/// reads; no line is written that another row reads or writes, so a kernel need not keep states apart. Gives `y`, f32 `[tokens, heads, value]`, and the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatefulRecurrence {
    /// Has it a part of low rank?
    pub low_rank: bool,
}

/// The inputs `q`, `k`, `v`, `log_decay`, `table`, `lines` and `query_start`, before those of the part of low rank.
const INPUTS: usize = 7;
const TABLE: usize = 4;
const LINES: usize = 5;

impl StatefulRecurrence {
    fn prim(self) -> Prim {
        Prim::LinearRecurrence { low_rank: self.low_rank }
    }

    /// The inputs of the recurrence itself, if they are as many as they must be.
    fn of_recurrence(inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, k, v, decay, _, lines, starts, low_rank @ ..] = inputs else {
            return Err(takes("q, k, v, log_decay, table, lines and query_start", inputs));
        };
        let (Some(rows), Some(key)) = (lines.shape.0.first(), q.shape.0.get(2)) else {
            return Err(format!("lines must be i32[rows, 2] and q of three axes, got {lines} and {q}"));
        };
        let [_, heads, value] = &v.shape.0[..] else { return Err(format!("v must have three axes, got {v}")) };
        let state = Type::tensor(DType::F32, [rows, heads, key, value]);
        Ok([q, k, v, decay, &state, starts].into_iter().chain(low_rank).cloned().collect())
    }
}

impl Composite for StatefulRecurrence {
    fn name(&self) -> &'static str {
        "stateful_recurrence"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        if inputs.len() != INPUTS + if self.low_rank { 2 } else { 0 } {
            return Err(takes(
                "q, k, v, log_decay, table, lines, query_start, and erase and write of low rank",
                inputs,
            ));
        }
        let of_recurrence = Self::of_recurrence(inputs)?;
        let made = self.prim().infer(&of_recurrence)?;
        let (table, lines) = (&inputs[TABLE], &inputs[LINES]);
        let rows = lines.shape.0[0].clone();
        want("lines", lines, DType::I32, Shape(vec![rows, 2.into()]))?;
        let width = &made[1].shape.0[1..];
        let width = width.iter().map(Dim::as_const).product::<Option<usize>>();
        let fits = table.state && table.dtype == DType::F32 && table.format.is_none() && table.shape.rank() == 2;
        if !fits || width.is_none() || table.shape.0[1].as_const() != width {
            return Err(format!("table must be a state f32[lines, {}], got {table}", width.unwrap_or_default()));
        }
        Ok(vec![made[0].clone(), table.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, k, v, decay, table, lines, starts, low_rank @ ..] = inputs else {
            unreachable!("infer has counted the inputs")
        };
        let [key, heads, value] = [(*k, 2), (*v, 1), (*v, 2)].map(|(x, axis)| g.ty(x).map(|t| t.shape.0[axis].clone()));
        let (rows, width) = (g.ty(*lines)?.shape.0[0].clone(), g.ty(*table)?.shape.0[1].clone());
        let line = |g: &mut Builder, which: usize| {
            let column = g.slice(*lines, 1, which, 1)?;
            g.reshape(column, [&rows])
        };
        let (from, to) = (line(g, 0)?, line(g, 1)?);
        let all = g.state_read(*table)?;
        let before = g.gather(all, from, 0)?;
        let before = g.reshape(before, [&rows, &heads?, &key?, &value?])?;
        let low_rank = if let [erase, write] = low_rank { Some([*erase, *write]) } else { None };
        let [y, after] = g.linear_recurrence([*q, *k, *v, *decay, before, *starts], low_rank)?;
        let after = g.reshape(after, [&rows, &width])?;
        Ok(vec![y, g.table_write(*table, after, to)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let lines = Cost::moving(&inputs[LINES..=LINES], &[]);
        let of_recurrence = Self::of_recurrence(inputs).unwrap_or_default();
        // The states of the rows, and not the table, are read and written.
        let state = of_recurrence.get(TABLE).cloned().unwrap_or_else(|| outputs[1].clone());
        let cost = self.prim().cost(&of_recurrence, &[outputs[0].clone(), state]);
        Cost { bytes_read: cost.bytes_read.clone() + &lines.bytes_read, ..cost }
    }

    /// By heads, which are the outer part of a line; q and k of one group go to all. Lines are flat, so not by values.
    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (cut, whole) = (Placement::shard(1), Placement::Replicate);
        let of_groups = if inputs[0].shape.0[1].is_one() { whole } else { cut };
        let behind = vec![cut; inputs.len() - INPUTS];
        vec![ShardingRule {
            inputs: [vec![of_groups, of_groups, cut, cut, cut, whole, whole], behind].concat(),
            outputs: vec![cut, cut],
        }]
    }
}

impl Builder {
    /// `(y, table)` of a recurrence over lines of a table, from `[q, k, v, log_decay, table, lines, query_start]`, and
    /// `[erase, write]` if it has a part of low rank; see [`StatefulRecurrence`].
    ///
    /// # Errors
    /// When an input does not have the type described there.
    pub fn stateful_recurrence(&mut self, inputs: [Var; INPUTS], low_rank: Option<[Var; 2]>) -> Result<[Var; 2]> {
        let op = StatefulRecurrence { low_rank: low_rank.is_some() };
        let inputs: Vec<Var> = inputs.into_iter().chain(low_rank.into_iter().flatten()).collect();
        let out = self.composite(op, &inputs)?;
        Ok([out[0], out[1]])
    }
}

/// Those of the recurrence, with states in lines of a table, one that begins with zeros, and one that is not kept.
pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    let all = crate::prim::samples::recurrences(&mut Rng::new(31), dtype);
    // With and without a part of low rank in turn.
    for (nth, of) in all.into_iter().step_by(3).enumerate() {
        let inputs: Vec<Tensor> = of.inputs.iter().map(|value| value.tensor().clone()).collect();
        let [q, k, v, decay, state, starts, low_rank @ ..] = &inputs[..] else { continue };
        let rows = state.shape[0];
        let width: usize = state.shape[1..].iter().product();
        if !low_rank.is_empty() && q.shape[0] * width > 250_000 {
            continue;
        }
        let lines = shuffled_lines(rng, rows, nth);
        let mut sample = Sample::new(StatefulRecurrence { low_rank: !low_rank.is_empty() });
        for input in [q, k, v, decay] {
            sample = sample.input(input.clone());
        }
        sample = sample.state(rng.normal(DType::F32, &[2 * rows + 1, width]));
        sample = sample.input(lines).input(starts.clone());
        samples.push(low_rank.iter().fold(sample, |sample, input| sample.input(input.clone())));
    }
    samples
}

/// Lines of a table of `2 * rows + 1` that `rows` rows read and write; of some samples, by `nth`, a row begins with zeros, is not kept or stays
/// in its place.
pub(super) fn shuffled_lines(rng: &mut Rng, rows: usize, nth: usize) -> Tensor {
    let mut places = super::paging::shuffled(rng, 2 * rows + 1);
    if rows > 1 {
        places[nth % rows] = -1;
        places[rows + (nth + 1) % rows] = if nth.is_multiple_of(2) { -1 } else { 2 * rows as i64 + 1 };
    } else if rows == 1 && nth.is_multiple_of(2) {
        // In its own place.
        places[1] = places[0];
    }
    let lines = (0..rows).flat_map(|row| [places[row], places[rows + row]]).collect();
    Tensor::int(DType::I32, &[rows, 2], lines)
}
