//! The positions of a paged cache that an indexer scores best.
//!
//! Floor: the keys of each sequence read once, and `2 dim` operations a (query, key) pair of each head.
//!
//! A piece is a token. Its scores stay in the memory of a thread, a number for each position; the value of the last
//! that is kept is found by counting them by their leading bits, eight at a time.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::IndexTopK;

use super::kernel::with_stored;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelSpec};
use crate::kernels::linear::source::{Lanes, Plain};
use crate::kernels::linear::tile::{self, Room, Tile};
use crate::scratch::Scratch;
use crate::simd::{self, Element, LANES, fma, vectorised};

struct IndexKernel {
    top_k: usize,
    tokens: usize,
    heads: usize,
    dim: usize,
    /// Of queries, and of the weights of heads.
    dtypes: [DType; 2],
    blocks: usize,
    block_size: usize,
    cache: DType,
    /// Are there scales of its rows?
    scaled: bool,
    sequences: usize,
    /// Columns of the block table.
    table: usize,
}

/// A token's queries, and working memory.
struct TokenState<'a> {
    q: &'a mut [Lanes],
    /// Weights of heads.
    w: &'a mut [f32],
    /// Products of heads with the keys of a tile, a row for each head.
    products: &'a mut [f32],
    sums: &'a mut [Lanes],
    weights: &'a mut [Lanes],
}

pub(super) fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<IndexTopK>().ok_or("no index in the group")?;
    let [q, w, keys, table, ..] = &spec.inputs[..] else { return Err("an index takes six inputs".into()) };
    Ok(Box::new(IndexKernel {
        top_k: op.top_k,
        tokens: q.shape[0],
        heads: q.shape[1],
        dim: q.shape[2],
        dtypes: [q.dtype, w.dtype],
        blocks: keys.shape[0],
        block_size: keys.shape[3],
        cache: keys.dtype,
        scaled: spec.inputs.len() > 6,
        sequences: table.shape[0],
        table: table.shape[1],
    }))
}

impl CpuKernel for IndexKernel {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        // Half the context, for want of knowing.
        let keys = (self.table * self.block_size / 2) as f64;
        100.0 + self.top_k as f64 + keys * (4.0 + self.heads as f64 * (0.2 + self.dim as f64 * 0.03))
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let (vectors, columns) = (self.dim.div_ceil(LANES), tile::columns(self.heads));
        let [q, w, products, sums, weights, scores] = scratch.slices::<f32, 6>([
            self.heads * vectors * LANES,
            self.heads,
            self.heads * columns,
            self.heads * columns * LANES,
            tile::packed_room(self.heads, vectors) * LANES,
            self.table * self.block_size,
        ]);
        let mut state = TokenState {
            q: q.as_chunks_mut().0,
            w,
            products,
            sums: sums.as_chunks_mut().0,
            weights: weights.as_chunks_mut().0,
        };
        let out = io.output::<i32>(0);
        for token in tokens {
            // SAFETY: this token's row is our piece's alone.
            let best = unsafe { out.part(token * self.top_k..(token + 1) * self.top_k) };
            let seen = self.seen(io, token);
            if seen <= self.top_k {
                best.fill(-1);
                best.iter_mut().zip(0..seen as i32).for_each(|(to, position)| *to = position);
            } else {
                self.scores(io, token, &mut state, &mut scores[..seen]);
                keep_best(&scores[..seen], best);
            }
        }
    }
}

impl IndexKernel {
    /// Positions that `token` sees.
    fn seen(&self, io: &KernelIo<'_>, token: usize) -> usize {
        let (id, position) = (io.input::<i32>(4)[token], io.input::<i32>(5)[token]);
        match (usize::try_from(id), usize::try_from(position)) {
            (Ok(id), Ok(position)) if id < self.sequences => (position + 1).min(self.table * self.block_size),
            _ => 0,
        }
    }

    /// Scores of the first positions of `token`'s sequence.
    fn scores(&self, io: &KernelIo<'_>, token: usize, state: &mut TokenState<'_>, scores: &mut [f32]) {
        let vectors = self.dim.div_ceil(LANES);
        if self.heads * self.dim == 0 {
            return scores.fill(0.0);
        }
        for (head, q) in state.q.chunks_exact_mut(vectors).enumerate() {
            let q = q.as_flattened_mut();
            simd::load(io, 0, self.dtypes[0], (token * self.heads + head) * self.dim, &mut q[..self.dim]);
            tile::fill(q, self.dim);
        }
        simd::load(io, 1, self.dtypes[1], token * self.heads, state.w);
        let sequence = io.input::<i32>(4)[token] as usize;
        let table = &io.input::<i32>(3)[sequence * self.table..][..self.table];
        for (block, scores) in table.iter().zip(scores.chunks_mut(self.block_size)) {
            match usize::try_from(*block).ok().filter(|block| *block < self.blocks) {
                None => scores.fill(0.0),
                Some(block) => with_stored!(self.cache, T => {
                    let keys = &io.input::<T>(2)[block * self.block_size * self.dim..];
                    self.score_block(keys, state, scores);
                    if self.scaled {
                        // A positive factor of a key is one of its score.
                        let scales = &io.input::<f32>(6)[block * self.block_size..];
                        scores.iter_mut().zip(scales).for_each(|(score, scale)| *score *= scale);
                    }
                }),
            }
        }
    }

    /// Scores of keys that lie together from the beginning of `keys`.
    fn score_block<T: Element>(&self, keys: &[T], state: &mut TokenState<'_>, scores: &mut [f32]) {
        let source = Plain { data: keys, inner: self.dim };
        let columns = tile::columns(self.heads);
        for (nth, scores) in scores.chunks_mut(columns).enumerate() {
            let of_tile = nth * columns..nth * columns + scores.len();
            let tile = Tile { inner: self.dim, rows: self.heads, columns: of_tile, stride: columns };
            let mut room = Room { sums: state.sums, weights: state.weights };
            tile::run(&tile, source, state.q, &mut room, state.products);
            weigh_heads(state.products, columns, state.w, scores);
        }
    }
}

vectorised! {
    /// Sums over heads of the positive products, weighed; `stride` products a head.
    fn weigh_heads(products: &[f32], stride: usize, w: &[f32], scores: &mut [f32]) {
        scores.fill(0.0);
        for (products, w) in products.chunks_exact(stride).zip(w) {
            for (score, product) in scores.iter_mut().zip(products) {
                let positive = if *product > 0.0 { *product } else { 0.0 };
                *score = fma::<FMA>(*w, positive, *score);
            }
        }
    }
}

/// The order of scores as that of integers: 0 for a NaN, which is below all, and one number for both zeros.
fn rank(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    match (score.is_nan(), bits >> 31) {
        (true, _) => 0,
        (_, 1) => !bits,
        _ => bits | 1 << 31,
    }
}

/// The positions of the `best.len()` largest of more `scores`, the first of equal ones, in ascending order. NaNs are not
/// among them.
fn keep_best(scores: &[f32], best: &mut [i32]) {
    // The rank of the last that is kept, and how many of that rank are.
    let (mut last, mut of_last) = (0u32, best.len());
    for shift in [24, 16, 8, 0] {
        let mut counts = [0usize; 256];
        for rank in scores.iter().map(|score| rank(*score)) {
            // The bits above are those found before.
            if shift == 24 || rank >> (shift + 8) == last >> (shift + 8) {
                counts[(rank >> shift & 0xff) as usize] += 1;
            }
        }
        let mut byte = 255;
        while byte > 0 && counts[byte] < of_last {
            of_last -= counts[byte];
            byte -= 1;
        }
        last |= (byte as u32) << shift;
    }
    let kept = scores.iter().enumerate().filter(|(_, score)| {
        let rank = rank(**score);
        let tied = rank == last && of_last > 0;
        of_last -= usize::from(tied);
        rank != 0 && (rank > last || tied)
    });
    let mut to = best.iter_mut();
    for ((position, _), to) in kept.zip(to.by_ref()) {
        *to = position as i32;
    }
    to.for_each(|to| *to = -1);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(scores: &[f32], count: usize) -> Vec<i32> {
        let mut best = vec![7; count];
        keep_best(scores, &mut best);
        best
    }

    #[test]
    fn the_largest_scores_are_kept_in_order_of_position() {
        assert_eq!(best(&[1.0, -3.0, 2.5, 0.5, 2.0], 3), [0, 2, 4]);
        assert_eq!(best(&[-1.0, -3.0, -2.5, f32::NEG_INFINITY], 2), [0, 2]);
        assert_eq!(best(&[1.0, f32::INFINITY, 1.0 + f32::EPSILON], 2), [1, 2]);
    }

    #[test]
    fn the_first_of_equal_scores_are_kept() {
        assert_eq!(best(&[0.0, 5.0, -0.0, 0.0, 0.0], 3), [0, 1, 2]);
        assert_eq!(best(&[-1.0, -0.0, -1.0, 0.0, -1.0], 4), [0, 1, 2, 3]);
    }

    #[test]
    fn a_score_that_is_no_number_is_not_kept() {
        assert_eq!(best(&[f32::NAN, 1.0, -f32::NAN, 0.0], 3), [1, 3, -1]);
    }
}
