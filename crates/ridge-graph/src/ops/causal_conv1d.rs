//! The short causal convolution of state-space models and gated linear attention (Gu and Dao 2023, "Mamba", section 3.4), over
//! the sequences of a step, each continued from the tokens before it.

use super::require::{takes, want, want_floats, want_weight};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `y[t, c] = sum over j of w[c, K - 1 - j] * x[t - j, c]`, each channel by itself, where tokens before the step are those of
/// `state`; computed in f32.
///
/// `x`: `[tokens, channels]` of any float dtype; `w`: `[channels, K]`; `state`: `[sequences, K - 1, channels]` of the dtype
/// of `x`, the inputs before the step, the last one last; `seq_ids`: i32 `[tokens]`, negative for padding; `query_start`:
/// i32 `[sequences + 1]`. Gives `y`, f32 `[tokens, channels]`, 0 for padding, and the state behind the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CausalConv1d;

impl Composite for CausalConv1d {
    fn name(&self) -> &'static str {
        "causal_conv1d"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, w, state, ids, starts] = inputs else {
            return Err(takes("x, w, state, seq_ids and query_start", inputs));
        };
        want_floats("x", x, 2, "[tokens, channels]")?;
        want_weight("w", w, 2, "[channels, kernel]")?;
        want_floats("state", state, 3, "[sequences, kernel - 1, channels]")?;
        let (tokens, channels) = (x.shape.0[0].clone(), x.shape.0[1].clone());
        let taps = w.shape.0[1].as_const().filter(|taps| *taps >= 2);
        let Some(taps) = taps else { return Err(format!("w must have 2 taps or more, got {w}")) };
        if w.shape.0[0] != channels {
            return Err(format!("w must have the {channels} channels of x, got {w}"));
        }
        let rows = state.shape.0[0].clone();
        want("state", state, x.dtype, Shape(vec![rows.clone(), (taps - 1).into(), channels]))?;
        want("seq_ids", ids, DType::I32, Shape(vec![tokens]))?;
        want("query_start", starts, DType::I32, Shape(vec![rows + 1]))?;
        Ok(vec![Type::tensor(DType::F32, x.shape.clone()), state.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [x, w, state, ids, starts] = inputs else { unreachable!("infer has counted the inputs") };
        let (shape, old) = (g.ty(*x)?.shape.clone(), g.ty(*state)?.shape.clone());
        let (tokens, channels, rows) = (shape.0[0].clone(), shape.0[1].clone(), old.0[0].clone());
        let kept = old.0[1].as_const().unwrap_or_default();
        let int = |g: &mut Builder, value: f64| g.constant(DType::I32, value);
        let (zero, one, none) = (int(g, 0.0)?, int(g, 1.0)?, int(g, -1.0)?);
        let width = int(g, kept as f64)?;
        // What the state has, sequence by sequence, and the step's tokens behind it.
        let before = rows.clone() * kept as i64;
        let flat = g.reshape(*state, Shape(vec![before.clone(), channels.clone()]))?;
        let all = g.concat(&[flat, *x], 0)?;
        let first = g.dim_value(&before)?;
        let first = g.cast(first, DType::I32)?;

        let begins = g.slice(*starts, 0, 0, &rows)?;
        let begin = g.gather(begins, *ids, 0)?;
        let token = g.iota([&tokens], 0, DType::I32)?;
        let into = g.sub(token, begin)?;
        let real = g.ge(*ids, zero)?;
        let w = g.cast(*w, DType::F32)?;
        let mut y = None;
        for back in 0..=kept {
            // The input `back` tokens before each.
            let by = int(g, back as f64)?;
            let at = g.sub(into, by)?;
            let in_step = g.ge(at, zero)?;
            let of_step = g.sub(token, by)?;
            let of_step = g.add(of_step, first)?;
            let of_state = g.add(*ids, one)?;
            let of_state = g.mul(of_state, width)?;
            let of_state = g.add(of_state, at)?;
            let at = g.select(in_step, of_step, of_state)?;
            let at = g.select(real, at, none)?;
            let input = g.gather(all, at, 0)?;
            let input = g.cast(input, DType::F32)?;
            let tap = g.slice(w, 1, kept - back, 1)?;
            let tap = g.reshape(tap, Shape(vec![channels.clone()]))?;
            let term = g.mul(input, tap)?;
            y = Some(match y {
                Some(sum) => g.add(sum, term)?,
                None => term,
            });
        }

        let ends = g.slice(*starts, 0, 1, &rows)?;
        let column = Shape(vec![rows.clone(), 1.into()]);
        let table = Shape(vec![rows.clone(), kept.into()]);
        let [begin, end] = [begins, ends].map(|var| g.reshape(var, column.clone()));
        let (begin, end) = (begin?, end?);
        let count = g.sub(end, begin)?;
        let nth = g.iota(table.clone(), 1, DType::I32)?;
        let back = g.sub(width, nth)?;
        let in_step = g.le(back, count)?;
        let of_step = g.sub(end, back)?;
        let of_step = g.add(of_step, first)?;
        let row = g.iota(table, 0, DType::I32)?;
        let of_state = g.mul(row, width)?;
        let of_state = g.add(of_state, nth)?;
        let of_state = g.add(of_state, count)?;
        let at = g.select(in_step, of_step, of_state)?;
        let after = g.gather(all, at, 0)?;
        Ok(y.into_iter().chain([after]).collect())
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let taps = Poly::from(&inputs[1].shape.0[1]);
        Cost { vector_flops: &(outputs[0].shape.elements() * 2) * &taps, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let cut = Placement::shard;
        vec![ShardingRule {
            inputs: vec![cut(1), cut(0), cut(2), Placement::Replicate, Placement::Replicate],
            outputs: vec![cut(1), cut(2)],
        }]
    }
}

impl Builder {
    /// `(y, state)` of a causal convolution, from `[x, w, state]` and `[seq_ids, query_start]`; see [`CausalConv1d`].
    ///
    /// # Errors
    /// When an input does not have the type described there.
    pub fn causal_conv1d(&mut self, [x, w, state]: [Var; 3], [ids, starts]: [Var; 2]) -> Result<[Var; 2]> {
        let out = self.composite(CausalConv1d, &[x, w, state, ids, starts])?;
        Ok([out[0], out[1]])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // Tokens of each sequence, padding, channels, taps.
    type Case<'a> = (&'a [usize], usize, usize, usize);
    let cases: [Case<'_>; 7] = [
        (&[], 0, 4, 4),
        (&[], 2, 3, 2),
        (&[1], 0, 1, 2),
        (&[1, 1, 1], 1, 33, 4),
        (&[2, 0, 7, 3], 2, 16, 4),
        (&[40, 5], 0, 100, 3),
        (&[0, 3], 3, 5, 5),
    ];
    let mut samples = Vec::new();
    for (rows, padding, channels, taps) in cases {
        let mut ids: Vec<i64> = rows.iter().enumerate().flat_map(|(row, n)| vec![row as i64; *n]).collect();
        let mut starts = vec![0];
        rows.iter().for_each(|n| starts.push(starts.last().copied().unwrap_or(0) + *n as i64));
        ids.resize(ids.len() + padding, -1);
        samples.push(
            Sample::new(CausalConv1d)
                .input(rng.normal(dtype, &[ids.len(), channels]))
                .input(rng.normal(dtype, &[channels, taps]))
                .input(rng.normal(dtype, &[rows.len(), taps - 1, channels]))
                .input(Tensor::int(DType::I32, &[ids.len()], ids))
                .input(Tensor::int(DType::I32, &[rows.len() + 1], starts)),
        );
    }
    samples
}
