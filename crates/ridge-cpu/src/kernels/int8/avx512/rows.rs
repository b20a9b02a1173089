//! As [`EightRows`](super::super::rows::EightRows), 16 rows by vectors of AVX-512.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_castsi128_si256, _mm256_inserti128_si256,
    _mm512_castsi256_si512, _mm512_inserti64x4, _mm512_loadu_si512, _mm512_or_si512, _mm512_sll_epi32,
    _mm512_srl_epi32, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use ridge_graph::format::BlockFormat;

use super::super::rows::InterleavedRows;
use super::super::scale::SIDE;
use crate::interleave::Line;
use crate::simd;

/// 16 rows from a group of K on.
pub(in crate::kernels::int8) trait SixteenRows: Copy {
    /// The four 32-bit words from byte `at` on, each of all rows.
    ///
    /// # Safety
    /// There is AVX-512, and the 16 bytes are inside of every row.
    unsafe fn words(self, at: usize) -> [__m512i; 4];
}

/// 16 rows that begin a stride apart.
#[derive(Clone, Copy)]
pub(super) struct StridedRows {
    first: *const u8,
    /// Bytes from a row to the next.
    stride: usize,
}

impl StridedRows {
    /// Those that begin every `stride` bytes of `data`, from byte `from` of each on.
    pub(super) fn new(data: &[u8], stride: usize, from: usize) -> Self {
        assert!(data.len() >= SIDE * stride);
        Self { first: data.as_ptr().wrapping_add(from), stride }
    }

    /// 16 bytes from byte `at` on of rows `row`, `row + 4` and so on.
    ///
    /// # Safety
    /// As for [`SixteenRows::words`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn every_fourth(self, row: usize, at: usize) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe {
            let first = self.first.add(row * self.stride + at);
            let a = _mm_loadu_si128(first.cast::<__m128i>());
            let b = _mm_loadu_si128(first.add(4 * self.stride).cast::<__m128i>());
            let c = _mm_loadu_si128(first.add(8 * self.stride).cast::<__m128i>());
            let d = _mm_loadu_si128(first.add(12 * self.stride).cast::<__m128i>());
            let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
            let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(c), d);
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }
}

impl SixteenRows for StridedRows {
    /// Two shuffles a vector, where loads that fill a quarter of a vector need none.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn words(self, at: usize) -> [__m512i; 4] {
        // SAFETY: by the caller's promise.
        let (a, b, c, d) = unsafe {
            (self.every_fourth(0, at), self.every_fourth(1, at), self.every_fourth(2, at), self.every_fourth(3, at))
        };
        let (low, low_of_last) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (high, high_of_last) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(low, low_of_last),
            _mm512_unpackhi_epi64(low, low_of_last),
            _mm512_unpacklo_epi64(high, high_of_last),
            _mm512_unpackhi_epi64(high, high_of_last),
        ]
    }
}

impl<B: BlockFormat> SixteenRows for InterleavedRows<B> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn words(self, at: usize) -> [__m512i; 4] {
        let at = self.at + at;
        // SAFETY: by the caller's promise.
        let line = |nth: usize| unsafe { _mm512_loadu_si512(self.line(at / 4 + nth).cast()) };
        let words = [line(0), line(1), line(2), line(3)];
        let bits = at % 4 * 8;
        if bits == 0 {
            return words;
        }
        let [right, left] = [bits as i32, 32 - bits as i32].map(|bits| _mm_cvtsi32_si128(bits));
        let next = [words[1], words[2], words[3], line(4)];
        let mut shifted = words;
        for ((word, next), to) in words.into_iter().zip(next).zip(&mut shifted) {
            *to = _mm512_or_si512(_mm512_srl_epi32(word, right), _mm512_sll_epi32(next, left));
        }
        shifted
    }
}

/// How far ahead interleaved rows are fetched to second-level cache for one row of x, in bytes, where that is quicker than what the
/// processor fetches by itself: on Sapphire Rapids by a third to a half, while on Zen 4 it takes half of the rate
/// (`benches/results/2026-11-26-cpu-levels.md`, `2026-11-24-cpu-levels.md`).
const AHEAD: usize = 20 << 10;

/// Interleaved rows of which lines are fetched as those before them are read, one for one: lines of a whole unit at once fill the
/// buffers of a core's misses. Where lines are read in another order than they lie, units at once are quicker.
pub(super) struct FetchedRows<B>(pub(super) InterleavedRows<B>);

impl<B> Clone for FetchedRows<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for FetchedRows<B> {}

impl<B: BlockFormat> SixteenRows for FetchedRows<B> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn words(self, at: usize) -> [__m512i; 4] {
        let first = (self.0.at + at) / 4;
        for line in first..first + 4 {
            simd::fetch_far(self.0.line(line).cast::<u8>().wrapping_add(AHEAD), size_of::<Line>());
        }
        // SAFETY: by the caller's promise.
        unsafe { self.0.words(at) }
    }
}
