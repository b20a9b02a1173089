//! The long convolution of Hyena (Poli et al. 2023, "Hyena Hierarchy: Towards Larger Convolutional Language Models", section 3), over
//! sequences whose inputs are kept in a paged cache.

use super::paged_rows::SequenceRows;
use super::require::{takes, want};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// `y[t, c] = sum over s of filter[p - s, c] * x[s, c]`, each channel by itself, where `p` is the position of token `t` and `s`
/// goes over positions from 0 to `p` of its sequence; the filter is 0 behind its last row. Computed in f32.
///
/// `cache`: the state `[blocks, 1, 1, block_size, channels]` with `x`, those of the step's tokens among them; `block_table`: i32
/// `[sequences, blocks]`; `seq_ids`: i32 `[tokens]`, negative for padding; `positions`: i32 `[tokens]`; `filter`: f32 `[length,
/// channels]`; with a cache of codes its scales. Gives f32 `[tokens, channels]`, 0 for padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LongConvolution {
    /// The step's number of (token, position before or at it) pairs, for the cost alone.
    pub pairs: Sym,
    /// Tokens of the cache that the step reads, summed over sequences, for the cost alone.
    pub cached: Sym,
}

impl Composite for LongConvolution {
    fn name(&self) -> &'static str {
        "long_convolution"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [cache, table, ids, positions, filter, scales @ ..] = inputs else {
            return Err(takes("cache, block_table, seq_ids, positions and filter", inputs));
        };
        let shape = super::kv_write::want_cache(cache)?;
        if [&shape[1], &shape[2]].iter().any(|extent| **extent != Dim::from(1)) {
            return Err(format!("cache must be [blocks, 1, 1, block_size, channels], got {cache}"));
        }
        let channels = shape[4].clone();
        if table.shape.rank() != 2 || table.dtype != DType::I32 || !table.is_plain() {
            return Err(format!("block_table must be i32[sequences, blocks], got {table}"));
        }
        if ids.shape.rank() != 1 || filter.shape.rank() != 2 {
            return Err(format!("seq_ids must be [tokens] and filter [length, channels], got {ids} and {filter}"));
        }
        let (tokens, length) = (ids.shape.0[0].clone(), filter.shape.0[0].clone());
        want("seq_ids", ids, DType::I32, [&tokens])?;
        want("positions", positions, DType::I32, [&tokens])?;
        want("filter", filter, DType::F32, [&length, &channels])?;
        match length.as_const() {
            Some(length) if length > 0 => {}
            _ => return Err(format!("filter must have a number of rows, 1 or more, got {filter}")),
        }
        super::kv_write::want_scales(cache, scales)?;
        Ok(vec![Type::tensor(DType::F32, [&tokens, &channels])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [cache, table, ids, positions, filter, scales @ ..] = inputs else {
            unreachable!("infer has counted the inputs")
        };
        let (tokens, shape) = (g.ty(*ids)?.shape.0[0].clone(), g.ty(*filter)?.shape.clone());
        let (length, channels) = (shape.0[0].as_const().unwrap_or_default(), &shape.0[1]);
        let one = Dim::from(1);
        let rows = SequenceRows::read(g, *cache, scales, *table, *ids)?;
        let x = g.reshape(rows.sides[0], Shape::new([&tokens, &rows.keys, channels]))?;

        let position = g.reshape(*positions, Shape::new([&tokens, &one]))?;
        let id = g.reshape(*ids, Shape::new([&tokens, &one]))?;
        let key = g.iota(Shape::new([&one, &rows.keys]), 1, DType::I32)?;
        let back = g.sub(position, key)?;
        let (zero, end) = (g.constant(DType::I32, 0.0)?, g.constant(DType::I32, length as f64)?);
        let (real, causal, near) = (g.ge(id, zero)?, g.ge(back, zero)?, g.lt(back, end)?);
        let seen = g.and(causal, near)?;
        let seen = g.and(seen, real)?;
        let back = g.select(seen, back, zero)?;
        let taps = g.gather(*filter, back, 0)?;
        let terms = g.mul(taps, x)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let seen = g.reshape(seen, Shape::new([&tokens, &rows.keys, &one]))?;
        let terms = g.select(seen, terms, nothing)?;
        let y = g.reduce_sum(terms, 1)?;
        Ok(vec![g.reshape(y, Shape::new([&tokens, channels]))?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (cache, channels) = (&inputs[0], Poly::from(&inputs[4].shape.0[1]));
        let symbol = |s: &Sym| Poly::from(&Dim::from(s.clone()));
        let scale = if inputs.len() > 5 { DType::F32.size_bytes() } else { 0 };
        let row = channels.clone() * (cache.dtype.size_bytes() as i128) + &Poly::from(scale as i128);
        let moved = Cost::moving(&inputs[1..5], outputs);
        Cost {
            vector_flops: &symbol(&self.pairs) * &(channels * 2),
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
}

impl Builder {
    /// The long convolution of what a paged cache has; see [`LongConvolution`]. `cache` has the inputs and, where they are codes,
    /// their scales; `rows` are the block table, the sequences of tokens and their positions.
    ///
    /// # Errors
    /// When the cache is none of one side and head, or the other inputs do not fit it.
    pub fn long_convolution(
        &mut self,
        cache: &[Var],
        [table, seq_ids, positions]: [Var; 3],
        filter: Var,
        op: LongConvolution,
    ) -> Result<Var> {
        let (x, scales) = cache
            .split_first()
            .ok_or_else(|| crate::error::GraphError::usage(self.scope(), "long_convolution takes a cache"))?;
        let inputs: Vec<Var> =
            [*x, table, seq_ids, positions, filter].into_iter().chain(scales.iter().copied()).collect();
        Ok(self.composite(op, &inputs)?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (sequences as (cached, new), padding, block size, spare columns, channels, rows of the filter, dtype of the cache)
    type Case<'a> = (&'a [(usize, usize)], usize, usize, usize, usize, usize, DType);
    let cases: [Case<'_>; 11] = [
        (&[], 0, 4, 0, 8, 3, dtype),
        (&[], 2, 4, 1, 8, 3, dtype),
        (&[(0, 1)], 0, 1, 0, 1, 1, dtype),
        (&[(0, 0), (9, 1)], 1, 4, 0, 0, 8, dtype),
        // A filter shorter than the sequences, and one that is longer.
        (&[(0, 6), (4, 3), (0, 4)], 2, 4, 1, 16, 5, dtype),
        (&[(7, 1), (0, 9), (16, 1)], 1, 8, 0, 33, 64, dtype),
        (&[(0, 20), (40, 2)], 0, 16, 1, 70, 48, dtype),
        (&[(63, 1), (64, 1), (33, 1)], 1, 16, 0, 64, 100, dtype),
        (&[(150, 2), (0, 40)], 0, 16, 1, 24, 200, DType::BF16),
        (&[(33, 2), (0, 17)], 1, 16, 1, 32, 40, DType::I8),
        (&[(5, 9)], 0, 4, 0, 33, 14, DType::F8E4M3),
    ];
    let mut samples = Vec::new();
    for (sequences, padding, block_size, spare, channels, length, stored) in cases {
        let step = super::paging::PagedStep::new(rng, sequences, padding, block_size, spare);
        let cache = [step.blocks, 1, 1, block_size, channels];
        let sample = Sample::new(LongConvolution { pairs: Sym::new("pairs"), cached: Sym::new("cached") })
            .state(super::paging::cache(rng, stored, &cache))
            .input(step.block_table)
            .input(step.seq_ids)
            .input(step.positions)
            .input(rng.normal(DType::F32, &[length, channels]));
        samples.push(match stored {
            DType::I8 => sample.state(super::paging::scales(rng, &cache[..4])),
            _ => sample,
        });
    }
    samples
}
