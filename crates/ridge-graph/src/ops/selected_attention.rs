//! Attention to chosen tokens of a paged cache (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1: sparse attention to the
//! tokens that an indexer selects).

use super::paged_rows::{SequenceRows, attention_shares, query_groups};
use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, CompositeRef, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// Attention of each token to the positions `selected[t]` of its own sequence, computed in f32.
///
/// `q`, `kv`, `block_table` and `seq_ids` as in [`PagedAttention`](super::PagedAttention); `selected`: i32
/// `[tokens, top_k]`, different positions in any order, as [`IndexTopK`](super::IndexTopK) gives them; negative for none.
/// Positions beyond the table are not seen. A cache of codes has its scales behind them. Gives the type of `q`; the output of
/// padding, and of a token without positions, is zero.
#[derive(Clone, Debug)]
pub struct SelectedAttention {
    /// Factor of the scores.
    pub scale: f64,
    /// Columns of `selected`: a token attends to so many positions at most.
    pub top_k: usize,
    /// The step's number of (query, selected key) pairs, for the cost alone.
    pub pairs: Sym,
    /// Tokens of the cache that the step reads, for the cost alone.
    pub cached: Sym,
}

eq_by_bits!(SelectedAttention { scale; top_k, pairs, cached });

impl Composite for SelectedAttention {
    fn name(&self) -> &'static str {
        "selected_attention"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, kv, table, ids, selected, scales @ ..] = inputs else {
            return Err(takes("q, kv, block_table, seq_ids and selected", inputs));
        };
        want_floats("q", q, 3, "[tokens, heads, dim]")?;
        let cache = super::kv_write::want_cache(kv)?;
        if cache[4] != q.shape.0[2] {
            return Err(format!("kv must have heads of {} elements as q has, got {kv}", q.shape.0[2]));
        }
        query_groups(q, kv)?;
        if table.shape.rank() != 2 || table.dtype != DType::I32 || !table.is_plain() {
            return Err(format!("block_table must be i32[sequences, blocks], got {table}"));
        }
        want("seq_ids", ids, DType::I32, [&q.shape.0[0]])?;
        want("selected", selected, DType::I32, [&q.shape.0[0], &self.top_k.into()])?;
        super::kv_write::want_scales(kv, scales)?;
        Ok(vec![q.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, kv, table, ids, selected, scales @ ..] = inputs else { unreachable!("infer has counted the inputs") };
        let (qt, kt) = (g.ty(*q)?.clone(), g.ty(*kv)?.clone());
        let (group, heads) = query_groups(&qt, &kt).map_err(|why| GraphError::usage(g.scope(), why))?;
        let (tokens, dim, count) = (&qt.shape.0[0], &qt.shape.0[2], g.ty(*selected)?.shape.last());
        let (heads, group, one) = (Dim::from(heads), Dim::from(group), Dim::from(1));
        let SequenceRows { sides, keys } = SequenceRows::read(g, *kv, scales, *table, *ids)?;
        let (k, v) = (sides[0], sides[sides.len() - 1]);
        let x = g.cast(*q, DType::F32)?;
        let x = g.reshape(x, Shape::new([tokens, &heads, &group, dim]))?;
        let scores = g.matmul(x, k, false, true, DType::F32)?;
        let scale = g.constant(DType::F32, self.scale)?;
        let scores = g.mul(scores, scale)?;

        // Is a key one of those selected?
        let key = g.iota(Shape::new([&one, &keys, &one]), 1, DType::I32)?;
        let selected = g.reshape(*selected, Shape::new([tokens, &one, &count]))?;
        let hit = g.eq(key, selected)?;
        let hit = g.cast(hit, DType::F32)?;
        let hits = g.reduce_sum(hit, 2)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let hit = g.gt(hits, nothing)?;
        let hit = g.reshape(hit, Shape::new([tokens, &one, &one, &keys]))?;
        let id = g.reshape(*ids, Shape::new([tokens, &one, &one, &one]))?;
        let first = g.constant(DType::I32, 0.0)?;
        let real = g.ge(id, first)?;
        let seen = g.and(hit, real)?;
        let share = attention_shares(g, scores, seen, None)?;
        let y = g.matmul(share, v, false, false, DType::F32)?;
        let y = g.reshape(y, qt.shape.clone())?;
        Ok(vec![g.cast(y, qt.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (q, kv) = (&inputs[0], &inputs[1]);
        let symbol = |s: &Sym| Poly::from(&Dim::from(s.clone()));
        let scores = &Poly::from(&q.shape.0[1]) * &symbol(&self.pairs);
        let sides = super::kv_write::sides(kv);
        let mut token = Poly::product([&kv.shape.0[2], &kv.shape.0[4]]) * ((sides * kv.dtype.size_bytes()) as i128);
        if inputs.len() > 5 {
            token += &(Poly::from(&kv.shape.0[2]) * ((sides * DType::F32.size_bytes()) as i128));
        }
        let moved = Cost::moving(&[&inputs[..1], &inputs[2..5]].concat(), outputs);
        Cost {
            matrix_flops: &scores * &(Poly::from(&q.shape.0[2]) * 4),
            // Scaling, maximum, difference and sum.
            vector_flops: scores.clone() * 4,
            special_flops: scores,
            bytes_read: moved.bytes_read.clone() + &(&token * &symbol(&self.cached)),
            ..moved
        }
    }

    fn work(&self) -> Work {
        Work::Attention(AttentionWork {
            pairs: vec![self.pairs.clone()],
            cached: vec![self.cached.clone()],
            window: Some(self.top_k),
            ..AttentionWork::default()
        })
    }

    fn of_single_rows(&self) -> Option<CompositeRef> {
        let (pairs, cached) = (self.pairs.of_taken_rows(), self.cached.of_taken_rows());
        Some(CompositeRef::new(Self { pairs, cached, ..self.clone() }))
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (cut, whole) = (Placement::shard, Placement::Replicate);
        let rule = |q, kv, ids, selected, scales, output| {
            let mut places = vec![q, kv, whole, ids, selected];
            places.resize(inputs.len(), scales);
            ShardingRule { inputs: places, outputs: vec![output] }
        };
        let by_tokens = rule(cut(0), whole, cut(0), cut(0), whole, cut(0));
        // By heads: whole groups to a rank, or any heads where all have the same keys.
        let by_heads = match inputs[1].shape.0[2].as_const() {
            Some(1) => rule(cut(1), whole, whole, whole, whole, cut(1)),
            _ => rule(cut(1), cut(2), whole, whole, cut(2), cut(1)),
        };
        vec![by_heads, by_tokens]
    }
}

impl Builder {
    /// Attention to selected positions; see [`SelectedAttention`]. `cache` is keys and values, with their scales where it is
    /// of codes; `at` is block table, sequences and the positions selected.
    ///
    /// # Errors
    /// When `cache` is not a paged cache, or the others do not fit it.
    pub fn selected_attention(&mut self, q: Var, cache: &[Var], at: [Var; 3], op: SelectedAttention) -> Result<Var> {
        let (kv, scales) = cache.split_at(cache.len().min(1));
        Ok(self.composite(op, &[&[q], kv, &at, scales].concat())?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (sequences as (cached, new), padding, block size, spare columns, heads, kv heads, sides, dim, selected, dtype of the cache)
    type Case<'a> = (&'a [(usize, usize)], usize, usize, usize, usize, usize, usize, usize, usize, DType);
    let cases: [Case<'_>; 12] = [
        (&[], 0, 4, 0, 2, 1, 1, 8, 3, dtype),
        (&[], 3, 4, 1, 2, 1, 1, 8, 3, dtype),
        (&[(0, 1)], 0, 1, 0, 1, 1, 1, 1, 1, dtype),
        (&[(0, 3)], 1, 4, 0, 2, 1, 1, 8, 0, dtype),
        (&[(0, 6), (4, 3), (9, 1)], 2, 4, 1, 4, 1, 1, 16, 5, dtype),
        (&[(7, 1), (0, 9), (16, 1)], 1, 8, 0, 4, 2, 2, 33, 4, dtype),
        (&[(63, 1), (64, 1), (33, 1)], 1, 16, 0, 16, 1, 1, 36, 16, dtype),
        (&[(33, 4), (150, 2)], 1, 16, 0, 16, 1, 1, 96, 24, DType::BF16),
        // More than a span of 512.
        (&[(1200, 2)], 0, 64, 1, 4, 1, 1, 16, 600, dtype),
        (&[(33, 2), (0, 17)], 1, 16, 1, 8, 1, 1, 32, 9, DType::I8),
        (&[(20, 2), (0, 5)], 1, 16, 0, 4, 2, 2, 33, 7, DType::I8),
        (&[(130, 3)], 0, 8, 1, 20, 1, 1, 64, 40, dtype),
    ];
    let mut samples = Vec::new();
    for (sequences, padding, block_size, spare, heads, kv_heads, sides, dim, selected, stored) in cases {
        let step = super::paging::PagedStep::new(rng, sequences, padding, block_size, spare);
        let tokens = step.seq_ids.len();
        let chosen = selection(rng, step.positions.ints(), selected);
        let cache = [step.blocks, sides, kv_heads, block_size, dim];
        let op = SelectedAttention {
            scale: 1.0 / (dim as f64).sqrt(),
            top_k: selected,
            pairs: Sym::new("pairs"),
            cached: Sym::new("cached"),
        };
        let sample = Sample::new(op)
            .input(rng.normal(dtype, &[tokens, heads, dim]))
            .state(super::paging::cache(rng, stored, &cache))
            .input(step.block_table)
            .input(step.seq_ids)
            .input(Tensor::int(DType::I32, &[tokens, selected], chosen));
        samples.push(match stored {
            DType::I8 => sample.state(super::paging::scales(rng, &cache[..4])),
            _ => sample,
        });
    }
    samples
}

/// For each position `count` of those up to it at random, ascending; -1 behind them, and sometimes between.
fn selection(rng: &mut Rng, positions: &[i64], count: usize) -> Vec<i64> {
    let mut all = Vec::with_capacity(positions.len() * count);
    for position in positions {
        let seen = usize::try_from(*position).unwrap_or(0) + 1;
        let mut row = super::paging::shuffled(rng, seen);
        row.truncate(count);
        row.sort_unstable();
        row.resize(count, -1);
        if count > 3 && rng.below(4) == 0 {
            row[rng.below(count)] = -1;
        }
        all.extend(row);
    }
    all
}
