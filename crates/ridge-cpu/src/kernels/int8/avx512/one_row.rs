//! One row of x by blocks of 16 rows of a weight, which are multiplied as they are taken apart: nothing goes through memory.
//!
//! A vector holds a word of each of the 16 rows ([`SixteenRows`]); codes, scales and minima come from it by shifts and masks.
//!
//! Floor: every block read once.

#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtph_ps,
    _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_sllv_epi32, _mm512_srai_epi32,
    _mm512_srli_epi32, _mm512_srlv_epi32, _mm512_xor_si512,
};

use ridge_graph::format::{BlockFormat, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};

use super::super::interleaved::Interleaved;
use super::super::scale::{GROUP, SUMMED};
use super::super::unpack::Vectors;
use super::rows::SixteenRows;

/// A group of K of the row of x.
pub(in crate::kernels::int8) struct RowOfX<'a> {
    /// Its codes, arranged by [`OneRow::arrange`].
    pub(super) codes: &'a [u8; ARRANGED],
    /// Sums of codes over what shares a scale, at its first 16 elements, and what integers begin with.
    pub(super) sums: &'a [f32; GROUP / SUMMED],
    pub(super) begin: &'a [i32; GROUP / SUMMED],
}

impl RowOfX<'_> {
    /// Four codes, 16 times.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn word(&self, nth: usize) -> __m512i {
        _mm512_set1_epi32(i32::from_ne_bytes(self.codes.as_chunks().0[nth]))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn begin(&self, unit: usize) -> __m512i {
        _mm512_set1_epi32(self.begin[unit])
    }
}

/// Bytes of a group of codes of x, arranged: the most that a format takes.
pub(in crate::kernels::int8) const ARRANGED: usize = 8 * Q8_0::BYTES;

/// A format of which one row of x may multiply blocks as they are taken apart.
pub(in crate::kernels::int8) trait OneRow: Interleaved + Vectors {
    /// Is it so?
    const FUSED: bool = false;

    /// Codes of x in the order in which they are multiplied.
    fn arrange(x: &[u8; GROUP], to: &mut [u8; ARRANGED]) {
        to[..GROUP].copy_from_slice(x);
    }

    /// What the products of a group of K of 16 rows with that of x stand for but for the scale of x.
    ///
    /// # Safety
    /// There is AVX-512 VNNI, and there are blocks of 256 elements at every row.
    unsafe fn sum(_rows: impl SixteenRows, _x: &RowOfX<'_>) -> __m512 {
        unreachable!("{} is taken apart before it is multiplied", Self::NAME)
    }
}

/// The lower halves of words, which are f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn halves(words: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
}

/// The `mask` bits of words from bit `first` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn field(words: __m512i, first: usize, mask: i32) -> __m512i {
    _mm512_and_si512(_mm512_srlv_epi32(words, _mm512_set1_epi32(first as i32)), _mm512_set1_epi32(mask))
}

/// Bit `bit` of each byte, as 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn fifth(words: __m512i, bit: usize) -> __m512i {
    _mm512_sllv_epi32(field(words, bit, 0x0101_0101), _mm512_set1_epi32(4))
}

/// Lower and upper nibbles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let low = _mm512_set1_epi8(15);
    [_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi32::<4>(bytes), low)]
}

impl OneRow for Q8_0 {
    const FUSED: bool = true;

    /// Two blocks are 17 words: the scale of the first one is half a word, and that of the second one the other half of its
    /// ninth. Codes of x are zeros there.
    fn arrange(x: &[u8; GROUP], to: &mut [u8; ARRANGED]) {
        for (x, to) in x.as_chunks::<32>().0.iter().zip(to.as_chunks_mut::<34>().0) {
            to[..2].fill(0);
            to[2..].copy_from_slice(x);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        let sign = _mm512_set1_epi8(-128);
        let mut sum = _mm512_setzero_ps();
        // The block whose words come, its integers in two chains, and the word that has its scale.
        let (mut even, mut odd, mut scale) = (_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_ps());
        macro_rules! quads {
            ($($quad:literal)*) => {
                $(
                    // SAFETY: 272 bytes are 17 quads.
                    let words = unsafe { rows.words(16 * $quad) };
                    for j in 0..4 {
                        let (word, nth) = (words[j], 4 * $quad + j);
                        let (pair, at) = (nth / 17, nth % 17);
                        let codes = _mm512_xor_si512(word, sign);
                        if at == 0 {
                            scale = halves(word);
                            (even, odd) = (x.begin(4 * pair), _mm512_setzero_si512());
                        }
                        if at % 2 == 0 || at == 9 {
                            if at == 9 {
                                even = x.begin(4 * pair + 2);
                                odd = _mm512_setzero_si512();
                            }
                            even = _mm512_dpbusd_epi32(even, codes, x.word(nth));
                        } else {
                            odd = _mm512_dpbusd_epi32(odd, codes, x.word(nth));
                        }
                        if at == 8 || at == 16 {
                            let integers = _mm512_add_epi32(even, odd);
                            sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), scale, sum);
                        }
                        if at == 8 {
                            scale = halves(_mm512_srli_epi32::<16>(word));
                        }
                    }
                )*
            };
        }
        quads!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
        sum
    }
}

/// Scales and minima of Q4_K and Q5_K from the first four words of a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn packed_scales([both, scales, minima, rest]: [__m512i; 4]) -> [[__m512; 2]; 8] {
    let (scale, minimum) = (halves(both), halves(_mm512_srli_epi32::<16>(both)));
    // Byte `i` of each word is of groups `i` and `i + 4`.
    let last_scales = _mm512_or_si512(field(rest, 0, 0x0f0f_0f0f), field(scales, 2, 0x3030_3030));
    let last_minima = _mm512_or_si512(field(rest, 4, 0x0f0f_0f0f), field(minima, 2, 0x3030_3030));
    let words = [[scales, minima], [last_scales, last_minima]];
    let mut all = [[_mm512_setzero_ps(); 2]; 8];
    for group in 0..8 {
        let [scales, minima] = words[group / 4];
        all[group] = [
            _mm512_mul_ps(scale, _mm512_cvtepi32_ps(field(scales, group % 4 * 8, 63))),
            _mm512_mul_ps(minimum, _mm512_cvtepi32_ps(field(minima, group % 4 * 8, 63))),
        ];
    }
    all
}

/// Adds the products of two groups that share their bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn add_pair(
    sum: __m512,
    pair: usize,
    integers: [__m512i; 2],
    scales: &[[__m512; 2]; 8],
    of_x: &[f32; GROUP / SUMMED],
) -> __m512 {
    let mut sum = sum;
    for of in 0..2 {
        let [scale, minimum] = scales[2 * pair + of];
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[of]), scale, sum);
        sum = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(of_x[2 * (2 * pair + of)]), sum);
    }
    sum
}

impl OneRow for Q4K {
    const FUSED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        // SAFETY: a block is 144 bytes.
        let scales = packed_scales(unsafe { rows.words(0) });
        let mut sum = _mm512_setzero_ps();
        for pair in 0..4 {
            let mut integers = [_mm512_setzero_si512(); 2];
            for part in 0..2 {
                // SAFETY: as above.
                let words = unsafe { rows.words(16 + 32 * pair + 16 * part) };
                for nth in 0..4 {
                    let first = 16 * pair + 4 * part + nth;
                    let [low, high] = nibbles(words[nth]);
                    integers[0] = _mm512_dpbusd_epi32(integers[0], low, x.word(first));
                    integers[1] = _mm512_dpbusd_epi32(integers[1], high, x.word(first + 8));
                }
            }
            sum = add_pair(sum, pair, integers, &scales, x.sums);
        }
        sum
    }
}

impl OneRow for Q5K {
    const FUSED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        // SAFETY: a block is 176 bytes.
        let (scales, fifths) = unsafe { (packed_scales(rows.words(0)), [rows.words(16), rows.words(32)]) };
        let mut sum = _mm512_setzero_ps();
        for pair in 0..4 {
            let mut integers = [_mm512_setzero_si512(); 2];
            for part in 0..2 {
                // SAFETY: as above.
                let words = unsafe { rows.words(48 + 32 * pair + 16 * part) };
                for nth in 0..4 {
                    let first = 16 * pair + 4 * part + nth;
                    let [low, high] = nibbles(words[nth]);
                    let low = _mm512_or_si512(low, fifth(fifths[part][nth], 2 * pair));
                    let high = _mm512_or_si512(high, fifth(fifths[part][nth], 2 * pair + 1));
                    integers[0] = _mm512_dpbusd_epi32(integers[0], low, x.word(first));
                    integers[1] = _mm512_dpbusd_epi32(integers[1], high, x.word(first + 8));
                }
            }
            sum = add_pair(sum, pair, integers, &scales, x.sums);
        }
        sum
    }
}

impl OneRow for Q6K {
    const FUSED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        // SAFETY: a block is 210 bytes, its last ones an f16.
        let (groups, scale) = unsafe { (rows.words(192), halves(_mm512_srli_epi32::<16>(rows.words(194)[3]))) };
        let mut sum = _mm512_setzero_ps();
        for half in 0..2 {
            // SAFETY: as above.
            let uppers = unsafe { [rows.words(128 + 32 * half), rows.words(144 + 32 * half)] };
            let mut integers = [_mm512_setzero_si512(); 8];
            for part in 0..4 {
                // SAFETY: as above.
                let bytes = unsafe { rows.words(64 * half + 16 * part) };
                integers[part] = x.begin(8 * half + part);
                integers[part + 4] = x.begin(8 * half + part + 4);
                for nth in 0..4 {
                    let first = 32 * half + 4 * part + nth;
                    // Elements of the first two groups of 32 have the lower two bits and nibbles.
                    let by = _mm512_set1_epi32(2 * (part as i32 / 2));
                    let two = _mm512_srlv_epi32(uppers[part % 2][nth], by);
                    let upper = _mm512_set1_epi8(0x30);
                    let low_bits = _mm512_and_si512(_mm512_sllv_epi32(two, _mm512_set1_epi32(4)), upper);
                    let high_bits = _mm512_and_si512(two, upper);
                    let [low, high] = nibbles(bytes[nth]);
                    let (low, high) = (_mm512_or_si512(low, low_bits), _mm512_or_si512(high, high_bits));
                    integers[part] = _mm512_dpbusd_epi32(integers[part], low, x.word(first));
                    integers[part + 4] = _mm512_dpbusd_epi32(integers[part + 4], high, x.word(first + 16));
                }
            }
            for nth in 0..8 {
                let group = 8 * half + nth;
                let above = _mm512_sllv_epi32(groups[group / 4], _mm512_set1_epi32(24 - group as i32 % 4 * 8));
                let of_group = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(above)));
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[nth]), of_group, sum);
            }
        }
        sum
    }
}

/// Formats that are taken apart before they are multiplied.
macro_rules! taken_apart {
    ($($format:ident)*) => { $(impl OneRow for $format {})* };
}

taken_apart!(Q4_0 Q4_1 Q5_0 Q5_1 Iq4Nl Iq4Xs Mxfp4 Q2K Q3K);
