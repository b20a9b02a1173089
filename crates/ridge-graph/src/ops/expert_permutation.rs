//! The order that puts tokens of one expert together: a stable counting sort of (token, choice) pairs by expert, all of
//! it on the device (Gale et al. 2022, "MegaBlocks", section 5.2, without padding of groups).

use super::require::{flat, takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;

/// The pairs of a step's tokens and the experts that each goes to, sorted by expert.
///
/// `ids`: i32 `[tokens, top_k]`, the experts of each token; `seq_ids`: i32 `[tokens]`, negative for padding, which goes to
/// no expert; nor does a pair whose expert is none of `0..experts`. With `n = tokens * top_k` gives
///
/// - `rows`: i32 `[n]`, the token of each pair in the order of experts, pairs of one expert in the order of tokens and
///   choices; -1 behind the last pair;
/// - `places`: i32 `[tokens, top_k]`, where each pair is in that order, -1 for one that goes to no expert;
/// - `offsets`: i32 `[experts + 1]`: the pairs of expert `e` are `offsets[e]..offsets[e + 1]`, beginning with 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPermutation {
    /// Number of experts.
    pub experts: usize,
}

impl Composite for ExpertPermutation {
    fn name(&self) -> &'static str {
        "expert_permutation"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [ids, seq_ids] = inputs else { return Err(takes("ids and seq_ids", inputs)) };
        if ids.shape.rank() != 2 || ids.dtype != DType::I32 || !ids.is_plain() {
            return Err(format!("ids must be i32[tokens, top_k], got {ids}"));
        }
        want("seq_ids", seq_ids, DType::I32, [&ids.shape.0[0]])?;
        if self.experts == 0 {
            return Err("there must be at least one expert".into());
        }
        let pairs = flat(&ids.shape.0)?;
        let i32s = |shape: Shape| Type::tensor(DType::I32, shape);
        Ok(vec![i32s(Shape(vec![pairs])), ids.clone(), i32s([self.experts + 1].into())])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let shape = g.ty(inputs[0])?.shape.clone();
        let pairs = flat(&shape.0).map_err(|why| GraphError::usage(g.scope(), why))?;
        let vector = Shape(vec![pairs.clone()]);
        let (zero, minus_one) = (g.constant(DType::I32, 0.0)?, g.constant(DType::I32, -1.0)?);
        let experts = g.constant(DType::I32, self.experts as f64)?;
        let seq_ids = g.reshape(inputs[1], Shape(vec![shape.0[0].clone(), 1.into()]))?;
        let used = g.ge(seq_ids, zero)?;
        let used = g.broadcast(used, shape.clone())?;
        let named = g.ge(inputs[0], zero)?;
        let named = g.and(named, used)?;
        let below = g.lt(inputs[0], experts)?;
        let valid = g.and(named, below)?;
        // Pairs that go to no expert come last.
        let key = g.select(valid, inputs[0], experts)?;
        let key = g.reshape(key, vector.clone())?;
        let (_, order) = g.sort(key, 0, false, pairs.clone())?;

        let bounds = Shape(vec![(self.experts + 1).into(), pairs.clone()]);
        let expert = g.iota(bounds, 0, DType::I32)?;
        let before = g.lt(key, expert)?;
        let before = g.cast(before, DType::I32)?;
        let offsets = g.reduce_sum(before, 1)?;
        let offsets = g.reshape(offsets, [self.experts + 1])?;

        let total = g.slice(offsets, 0, self.experts, 1)?;
        let place = g.iota(vector.clone(), 0, DType::I32)?;
        let is_pair = g.lt(place, total)?;
        let top_k = g.dim_value(&shape.0[1])?;
        let top_k = g.cast(top_k, DType::I32)?;
        let token = g.div(order, top_k)?;
        let rows = g.select(is_pair, token, minus_one)?;

        let nowhere = g.broadcast(minus_one, vector)?;
        let places = g.scatter(nowhere, order, place, 0)?;
        let places = g.reshape(places, shape)?;
        let places = g.select(valid, places, minus_one)?;
        Ok(vec![rows, places, offsets])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 4, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }
}

impl Builder {
    /// `(rows, places, offsets)` of pairs sorted by expert; see [`ExpertPermutation`].
    ///
    /// # Errors
    /// When `ids` is not i32 `[tokens, top_k]`, `seq_ids` is not i32 `[tokens]`, or there are no experts.
    pub fn expert_permutation(&mut self, ids: Var, seq_ids: Var, experts: usize) -> Result<(Var, Var, Var)> {
        let out = self.composite(ExpertPermutation { experts }, &[ids, seq_ids])?;
        Ok((out[0], out[1], out[2]))
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    // (tokens, top_k, experts): few, a warp's, more pairs than a block of threads has, and more experts.
    let cases = [(0, 2, 4), (1, 1, 1), (1, 8, 128), (7, 2, 8), (40, 3, 5), (300, 8, 64), (5, 2, 1500), (3000, 2, 8)];
    let sample = |(tokens, top_k, experts): (usize, usize, usize)| {
        Sample::new(ExpertPermutation { experts })
            .input(rng.integers(DType::I32, &[tokens, top_k], -1, experts as i64 + 1))
            .input(rng.integers(DType::I32, &[tokens], -1, 5))
            .judged(Check::Exact)
    };
    cases.into_iter().map(sample).collect()
}
