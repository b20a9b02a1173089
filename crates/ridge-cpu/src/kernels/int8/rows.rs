//! Where 32-bit words of several rows of a weight come from, each vector the same word of all rows: shuffled together from
//! rows that lie one after another, or loaded from interleaved ones ([`Interleaving`](crate::interleave::Interleaving)).

use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_castsi128_si256, _mm256_inserti128_si256,
    _mm256_loadu_si256, _mm256_or_si256, _mm256_sll_epi32, _mm256_srl_epi32, _mm256_unpackhi_epi32,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64, _mm512_castsi256_si512, _mm512_inserti64x4,
    _mm512_loadu_si512, _mm512_or_si512, _mm512_sll_epi32, _mm512_srl_epi32, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::marker::PhantomData;
use std::ops::Range;

use ridge_graph::format::BlockFormat;

use super::scale::SIDE;
use crate::interleave::{self, Line};

/// Rows of a weight whose codes lie side by side.
pub(super) const EIGHT: usize = 8;

/// Eight rows from a block on.
pub(super) trait EightRows: Copy {
    /// `bytes` bytes further on in each row.
    fn after(self, bytes: usize) -> Self;

    /// The four 32-bit words from byte `at` on, each of all rows.
    ///
    /// # Safety
    /// There is AVX2, and the 16 bytes are inside of every row's block.
    unsafe fn words(self, at: usize) -> [__m256i; 4];
}

/// 16 rows from a group of K on.
pub(super) trait SixteenRows: Copy {
    /// The four 32-bit words from byte `at` on, each of all rows.
    ///
    /// # Safety
    /// There is AVX-512, and the 16 bytes are inside of every row.
    unsafe fn words(self, at: usize) -> [__m512i; 4];
}

/// Where a block of each row begins.
#[derive(Clone, Copy)]
pub(super) struct BlockPointers([*const u8; EIGHT]);

impl BlockPointers {
    /// Those at byte `from` of the first eight of `rows`, which begin every `stride` bytes of `data`; in place of rows that
    /// are not there the last one.
    #[inline]
    pub(super) fn new(data: &[u8], rows: Range<usize>, stride: usize, from: usize) -> Self {
        let mut pointers = [data.as_ptr(); EIGHT];
        for (nth, row) in pointers.iter_mut().enumerate() {
            *row = row.wrapping_add((rows.start + nth).min(rows.end - 1) * stride + from);
        }
        Self(pointers)
    }
}

impl EightRows for BlockPointers {
    #[inline]
    fn after(self, bytes: usize) -> Self {
        Self(self.0.map(|row| row.wrapping_add(bytes)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(self, at: usize) -> [__m256i; 4] {
        // SAFETY: by the caller's promise.
        let of = |row: usize| unsafe { _mm_loadu_si128(self.0[row].wrapping_add(at).cast::<__m128i>()) };
        let both = |row: usize| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(of(row)), of(row + 4));
        let (a, b, c, d) = (both(0), both(1), both(2), both(3));
        let (low, low_of_last) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (high, high_of_last) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(low, low_of_last),
            _mm256_unpackhi_epi64(low, low_of_last),
            _mm256_unpacklo_epi64(high, high_of_last),
            _mm256_unpackhi_epi64(high, high_of_last),
        ]
    }
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

/// Interleaved rows of blocks of `B`: the lanes of lines. Words that begin within those of the lines are two lines shifted
/// together, whose second one is inside of the unit too, since blocks do not end with the first of their bytes.
pub(super) struct InterleavedRows<B> {
    /// The first lane of the first line.
    first: *const u32,
    /// Bytes of each row that are passed by.
    at: usize,
    format: PhantomData<B>,
}

impl<B> Clone for InterleavedRows<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for InterleavedRows<B> {}

impl<B: BlockFormat> InterleavedRows<B> {
    /// The rows from lane `lane` on of the unit that begins with the first of `lines`.
    pub(super) fn new(lines: &[Line], lane: usize) -> Self {
        Self { first: lines.as_ptr().cast::<u32>().wrapping_add(lane), at: 0, format: PhantomData }
    }

    #[inline]
    fn line(self, nth: usize) -> *const u32 {
        self.first.wrapping_add(interleave::place([B::ELEMENTS, B::BYTES], nth) * SIDE)
    }
}

/// Words of interleaved rows by the instructions of one length of vectors.
macro_rules! interleaved_words {
    ($trait:ident, $vector:ty, $features:literal, $load:ident, $right:ident, $left:ident, $or:ident $(, $after:item)?) => {
        impl<B: BlockFormat> $trait for InterleavedRows<B> {
            $($after)?

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn words(self, at: usize) -> [$vector; 4] {
                let at = self.at + at;
                // SAFETY: by the caller's promise.
                let line = |nth: usize| unsafe { $load(self.line(at / 4 + nth).cast()) };
                let words = [line(0), line(1), line(2), line(3)];
                let bits = at % 4 * 8;
                if bits == 0 {
                    return words;
                }
                let [right, left] = [bits as i32, 32 - bits as i32].map(|bits| _mm_cvtsi32_si128(bits));
                let next = [words[1], words[2], words[3], line(4)];
                let mut shifted = words;
                for ((word, next), to) in words.into_iter().zip(next).zip(&mut shifted) {
                    *to = $or($right(word, right), $left(next, left));
                }
                shifted
            }
        }
    };
}

interleaved_words!(
    EightRows,
    __m256i,
    "avx2,fma,f16c",
    _mm256_loadu_si256,
    _mm256_srl_epi32,
    _mm256_sll_epi32,
    _mm256_or_si256,
    #[inline]
    fn after(self, bytes: usize) -> Self {
        Self { at: self.at + bytes, ..self }
    }
);

interleaved_words!(
    SixteenRows,
    __m512i,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c",
    _mm512_loadu_si512,
    _mm512_srl_epi32,
    _mm512_sll_epi32,
    _mm512_or_si512
);
