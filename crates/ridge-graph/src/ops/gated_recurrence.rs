//! A linear recurrence over lines of a table, of operands in the dtype of activations.

use super::require::{takes, want, want_floats};
use super::stateful_recurrence::shuffled_lines;
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

/// [`StatefulRecurrence`](super::StatefulRecurrence) of values with a weight for each head of a token: what state-space
/// models and linear attention compute in 16-bit activations. The keys of a head decay alike, or each by itself. With `a = exp(log_decay)`, the state of a head becomes
/// `a S + k (weight v)^T`, or with [`GatedRecurrence::delta`] `a S + k (weight (v - a S^T k))^T`; then `y = S^T q`.
///
/// `q` and `k`: `[tokens, groups, key]`, `v`: `[tokens, heads, value]`, of one float dtype; `weight`: f32 `[tokens, heads, 1]`;
/// `log_decay`: likewise, or `[tokens, heads, key]`; `table`, `lines` and `query_start` as there; the state stays f32. Gives `y`, `[tokens, heads, value]` of the dtype of `v`, rounded once, and the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedRecurrence {
    /// Is what the state has for a key taken from its value: the gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks",
    /// section 3)?
    pub delta: bool,
}

/// The inputs `q`, `k`, `v`, `weight`, `log_decay`, `table`, `lines` and `query_start`.
const INPUTS: usize = 8;
const TABLE: usize = 5;

impl Composite for GatedRecurrence {
    fn name(&self) -> &'static str {
        "gated_recurrence"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, k, v, weight, decay, table, lines, starts] = inputs else {
            return Err(takes("q, k, v, weight, log_decay, table, lines and query_start", inputs));
        };
        want_floats("q", q, 3, "[tokens, groups, key]")?;
        want_floats("v", v, 3, "[tokens, heads, value]")?;
        want("k", k, q.dtype, q.shape.clone())?;
        let ([tokens, groups, key], [_, heads, value]) = (&q.shape.0[..], &v.shape.0[..]) else {
            unreachable!("both have three axes")
        };
        want("v", v, q.dtype, [tokens, heads, value])?;
        want("weight", weight, DType::F32, [tokens, heads, &1.into()])?;
        let decays = if decay.shape.0.last() == Some(key) { key.clone() } else { 1.into() };
        want("log_decay", decay, DType::F32, [tokens, heads, &decays])?;
        if let (Some(groups), Some(heads)) = (groups.as_const(), heads.as_const())
            && (groups == 0 || !heads.is_multiple_of(groups))
        {
            return Err(format!("v has {heads} heads, no multiple of the {groups} groups of q and k"));
        }
        let Some(rows) = lines.shape.0.first() else { return Err(format!("lines must be i32[rows, 2], got {lines}")) };
        want("lines", lines, DType::I32, [rows, &2.into()])?;
        want("query_start", starts, DType::I32, [rows.clone() + 1])?;
        let width = [heads, key, value].into_iter().map(Dim::as_const).product::<Option<usize>>();
        let fits = table.state && table.dtype == DType::F32 && table.format.is_none() && table.shape.rank() == 2;
        if !fits || width.is_none() || table.shape.0[1].as_const() != width {
            return Err(format!("table must be a state f32[lines, {}], got {table}", width.unwrap_or_default()));
        }
        Ok(vec![v.clone(), table.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, k, v, weight, decay, table, lines, starts] = *inputs else {
            unreachable!("infer has counted the inputs")
        };
        let dtype = g.ty(v)?.dtype;
        let ([q, k, v, decay], low_rank) = g.gated_operands([q, k, v, weight, decay], self.delta)?;
        let [y, table] = g.stateful_recurrence([q, k, v, decay, table, lines, starts], low_rank)?;
        Ok(vec![g.cast(y, dtype)?, table])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let [q, k, v, _, decay, _, lines, starts] = inputs else { return Cost::default() };
        // The states of the rows, and not the table, are read and written.
        let extents = [&lines.shape.0[0], &v.shape.0[1], &q.shape.0[2], &v.shape.0[2]];
        let state = Type::tensor(DType::F32, Shape(extents.into_iter().cloned().collect()));
        let made = [outputs[0].clone(), state.clone()];
        let of_recurrence = [q, k, v, decay, &state, starts].map(Clone::clone);
        let arithmetic = Prim::LinearRecurrence { low_rank: self.delta }.cost(&of_recurrence, &made);
        let mut read = inputs.to_vec();
        read[TABLE] = state;
        let moved = Cost::moving(&read, &made);
        Cost { bytes_read: moved.bytes_read, bytes_written: moved.bytes_written, ..arithmetic }
    }

    /// By heads, which are the outer part of a line; q and k of one group go to all. Lines are flat, so not by values.
    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (cut, whole) = (Placement::shard(1), Placement::Replicate);
        let of_groups = if inputs[0].shape.0[1].is_one() { whole } else { cut };
        vec![ShardingRule {
            inputs: vec![of_groups, of_groups, cut, cut, cut, cut, whole, whole],
            outputs: vec![cut, cut],
        }]
    }
}

impl Builder {
    /// `(y, table)` of a recurrence over lines of a table, from `[q, k, v, weight, log_decay, table, lines, query_start]`; see
    /// [`GatedRecurrence`].
    ///
    /// # Errors
    /// When an input does not have the type described there.
    pub fn gated_recurrence(&mut self, inputs: [Var; INPUTS], delta: bool) -> Result<[Var; 2]> {
        let out = self.composite(GatedRecurrence { delta }, &inputs)?;
        Ok([out[0], out[1]])
    }

    /// What [`GatedRecurrence`] gives to a linear recurrence: f32 `q`, `k`, `v` and `log_decay`, and with `delta` the part of low rank.
    ///
    /// # Errors
    /// When an input does not have the type described there.
    pub fn gated_operands(
        &mut self,
        [q, k, v, weight, log_decay]: [Var; 5],
        delta: bool,
    ) -> Result<([Var; 4], Option<[Var; 2]>)> {
        let [q, k, v] = [q, k, v].map(|x| self.cast(x, DType::F32));
        let (k, v) = (k?, v?);
        let heads = self.ty(v)?.shape.0[1].clone();
        let low_rank = if delta {
            // `a S + k (w (v - a S^T k))^T`: what is erased is `-w k (a k)^T S`.
            let of_heads = repeated(self, k, &heads)?;
            let kept = self.exp(log_decay)?;
            let erase = self.mul(of_heads, kept)?;
            let less = self.neg(weight)?;
            Some([erase, self.mul(of_heads, less)?])
        } else {
            None
        };
        Ok(([q?, k, self.mul(v, weight)?, log_decay], low_rank))
    }
}

/// Each group of `x`, `[tokens, groups, width]`, several times, for `heads` neighbouring ones.
fn repeated(g: &mut Builder, x: Var, heads: &Dim) -> Result<Var> {
    let [tokens, groups, width] = &g.ty(x)?.shape.0.clone()[..] else { unreachable!("infer has counted the axes") };
    let each = match (heads.as_const(), groups.as_const()) {
        (Some(heads), Some(groups)) if heads != groups => heads / groups,
        _ => return Ok(x),
    };
    let apart = g.reshape(x, [tokens, groups, &1.into(), width])?;
    let several = g.broadcast(apart, [tokens, groups, &each.into(), width])?;
    g.reshape(several, [tokens, heads, width])
}

/// Rows of a step, padding behind them, and groups, heads, keys and values.
type Case<'a> = (&'a [usize], usize, [usize; 4]);

/// Which cases of the samples have keys that decay by themselves too: of less than a chunk, of several, of many keys, and decays that leave nothing.
const BY_KEY: [usize; 5] = [1, 3, 4, 5, 6];

/// In f32 and the 16-bit dtypes, with and without the delta rule, from decays that keep nearly all to such that leave next to nothing.
pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        return Vec::new();
    }
    let cases: [(Case<'_>, f64); 9] = [
        ((&[], 2, [1, 2, 8, 16]), 0.1),
        ((&[1, 1, 1], 1, [2, 4, 16, 24]), 2.0),
        ((&[5], 0, [1, 2, 12, 20]), 0.5),
        ((&[150, 17, 3, 64], 2, [1, 2, 40, 8]), 0.1),
        ((&[70, 15], 0, [2, 2, 16, 72]), 2.0),
        ((&[90], 1, [1, 1, 136, 16]), 0.02),
        ((&[16, 0, 65], 0, [1, 2, 16, 32]), 60.0),
        ((&[97], 0, [1, 2, 33, 19]), 0.5),
        ((&[200, 20], 3, [2, 4, 16, 16]), 0.1),
    ];
    let mut samples = Vec::new();
    for (nth, (case, rate)) in cases.iter().enumerate() {
        for delta in [false, true] {
            samples.push(sample(rng, dtype, *case, *rate, delta, 1, nth));
        }
    }
    for (nth, decays_by_key) in BY_KEY.into_iter().enumerate() {
        let (case, rate) = cases[decays_by_key];
        samples.push(sample(rng, dtype, case, rate, nth == 0, case.2[2], nth));
    }
    // Several slices of keys, and several tiles of values.
    for (key, value) in [(72, 40), (16, 136)] {
        samples.push(sample(rng, dtype, (&[80, 33], 1, [1, 1, key, value]), 0.5, false, key, 0));
    }
    samples
}

/// One of them; logarithms of decays lie between `-rate` and 0.
fn sample(rng: &mut Rng, dtype: DType, of: Case<'_>, rate: f64, delta: bool, decays: usize, nth: usize) -> Sample {
    let (rows, padding, [groups, heads, key, value]) = of;
    let tokens = rows.iter().sum::<usize>() + padding;
    // As models have them: unit keys, so that the state neither vanishes nor grows.
    let unit = (key as f64).sqrt().recip();
    let [q, k] = [(); 2].map(|()| {
        let x = rng.normal(DType::F32, &[tokens, groups, key]);
        Tensor::float(dtype, &x.shape, x.floats().iter().map(|x| x * unit).collect()).rounded()
    });
    let v = rng.normal(dtype, &[tokens, heads, value]);
    let mut of_heads = |draw: fn(&mut Rng) -> f64, by: f64, width: usize| {
        let all = (0..tokens * heads * width).map(|_| by * draw(rng)).collect();
        Tensor::float(DType::F32, &[tokens, heads, width], all).rounded()
    };
    let weight = of_heads(Rng::unit, 1.0, 1);
    let decay = of_heads(|rng| rng.unit() * rng.unit(), -rate, decays);
    let starts = (0..=rows.len()).map(|row| rows[..row].iter().sum::<usize>() as i64).collect();
    let sample = Sample::new(GatedRecurrence { delta });
    let sample = [q, k, v, weight, decay].into_iter().fold(sample, Sample::input);
    sample
        .state(rng.normal(DType::F32, &[2 * rows.len() + 1, heads * key * value]))
        .input(shuffled_lines(rng, rows.len(), nth))
        .input(Tensor::int(DType::I32, &[rows.len() + 1], starts))
}
