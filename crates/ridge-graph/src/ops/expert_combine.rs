//! What the experts of each token gave, added up by weight.

use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// `out[t] = sum over i of weights[t, i] * y[places[t, i]]`, summed in f32 in the order of `i` and rounded once. So a
/// token's bits do not depend on where its rows are. A place out of range counts as zeros.
///
/// `y`: `[n, hidden]` of any float dtype; `places`: i32 `[tokens, top_k]`, of
/// [`ExpertPermutation`](super::ExpertPermutation); `weights`: f32 `[tokens, top_k]`. Gives `[tokens, hidden]` of the dtype
/// of `y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCombine;

impl Composite for ExpertCombine {
    fn name(&self) -> &'static str {
        "expert_combine"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [y, places, weights] = inputs else { return Err(takes("y, places and weights", inputs)) };
        want_floats("y", y, 2, "[n, hidden]")?;
        want_floats("weights", weights, 2, "[tokens, top_k]")?;
        want("weights", weights, DType::F32, weights.shape.clone())?;
        want("places", places, DType::I32, weights.shape.clone())?;
        Ok(vec![y.with_shape(Shape(vec![weights.shape.0[0].clone(), y.shape.last()]))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let pairs = g.ty(inputs[1])?.shape.clone();
        let rows = g.gather(inputs[0], inputs[1], 0)?;
        let rows = g.cast(rows, DType::F32)?;
        let weights = g.reshape(inputs[2], Shape(vec![pairs.0[0].clone(), pairs.0[1].clone(), 1.into()]))?;
        let rows = g.mul(rows, weights)?;
        let sum = g.reduce_sum(rows, 1)?;
        let sum = g.reshape(sum, Shape(vec![pairs.0[0].clone(), ty.shape.last()]))?;
        Ok(vec![g.cast(sum, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = &inputs[1].shape.elements() * &crate::Poly::from(&inputs[0].shape.last());
        Cost { vector_flops: elements * 2, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let whole = Placement::Replicate;
        [Placement::shard(1), Placement::Partial]
            .map(|y| ShardingRule { inputs: vec![y, whole, whole], outputs: vec![y] })
            .into()
    }
}

impl Builder {
    /// Rows of `y` added up by weight; see [`ExpertCombine`].
    ///
    /// # Errors
    /// When `y` is not a float matrix, `weights` is not an f32 matrix, or `places` is not i32 of its shape.
    pub fn expert_combine(&mut self, y: Var, places: Var, weights: Var) -> Result<Var> {
        Ok(self.composite(ExpertCombine, &[y, places, weights])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (tokens, top_k, rows of y, hidden)
    let cases = [(0, 2, 0, 8), (1, 1, 1, 1), (5, 2, 10, 33), (40, 8, 320, 17), (3, 3, 9, 520), (2, 2, 4, 0)];
    let sample = |(tokens, top_k, rows, hidden): (usize, usize, usize, usize)| {
        Sample::new(ExpertCombine)
            .input(rng.normal(dtype, &[rows, hidden]))
            .input(rng.integers(DType::I32, &[tokens, top_k], -1, rows as i64))
            .input(rng.normal(DType::F32, &[tokens, top_k]))
    };
    cases.into_iter().map(sample).collect()
}
