//! Attention over blocks of long texts (Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", section 2), as encoders
//! that were trained with it compute it.

use super::ragged_attention::{RaggedAttention, RaggedAttentionParts};
use super::require::{takes, want};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// Attention of each token to blocks of its own sequence, in both directions and without a cache, computed in f32.
///
/// `q`: `[tokens, heads, dim]`, `k`, `v`: `[tokens, kv_heads, dim]`, all of one float dtype; `seq_ids`: i32 `[tokens]`, negative
/// for padding and else below `tokens`; `positions`: i32 `[tokens]`, from 0 in each sequence. Tokens of a sequence stand together and in order. Gives the
/// type of `q`; the output of padding is zero.
///
/// A sequence is cut into blocks of `block` tokens, the last of which may be shorter. The tokens of the first and the last block
/// see all tokens. The others see those of the first and the last block, of their own block and of the blocks beside it. For
/// these, `repeats` further shares of the softmax go to the tokens of the first block: where training had that many random blocks,
/// inference has the first one in their place, which then counts `1 + repeats` times (transformers,
/// `BigBirdBlockSparseAttention`). In sequences of at most `(5 + 2 repeats) block` tokens every token sees all tokens alike.
#[derive(Clone, Debug)]
pub struct BlockSparseAttention {
    /// Factor of the scores, usually `1 / sqrt(dim)`.
    pub scale: f64,
    /// Tokens of a block; 1 or more.
    pub block: usize,
    /// How many times more the first block counts for tokens between the first and the last block.
    pub repeats: usize,
    /// The step's number of (query, key) pairs, for the cost alone.
    pub pairs: Sym,
}

eq_by_bits!(BlockSparseAttention { scale; block, repeats, pairs });

impl BlockSparseAttention {
    /// The longest sequence whose tokens all see each other.
    pub fn dense_tokens(&self) -> usize {
        self.repeats.saturating_mul(2).saturating_add(5).saturating_mul(self.block)
    }

    fn dense(&self) -> RaggedAttention {
        RaggedAttention::new(self.scale, self.pairs.clone())
    }

    /// Which keys each query sees, and those of them that count more than once: bool `[1, 1, tokens, tokens]` each.
    fn seen(&self, g: &mut Builder, tokens: &Dim, ids: Var, positions: Var) -> Result<[Var; 2]> {
        let one = Dim::from(1);
        let rows = Shape::new([&one, &one, tokens, &one]);
        let columns = Shape::new([&one, &one, &one, tokens]);
        let int = |g: &mut Builder, value: usize| g.constant(DType::I32, value as f64);
        let (zero, unit, size) = (int(g, 0)?, int(g, 1)?, int(g, self.block)?);
        let [of_query, of_key] = [g.reshape(ids, rows.clone())?, g.reshape(ids, columns.clone())?];
        let same = g.eq(of_query, of_key)?;
        let real = g.ge(of_query, zero)?;
        let same = g.and(same, real)?;
        // The last position of the query's sequence.
        let at_key = g.reshape(positions, columns)?;
        let at = g.select(same, at_key, zero)?;
        let last = g.reduce_max(at, 3)?;
        let limit = int(g, self.dense_tokens())?;
        let short = g.lt(last, limit)?;

        let block = |g: &mut Builder, position: Var| g.div(position, size);
        let at_query = g.reshape(positions, rows)?;
        let [query, key, last] = [block(g, at_query)?, block(g, at_key)?, block(g, last)?];
        let edge = |g: &mut Builder, block: Var| -> Result<[Var; 2]> {
            let first = g.eq(block, zero)?;
            let end = g.eq(block, last)?;
            Ok([first, g.or(first, end)?])
        };
        let [_, from_edge] = edge(g, query)?;
        let [first, to_edge] = edge(g, key)?;
        let whole = g.or(short, from_edge)?;
        let (below, above) = (g.sub(query, unit)?, g.add(query, unit)?);
        let [low, high] = [g.ge(key, below)?, g.le(key, above)?];
        let near = g.and(low, high)?;
        let near = g.or(near, to_edge)?;
        let reached = g.or(near, whole)?;
        let seen = g.and(same, reached)?;
        let between = g.not(whole)?;
        Ok([seen, g.and(first, between)?])
    }
}

impl Composite for BlockSparseAttention {
    fn name(&self) -> &'static str {
        "block_sparse_attention"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [.., positions] = inputs else { return Err(takes("q, k, v, seq_ids and positions", inputs)) };
        self.dense().check(&inputs[..inputs.len() - 1])?;
        want("positions", positions, DType::I32, [&inputs[0].shape.0[0]])?;
        if self.block == 0 {
            return Err("block must be 1 or more, got 0".into());
        }
        Ok(vec![inputs[0].clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, k, v, ids, positions] = inputs else { unreachable!("infer has counted the inputs") };
        let parts = RaggedAttentionParts::new(g, [*q, *k, *v], self.scale)?;
        let [seen, more] = self.seen(g, &parts.tokens(), *ids, *positions)?;
        let (added, nothing) = (g.constant(DType::F32, (self.repeats as f64).ln_1p())?, g.constant(DType::F32, 0.0)?);
        let added = g.select(more, added, nothing)?;
        let scores = g.add(parts.scores, added)?;
        Ok(vec![parts.attend(g, scores, seen)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let scores = &Poly::from(&inputs[0].shape.0[1]) * &Poly::from(&Dim::from(self.pairs.clone()));
        Cost {
            matrix_flops: &scores * &(Poly::from(&inputs[0].shape.0[2]) * 4),
            // Scaling, the share of the first block, maximum, difference and sum.
            vector_flops: scores.clone() * 5,
            special_flops: scores,
            ..Cost::moving(inputs, outputs)
        }
    }

    fn work(&self) -> Work {
        let window = Some(self.block.saturating_mul(5).div_ceil(2));
        Work::Attention(AttentionWork { pairs: vec![self.pairs.clone()], window, ..AttentionWork::default() })
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // By heads, whole groups to a rank.
        let (heads, whole) = (Placement::shard(1), Placement::Replicate);
        vec![ShardingRule { inputs: vec![heads, heads, heads, whole, whole], outputs: vec![heads] }]
    }
}

impl Builder {
    /// Attention of tokens to blocks of their sequences; see [`BlockSparseAttention`].
    ///
    /// # Errors
    /// When `k` and `v` do not fit `q`, `seq_ids` or `positions` is not an i32 of each token, or `op.block` is 0.
    pub fn block_sparse_attention(
        &mut self,
        [q, k, v]: [Var; 3],
        [seq_ids, positions]: [Var; 2],
        op: BlockSparseAttention,
    ) -> Result<Var> {
        Ok(self.composite(op, &[q, k, v, seq_ids, positions])?[0])
    }
}

pub(crate) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    /// Lengths of the sequences, padding, heads, kv heads, dim, block and repeats.
    type Case<'a> = (&'a [usize], usize, [usize; 3], usize, usize);
    let cases: [Case<'_>; 9] = [
        (&[], 0, [2, 1, 8], 4, 1),
        (&[], 3, [2, 2, 8], 4, 1),
        (&[1], 0, [1, 1, 1], 1, 0),
        // All that is seen, one token more, and two.
        (&[28, 29, 30], 1, [2, 2, 16], 4, 1),
        (&[41, 3, 60], 2, [4, 2, 10], 4, 1),
        // Blocks of one token, and the first as often as any.
        (&[13, 5], 0, [2, 1, 16], 1, 0),
        (&[70, 9], 0, [2, 1, 33], 5, 3),
        (&[64], 0, [2, 2, 64], 8, 1),
        (&[97], 3, [1, 1, 8], 10, 2),
    ];
    let sample = |(lengths, padding, [heads, kv_heads, dim], block, repeats): Case<'_>| {
        let op = BlockSparseAttention { scale: 1.0 / (dim as f64).sqrt(), block, repeats, pairs: Sym::new("pairs") };
        let of = |each: fn(usize, usize) -> i64| -> Vec<i64> {
            lengths.iter().enumerate().flat_map(|(id, n)| (0..*n).map(move |at| each(id, at))).collect()
        };
        let (mut ids, mut positions) = (of(|id, _| id as i64), of(|_, at| at as i64));
        ids.resize(ids.len() + padding, -1);
        positions.resize(ids.len(), 0);
        let tokens = ids.len();
        let qkv = [heads, kv_heads, kv_heads].map(|heads| rng.normal(dtype, &[tokens, heads, dim]));
        let rows = [ids, positions].map(|row| Tensor::int(DType::I32, &[tokens], row));
        qkv.into_iter().chain(rows).fold(Sample::new(op), Sample::input)
    };
    cases.into_iter().map(sample).collect()
}
