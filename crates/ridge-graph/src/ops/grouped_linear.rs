//! Matrix products of each token with the weights of its own experts (Gale et al. 2022, "MegaBlocks", section 4).

use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule, rowwise_rules};
use crate::types::Type;
use crate::why::Why;

/// `y[t, i] = w[ids[t, i]] x[t, i]`, summed in f32 and rounded once.
///
/// `x`: `[tokens, top_k, K]`, or `[tokens, 1, K]` where all experts of a token take the same; `w`: `[experts, N, K]` of
/// any float dtype; `ids`: i32 `[tokens, top_k]`. Gives `[tokens, top_k, N]` of the dtype of `x`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedLinear {
    /// How many experts the step's tokens reach, whose weights are read: for the cost alone.
    pub reached: Sym,
}

impl Composite for GroupedLinear {
    fn name(&self) -> &'static str {
        "grouped_linear"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, w, ids] = inputs else { return Err(takes("x, w and ids", inputs)) };
        want_floats("x", x, 3, "[tokens, top_k or 1, K]")?;
        want_floats("w", w, 3, "[experts, N, K]")?;
        if w.shape.last() != x.shape.last() {
            return Err(format!("w must be [experts, N, {}] to follow x, got {w}", x.shape.last()));
        }
        let top_k = ids.shape.last();
        want("ids", ids, DType::I32, [x.shape.0[0].clone(), top_k.clone()])?;
        if x.shape.0[1] != top_k && !x.shape.0[1].is_one() {
            return Err(format!("x must have {top_k} rows or 1 a token as ids has, got {x}"));
        }
        Ok(vec![x.with_shape(Shape(vec![x.shape.0[0].clone(), top_k, w.shape.0[1].clone()]))])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (xt, wt) = (g.ty(inputs[0])?.clone(), g.ty(inputs[1])?.clone());
        let top_k = g.ty(inputs[2])?.shape.last();
        let (tokens, inner, out) = (xt.shape.0[0].clone(), xt.shape.last(), wt.shape.0[1].clone());
        let x = g.cast(inputs[0], DType::F32)?;
        let x = g.broadcast(x, Shape(vec![tokens.clone(), top_k.clone(), inner.clone()]))?;
        let x = g.reshape(x, Shape(vec![tokens.clone(), top_k.clone(), 1.into(), inner]))?;
        let w = g.gather(inputs[1], inputs[2], 0)?;
        let w = g.cast(w, DType::F32)?;
        let y = g.matmul(x, w, false, true, DType::F32)?;
        let y = g.reshape(y, Shape(vec![tokens, top_k, out]))?;
        Ok(vec![g.cast(y, xt.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (x, w, ids) = (&inputs[0], &inputs[1], &inputs[2]);
        let of_expert = Type { shape: Shape(w.shape.0[1..].to_vec()), ..w.clone() }.bytes();
        let reached = Poly::from(&Dim::from(self.reached.clone()));
        Cost {
            matrix_flops: &outputs[0].shape.elements() * &(Poly::from(&x.shape.last()) * 2),
            bytes_read: x.bytes() + &ids.bytes() + &(&of_expert * &reached),
            ..Cost::moving(&[], outputs)
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (whole, cut) = (Placement::Replicate, Placement::shard);
        let mut rules = vec![
            ShardingRule { inputs: vec![whole, cut(1), whole], outputs: vec![cut(2)] },
            ShardingRule { inputs: vec![cut(2), cut(2), whole], outputs: vec![Placement::Partial] },
        ];
        // By tokens, each with its ids.
        for rule in rowwise_rules(&inputs[2].shape, 1, 1) {
            let tokens = rule.inputs[0];
            rules.push(ShardingRule { inputs: vec![tokens, whole, tokens], outputs: vec![tokens] });
        }
        rules
    }
}

impl Builder {
    /// Products with the weights of each token's experts; see [`GroupedLinear`].
    ///
    /// # Errors
    /// When `x`, `w` and `ids` do not fit each other.
    pub fn grouped_linear(&mut self, x: Var, w: Var, ids: Var, reached: &Sym) -> Result<Var> {
        Ok(self.composite(GroupedLinear { reached: reached.clone() }, &[x, w, ids])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (tokens, rows of x a token, top_k, experts, N, K)
    let cases =
        [(0, 1, 2, 4, 5, 8), (1, 1, 1, 1, 1, 1), (5, 1, 2, 8, 17, 33), (7, 3, 3, 4, 16, 20), (2, 2, 2, 3, 9, 0)];
    let sample = |(tokens, rows, top_k, experts, n, k): (usize, usize, usize, usize, usize, usize)| {
        Sample::new(GroupedLinear { reached: Sym::new("reached") })
            .input(rng.normal(dtype, &[tokens, rows, k]))
            .input(rng.normal(dtype, &[experts, n, k]))
            .input(rng.integers(DType::I32, &[tokens, top_k], 0, experts as i64))
    };
    cases.into_iter().map(sample).collect()
}
