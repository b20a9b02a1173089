//! Valid paged steps for samples: ragged sequences, blocks in shuffled order, entries that no token needs left -1.

use crate::dtype::DType;
use crate::sample::Rng;
use crate::tensor::Tensor;

/// Numbers `0..n` in random order (Fisher and Yates).
pub(super) fn shuffled(rng: &mut Rng, n: usize) -> Vec<i64> {
    let mut order: Vec<i64> = (0..n as i64).collect();
    for i in (1..n).rev() {
        order.swap(i, rng.below(i + 1));
    }
    order
}

/// A cache of `dtype`: of i8 any codes.
pub(super) fn cache(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
    if dtype == DType::I8 { rng.integers(dtype, shape, -127, 128) } else { rng.normal(dtype, shape) }
}

/// A cache of codes of `dtype`, i8 or f8e4m3, that has scales.
pub(super) fn codes(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
    if dtype == DType::I8 {
        return cache(rng, dtype, shape);
    }
    let drawn = rng.normal(DType::F32, shape);
    let codes = drawn.floats().iter().map(|x| (100.0 * x).clamp(-448.0, 448.0)).collect();
    Tensor::float(dtype, shape, codes).rounded()
}

/// Scales of a cache of codes, which are a hundred times as large as what they stand for.
pub(super) fn scales(rng: &mut Rng, shape: &[usize]) -> Tensor {
    let scales = rng.normal(DType::F32, shape);
    let scales = scales.floats().iter().map(|x| 0.01 * x.abs() + 0.001).collect();
    Tensor::float(DType::F32, shape, scales).rounded()
}

/// What one step of several sequences is given.
pub(super) struct PagedStep {
    /// Blocks of the cache; one more than are used.
    pub(super) blocks: usize,
    /// i32 `[sequences, blocks of a sequence]`.
    pub(super) block_table: Tensor,
    /// i32 `[tokens]`, -1 for padding.
    pub(super) seq_ids: Tensor,
    /// i32 `[tokens]`.
    pub(super) positions: Tensor,
    /// First token of each sequence, then the number of tokens: i32 `[sequences + 1]`.
    pub(super) query_start: Tensor,
    /// Tokens that are in the cache already: i32 `[sequences]`.
    pub(super) lengths: Tensor,
}

impl PagedStep {
    /// A step of `(tokens in the cache, new tokens)` sequences, with `padding` tokens after them and `spare` columns
    /// of the block table that nobody needs.
    pub(super) fn new(
        rng: &mut Rng,
        sequences: &[(usize, usize)],
        padding: usize,
        block_size: usize,
        spare: usize,
    ) -> Self {
        let needed: Vec<usize> = sequences.iter().map(|(old, new)| (old + new).div_ceil(block_size)).collect();
        let width = needed.iter().max().copied().unwrap_or(0) + spare;
        let blocks = needed.iter().sum::<usize>() + 1;
        let mut free = shuffled(rng, blocks).into_iter();
        let (mut table, mut ids, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let mut starts = vec![0];
        for (sequence, ((old, new), needed)) in sequences.iter().zip(&needed).enumerate() {
            table.extend(free.by_ref().take(*needed));
            table.resize((sequence + 1) * width, -1);
            ids.extend(vec![sequence as i64; *new]);
            positions.extend(*old as i64..(old + new) as i64);
            starts.push(ids.len() as i64);
        }
        ids.resize(ids.len() + padding, -1);
        positions.resize(ids.len(), 0);
        let lengths = sequences.iter().map(|(old, _)| *old as i64).collect();
        let int = |shape: &[usize], values| Tensor::int(DType::I32, shape, values);
        Self {
            blocks,
            block_table: int(&[sequences.len(), width], table),
            seq_ids: int(&[ids.len()], ids),
            positions: int(&[positions.len()], positions),
            query_start: int(&[starts.len()], starts),
            lengths: int(&[sequences.len()], lengths),
        }
    }
}
