//! Causal attention over a paged cache (Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; query groups
//! of Ainslie et al. 2023, "GQA"; pages of Kwon et al. 2023, "Efficient Memory Management for Large Language Model
//! Serving with PagedAttention").

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

/// Attention of each token to positions `0..=positions[t]` of its own sequence, computed in f32.
///
/// `q`: `[tokens, heads, dim]` of any float dtype; `kv`: the state of [`KvWrite`](super::KvWrite),
/// `[blocks, 2, kv_heads, block_size, dim]`, which is read and not replaced; `block_table`: i32
/// `[sequences, blocks of a sequence]`; `seq_ids`: i32 `[tokens]`, the row of the table, negative for padding;
/// `positions`: i32 `[tokens]`. Behind them a cache of i8 has its scales. Gives the type of `q`.
///
/// Query head `h` uses key and value head `h / (heads / kv_heads)`. Position `p` of a sequence is at offset
/// `p % block_size` of block `block_table[seq, p / block_size]`; entries that no token reaches may be -1. The output of
/// padding is zero.
///
/// With a window the token at position `p` attends to positions above `p - window` alone, its own included (Beltagy et
/// al. 2020, "Longformer", section 3.1). With a soft cap each score `s` is `softcap * tanh(s / softcap)` (Gemma Team
/// 2024, "Gemma 2", section 2).
#[derive(Clone, Debug)]
pub struct PagedAttention {
    /// Factor of the scores, usually `1 / sqrt(dim)`.
    pub scale: f64,
    /// How many positions a token sees, its own included; 1 or more. All before it if `None`.
    pub window: Option<usize>,
    /// Scores stay within this; above 0.
    pub softcap: Option<f64>,
    /// The step's number of (query, key) pairs, for the cost alone.
    pub pairs: Sym,
    /// Tokens of the cache that the step reads, summed over sequences, for the cost alone.
    pub cached: Sym,
}

eq_by_bits!(PagedAttention { scale, softcap; window, pairs, cached });

/// Below every score, and finite, so that a row without any key has no infinite differences.
const MASKED: f64 = -3.0e38;

impl PagedAttention {
    /// Attention to all positions before, without a cap.
    pub fn new(scale: f64, pairs: Sym, cached: Sym) -> Self {
        Self { scale, window: None, softcap: None, pairs, cached }
    }

    /// `(query heads of each kv head, kv heads)`.
    fn groups(q: &Type, kv: &Type) -> Result<(usize, usize), Why> {
        let (heads, kv_heads) = (&q.shape.0[1], &kv.shape.0[2]);
        let group = match (heads.as_const(), kv_heads.as_const()) {
            (Some(0), Some(0)) => Some((1, 0)),
            (Some(h), Some(k)) if k > 0 && h % k == 0 => Some((h / k, k)),
            _ => None,
        };
        group.ok_or_else(|| format!("q has {heads} heads, which must be a multiple of the {kv_heads} of kv"))
    }
}

impl Composite for PagedAttention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, kv, table, ids, positions, scales @ ..] = inputs else {
            return Err(takes("q, kv, block_table, seq_ids and positions", inputs));
        };
        want_floats("q", q, 3, "[tokens, heads, dim]")?;
        let cache = super::kv_write::want_cache(kv)?;
        if cache[4] != q.shape.0[2] {
            return Err(format!("kv must have heads of {} elements as q has, got {kv}", q.shape.0[2]));
        }
        Self::groups(q, kv)?;
        if table.shape.rank() != 2 || table.dtype != DType::I32 || !table.is_plain() {
            return Err(format!("block_table must be i32[sequences, blocks], got {table}"));
        }
        want("seq_ids", ids, DType::I32, [&q.shape.0[0]])?;
        want("positions", positions, DType::I32, [&q.shape.0[0]])?;
        super::kv_write::want_scales(kv, scales)?;
        if self.window == Some(0) {
            return Err("a window must have 1 position or more".into());
        }
        if self.softcap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
            return Err(format!("softcap must be above 0, got {}", self.softcap.unwrap_or_default()));
        }
        Ok(vec![q.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, kv, table, ids, positions, scales @ ..] = inputs else { unreachable!("infer has counted the inputs") };
        let (qt, kt) = (g.ty(*q)?.clone(), g.ty(*kv)?.clone());
        let fail = |g: &Builder, why: Why| GraphError::usage(g.scope(), why);
        let (group, heads) = Self::groups(&qt, &kt).map_err(|why| fail(g, why))?;
        let (tokens, dim) = (&qt.shape.0[0], &qt.shape.0[2]);
        let (blocks, block_size) = (g.ty(*table)?.shape.last(), &kt.shape.0[3]);
        let keys = flat(&[blocks.clone(), block_size.clone()]).map_err(|why| fail(g, why))?;
        let (heads, group, one) = (Dim::from(heads), Dim::from(group), Dim::from(1));

        // Each token's own blocks: [tokens, blocks, 2, kv_heads, block_size, dim].
        let row = g.gather(*table, *ids, 0)?;
        let cache = g.state_read(*kv)?;
        let cache = g.gather(cache, row, 0)?;
        // Of codes their scales: [tokens, blocks, 2, kv_heads, block_size].
        let scales = match scales.first() {
            Some(scales) => {
                let scales = g.state_read(*scales)?;
                Some(g.gather(scales, row, 0)?)
            }
            None => None,
        };
        let mut sides = Vec::with_capacity(2);
        for side in 0..2usize {
            let x = g.slice(cache, 2, side, 1)?;
            let x = g.reshape(x, Shape::new([tokens, &blocks, &heads, block_size, dim]))?;
            let x = g.transpose(x, &[0, 2, 1, 3, 4])?;
            let x = g.reshape(x, Shape::new([tokens, &heads, &keys, dim]))?;
            let mut x = g.cast(x, DType::F32)?;
            if let Some(scales) = scales {
                let scales = g.slice(scales, 2, side, 1)?;
                let scales = g.reshape(scales, Shape::new([tokens, &blocks, &heads, block_size]))?;
                let scales = g.transpose(scales, &[0, 2, 1, 3])?;
                let scales = g.reshape(scales, Shape::new([tokens, &heads, &keys, &one]))?;
                x = g.mul(x, scales)?;
            }
            sides.push(x);
        }
        let (k, v) = (sides[0], sides[1]);

        let grouped = Shape::new([tokens, &heads, &group, dim]);
        let x = g.cast(*q, DType::F32)?;
        let x = g.reshape(x, grouped)?;
        let scores = g.matmul(x, k, false, true, DType::F32)?;
        let scale = g.constant(DType::F32, self.scale)?;
        let mut scores = g.mul(scores, scale)?;
        if let Some(cap) = self.softcap {
            let inverse = g.constant(DType::F32, 1.0 / cap)?;
            let bent = g.mul(scores, inverse)?;
            let bent = g.tanh(bent)?;
            let cap = g.constant(DType::F32, cap)?;
            scores = g.mul(bent, cap)?;
        }

        let per_token = Shape::new([tokens, &one, &one, &one]);
        let position = g.reshape(*positions, per_token.clone())?;
        let id = g.reshape(*ids, per_token)?;
        let key = g.iota(Shape::new([tokens, &one, &one, &keys]), 3, DType::I32)?;
        let causal = g.le(key, position)?;
        let zero = g.constant(DType::I32, 0.0)?;
        let real = g.ge(id, zero)?;
        let mut seen = g.and(causal, real)?;
        if let Some(window) = self.window {
            let window = g.constant(DType::I32, window as f64)?;
            let end = g.add(key, window)?;
            let near = g.gt(end, position)?;
            seen = g.and(seen, near)?;
        }

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
        let y = g.matmul(share, v, false, false, DType::F32)?;
        let y = g.reshape(y, qt.shape.clone())?;
        Ok(vec![g.cast(y, qt.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (q, kv) = (&inputs[0], &inputs[1]);
        let symbol = |s: &Sym| Poly::from(&Dim::from(s.clone()));
        let scores = &Poly::from(&q.shape.0[1]) * &symbol(&self.pairs);
        let mut token = Poly::product([&kv.shape.0[2], &kv.shape.0[4]]) * (2 * kv.dtype.size_bytes() as i128);
        if let Some(scales) = inputs.get(5) {
            token += &(Poly::from(&kv.shape.0[2]) * (2 * scales.dtype.size_bytes() as i128));
        }
        let tables = Cost::moving(&inputs[2..5], &[]).bytes_read;
        Cost {
            matrix_flops: &scores * &(Poly::from(&q.shape.0[2]) * 4),
            // Scaling, maximum, difference and sum; two products more and a tangent with a cap.
            vector_flops: scores.clone() * if self.softcap.is_some() { 6 } else { 4 },
            special_flops: scores * if self.softcap.is_some() { 2 } else { 1 },
            bytes_read: q.bytes() + &(&token * &symbol(&self.cached)) + &tables,
            ..Cost::moving(&[], outputs)
        }
    }

    fn work(&self) -> Work {
        Work::Attention(AttentionWork {
            pairs: vec![self.pairs.clone()],
            cached: vec![self.cached.clone()],
            window: self.window,
            ..AttentionWork::default()
        })
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (cut, whole) = (Placement::shard, Placement::Replicate);
        let rule = |places: [Placement; 5], scales, output| {
            let mut inputs_at = places.to_vec();
            inputs_at.resize(inputs.len(), scales);
            ShardingRule { inputs: inputs_at, outputs: vec![output] }
        };
        vec![
            // By heads, whole groups to a rank.
            rule([cut(1), cut(2), whole, whole, whole], cut(2), cut(1)),
            rule([cut(0), whole, whole, cut(0), cut(0)], whole, cut(0)),
        ]
    }
}

impl Builder {
    /// Causal attention of a step's tokens over a paged cache; see [`PagedAttention`].
    ///
    /// # Errors
    /// When `kv` is not a paged cache, `q` does not fit it, or a table has another shape than described there.
    pub fn attention(
        &mut self,
        q: Var,
        kv: Var,
        block_table: Var,
        seq_ids: Var,
        positions: Var,
        op: PagedAttention,
    ) -> Result<Var> {
        Ok(self.composite(op, &[q, kv, block_table, seq_ids, positions])?[0])
    }

    /// As [`Builder::attention`], over a cache of i8 and its scales.
    ///
    /// # Errors
    /// As there, and when `scales` are not those of `kv`.
    pub fn attention_codes(
        &mut self,
        q: Var,
        [kv, scales]: [Var; 2],
        block_table: Var,
        seq_ids: Var,
        positions: Var,
        op: PagedAttention,
    ) -> Result<Var> {
        Ok(self.composite(op, &[q, kv, block_table, seq_ids, positions, scales])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (sequences as (cached, new), padding, block size, spare columns, heads, kv heads, dim, dtype of the cache, window,
    // softcap)
    type Case<'a> = (&'a [(usize, usize)], usize, usize, usize, usize, usize, usize, DType, Option<usize>, Option<f64>);
    let cases: [Case<'_>; 19] = [
        (&[], 0, 4, 0, 2, 1, 8, dtype, None, None),
        (&[], 3, 4, 1, 2, 1, 8, dtype, None, None),
        (&[(0, 1)], 0, 1, 0, 1, 1, 1, dtype, None, None),
        (&[(7, 1), (16, 1), (0, 1)], 2, 8, 1, 8, 1, 16, dtype, None, None),
        (&[(0, 17), (5, 0), (3, 6)], 0, 16, 2, 4, 2, 33, dtype, None, None),
        (&[(33, 1), (63, 1), (64, 1)], 1, 16, 0, 16, 2, 64, dtype, None, None),
        (&[(0, 20)], 4, 3, 0, 3, 3, 10, dtype, None, None),
        (&[(4, 2), (9, 1)], 0, 4, 1, 4, 2, 16, DType::BF16, None, None),
        (&[(4, 2), (9, 1)], 0, 4, 1, 4, 4, 16, DType::F8E4M3, None, None),
        (&[(0, 20), (7, 1)], 3, 4, 1, 4, 2, 16, dtype, Some(1), None),
        (&[(30, 12), (3, 1), (4, 1), (5, 1)], 2, 4, 0, 4, 2, 16, dtype, Some(5), None),
        (&[(0, 9), (40, 1)], 0, 16, 1, 2, 1, 33, dtype, Some(100), Some(1.5)),
        (&[(0, 17), (5, 0), (3, 6)], 1, 16, 0, 4, 2, 8, dtype, None, Some(0.5)),
        (&[(33, 2), (64, 1)], 0, 16, 0, 4, 4, 16, DType::BF16, Some(16), Some(50.0)),
        (&[(1030, 3)], 0, 64, 0, 2, 1, 8, dtype, Some(520), None),
        (&[(0, 17), (5, 0), (3, 6)], 1, 16, 1, 4, 2, 8, DType::I8, None, None),
        (&[(33, 1), (63, 1), (140, 1)], 1, 16, 0, 8, 2, 64, DType::I8, None, Some(5.0)),
        (&[(0, 20), (7, 1)], 3, 4, 1, 4, 2, 33, DType::I8, Some(5), None),
        (&[(120, 30)], 0, 32, 0, 4, 1, 32, DType::I8, None, None),
    ];
    let mut samples = Vec::new();
    for (sequences, padding, block_size, spare, heads, kv_heads, dim, stored, window, softcap) in cases {
        let step = super::paging::PagedStep::new(rng, sequences, padding, block_size, spare);
        let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
        let tokens = step.seq_ids.len();
        let cache = [step.blocks, 2, kv_heads, block_size, dim];
        let sample = Sample::new(PagedAttention { window, softcap, ..op })
            .input(rng.normal(dtype, &[tokens, heads, dim]))
            .state(super::paging::cache(rng, stored, &cache))
            .input(step.block_table)
            .input(step.seq_ids)
            .input(step.positions);
        samples.push(match stored {
            // Codes are a hundred times as large as what they stand for.
            DType::I8 => {
                let scales = rng.normal(DType::F32, &cache[..4]);
                let scales = scales.floats().iter().map(|x| 0.01 * x.abs() + 0.001).collect();
                sample.state(Tensor::float(DType::F32, &cache[..4], scales).rounded())
            }
            _ => sample,
        });
    }
    samples
}
