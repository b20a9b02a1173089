//! The tokens of a paged cache that sparse attention attends to (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1: the
//! lightning indexer and the selection of its best tokens).

use super::paged_rows::{MASKED, SequenceRows};
use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// The `top_k` positions with the best scores among `0..=positions[t]` of each token's own sequence: in ascending order, -1
/// behind them where there are fewer.
///
/// The score of position `s` is `sum_h w[t, h] * max(0, q[t, h] . k[s])`, in f32. Of equal scores the lower position is
/// better. A positive factor of all scores changes nothing, so the op has none.
///
/// `q`: `[tokens, heads, dim]` and `w`: `[tokens, heads]` of any float dtypes; `keys`: a state as that of
/// [`KvWrite`](super::KvWrite) with one side and one head, `[blocks, 1, 1, block_size, dim]`, which is read and not replaced;
/// `block_table`, `seq_ids` and `positions` as in [`PagedAttention`](super::PagedAttention). Keys of codes have their scales
/// behind them. Gives i32 `[tokens, top_k]`; padding has no positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexTopK {
    /// Positions that a token keeps; 1 or more.
    pub top_k: usize,
    /// The step's number of (query, key) pairs, for the cost alone.
    pub pairs: Sym,
    /// Tokens of the cache that the step reads, summed over sequences, for the cost alone.
    pub cached: Sym,
}

/// Behind every position.
const NOWHERE: f64 = i32::MAX as f64;

impl Composite for IndexTopK {
    fn name(&self) -> &'static str {
        "index_topk"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, w, keys, table, ids, positions, scales @ ..] = inputs else {
            return Err(takes("q, w, keys, block_table, seq_ids and positions", inputs));
        };
        want_floats("q", q, 3, "[tokens, heads, dim]")?;
        want_floats("w", w, 2, "[tokens, heads]")?;
        if w.shape.0[..] != q.shape.0[..2] {
            return Err(format!("w must have the tokens and heads of q, {q}, got {w}"));
        }
        let cache = super::kv_write::want_cache(keys)?;
        let one = Dim::from(1);
        if cache[1] != one || cache[2] != one || cache[4] != q.shape.0[2] {
            return Err(format!("keys must be [blocks, 1, 1, block_size, {}], got {keys}", q.shape.0[2]));
        }
        if table.shape.rank() != 2 || table.dtype != DType::I32 || !table.is_plain() {
            return Err(format!("block_table must be i32[sequences, blocks], got {table}"));
        }
        want("seq_ids", ids, DType::I32, [&q.shape.0[0]])?;
        want("positions", positions, DType::I32, [&q.shape.0[0]])?;
        super::kv_write::want_scales(keys, scales)?;
        if self.top_k == 0 {
            return Err("top_k must be 1 or more".into());
        }
        Ok(vec![Type::tensor(DType::I32, [q.shape.0[0].clone(), self.top_k.into()])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, w, keys, table, ids, positions, scales @ ..] = inputs else {
            unreachable!("infer has counted the inputs")
        };
        let shape = g.ty(*q)?.shape.clone();
        let (tokens, heads, dim) = (&shape.0[0], &shape.0[1], &shape.0[2]);
        let one = Dim::from(1);
        let rows = SequenceRows::read(g, *keys, scales, *table, *ids)?;
        let k = g.reshape(rows.sides[0], Shape::new([tokens, &rows.keys, dim]))?;
        let q = g.cast(*q, DType::F32)?;
        let products = g.matmul(q, k, false, true, DType::F32)?;
        let zero = g.constant(DType::F32, 0.0)?;
        let products = g.max(products, zero)?;
        let w = g.cast(*w, DType::F32)?;
        let w = g.reshape(w, Shape::new([tokens, &one, heads]))?;
        let scores = g.matmul(w, products, false, false, DType::F32)?;
        let scores = g.reshape(scores, Shape::new([tokens, &rows.keys]))?;

        let position = g.reshape(*positions, Shape::new([tokens, &one]))?;
        let id = g.reshape(*ids, Shape::new([tokens, &one]))?;
        let first = g.constant(DType::I32, 0.0)?;
        let real = g.ge(id, first)?;
        let key = g.iota(Shape::new([&one, &rows.keys]), 1, DType::I32)?;
        let causal = g.le(key, position)?;
        let seen = g.and(causal, real)?;
        let masked = g.constant(DType::F32, MASKED)?;
        let scores = g.select(seen, scores, masked)?;
        // So many columns that the best can be taken from them.
        let scores = g.pad(scores, 1, 0, self.top_k, MASKED)?;
        let (_, best) = g.sort(scores, 1, true, self.top_k)?;

        let causal = g.le(best, position)?;
        let chosen = g.and(causal, real)?;
        let nowhere = g.constant(DType::I32, NOWHERE)?;
        let best = g.select(chosen, best, nowhere)?;
        let (best, _) = g.sort(best, 1, false, self.top_k)?;
        let there = g.lt(best, nowhere)?;
        let none = g.constant(DType::I32, -1.0)?;
        Ok(vec![g.select(there, best, none)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (q, keys) = (&inputs[0], &inputs[2]);
        let symbol = |s: &Sym| Poly::from(&Dim::from(s.clone()));
        let scores = &Poly::from(&q.shape.0[1]) * &symbol(&self.pairs);
        let scale = if inputs.len() > 6 { DType::F32.size_bytes() } else { 0 };
        let row = Poly::from(&keys.shape.0[4]) * (keys.dtype.size_bytes() as i128) + &Poly::from(scale as i128);
        let moved = Cost::moving(&[&inputs[..2], &inputs[3..6]].concat(), outputs);
        Cost {
            matrix_flops: &scores * &(Poly::from(&q.shape.0[2]) * 2),
            // The larger of zero and the product, weighed and added; then a few passes over the sums that find the best.
            vector_flops: scores * 3 + &(symbol(&self.pairs) * 4),
            bytes_read: moved.bytes_read.clone() + &(&row * &symbol(&self.cached)),
            ..moved
        }
    }

    fn work(&self) -> Work {
        Work::Attention(AttentionWork {
            pairs: vec![self.pairs.clone()],
            cached: vec![self.cached.clone()],
            ..AttentionWork::default()
        })
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn of_single_rows(&self) -> Option<CompositeRef> {
        let (pairs, cached) = (self.pairs.of_taken_rows(), self.cached.of_taken_rows());
        Some(CompositeRef::new(Self { pairs, cached, ..self.clone() }))
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // By tokens: a score is a sum over heads.
        let (cut, whole) = (Placement::shard(0), Placement::Replicate);
        let mut places = vec![cut, cut, whole, whole, cut, cut];
        places.resize(inputs.len(), whole);
        vec![ShardingRule { inputs: places, outputs: vec![cut] }]
    }
}

impl Builder {
    /// The best positions of each token, i32 `[tokens, top_k]`; see [`IndexTopK`]. `keys` is the cache, with its scales where
    /// it is of codes; `at` is block table, sequences and positions.
    ///
    /// # Errors
    /// When `keys` is not a paged cache of one head and one side, or the others do not fit it.
    pub fn index_topk(&mut self, [q, w]: [Var; 2], keys: &[Var], at: [Var; 3], op: IndexTopK) -> Result<Var> {
        let (keys, scales) = keys.split_at(keys.len().min(1));
        Ok(self.composite(op, &[&[q, w], keys, &at, scales].concat())?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (sequences as (cached, new), padding, block size, spare columns, heads, dim, best, dtype of the keys)
    type Case<'a> = (&'a [(usize, usize)], usize, usize, usize, usize, usize, usize, DType);
    let cases: [Case<'_>; 12] = [
        (&[], 0, 4, 0, 2, 8, 3, dtype),
        (&[], 2, 4, 1, 2, 8, 3, dtype),
        (&[(0, 1)], 0, 1, 0, 1, 1, 1, dtype),
        (&[(0, 0), (9, 1)], 1, 4, 0, 0, 8, 3, dtype),
        // Fewer positions than the best, as many, and more.
        (&[(0, 6), (4, 3), (0, 4)], 2, 4, 1, 3, 16, 5, dtype),
        (&[(7, 1), (0, 9), (16, 1)], 1, 8, 0, 4, 33, 4, dtype),
        // One head: many scores are zero, of which the first are taken.
        (&[(0, 20), (40, 2)], 0, 16, 1, 1, 8, 6, dtype),
        (&[(63, 1), (64, 1), (33, 1)], 1, 16, 0, 8, 64, 16, dtype),
        (&[(150, 2), (0, 3)], 0, 16, 1, 16, 128, 32, DType::BF16),
        (&[(1030, 2), (600, 1)], 1, 64, 0, 2, 32, 512, dtype),
        (&[(33, 2), (0, 17)], 1, 16, 1, 4, 32, 8, DType::I8),
        (&[(5, 9)], 0, 4, 0, 2, 33, 6, DType::F8E4M3),
    ];
    let mut samples = Vec::new();
    for (sequences, padding, block_size, spare, heads, dim, top_k, stored) in cases {
        let step = super::paging::PagedStep::new(rng, sequences, padding, block_size, spare);
        let tokens = step.seq_ids.len();
        let cache = [step.blocks, 1, 1, block_size, dim];
        let op = IndexTopK { top_k, pairs: Sym::new("pairs"), cached: Sym::new("cached") };
        let sample = Sample::new(op)
            .input(rng.normal(dtype, &[tokens, heads, dim]))
            .input(rng.normal(dtype, &[tokens, heads]))
            .state(super::paging::cache(rng, stored, &cache))
            .input(step.block_table)
            .input(step.seq_ids)
            .input(step.positions);
        samples.push(match stored {
            DType::I8 => sample.state(super::paging::scales(rng, &cache[..4])),
            _ => sample,
        });
    }
    samples
}
