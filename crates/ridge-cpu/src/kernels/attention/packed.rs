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
    __m512, __m512i, __mmask16, _CMP_NEQ_UQ, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_cmp_ps_mask,
    _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_permutex2var_ps, _mm512_permutexvar_ps,
    _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4,
    _mm512_storeu_ps, _mm512_sub_ps,
};
use std::ops::Range;

use ridge_graph::DType;

use super::kernel::{AttentionKernel, SPAN, TokenRows};
use crate::io::KernelIo;
use crate::kernels::linear::source::Lanes;
use crate::scratch::Scratch;
use crate::simd::{self, Element, LANES, power};

/// Sums that a row keeps, so that one addition need not wait for another.
const CHAINS: usize = 4;

/// What is kept for the rows of a piece.
struct PackedState<'a> {
    /// Queries, [`LANES`] apart.
    q: &'a mut [Lanes],
    /// Scores, then their exponentials: [`SPAN`] a row.
    scores: &'a mut [f32],
    /// Weighed values: [`CHAINS`] vectors of several keys each a row.
    out: &'a mut [Lanes],
    /// In each lane, the span's largest score.
    most: &'a mut [Lanes],
    /// In each lane, the sum of exponentials.
    total: &'a mut [Lanes],
    /// The largest score of all spans so far.
    largest: &'a mut [f32],
    /// Elements of a token's query heads of one kv head.
    line: &'a mut [f32],
}

/// Where the vectors of a span begin, for side 0 of kv head 0, which is the same for all heads.
struct PackedPlaces {
    /// The first token and the beginning of the span.
    of: Option<(usize, usize)>,
    /// Element of the cache, if there is a block.
    at: [Option<usize>; SPAN / LANES],
}

/// Is this kernel for heads of `dim` elements?
pub(super) fn takes(dim: usize) -> bool {
    matches!(dim, 4 | 8) && simd::isa() >= simd::Isa::Avx512
}

impl AttentionKernel {
    pub(super) fn run_packed(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        match self.dim {
            4 => self.run_packed_of::<4>(io, pieces, scratch),
            8 => self.run_packed_of::<8>(io, pieces, scratch),
            dim => unreachable!("heads of {dim} elements are not packed"),
        }
    }

    fn run_packed_of<const DIM: usize>(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch) {
        let rows = self.together * self.group();
        let copied = if self.lies_packed() { 0 } else { SPAN * DIM };
        let [q, room, scores, out, most, total, largest, line] = scratch.slices::<f32, 8>([
            rows * LANES,
            copied,
            rows * SPAN,
            rows * CHAINS * LANES,
            rows * LANES,
            rows * LANES,
            rows,
            self.group() * DIM,
        ]);
        let mut state = PackedState {
            q: q.as_chunks_mut().0,
            scores,
            out: out.as_chunks_mut().0,
            most: most.as_chunks_mut().0,
            total: total.as_chunks_mut().0,
            largest,
            line,
        };
        let mut places = PackedPlaces { of: None, at: [None; SPAN / LANES] };
        let per_head = self.tokens.div_ceil(self.together);
        for piece in pieces {
            let (head, block) = (piece / per_head, piece % per_head);
            let end = ((block + 1) * self.together).min(self.tokens);
            let mut token = block * self.together;
            while token < end {
                let rows = self.rows(io, token..end);
                token = rows.tokens.end;
                self.attend_packed::<DIM>(io, head, &rows, room.as_chunks_mut().0, &mut places, &mut state);
            }
        }
    }

    fn attend_packed<const DIM: usize>(
        &self,
        io: &KernelIo<'_>,
        head: usize,
        rows: &TokenRows,
        room: &mut [Lanes],
        places: &mut PackedPlaces,
        state: &mut PackedState<'_>,
    ) {
        let group = self.group();
        let count = rows.tokens.len() * group;
        // A token's queries of this head lie together, as do its outputs.
        let at = |token: usize| ((rows.tokens.start + token) * self.heads + head * group) * DIM;
        for (token, to) in state.q[..count].chunks_exact_mut(group).enumerate() {
            let q = simd::view(io, 0, self.dtype, at(token), &mut *state.line);
            // SAFETY: whoever made this kernel has found AVX-512.
            unsafe { scale::<DIM>(q, self.scale, to) };
        }
        state.out[..count * CHAINS].fill([0.0; LANES]);
        state.total[..count].fill([0.0; LANES]);
        state.largest[..count].fill(f32::NEG_INFINITY);
        let most = if rows.seen == 0 { 0 } else { rows.seen + rows.tokens.len() - 1 };
        let start = self.start(rows, 0) / SPAN * SPAN;
        for from in (start..most).step_by(SPAN) {
            let span = from..most.min(from + SPAN);
            let seen_by = |token: usize| {
                let seen = (rows.seen + token).saturating_sub(from).min(SPAN);
                self.start(rows, token).saturating_sub(from)..seen
            };
            let (vectors, of) = (span.len().div_ceil(LANES), (count, group));
            // Values lie behind the keys of all heads in a block.
            let values = self.heads_to_values() * self.block_size * DIM;
            let keys = self.vectors::<DIM>(io, [head, 0], rows, &span, room, places);
            // SAFETY: whoever made this kernel has found AVX-512.
            unsafe {
                score_all(&keys[..vectors], values, of, seen_by, state);
                if let Some(cap) = self.softcap {
                    cap_all(cap, of, seen_by, state);
                }
                online_softmax_rows(of, seen_by, state);
            }
            let values = self.vectors::<DIM>(io, [head, 1], rows, &span, room, places);
            // SAFETY: as above.
            unsafe { weigh_all(&values[..vectors], of, seen_by, state) };
        }
        for token in 0..rows.tokens.len() {
            let of_token = token * group..(token + 1) * group;
            let line = std::mem::take(&mut state.line);
            // SAFETY: this token's query heads of this kv head are our piece's alone.
            let to = unsafe { simd::place(io, 0, self.dtype, at(token), &mut *line) };
            // SAFETY: as above, and whoever made this kernel has found AVX-512.
            unsafe {
                finish::<DIM>(state, of_token, to);
                simd::put(io, 0, self.dtype, at(token), to);
            }
            state.line = line;
        }
    }

    /// Does the cache lie in whole vectors of f32?
    fn lies_packed(&self) -> bool {
        self.cache == DType::F32 && self.block_size.is_multiple_of(LANES)
    }

    /// The span's keys (side 0) or values (side 1). Those of no block are zeros, and those behind the span are anything.
    fn vectors<'a, const DIM: usize>(
        &self,
        io: &KernelIo<'a>,
        [head, side]: [usize; 2],
        rows: &TokenRows,
        span: &Range<usize>,
        room: &'a mut [Lanes],
        places: &mut PackedPlaces,
    ) -> [&'a [Lanes; DIM]; SPAN / LANES] {
        let mut vectors = [const { &[[0.0; LANES]; DIM] }; SPAN / LANES];
        if self.lies_packed() {
            if places.of != Some((rows.tokens.start, span.start)) {
                places.of = Some((rows.tokens.start, span.start));
                self.runs(io, rows.sequence, span, |keys, at| {
                    let first =
                        at.map(|(block, offset)| (block * self.sides * self.kv_heads * self.block_size + offset) * DIM);
                    let to = &mut places.at[keys.start / LANES..keys.end.div_ceil(LANES)];
                    to.iter_mut().enumerate().for_each(|(i, to)| *to = first.map(|first| first + i * LANES * DIM));
                });
            }
            let cache = io.input::<f32>(1);
            let cache = &cache[(side * self.heads_to_values() + head) * self.block_size * DIM..];
            for (to, at) in vectors.iter_mut().zip(&places.at[..span.len().div_ceil(LANES)]) {
                if let Some(at) = at {
                    let found = cache[*at..].as_chunks::<LANES>().0.first_chunk();
                    *to = found.expect("blocks are whole vectors");
                }
            }
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

/// How many rows, and how many of them each token has.
type Counts = (usize, usize);

/// Scores of each row for the keys that its token sees, minus infinity for others, and the largest. Values, which lie
/// `values` elements behind keys and come next, are brought to cache on the way: blocks are too far apart for the machine
/// to see that they follow each other.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn score_all<const DIM: usize>(
    keys: &[&[Lanes; DIM]],
    values: usize,
    (count, group): Counts,
    seen_by: impl Fn(usize) -> Range<usize>,
    state: &mut PackedState<'_>,
) {
    let apart = [indices(&APART[0]), indices(&APART[1])];
    let none = _mm512_set1_ps(f32::NEG_INFINITY);
    state.most[..count].iter_mut().for_each(|most| store(none, most));
    // What the first token and the last one see is seen by all.
    let whole = seen_by((count / group).saturating_sub(1)).start..seen_by(0).end;
    for (nth, keys) in keys.iter().enumerate() {
        for key in keys.iter() {
            _mm_prefetch::<_MM_HINT_T0>(key.as_ptr().wrapping_add(values).cast());
        }
        let mut turned: [__m512; DIM] = std::array::from_fn(|i| load(&keys[i]));
        for _ in 0..DIM.ilog2() {
            let pairs = turned;
            for i in 0..DIM / 2 {
                turned[i] = _mm512_permutex2var_ps(pairs[2 * i], apart[0], pairs[2 * i + 1]);
                turned[DIM / 2 + i] = _mm512_permutex2var_ps(pairs[2 * i], apart[1], pairs[2 * i + 1]);
            }
        }
        let seen_whole = whole.start <= nth * LANES && (nth + 1) * LANES <= whole.end;
        for (token, first) in (0..count).step_by(group).enumerate() {
            let seen = if seen_whole { __mmask16::MAX } else { lanes_in(&seen_by(token), nth) };
            for ((q, most), to) in state.q[first..][..group]
                .iter()
                .zip(&mut state.most[first..][..group])
                .zip(state.scores[first * SPAN..].chunks_exact_mut(SPAN))
            {
                let mut sums = [_mm512_setzero_ps(); 2];
                for d in 0..DIM {
                    sums[d % 2] = _mm512_fmadd_ps(_mm512_set1_ps(q[d]), turned[d], sums[d % 2]);
                }
                let mut score = _mm512_add_ps(sums[0], sums[1]);
                if seen != __mmask16::MAX {
                    score = _mm512_mask_mov_ps(none, seen, score);
                }
                // In this order NaN is passed over.
                store(_mm512_max_ps(score, load(most)), most);
                store(score, &mut to.as_chunks_mut().0[nth]);
            }
        }
    }
}

/// Caps the scores of all rows as `cap * tanh(score / cap)`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn cap_all(cap: f32, (count, group): Counts, seen_by: impl Fn(usize) -> Range<usize>, state: &mut PackedState<'_>) {
    for row in 0..count {
        let keys = seen_by(row / group);
        if keys.is_empty() {
            continue;
        }
        let mut most = _mm512_set1_ps(f32::NEG_INFINITY);
        let scores = &mut state.scores[row * SPAN..][..SPAN];
        scores[keys.clone()].iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        for score in &scores.as_chunks::<LANES>().0[keys.start / LANES..keys.end.div_ceil(LANES)] {
            most = _mm512_max_ps(load(score), most);
        }
        store(most, &mut state.most[row]);
    }
}

/// The lanes of vector `nth` of a span that are in `keys`.
fn lanes_in(keys: &Range<usize>, nth: usize) -> __mmask16 {
    let bits = |end: usize| (1u32 << end.saturating_sub(nth * LANES).min(LANES)) - 1;
    (bits(keys.end) & !bits(keys.start)) as __mmask16
}

/// Turns the scores of all rows into exponentials, takes note of the largest score and adds to the sums, and scales what
/// came before.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn online_softmax_rows((count, group): Counts, seen_by: impl Fn(usize) -> Range<usize>, state: &mut PackedState<'_>) {
    for (token, first) in (0..count).step_by(group).enumerate() {
        let keys = seen_by(token);
        if !keys.is_empty() {
            (first..first + group).for_each(|row| online_softmax(row, &keys, state));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn online_softmax(row: usize, keys: &Range<usize>, state: &mut PackedState<'_>) {
    let log2_e = _mm512_set1_ps(std::f32::consts::LOG2_E);
    let (before, here) = (state.largest[row], _mm512_reduce_max_ps(load(&state.most[row])));
    let largest = if here > before { here } else { before };
    state.largest[row] = largest;
    // Of minus infinity alone nothing is taken: infinity less infinity would be NaN.
    let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
    let most = _mm512_mul_ps(_mm512_set1_ps(shift), log2_e);
    let vectors = keys.start / LANES..keys.end.div_ceil(LANES);
    let scores = &mut state.scores[row * SPAN..][..SPAN].as_chunks_mut::<LANES>().0[vectors.clone()];
    let mut sums = [_mm512_setzero_ps(); 2];
    for (i, score) in scores.iter_mut().enumerate() {
        let weight = power::<3>(_mm512_fmsub_ps(load(score), log2_e, most));
        store(weight, score);
        sums[(vectors.start + i) % 2] = _mm512_add_ps(sums[(vectors.start + i) % 2], weight);
    }
    let mut total = _mm512_add_ps(sums[0], sums[1]);
    if before != f32::NEG_INFINITY {
        let kept = power::<3>(_mm512_sub_ps(_mm512_mul_ps(_mm512_set1_ps(before), log2_e), most));
        if _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(kept, _mm512_set1_ps(1.0)) != 0 {
            let out = &mut state.out[row * CHAINS..][..CHAINS];
            out.iter_mut().for_each(|x| store(_mm512_mul_ps(load(x), kept), x));
        }
        total = _mm512_fmadd_ps(load(&state.total[row]), kept, total);
    }
    store(total, &mut state.total[row]);
}

/// Adds what rows see of `values`, weighed, to what they have: two rows of one token at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn weigh_all<const DIM: usize>(
    values: &[&[Lanes; DIM]],
    (count, group): Counts,
    seen_by: impl Fn(usize) -> Range<usize>,
    state: &mut PackedState<'_>,
) {
    for (token, first) in (0..count).step_by(group).enumerate() {
        let keys = seen_by(token);
        if keys.is_empty() {
            continue;
        }
        for row in (first..first + group).step_by(2) {
            if row + 1 < first + group {
                weigh::<DIM, 2>(values, &keys, row, state);
            } else {
                weigh::<DIM, 1>(values, &keys, row, state);
            }
        }
    }
}

/// Adds those of `values` that are of `keys`, weighed, to the sums of rows `row..row + ROWS`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn weigh<const DIM: usize, const ROWS: usize>(
    values: &[&[Lanes; DIM]],
    keys: &Range<usize>,
    row: usize,
    state: &mut PackedState<'_>,
) {
    // Keys of a vector of values.
    let together = LANES / DIM;
    let of: &[[i32; LANES]; DIM] = const { &weight_of::<DIM>() };
    let weights: [&[Lanes]; ROWS] =
        std::array::from_fn(|r| state.scores[(row + r) * SPAN..][..SPAN].as_chunks::<LANES>().0);
    let out: &mut [[Lanes; CHAINS]] = state.out[row * CHAINS..].as_chunks_mut().0;
    let mut sums: [[__m512; CHAINS]; ROWS] = std::array::from_fn(|r| std::array::from_fn(|i| load(&out[r][i])));
    for nth in keys.start / LANES..keys.end.div_ceil(LANES) {
        let seen = lanes_in(keys, nth);
        let weight: [__m512; ROWS] = std::array::from_fn(|r| load(&weights[r][nth]));
        for (v, value) in values[nth].iter().enumerate() {
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
            for r in 0..ROWS {
                let of_keys = _mm512_permutexvar_ps(indices(&of[v]), weight[r]);
                sums[r][v % CHAINS] = _mm512_fmadd_ps(of_keys, value, sums[r][v % CHAINS]);
            }
        }
    }
    for (sums, out) in sums.iter().zip(out) {
        sums.iter().zip(out).for_each(|(sum, to)| store(*sum, to));
    }
}

/// Output of `rows`: the sums of their chains and of all keys in these, over the sum of weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn finish<const DIM: usize>(state: &PackedState<'_>, rows: Range<usize>, to: &mut [f32]) {
    for (row, to) in rows.zip(to.as_chunks_mut::<DIM>().0) {
        let [a, b, c, d] = state.out[row * CHAINS..].first_chunk::<CHAINS>().expect("a row has all chains");
        let mut sums = _mm512_add_ps(_mm512_add_ps(load(a), load(c)), _mm512_add_ps(load(b), load(d)));
        // Halves, and of these halves until a key is left.
        sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4::<0b01_00_11_10>(sums, sums));
        if DIM == 4 {
            sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4::<0b10_11_00_01>(sums, sums));
        }
        let total = _mm512_reduce_add_ps(load(&state.total[row]));
        let factor = _mm512_set1_ps(if total > 0.0 { 1.0 / total } else { 1.0 });
        // SAFETY: as many lanes as there are elements.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), (1 << DIM) - 1, _mm512_mul_ps(sums, factor)) };
    }
}

/// Each of the queries in `from`, scaled, [`LANES`] apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn scale<const DIM: usize>(from: &[f32], by: f32, to: &mut [Lanes]) {
    for (from, to) in from.as_chunks::<DIM>().0.iter().zip(to) {
        // SAFETY: as many lanes as there are elements.
        let q = unsafe { _mm512_maskz_loadu_ps((1 << DIM) - 1, from.as_ptr()) };
        store(_mm512_mul_ps(q, _mm512_set1_ps(by)), to);
    }
}
