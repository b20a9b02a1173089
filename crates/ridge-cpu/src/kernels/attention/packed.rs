//! Heads of 4 or 8 elements on AVX-512, where a vector holds several of them.
//!
//! Keys and values of f32 are read where they lie if blocks of the cache are whole vectors of keys, others are brought
//! together as f32, a span at a time. Of 16 keys those at a time are turned that fill a vector, in
//! as many steps as their length has bits, each of which takes the even and the odd lanes of two vectors apart; a lane is
//! then a key, and all rows use what was turned. Values stay as they lie, several keys in a vector of sums.
//!
//! Floor: of 16 keys of 8 elements 24 shuffles for all rows, and for each row 8 products for scores, 11 instructions for
//! exponentials, and 8 shuffles and 8 products for values.

use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _CMP_NEQ_UQ, _mm512_add_ps, _mm512_cmp_ps_mask, _mm512_fmadd_ps, _mm512_fmsub_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_ps, _mm512_maskz_loadu_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_permutex2var_ps, _mm512_permutexvar_ps, _mm512_reduce_max_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps, _mm512_sub_ps,
};
use std::ops::Range;

use ridge_graph::DType;

use super::{Attention, Rows, SPAN};
use crate::kernel::{Io, Scratch};
use crate::kernels::linear::source::Lanes;
use crate::simd::{self, Element, LANES, power};

/// Sums that a row keeps, so that one addition need not wait for another.
const CHAINS: usize = 4;

/// What is kept for the rows of a piece.
struct State<'a> {
    /// Queries, [`LANES`] apart.
    q: &'a mut [Lanes],
    /// Scores, then their exponentials: [`SPAN`] a row.
    scores: &'a mut [f32],
    /// Weighed values: [`CHAINS`] vectors of several keys each a row.
    out: &'a mut [Lanes],
    /// Largest score, and the sum of exponentials.
    softmax: &'a mut [[f32; 2]],
}

/// Is this kernel for heads of `dim` elements?
pub(super) fn takes(dim: usize) -> bool {
    matches!(dim, 4 | 8) && simd::isa() >= simd::Isa::Avx512
}

impl Attention {
    pub(super) fn run_packed(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        match self.dim {
            4 => self.run_packed_of::<4>(io, pieces, scratch),
            8 => self.run_packed_of::<8>(io, pieces, scratch),
            dim => unreachable!("heads of {dim} elements are not packed"),
        }
    }

    fn run_packed_of<const DIM: usize>(&self, io: &Io<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let rows = self.together * self.group();
        let [q, room, scores, out, softmax] =
            scratch.slices::<f32, 5>([rows * LANES, SPAN * DIM, rows * SPAN, rows * CHAINS * LANES, rows * 2]);
        let mut state =
            State { q: q.as_chunks_mut().0, scores, out: out.as_chunks_mut().0, softmax: softmax.as_chunks_mut().0 };
        let per_head = self.tokens.div_ceil(self.together);
        for piece in pieces {
            let (head, block) = (piece / per_head, piece % per_head);
            let end = ((block + 1) * self.together).min(self.tokens);
            let mut token = block * self.together;
            while token < end {
                let rows = self.rows(io, token..end);
                token = rows.tokens.end;
                self.attend_packed::<DIM>(io, head, &rows, room.as_chunks_mut().0, &mut state);
            }
        }
    }

    fn attend_packed<const DIM: usize>(
        &self,
        io: &Io<'_>,
        head: usize,
        rows: &Rows,
        room: &mut [Lanes],
        state: &mut State<'_>,
    ) {
        let group = self.group();
        let count = rows.tokens.len() * group;
        let at = |row: usize| ((rows.tokens.start + row / group) * self.heads + head * group + row % group) * DIM;
        for (row, q) in state.q[..count].iter_mut().enumerate() {
            simd::load(io, 0, self.dtype, at(row), &mut q[..DIM]);
            q[..DIM].iter_mut().for_each(|q| *q *= self.scale);
        }
        state.out[..count * CHAINS].fill([0.0; LANES]);
        state.softmax[..count].fill([f32::NEG_INFINITY, 0.0]);
        let most = if rows.seen == 0 { 0 } else { rows.seen + rows.tokens.len() - 1 };
        let start = self.start(rows, 0) / SPAN * SPAN;
        for from in (start..most).step_by(SPAN) {
            let span = from..most.min(from + SPAN);
            let seen_by = |row: usize| {
                let seen = (rows.seen + row / group).saturating_sub(from).min(SPAN);
                self.start(rows, row / group).saturating_sub(from)..seen
            };
            let count_of = span.len().div_ceil(LANES);
            let keys = self.vectors::<DIM>(io, [head, 0], rows, &span, room);
            // SAFETY: whoever made this kernel has found AVX-512.
            unsafe { scores(&keys[..count_of], &state.q[..count], state.scores) };
            let values = self.vectors::<DIM>(io, [head, 1], rows, &span, room);
            for (row, keys) in (0..count).map(|row| (row, seen_by(row))).filter(|(_, keys)| !keys.is_empty()) {
                let scores = &mut state.scores[row * SPAN..][..SPAN];
                if let Some(cap) = self.softcap {
                    scores[keys.clone()].iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
                }
                let out = state.out[row * CHAINS..].first_chunk_mut().expect("a row has all chains");
                // SAFETY: as above.
                unsafe {
                    soften(scores, &keys, &mut state.softmax[row], out);
                    weigh(&values[..count_of], scores, &keys, out);
                }
            }
        }
        for row in 0..count {
            let [a, b, c, d] = *state.out[row * CHAINS..].first_chunk::<CHAINS>().expect("a row has all chains");
            let sums: Lanes = std::array::from_fn(|i| (a[i] + c[i]) + (b[i] + d[i]));
            let total = state.softmax[row][1];
            let factor = if total > 0.0 { 1.0 / total } else { 1.0 };
            let values: [f32; DIM] =
                std::array::from_fn(|i| sums.iter().skip(i).step_by(DIM).fold(0.0, |sum, x| sum + x) * factor);
            // SAFETY: this token's query heads of this kv head are our piece's alone.
            unsafe { simd::store(io, 0, self.dtype, at(row), &values) };
        }
    }

    /// The span's keys (side 0) or values (side 1), 16 after another. Those of no block are zeros, and those behind the
    /// span are anything.
    fn vectors<'a, const DIM: usize>(
        &self,
        io: &Io<'a>,
        [head, side]: [usize; 2],
        rows: &Rows,
        span: &Range<usize>,
        room: &'a mut [Lanes],
    ) -> [&'a [Lanes; DIM]; SPAN / LANES] {
        let mut vectors = [const { &[[0.0; LANES]; DIM] }; SPAN / LANES];
        if self.cache == DType::F32 && self.block_size.is_multiple_of(LANES) {
            let cache = io.input::<f32>(1);
            self.runs(io, rows.sequence, span, |keys, at| {
                if let Some(at) = at {
                    let of_block = self.slab(cache, head, side, at).as_chunks::<LANES>().0.as_chunks::<DIM>().0;
                    let to = keys.start / LANES..keys.end.div_ceil(LANES);
                    vectors[to].iter_mut().zip(of_block).for_each(|(to, from)| *to = from);
                }
            });
            return vectors;
        }
        simd::with_element!(self.cache, T => {
            let cache = io.input::<T>(1);
            self.runs(io, rows.sequence, span, |keys, at| {
                let to = &mut room.as_flattened_mut()[keys.start * DIM..keys.end * DIM];
                match at {
                    // SAFETY: whoever made this kernel has found AVX-512.
                    Some(at) => unsafe { widen(&self.slab(cache, head, side, at)[..to.len()], to) },
                    None => to.fill(0.0),
                }
            });
        });
        vectors.iter_mut().zip(room.as_chunks::<DIM>().0).for_each(|(to, from)| *to = from);
        vectors
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn widen<T: Element>(from: &[T], to: &mut [f32]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = x.widen();
    }
}

/// For each vector of 16 values, which of their weights its lanes take.
const fn weight_of<const DIM: usize>() -> [[i32; LANES]; DIM] {
    let mut of = [[0; LANES]; DIM];
    let mut i = 0;
    while i < DIM * LANES {
        of[i / LANES][i % LANES] = (i / DIM) as i32;
        i += 1;
    }
    of
}

/// Where the even lanes of two vectors are, and the odd ones.
const APART: [[i32; LANES]; 2] = {
    let mut apart = [[0; LANES]; 2];
    let mut i = 0;
    while i < LANES {
        apart[0][i] = 2 * i as i32;
        apart[1][i] = 2 * i as i32 + 1;
        i += 1;
    }
    apart
};

#[inline]
#[target_feature(enable = "avx512f")]
fn indices(of: &[i32; LANES]) -> __m512i {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(of: &Lanes) -> __m512 {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_ps(of.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(x: __m512, to: &mut Lanes) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) };
}

/// Scores of each of `q` for `keys`, [`SPAN`] apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn scores<const DIM: usize>(keys: &[&[Lanes; DIM]], q: &[Lanes], out: &mut [f32]) {
    let apart = [indices(&APART[0]), indices(&APART[1])];
    for (nth, keys) in keys.iter().enumerate() {
        let mut turned: [__m512; DIM] = std::array::from_fn(|i| load(&keys[i]));
        for _ in 0..DIM.ilog2() {
            let pairs = turned;
            for i in 0..DIM / 2 {
                turned[i] = _mm512_permutex2var_ps(pairs[2 * i], apart[0], pairs[2 * i + 1]);
                turned[DIM / 2 + i] = _mm512_permutex2var_ps(pairs[2 * i], apart[1], pairs[2 * i + 1]);
            }
        }
        for (row, q) in q.iter().enumerate() {
            let mut sums = [_mm512_setzero_ps(); 2];
            for d in 0..DIM {
                sums[d % 2] = _mm512_fmadd_ps(_mm512_set1_ps(q[d]), turned[d], sums[d % 2]);
            }
            let to = out[row * SPAN + nth * LANES..].first_chunk_mut().expect("rows are whole vectors");
            store(_mm512_add_ps(sums[0], sums[1]), to);
        }
    }
}

/// The lanes of vector `nth` of a span that are in `keys`.
fn lanes_in(keys: &Range<usize>, nth: usize) -> __mmask16 {
    let bits = |end: usize| (1u32 << end.saturating_sub(nth * LANES).min(LANES)) - 1;
    (bits(keys.end) & !bits(keys.start)) as __mmask16
}

/// Turns the scores of `keys` into exponentials, zeros beside them in the same vectors; takes note of the largest score
/// and the sum, and scales `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn soften(scores: &mut [f32], keys: &Range<usize>, [largest, total]: &mut [f32; 2], out: &mut [Lanes; CHAINS]) {
    let vectors = keys.start / LANES..keys.end.div_ceil(LANES);
    let scores = &mut scores.as_chunks_mut::<LANES>().0[vectors.clone()];
    let none = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut most = none;
    for (nth, score) in vectors.clone().zip(scores.iter_mut()) {
        let seen = lanes_in(keys, nth);
        let mut of_seen = load(score);
        if seen != __mmask16::MAX {
            of_seen = _mm512_mask_mov_ps(none, seen, of_seen);
            store(of_seen, score);
        }
        // In this order NaN is passed over.
        most = _mm512_max_ps(of_seen, most);
    }
    let (before, here) = (*largest, _mm512_reduce_max_ps(most));
    *largest = if here > before { here } else { before };
    let log2_e = _mm512_set1_ps(std::f32::consts::LOG2_E);
    let most = _mm512_mul_ps(_mm512_set1_ps(*largest), log2_e);
    let mut sums = [_mm512_setzero_ps(); 2];
    for (i, score) in scores.iter_mut().enumerate() {
        let weight = power::<3>(_mm512_fmsub_ps(load(score), log2_e, most));
        store(weight, score);
        sums[(vectors.start + i) % 2] = _mm512_add_ps(sums[(vectors.start + i) % 2], weight);
    }
    let mut sum = [0.0; LANES];
    store(_mm512_add_ps(sums[0], sums[1]), &mut sum);
    let sum = simd::sum_lanes(sum);
    if before == f32::NEG_INFINITY {
        *total = sum;
        return;
    }
    let kept = power::<3>(_mm512_sub_ps(_mm512_mul_ps(_mm512_set1_ps(before), log2_e), most));
    if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(kept, _mm512_set1_ps(1.0)) != 0 {
        out.iter_mut().for_each(|x| store(_mm512_mul_ps(load(x), kept), x));
    }
    let mut first = [0.0; LANES];
    store(kept, &mut first);
    *total = *total * first[0] + sum;
}

/// Adds those of `values` that are of `keys`, weighed, to `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn weigh<const DIM: usize>(values: &[&[Lanes; DIM]], weights: &[f32], keys: &Range<usize>, out: &mut [Lanes; CHAINS]) {
    // Keys of a vector of values.
    let together = LANES / DIM;
    let of: &[[i32; LANES]; DIM] = const { &weight_of::<DIM>() };
    let mut sums: [__m512; CHAINS] = std::array::from_fn(|i| load(&out[i]));
    for (nth, (vectors, weight)) in values.iter().zip(weights.as_chunks::<LANES>().0).enumerate() {
        let (weight, seen) = (load(weight), lanes_in(keys, nth));
        if seen == 0 {
            continue;
        }
        for (v, value) in vectors.iter().enumerate() {
            let value = if seen == __mmask16::MAX {
                load(value)
            } else {
                // What is not seen may be no number.
                let of_keys = Range { start: v * together, end: (v + 1) * together };
                let lanes = of_keys
                    .rev()
                    .fold(0u32, |lanes, key| lanes << DIM | if seen >> key & 1 == 1 { (1 << DIM) - 1 } else { 0 });
                // SAFETY: 64 bytes.
                unsafe { _mm512_maskz_loadu_ps(lanes as __mmask16, value.as_ptr()) }
            };
            let of_keys = _mm512_permutexvar_ps(indices(&of[v]), weight);
            sums[v % CHAINS] = _mm512_fmadd_ps(of_keys, value, sums[v % CHAINS]);
        }
    }
    sums.into_iter().zip(out).for_each(|(sum, to)| store(sum, to));
}
