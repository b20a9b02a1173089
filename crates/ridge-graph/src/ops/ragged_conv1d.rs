//! The short causal convolution over whole sequences, packed one behind another: [`CausalConv1d`](super::CausalConv1d) without a
//! state, which is what training needs.

use super::require::{takes, want, want_floats, want_weight};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `y[t, c] = sum over j <= positions[t] of w[c, K - 1 - j] * x[t - j, c]`, each channel by itself; computed in f32.
///
/// `x`: `[tokens, channels]` of any float dtype; `w`: `[channels, K]`; `positions`: i32 `[tokens]`, which count from 0 in each
/// sequence; a token of padding has position 0. Gives f32 `[tokens, channels]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaggedConv1d;

/// The gradient of [`RaggedConv1d`], computed in f32.
///
/// `x`, `w`, `positions`: the op's inputs; `dy`: f32 `[tokens, channels]`. Gives the cotangents of `x` and `w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaggedConv1dBackward;

impl Composite for RaggedConv1d {
    fn name(&self) -> &'static str {
        "ragged_conv1d"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, w, positions] = inputs else { return Err(takes("x, w and positions", inputs)) };
        want_floats("x", x, 2, "[tokens, channels]")?;
        want_weight("w", w, 2, "[channels, kernel]")?;
        if w.shape.0[0] != x.shape.0[1] || w.shape.0[1].as_const().is_none_or(|taps| taps == 0) {
            return Err(format!("w must have the {} channels of x and some taps, got {w}", x.shape.0[1]));
        }
        want("positions", positions, DType::I32, Shape(vec![x.shape.0[0].clone()]))?;
        Ok(vec![Type::tensor(DType::F32, x.shape.clone())])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [x, w, positions] = inputs else { unreachable!("infer has counted the inputs") };
        let taps = taps(g, *w)?;
        let w = g.cast(*w, DType::F32)?;
        let mut sum = None;
        for back in 0..taps {
            let input = earlier(g, *x, *positions, back)?;
            let term = times_tap(g, input, w, taps - 1 - back)?;
            sum = Some(plus(g, sum, term)?);
        }
        Ok(sum.into_iter().collect())
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: (0..3).map(Saved::Input).collect(),
            backward: CompositeRef::new(RaggedConv1dBackward),
            wrt: vec![0, 1],
        }
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let taps = Poly::from(&inputs[1].shape.0[1]);
        Cost { vector_flops: &(outputs[0].shape.elements() * 2) * &taps, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let cut = Placement::shard;
        vec![ShardingRule { inputs: vec![cut(1), cut(0), Placement::Replicate], outputs: vec![cut(1)] }]
    }
}

impl Composite for RaggedConv1dBackward {
    fn name(&self) -> &'static str {
        "ragged_conv1d_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [forward @ .., dy] = inputs else { return Err(takes("x, w, positions and dy", inputs)) };
        let y = RaggedConv1d.infer(forward)?;
        want("dy", dy, DType::F32, y[0].shape.clone())?;
        Ok(forward[..2].iter().map(Type::plain).collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [x, w, positions, dy] = inputs else { unreachable!("infer has counted the inputs") };
        let (taps, dtypes) = (taps(g, *w)?, [g.ty(*x)?.dtype, g.ty(*w)?.dtype]);
        let wide = g.cast(*w, DType::F32)?;
        let (mut dx, mut columns) = (None, Vec::with_capacity(taps));
        for nth in 0..taps {
            let coming = later(g, *dy, *positions, nth)?;
            let term = times_tap(g, coming, wide, taps - 1 - nth)?;
            dx = Some(plus(g, dx, term)?);
            let input = earlier(g, *x, *positions, taps - 1 - nth)?;
            let terms = g.mul(input, *dy)?;
            let sum = g.reduce_sum(terms, 0)?;
            let channels = g.ty(sum)?.shape.0[1].clone();
            columns.push(g.reshape(sum, Shape(vec![channels, 1.into()]))?);
        }
        let dw = g.concat(&columns, 1)?;
        let dw = g.cast(dw, dtypes[1])?;
        let dx = g.cast(dx.unwrap_or(*dy), dtypes[0])?;
        Ok(vec![dx, dw])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let taps = Poly::from(&inputs[1].shape.0[1]);
        Cost { vector_flops: &(outputs[0].shape.elements() * 4) * &taps, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let cut = Placement::shard;
        let inputs = vec![cut(1), cut(0), Placement::Replicate, cut(1)];
        vec![ShardingRule { inputs, outputs: vec![cut(1), cut(0)] }]
    }
}

fn taps(g: &Builder, w: Var) -> Result<usize> {
    Ok(g.ty(w)?.shape.0[1].as_const().unwrap_or_default())
}

/// `sum + term`, or the term where there is no sum yet.
fn plus(g: &mut Builder, sum: Option<Var>, term: Var) -> Result<Var> {
    sum.map_or(Ok(term), |sum| g.add(sum, term))
}

/// `x`, `[tokens, channels]`, times tap `tap` of each channel.
fn times_tap(g: &mut Builder, x: Var, w: Var, tap: usize) -> Result<Var> {
    let channels = g.ty(x)?.shape.0[1].clone();
    let tap = g.slice(w, 1, tap, 1)?;
    let tap = g.reshape(tap, Shape(vec![channels]))?;
    g.mul(x, tap)
}

/// Row `t - back` of `x` for each token `t`, in f32; zeros where that is not of its sequence.
fn earlier(g: &mut Builder, x: Var, positions: Var, back: usize) -> Result<Var> {
    moved(g, x, positions, back, -1.0)
}

/// Row `t + ahead` of `x` for each token `t`, in f32; zeros where that is not of its sequence.
fn later(g: &mut Builder, x: Var, positions: Var, ahead: usize) -> Result<Var> {
    let token = g.iota(g.ty(positions)?.shape.clone(), 0, DType::I32)?;
    let by = g.constant(DType::I32, ahead as f64)?;
    let at = g.add(token, by)?;
    // Behind the last token that is 0.
    let position = g.gather(positions, at, 0)?;
    moved(g, x, position, ahead, 1.0)
}

/// Row `t + sign * by` of `x` where `position[t] >= by`, else zeros; in f32.
fn moved(g: &mut Builder, x: Var, position: Var, by: usize, sign: f64) -> Result<Var> {
    if by == 0 {
        return g.cast(x, DType::F32);
    }
    let token = g.iota(g.ty(position)?.shape.clone(), 0, DType::I32)?;
    let (by, none) = (g.constant(DType::I32, by as f64)?, g.constant(DType::I32, -1.0)?);
    let at = if sign < 0.0 { g.sub(token, by)? } else { g.add(token, by)? };
    let holds = g.ge(position, by)?;
    let at = g.select(holds, at, none)?;
    let rows = g.gather(x, at, 0)?;
    g.cast(rows, DType::F32)
}

impl Builder {
    /// A causal convolution over whole sequences; see [`RaggedConv1d`].
    ///
    /// # Errors
    /// When an input does not have the type described there.
    pub fn ragged_conv1d(&mut self, x: Var, w: Var, positions: Var) -> Result<Var> {
        Ok(self.composite(RaggedConv1d, &[x, w, positions])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // Tokens of each sequence, padding, channels, taps.
    type Case<'a> = (&'a [usize], usize, usize, usize);
    let cases: [Case<'_>; 6] = [
        (&[], 0, 4, 4),
        (&[], 2, 3, 2),
        (&[1], 0, 1, 1),
        (&[1, 1, 1], 1, 33, 4),
        (&[2, 7, 3], 2, 16, 4),
        (&[40, 5], 0, 100, 3),
    ];
    let sample = |(rows, padding, channels, taps): Case<'_>| {
        let mut positions: Vec<i64> = rows.iter().flat_map(|n| 0..*n as i64).collect();
        positions.resize(positions.len() + padding, 0);
        Sample::new(RaggedConv1d)
            .input(rng.normal(dtype, &[positions.len(), channels]))
            .input(rng.normal(dtype, &[channels, taps]))
            .input(Tensor::int(DType::I32, &[positions.len()], positions))
    };
    cases.into_iter().map(sample).collect()
}

pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let with_cotangent = |sample: Sample| {
        let inputs: Vec<Tensor> = sample.inputs.iter().map(|value| value.tensor().clone()).collect();
        let shape = inputs[0].shape.clone();
        let sample = inputs.into_iter().fold(Sample::new(RaggedConv1dBackward), Sample::input);
        sample.input(rng.normal(DType::F32, &shape))
    };
    samples(&mut Rng::new(31), dtype).into_iter().map(with_cotangent).collect()
}
