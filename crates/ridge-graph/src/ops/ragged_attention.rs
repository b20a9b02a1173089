//! Attention in both directions over a batch of texts without padding (Vaswani et al. 2017, "Attention Is All You Need",
//! section 3.2.1; Devlin et al. 2019, "BERT", section 3).

use super::require::{flat, takes, want, want_floats};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// Attention of each token to all tokens of its own sequence, computed in f32.
///
/// `q`: `[tokens, heads, dim]`, `k`, `v`: `[tokens, kv_heads, dim]`, all of one float dtype; `seq_ids`: i32 `[tokens]`,
/// negative for padding. Gives the type of `q`. Query head `h` uses key and value head `h / (heads / kv_heads)`. The
/// output of padding is zero.
#[derive(Clone, Debug)]
pub struct RaggedAttention {
    /// Factor of the scores, usually `1 / sqrt(dim)`.
    pub scale: f64,
    /// The step's number of (query, key) pairs, for the cost alone.
    pub pairs: Sym,
}

eq_by_bits!(RaggedAttention { scale; pairs });

/// Below every score, and finite, so that a row without any key has no infinite differences.
const MASKED: f64 = -3.0e38;

impl RaggedAttention {
    /// `(query heads of each kv head, kv heads)`.
    fn groups(q: &Type, k: &Type) -> Result<(usize, usize), Why> {
        let (heads, kv_heads) = (&q.shape.0[1], &k.shape.0[1]);
        match (heads.as_const(), kv_heads.as_const()) {
            (Some(h), Some(k)) if k > 0 && h % k == 0 => Ok((h / k, k)),
            _ => Err(format!("q has {heads} heads, which must be a multiple of the {kv_heads} of k")),
        }
    }
}

impl Composite for RaggedAttention {
    fn name(&self) -> &'static str {
        "ragged_attention"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, k, v, ids] = inputs else { return Err(takes("q, k, v and seq_ids", inputs)) };
        want_floats("q", q, 3, "[tokens, heads, dim]")?;
        want_floats("k", k, 3, "[tokens, kv_heads, dim]")?;
        let [tokens, _, dim] = &q.shape.0[..] else { unreachable!("q has three axes") };
        want("k", k, q.dtype, [tokens, &k.shape.0[1], dim])?;
        want("v", v, q.dtype, k.shape.clone())?;
        want("seq_ids", ids, DType::I32, [tokens])?;
        Self::groups(q, k)?;
        Ok(vec![q.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, k, v, ids] = inputs else { unreachable!("infer has counted the inputs") };
        let (qt, kt) = (g.ty(*q)?.clone(), g.ty(*k)?.clone());
        let fail = |g: &Builder, why: Why| GraphError::usage(g.scope(), why);
        let (group, heads) = Self::groups(&qt, &kt).map_err(|why| fail(g, why))?;
        let (tokens, dim) = (&qt.shape.0[0], &qt.shape.0[2]);
        let rows = flat(&[group.into(), tokens.clone()]).map_err(|why| fail(g, why))?;
        let (heads, group, one) = (Dim::from(heads), Dim::from(group), Dim::from(1));

        // One batch a kv head, whose rows are its query heads' tokens.
        let x = g.cast(*q, DType::F32)?;
        let x = g.reshape(x, Shape::new([tokens, &heads, &group, dim]))?;
        let x = g.transpose(x, &[1, 2, 0, 3])?;
        let x = g.reshape(x, Shape::new([&heads, &rows, dim]))?;
        let mut sides = [*k, *v];
        for side in &mut sides {
            let wide = g.cast(*side, DType::F32)?;
            *side = g.transpose(wide, &[1, 0, 2])?;
        }
        let scores = g.matmul(x, sides[0], false, true, DType::F32)?;
        let scale = g.constant(DType::F32, self.scale)?;
        let scores = g.mul(scores, scale)?;
        let scores = g.reshape(scores, Shape::new([&heads, &group, tokens, tokens]))?;

        let of_query = g.reshape(*ids, Shape::new([&one, &one, tokens, &one]))?;
        let of_key = g.reshape(*ids, Shape::new([&one, &one, &one, tokens]))?;
        let same = g.eq(of_query, of_key)?;
        let zero = g.constant(DType::I32, 0.0)?;
        let real = g.ge(of_query, zero)?;
        let seen = g.and(same, real)?;
        let masked = g.constant(DType::F32, MASKED)?;
        let scores = g.select(seen, scores, masked)?;
        let largest = g.reduce_max(scores, 3)?;
        let shifted = g.sub(scores, largest)?;
        let weight = g.exp(shifted)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let weight = g.select(seen, weight, nothing)?;
        let total = g.reduce_sum(weight, 3)?;
        // Where no key is seen there is nothing to divide.
        let none = g.eq(total, nothing)?;
        let unit = g.constant(DType::F32, 1.0)?;
        let total = g.select(none, unit, total)?;
        let share = g.div(weight, total)?;
        let share = g.reshape(share, Shape::new([&heads, &rows, tokens]))?;
        let y = g.matmul(share, sides[1], false, false, DType::F32)?;
        let y = g.reshape(y, Shape::new([&heads, &group, tokens, dim]))?;
        let y = g.transpose(y, &[2, 0, 1, 3])?;
        let y = g.reshape(y, qt.shape.clone())?;
        Ok(vec![g.cast(y, qt.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let q = &inputs[0];
        let scores = &Poly::from(&q.shape.0[1]) * &Poly::from(&Dim::from(self.pairs.clone()));
        Cost {
            matrix_flops: &scores * &(Poly::from(&q.shape.0[2]) * 4),
            vector_flops: scores.clone() * 4,
            special_flops: scores,
            ..Cost::moving(inputs, outputs)
        }
    }

    fn work(&self) -> Work {
        Work::Attention(AttentionWork { pairs: vec![self.pairs.clone()], ..AttentionWork::default() })
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // By heads, whole groups to a rank.
        let heads = Placement::shard(1);
        vec![ShardingRule { inputs: vec![heads, heads, heads, Placement::Replicate], outputs: vec![heads] }]
    }
}

impl Builder {
    /// Attention of tokens to all tokens of their sequences; see [`RaggedAttention`].
    ///
    /// # Errors
    /// When `k` and `v` do not fit `q`, or `seq_ids` is not an i32 of each token.
    pub fn ragged_attention(&mut self, [q, k, v]: [Var; 3], seq_ids: Var, op: RaggedAttention) -> Result<Var> {
        Ok(self.composite(op, &[q, k, v, seq_ids])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (lengths of the sequences, padding, heads, kv heads, dim)
    let cases: [(&[usize], usize, usize, usize, usize); 8] = [
        (&[], 0, 2, 1, 8),
        (&[], 3, 2, 2, 8),
        (&[1], 0, 1, 1, 1),
        (&[7, 1, 0, 12], 2, 4, 4, 16),
        (&[17, 5], 0, 4, 2, 33),
        (&[40], 1, 6, 2, 10),
        (&[3, 60], 0, 2, 2, 64),
        (&[530], 2, 1, 1, 8),
    ];
    let mut samples = Vec::new();
    for (lengths, padding, heads, kv_heads, dim) in cases {
        let mut ids: Vec<i64> =
            lengths.iter().enumerate().flat_map(|(id, n)| std::iter::repeat_n(id as i64, *n)).collect();
        ids.resize(ids.len() + padding, -1);
        let tokens = ids.len();
        let op = RaggedAttention { scale: 1.0 / (dim as f64).sqrt(), pairs: Sym::new("pairs") };
        samples.push(
            Sample::new(op)
                .input(rng.normal(dtype, &[tokens, heads, dim]))
                .input(rng.normal(dtype, &[tokens, kv_heads, dim]))
                .input(rng.normal(dtype, &[tokens, kv_heads, dim]))
                .input(Tensor::int(DType::I32, &[tokens], ids)),
        );
    }
    // Tokens of a sequence need not lie together.
    samples.push(
        Sample::new(RaggedAttention { scale: 0.5, pairs: Sym::new("pairs") })
            .input(rng.normal(dtype, &[6, 2, 4]))
            .input(rng.normal(dtype, &[6, 2, 4]))
            .input(rng.normal(dtype, &[6, 2, 4]))
            .input(Tensor::int(DType::I32, &[6], vec![1, 0, 1, -1, 0, 1])),
    );
    samples
}
