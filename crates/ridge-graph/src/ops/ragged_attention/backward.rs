//! The gradient of attention without a cache (Dao et al. 2022, "FlashAttention", appendix B.2).

use super::super::require::{takes, want};
use super::terms::{RaggedAttention, by_kv_head, by_token, head_first};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;

/// Gradient of [`RaggedAttention`] with these attributes, computed in f32.
///
/// `q`, `k`, `v`, `seq_ids` as there; `y`: its output; `lse`: f32 `[tokens, heads]` of
/// [`RaggedAttentionSaving`](super::RaggedAttentionSaving); with dropout then `key` and `heads` as there; `dy`: of the type
/// of `y`. With the shares `p = exp(scores - lse)` of the keys that a query sees, and their factors `f` of dropout, gives
///
/// ```text
/// dv = (f p)^T dy      ds = p * (f * dy v^T - sum(dy * y))      dq = scale ds k      dk = scale ds^T q
/// ```
///
/// of the types of `q`, `k` and `v`, where `ds` is multiplied by `1 - (score / softcap)^2` if there is a cap.
#[derive(Clone, Debug, PartialEq)]
pub struct RaggedAttentionBackward(pub RaggedAttention);

impl Composite for RaggedAttentionBackward {
    fn name(&self) -> &'static str {
        "ragged_attention_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, k, v, ids, y, lse, random @ .., dy] = inputs else {
            return Err(takes("q, k, v, seq_ids, y, lse and dy", inputs));
        };
        self.0.check(&[&[q, k, v, ids].map(Type::clone), random].concat())?;
        want("y", y, q.dtype, q.shape.clone())?;
        want("lse", lse, DType::F32, [&q.shape.0[0], &q.shape.0[1]])?;
        want("dy", dy, q.dtype, q.shape.clone())?;
        Ok(vec![q.clone(), k.clone(), v.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, k, v, ids, y, lse, random @ .., dy] = inputs else { unreachable!("infer has counted the inputs") };
        let op = &self.0;
        let types = [*q, *k, *v].map(|x| g.ty(x).cloned());
        let [qt, kt, vt] = types;
        let (qt, kt, vt) = (qt?, kt?, vt?);
        let e = RaggedAttention::extents(g, *q, *k)?;
        let pairs = Shape::new([&e.heads, &e.group, &e.tokens, &e.tokens]);
        let flat_pairs = Shape::new([&e.heads, &e.rows, &e.tokens]);
        let one = crate::Dim::from(1);
        let per_row = Shape::new([&e.heads, &e.group, &e.tokens, &one]);

        let [x, y, dy] = [by_kv_head(g, &e, *q)?, by_kv_head(g, &e, *y)?, by_kv_head(g, &e, *dy)?];
        let [k, v] = [head_first(g, *k)?, head_first(g, *v)?];
        let found = op.scores(g, &e, [x, k, *ids])?;
        let lse = g.reshape(*lse, Shape::new([&e.tokens, &e.heads, &e.group, &one]))?;
        let lse = g.transpose(lse, &[1, 2, 0, 3])?;
        let below = g.sub(found.scores, lse)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        // A row without keys has no sum of exponentials.
        let below = g.select(found.seen, below, nothing)?;
        let share = g.exp(below)?;
        let share = g.select(found.seen, share, nothing)?;

        let dshare = g.matmul(dy, v, false, true, DType::F32)?;
        let mut dshare = g.reshape(dshare, pairs)?;
        let mut kept = share;
        if let Some(factors) = op.share_factors(g, &e, random)? {
            kept = g.mul(share, factors)?;
            dshare = g.mul(dshare, factors)?;
        }
        let along = g.mul(dy, y)?;
        let along = g.reduce_sum(along, 2)?;
        let along = g.reshape(along, per_row)?;
        let change = g.sub(dshare, along)?;
        let mut dscores = g.mul(share, change)?;
        if let Some(cap) = op.softcap {
            let inverse = g.constant(DType::F32, 1.0 / cap)?;
            let bent = g.mul(found.scores, inverse)?;
            let square = g.mul(bent, bent)?;
            let one = g.constant(DType::F32, 1.0)?;
            let slope = g.sub(one, square)?;
            dscores = g.mul(dscores, slope)?;
        }
        let scale = g.constant(DType::F32, op.scale)?;
        let dscores = g.mul(dscores, scale)?;
        let dscores = g.reshape(dscores, flat_pairs.clone())?;
        let kept = g.reshape(kept, flat_pairs)?;

        let dq = g.matmul(dscores, k, false, false, DType::F32)?;
        let dq = by_token(g, &e, dq, &qt)?;
        let dk = g.matmul(dscores, x, true, false, DType::F32)?;
        let dk = g.transpose(dk, &[1, 0, 2])?;
        let dk = g.cast(dk, kt.dtype)?;
        let dv = g.matmul(kept, dy, true, false, DType::F32)?;
        let dv = g.transpose(dv, &[1, 0, 2])?;
        Ok(vec![dq, dk, g.cast(dv, vt.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let scores = self.0.scored_pairs(&inputs[0]);
        let capped = self.0.softcap.is_some();
        Cost {
            // Scores, their shares' cotangents, and three products to the cotangents of q, k and v.
            matrix_flops: &scores * &(crate::Poly::from(&inputs[0].shape.0[2]) * 10),
            vector_flops: scores.clone() * (if capped { 9 } else { 5 } + self.0.dropout_flops()),
            special_flops: scores * if capped { 2 } else { 1 },
            ..Cost::moving(inputs, outputs)
        }
    }

    fn work(&self) -> Work {
        self.0.attention_work()
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let heads = Placement::shard(1);
        let mut inputs = vec![heads; 6];
        inputs[3] = Placement::Replicate;
        inputs.extend(self.0.random_placements());
        inputs.push(heads);
        vec![ShardingRule { inputs, outputs: vec![heads; 3] }]
    }
}
