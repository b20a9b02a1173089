//! Attention over blocks of long texts, in both directions.
//!
//! Floor: `4 dim` operations a (query, key) pair of each head, where a query between the first and the last block has at most five
//! blocks of keys. Keys and values of one head are widened once for the tokens of a piece; nothing is kept for pairs.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::BlockSparseAttention;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd::{self, vectorised};

pub(super) fn entries() -> [KernelEntry; 1] {
    let pattern = "block_sparse_attention(q, k, v, seq_ids, positions)";
    [KernelEntry::new("block_sparse_attention", pattern, |_| true, make)]
}

/// Tokens of a piece.
const TOGETHER: usize = 32;

struct BlockSparse {
    scale: f32,
    block: usize,
    /// Tokens of the longest sequence whose tokens see each other.
    dense: usize,
    /// What is added to the scores of the first block where it counts more than once.
    more: f32,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    dtype: DType,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<BlockSparseAttention>().ok_or("no attention in the group")?;
    let [q, k, ..] = &spec.inputs[..] else { return Err("attention takes five inputs".into()) };
    Ok(Box::new(BlockSparse {
        scale: op.scale as f32,
        block: op.block,
        dense: op.dense_tokens(),
        more: (op.repeats as f64).ln_1p() as f32,
        tokens: q.shape[0],
        heads: q.shape[1],
        kv_heads: k.shape[1],
        dim: q.shape[2],
        dtype: q.dtype,
    }))
}

/// The keys that a query sees: up to three spans of tokens, of which the first counts more if `repeated`.
#[derive(Debug, PartialEq, Eq)]
struct SeenKeys {
    spans: [Range<usize>; 3],
    repeated: bool,
}

impl SeenKeys {
    /// Of the query at `position` of a sequence of `length` tokens, counted from its first.
    fn new(position: usize, length: usize, block: usize, dense: usize) -> Self {
        let (at, last) = (position / block, (length - 1) / block);
        if length <= dense || at == 0 || at == last {
            return Self { spans: [0..length, length..length, length..length], repeated: false };
        }
        let first = block.min(length);
        let near = ((at - 1) * block).max(first)..((at + 2) * block).min(length);
        let end = (last * block).max(near.end)..length;
        Self { spans: [0..first, near, end], repeated: true }
    }

    fn keys(&self) -> impl Iterator<Item = usize> {
        self.spans.iter().cloned().flatten()
    }
}

impl CpuKernel for BlockSparse {
    fn pieces(&self) -> usize {
        if self.heads * self.dim == 0 { 0 } else { self.kv_heads * self.tokens.div_ceil(TOGETHER) }
    }

    fn nanos_per_piece(&self) -> f64 {
        let keys = self.dense.min(self.tokens);
        let pairs = TOGETHER.min(self.tokens) * keys * self.heads / self.kv_heads.max(1);
        200.0 + pairs as f64 * (1.0 + self.dim as f64 * 0.1)
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let width = self.tokens * self.dim;
        let [k, v, q, out, weights] = scratch.slices::<f32, 5>([width, width, self.dim, self.dim, self.tokens]);
        let (ids, positions) = (io.input::<i32>(3), io.input::<i32>(4));
        let blocks = self.tokens.div_ceil(TOGETHER);
        let mut widened = None;
        for piece in pieces {
            let (head, block) = (piece / blocks, piece % blocks);
            if widened != Some(head) {
                for token in 0..self.tokens {
                    let (from, to) =
                        ((token * self.kv_heads + head) * self.dim, token * self.dim..(token + 1) * self.dim);
                    simd::load(io, 1, self.dtype, from, &mut k[to.clone()]);
                    simd::load(io, 2, self.dtype, from, &mut v[to]);
                }
                widened = Some(head);
            }
            for token in block * TOGETHER..((block + 1) * TOGETHER).min(self.tokens) {
                let first = token.saturating_sub(positions[token].max(0) as usize);
                let length = ids[first..].iter().take_while(|id| **id == ids[token]).count();
                let group = self.heads / self.kv_heads;
                for head in head * group..(head + 1) * group {
                    let at = (token * self.heads + head) * self.dim;
                    simd::load(io, 0, self.dtype, at, q);
                    out.fill(0.0);
                    if ids[token] >= 0 && length > 0 {
                        let seen = SeenKeys::new(token - first, length, self.block, self.dense);
                        let rows = first * self.dim..(first + length) * self.dim;
                        self.attend(&seen, q, (&k[rows.clone()], &v[rows]), weights, out);
                    }
                    // SAFETY: this head of this token is this piece's alone.
                    unsafe { simd::store(io, 0, self.dtype, at, out) };
                }
            }
        }
    }
}

impl BlockSparse {
    /// The query of one token over the keys that it sees of the keys and values of its sequence.
    fn attend(&self, seen: &SeenKeys, q: &[f32], (k, v): (&[f32], &[f32]), weights: &mut [f32], out: &mut [f32]) {
        let mut count = 0;
        for key in seen.keys() {
            weights[count] = simd::dot(q, &k[key * self.dim..][..self.dim]) * self.scale;
            count += 1;
        }
        let weights = &mut weights[..count];
        if seen.repeated {
            weights[..seen.spans[0].len()].iter_mut().for_each(|weight| *weight += self.more);
        }
        let largest = simd::max(weights);
        let total = simd::exp_sum(weights, largest);
        for (key, weight) in seen.keys().zip(&*weights) {
            weigh(out, &v[key * self.dim..][..self.dim], *weight);
        }
        simd::scale(out, 1.0 / total);
    }
}

vectorised! {
    /// `out += weight * value`.
    fn weigh(out: &mut [f32], value: &[f32], weight: f32) {
        for (out, value) in out.iter_mut().zip(value) {
            *out = simd::fma::<FMA>(weight, *value, *out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_those_of_the_blocks_that_a_query_sees() {
        for (block, dense, length) in [(4, 28, 29), (4, 28, 28), (1, 5, 13), (5, 35, 70), (3, 0, 2), (3, 15, 47)] {
            for position in 0..length {
                let (at, last) = (position / block, (length - 1) / block);
                let whole = length <= dense || at == 0 || at == last;
                let sees = |key: usize| {
                    let key = key / block;
                    whole || key == 0 || key == last || key.abs_diff(at) <= 1
                };
                let expected: Vec<usize> = (0..length).filter(|key| sees(*key)).collect();
                let found = SeenKeys::new(position, length, block, dense);
                assert_eq!(found.keys().collect::<Vec<_>>(), expected, "{position} of {length}, blocks of {block}");
                assert!(found.repeated != whole && (whole || found.spans[0] == (0..block)));
            }
        }
    }
}
