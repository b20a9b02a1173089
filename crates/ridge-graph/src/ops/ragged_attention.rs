//! Attention over a batch of texts without padding and without a cache (Vaswani et al. 2017, "Attention Is All You Need",
//! section 3.2.1; Devlin et al. 2019, "BERT", section 3), in both directions or causal, and its gradient.

mod backward;
mod dropout;
mod terms;

pub use backward::RaggedAttentionBackward;
pub use dropout::ShareDropout;
pub use terms::RaggedAttention;

use super::paged_rows::attention_shares;
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;
use terms::{Extents, MASKED, by_kv_head, by_token, head_first};

/// [`RaggedAttention`] that gives `(y, lse)`: its output, and the natural logarithm of each query's sum of exponentials
/// of scores, f32 `[tokens, heads]`; 0 for a query that sees no key.
#[derive(Clone, Debug, PartialEq)]
pub struct RaggedAttentionSaving(pub RaggedAttention);

fn cost(op: &RaggedAttention, inputs: &[Type], outputs: &[Type]) -> Cost {
    let (scores, capped) = (op.scored_pairs(&inputs[0]), op.softcap.is_some());
    Cost {
        matrix_flops: &scores * &(crate::Poly::from(&inputs[0].shape.0[2]) * 4),
        vector_flops: scores.clone() * (if capped { 6 } else { 4 } + op.dropout_flops()),
        special_flops: scores * if capped { 2 } else { 1 },
        ..Cost::moving(inputs, outputs)
    }
}

/// By heads, whole groups to a rank.
fn rules(op: &RaggedAttention, outputs: usize) -> Vec<ShardingRule> {
    let heads = Placement::shard(1);
    let mut inputs = vec![heads, heads, heads, Placement::Replicate];
    inputs.extend(op.random_placements());
    vec![ShardingRule { inputs, outputs: vec![heads; outputs] }]
}

impl Composite for RaggedAttention {
    fn name(&self) -> &'static str {
        "ragged_attention"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.check(inputs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        Ok(vec![g.composite(RaggedAttentionSaving(self.clone()), inputs)?[0]])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        cost(self, inputs, outputs)
    }

    fn work(&self) -> Work {
        self.attention_work()
    }

    fn gradient(&self) -> Gradient {
        let mut saved: Vec<Saved> = (0..4).map(Saved::Input).collect();
        saved.extend([Saved::Output(0), Saved::Output(1)]);
        if self.drops() {
            saved.extend([Saved::Input(4), Saved::Input(5)]);
        }
        Gradient::Explicit {
            forward: CompositeRef::new(RaggedAttentionSaving(self.clone())),
            saved,
            backward: CompositeRef::new(RaggedAttentionBackward(self.clone())),
            wrt: vec![0, 1, 2],
        }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rules(self, 1)
    }
}

impl Composite for RaggedAttentionSaving {
    fn name(&self) -> &'static str {
        "ragged_attention_saving"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.0.check(inputs)?;
        let q = &inputs[0];
        Ok(vec![q.clone(), Type::tensor(DType::F32, [&q.shape.0[0], &q.shape.0[1]])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, k, v, ids, random @ ..] = inputs else { unreachable!("infer has counted the inputs") };
        let qt = g.ty(*q)?.clone();
        let e = RaggedAttention::extents(g, *q, *k)?;
        let x = by_kv_head(g, &e, *q)?;
        let [k, v] = [head_first(g, *k)?, head_first(g, *v)?];
        let found = self.0.scores(g, &e, [x, k, *ids])?;
        let masked = g.constant(DType::F32, MASKED)?;
        let scores = g.select(found.seen, found.scores, masked)?;
        let largest = g.reduce_max(scores, 3)?;
        let shifted = g.sub(scores, largest)?;
        let weight = g.exp(shifted)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let weight = g.select(found.seen, weight, nothing)?;
        let total = g.reduce_sum(weight, 3)?;
        // Where no key is seen there is nothing to divide.
        let none = g.eq(total, nothing)?;
        let unit = g.constant(DType::F32, 1.0)?;
        let total = g.select(none, unit, total)?;
        let mut share = g.div(weight, total)?;
        if let Some(factors) = self.0.share_factors(g, &e, random)? {
            share = g.mul(share, factors)?;
        }
        let share = g.reshape(share, Shape::new([&e.heads, &e.rows, &e.tokens]))?;
        let y = g.matmul(share, v, false, false, DType::F32)?;
        let y = by_token(g, &e, y, &qt)?;

        let log = g.log(total)?;
        let lse = g.add(log, largest)?;
        let lse = g.select(none, nothing, lse)?;
        let lse = g.transpose(lse, &[2, 0, 1, 3])?;
        let lse = g.reshape(lse, Shape::new([&e.tokens, &qt.shape.0[1]]))?;
        Ok(vec![y, lse])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        cost(&self.0, inputs, outputs)
    }

    fn work(&self) -> Work {
        self.0.attention_work()
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rules(&self.0, 2)
    }
}

/// Scores of every pair and what remains to be done with them, of attention that sees other keys than [`RaggedAttention`].
pub(super) struct RaggedAttentionParts {
    /// F32 `[kv_heads, group, tokens, tokens]`.
    pub(super) scores: Var,
    /// F32 `[kv_heads, tokens, dim]`.
    values: Var,
    extents: Extents,
    output: Type,
}

impl RaggedAttentionParts {
    /// Of `q`, `k` and `v` as [`RaggedAttention`] has them.
    pub(super) fn new(g: &mut Builder, [q, k, v]: [Var; 3], scale: f64) -> Result<Self> {
        let output = g.ty(q)?.clone();
        let extents = RaggedAttention::extents(g, q, k)?;
        let x = by_kv_head(g, &extents, q)?;
        let [k, values] = [head_first(g, k)?, head_first(g, v)?];
        let scores = g.matmul(x, k, false, true, DType::F32)?;
        let scale = g.constant(DType::F32, scale)?;
        let scores = g.mul(scores, scale)?;
        let e = &extents;
        let scores = g.reshape(scores, Shape::new([&e.heads, &e.group, &e.tokens, &e.tokens]))?;
        Ok(Self { scores, values, extents, output })
    }

    pub(super) fn tokens(&self) -> Dim {
        self.extents.tokens.clone()
    }

    /// The output for `scores` and which keys are `seen`, bool `[1, 1, tokens, tokens]`.
    pub(super) fn attend(&self, g: &mut Builder, scores: Var, seen: Var) -> Result<Var> {
        let e = &self.extents;
        let share = attention_shares(g, scores, seen, None)?;
        let share = g.reshape(share, Shape::new([&e.heads, &e.rows, &e.tokens]))?;
        let y = g.matmul(share, self.values, false, false, DType::F32)?;
        by_token(g, e, y, &self.output)
    }
}

impl Builder {
    /// Attention of tokens to tokens of their sequences; see [`RaggedAttention`]. Dropout is by a key of this place in the
    /// model ([`Builder::random_key`]).
    ///
    /// # Errors
    /// When `k` and `v` do not fit `q`, `seq_ids` is not an i32 of each token, or an attribute is out of range.
    pub fn ragged_attention(&mut self, [q, k, v]: [Var; 3], seq_ids: Var, op: RaggedAttention) -> Result<Var> {
        let mut inputs = vec![q, k, v, seq_ids];
        if op.drops() {
            let heads = self.ty(q)?.shape.0.get(1).cloned();
            let heads = heads.ok_or_else(|| GraphError::usage(self.scope(), "q must be [tokens, heads, dim]"))?;
            inputs.extend([self.random_key()?, self.iota([heads], 0, DType::I64)?]);
        }
        Ok(self.composite(op, &inputs)?[0])
    }
}
