//! Blocks of 16 rows of a weight: multiplied by one row of x as they are taken apart, so that nothing goes through memory, or
//! taken apart once for several rows of x.
//!
//! A vector holds a word of each of the 16 rows ([`SixteenRows`]); codes, scales and minima come from it by shifts and masks.
//!
//! Floor: every block read once.

#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

mod bytes;

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtph_ps,
    _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_sllv_epi32,
    _mm512_srai_epi32, _mm512_srli_epi32, _mm512_srlv_epi32, _mm512_store_ps, _mm512_store_si512, _mm512_xor_si512,
};

use std::sync::atomic::{Ordering, compiler_fence};

use ridge_graph::format::{BlockFormat, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};

use super::super::interleaved::Interleaved;
use super::super::scale::{GROUP, SIDE, SUMMED};
use super::rows::SixteenRows;

/// A group of K of the row of x.
pub(in crate::kernels::int8) struct RowOfX<'a> {
    /// Its codes, arranged by [`Wide::arrange`].
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

/// A group of K, or the first part of one, of 16 rows.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(in crate::kernels::int8) struct WideCodes {
    /// [`Above::ABOVE`](super::super::scale::Above::ABOVE) what they are: four of each row for each four elements.
    pub(super) codes: [[u8; 4 * SIDE]; GROUP / 4],
    /// For each 16 or 32 elements that share one.
    pub(super) scales: [[f32; SIDE]; GROUP / SUMMED],
    /// As scales, where the format has them.
    pub(super) minima: [[f32; SIDE]; GROUP / SUMMED],
}

impl WideCodes {
    /// Zeros.
    pub(super) fn new() -> Self {
        let floats = [[0.0; SIDE]; GROUP / SUMMED];
        Self { codes: [[0; 4 * SIDE]; GROUP / 4], scales: floats, minima: floats }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn put(&mut self, word: usize, codes: __m512i) {
        // SAFETY: 64 bytes, aligned as they lie in a structure so aligned.
        unsafe { _mm512_store_si512(self.codes[word].as_mut_ptr().cast(), codes) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn put_scale(&mut self, group: usize, scale: __m512) {
        // SAFETY: as above.
        unsafe { _mm512_store_ps(self.scales[group].as_mut_ptr(), scale) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn put_minimum(&mut self, group: usize, minimum: __m512) {
        // SAFETY: as above.
        unsafe { _mm512_store_ps(self.minima[group].as_mut_ptr(), minimum) }
    }
}

/// A format whose blocks of 16 rows may be taken apart together.
pub(in crate::kernels::int8) trait Wide: Interleaved {
    /// Is it so? Others are taken apart eight rows at a time.
    const TAKEN_TOGETHER: bool = false;

    /// Does [`Wide::sum`] read interleaved lines in the order in which they lie, but for a few?
    const IN_ORDER: bool = true;

    /// Codes of x in the order in which they are multiplied.
    fn arrange(x: &[u8; GROUP], to: &mut [u8; ARRANGED]) {
        to[..GROUP].copy_from_slice(x);
    }

    /// What the products of a group of K of 16 rows with that of x stand for but for the scale of x.
    ///
    /// # Safety
    /// There is AVX-512 VNNI, and there are blocks of 256 elements at every row.
    unsafe fn sum(_rows: impl SixteenRows, _x: &RowOfX<'_>) -> __m512 {
        unreachable!("{} is taken apart eight rows at a time", Self::NAME)
    }

    /// Takes apart a group of K of 16 rows.
    ///
    /// # Safety
    /// As for [`Wide::sum`].
    unsafe fn unpack_sixteen(_rows: impl SixteenRows, _to: &mut WideCodes) {
        unreachable!("{} is taken apart eight rows at a time", Self::NAME)
    }
}

/// The lower halves of words, which are f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn halves(words: __m512i) -> __m512 {
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

impl Wide for Q8_0 {
    const TAKEN_TOGETHER: bool = true;

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
        let mut sum = _mm512_setzero_ps();
        for pair in 0..4 {
            // SAFETY: 272 bytes are four pairs of blocks.
            let (of, last) = unsafe {
                let at = 68 * pair;
                let of = [rows.words(at), rows.words(at + 16), rows.words(at + 32), rows.words(at + 48)];
                (of, rows.words(at + 52)[3])
            };
            let first = 17 * pair;
            let mut integers = [x.begin(4 * pair), _mm512_setzero_si512()];
            for nth in 0..8 {
                integers[nth % 2] = add_signed(integers[nth % 2], of[nth / 4][nth % 4], x.word(first + nth));
            }
            // The ninth word ends one block and begins the other.
            let shared = of[2][0];
            integers[0] = add_signed(integers[0], shared, x.word(first + 8));
            sum = add_block(sum, integers, halves(of[0][0]));
            let mut integers = [x.begin(4 * pair + 2), _mm512_setzero_si512()];
            for nth in 9..16 {
                integers[nth % 2] = add_signed(integers[nth % 2], of[nth / 4][nth % 4], x.word(first + nth));
            }
            integers[0] = add_signed(integers[0], last, x.word(first + 16));
            sum = add_block(sum, integers, halves(_mm512_srli_epi32::<16>(shared)));
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack_sixteen(rows: impl SixteenRows, to: &mut WideCodes) {
        for pair in 0..4 {
            for odd in 0..2 {
                let (block, at) = (2 * pair + odd, 68 * pair + 34 * odd);
                // SAFETY: 272 bytes are eight blocks, of which an even one is followed by another.
                let [scale, first, last] = unsafe { [at, at + 2, at + 18].map(|at| rows.words(at)) };
                to.put_scale(block, halves(scale[0]));
                for nth in 0..4 {
                    to.put(8 * block + nth, _mm512_xor_si512(first[nth], _mm512_set1_epi8(-128)));
                    to.put(8 * block + 4 + nth, _mm512_xor_si512(last[nth], _mm512_set1_epi8(-128)));
                }
            }
        }
    }
}

/// `sum` and the products of codes with a sign, which are taken as 128 more, and of `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn add_signed(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i {
    _mm512_dpbusd_epi32(sum, _mm512_xor_si512(codes, _mm512_set1_epi8(-128)), x)
}

/// `sum` and what two sums of products of a block stand for.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn add_block(sum: __m512, [even, odd]: [__m512i; 2], scale: __m512) -> __m512 {
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(even, odd)), scale, sum)
}

/// Scales and minima of Q4_K and Q5_K, those of one group after another.
struct PackedScales {
    scale: __m512,
    minimum: __m512,
    /// Of the group to come and of those after it, in the bytes of each word; then of the last four groups.
    scales: [__m512i; 2],
    minima: [__m512i; 2],
}

impl PackedScales {
    /// From the first four words of a block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn new([both, scales, minima, rest]: [__m512i; 4]) -> Self {
        // Byte `i` of each word is of groups `i` and `i + 4`.
        let last_scales = _mm512_or_si512(field(rest, 0, 0x0f0f_0f0f), field(scales, 2, 0x3030_3030));
        let last_minima = _mm512_or_si512(field(rest, 4, 0x0f0f_0f0f), field(minima, 2, 0x3030_3030));
        Self {
            scale: halves(both),
            minimum: halves(_mm512_srli_epi32::<16>(both)),
            scales: [scales, last_scales],
            minima: [minima, last_minima],
        }
    }

    /// Scales and minima of groups `2 pair` and the next; pairs come in order.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn pair(&mut self, pair: usize) -> [[__m512; 2]; 2] {
        if pair == 2 {
            (self.scales[0], self.minima[0]) = (self.scales[1], self.minima[1]);
        }
        let mut of_pair = [[_mm512_setzero_ps(); 2]; 2];
        for of_group in &mut of_pair {
            let scale = _mm512_mul_ps(self.scale, _mm512_cvtepi32_ps(field(self.scales[0], 0, 63)));
            let minimum = _mm512_mul_ps(self.minimum, _mm512_cvtepi32_ps(field(self.minima[0], 0, 63)));
            *of_group = [scale, minimum];
            self.scales[0] = _mm512_srli_epi32::<8>(self.scales[0]);
            self.minima[0] = _mm512_srli_epi32::<8>(self.minima[0]);
        }
        of_pair
    }

    /// Adds the products of groups `2 pair` and the next, which share their bytes, to `sum`; pairs come in order.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn add_pair(&mut self, sum: __m512, pair: usize, integers: [__m512i; 2], of_x: &[f32; GROUP / SUMMED]) -> __m512 {
        let mut sum = sum;
        for (of, [scale, minimum]) in self.pair(pair).into_iter().enumerate() {
            sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[of]), scale, sum);
            sum = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(of_x[2 * (2 * pair + of)]), sum);
        }
        sum
    }

    /// Writes what [`PackedScales::pair`] gives.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn put_pair(&mut self, pair: usize, to: &mut WideCodes) {
        for (of, [scale, minimum]) in self.pair(pair).into_iter().enumerate() {
            to.put_scale(2 * pair + of, scale);
            to.put_minimum(2 * pair + of, minimum);
        }
    }
}

impl Wide for Q4K {
    const TAKEN_TOGETHER: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        // SAFETY: a block is 144 bytes.
        let mut scales = PackedScales::new(unsafe { rows.words(0) });
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
            sum = scales.add_pair(sum, pair, integers, x.sums);
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack_sixteen(rows: impl SixteenRows, to: &mut WideCodes) {
        // SAFETY: a block is 144 bytes.
        let mut scales = PackedScales::new(unsafe { rows.words(0) });
        for pair in 0..4 {
            for part in 0..2 {
                // SAFETY: as above.
                let words = unsafe { rows.words(16 + 32 * pair + 16 * part) };
                for nth in 0..4 {
                    let first = 16 * pair + 4 * part + nth;
                    let [low, high] = nibbles(words[nth]);
                    to.put(first, low);
                    to.put(first + 8, high);
                }
            }
            scales.put_pair(pair, to);
        }
    }
}

impl Wide for Q5K {
    const TAKEN_TOGETHER: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        // SAFETY: a block is 176 bytes.
        let (mut scales, fifths) = unsafe { (PackedScales::new(rows.words(0)), [rows.words(16), rows.words(32)]) };
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
            sum = scales.add_pair(sum, pair, integers, x.sums);
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack_sixteen(rows: impl SixteenRows, to: &mut WideCodes) {
        // SAFETY: a block is 176 bytes.
        let (mut scales, fifths) = unsafe { (PackedScales::new(rows.words(0)), [rows.words(16), rows.words(32)]) };
        for pair in 0..4 {
            for part in 0..2 {
                // SAFETY: as above.
                let words = unsafe { rows.words(48 + 32 * pair + 16 * part) };
                for nth in 0..4 {
                    let first = 16 * pair + 4 * part + nth;
                    let [low, high] = nibbles(words[nth]);
                    to.put(first, _mm512_or_si512(low, fifth(fifths[part][nth], 2 * pair)));
                    to.put(first + 8, _mm512_or_si512(high, fifth(fifths[part][nth], 2 * pair + 1)));
                }
            }
            scales.put_pair(pair, to);
        }
    }
}

/// Codes of 6 bits of elements 32 apart, whose upper bits are in `two` and lower ones are nibbles of two words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn six_bits(two: __m512i, bytes: [__m512i; 2]) -> [__m512i; 4] {
    let mut bits = [_mm512_slli_epi32::<4>(two), _mm512_slli_epi32::<2>(two), two, _mm512_srli_epi32::<2>(two)];
    let ([a, c], [b, d]) = (nibbles(bytes[0]), nibbles(bytes[1]));
    let lower = [a, b, c, d];
    for of in 0..4 {
        bits[of] = _mm512_or_si512(lower[of], _mm512_and_si512(bits[of], _mm512_set1_epi8(0x30)));
    }
    bits
}

/// Byte `nth` of words, which is signed.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn signed_byte(words: __m512i, nth: usize) -> __m512 {
    let above = _mm512_sllv_epi32(words, _mm512_set1_epi32(24 - nth as i32 * 8));
    _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(above))
}

impl Wide for Q6K {
    const TAKEN_TOGETHER: bool = true;
    const IN_ORDER: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn sum(rows: impl SixteenRows, x: &RowOfX<'_>) -> __m512 {
        // SAFETY: a block is 210 bytes, its last ones an f16.
        let (groups, scale) = unsafe { (rows.words(192), halves(_mm512_srli_epi32::<16>(rows.words(194)[3]))) };
        let mut sum = _mm512_setzero_ps();
        let mut of_half = [groups[0], groups[1]];
        for half in 0..2 {
            let mut integers = [_mm512_setzero_si512(); 8];
            for group in 0..8 {
                integers[group] = x.begin(8 * half + group);
            }
            for part in 0..2 {
                // Lines of the second part are not loaded before the first one is multiplied: registers would be spilled.
                compiler_fence(Ordering::SeqCst);
                // SAFETY: as above.
                let (uppers, bytes) = unsafe {
                    let (at, of_upper) = (64 * half + 16 * part, 128 + 32 * half + 16 * part);
                    (rows.words(of_upper), [rows.words(at), rows.words(at + 32)])
                };
                for nth in 0..4 {
                    let first = 32 * half + 4 * part + nth;
                    let codes = six_bits(uppers[nth], [bytes[0][nth], bytes[1][nth]]);
                    for of in 0..4 {
                        let sum = &mut integers[2 * of + part];
                        *sum = _mm512_dpbusd_epi32(*sum, codes[of], x.word(first + 8 * of));
                    }
                }
            }
            for nth in 0..8 {
                let of_group = _mm512_mul_ps(scale, signed_byte(of_half[nth / 4], nth % 4));
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[nth]), of_group, sum);
            }
            of_half = [groups[2], groups[3]];
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack_sixteen(rows: impl SixteenRows, to: &mut WideCodes) {
        // SAFETY: a block is 210 bytes, its last ones an f16.
        let (groups, scale) = unsafe { (rows.words(192), halves(_mm512_srli_epi32::<16>(rows.words(194)[3]))) };
        for half in 0..2 {
            for part in 0..2 {
                // SAFETY: as above.
                let (uppers, bytes) = unsafe {
                    let (at, of_upper) = (64 * half + 16 * part, 128 + 32 * half + 16 * part);
                    (rows.words(of_upper), [rows.words(at), rows.words(at + 32)])
                };
                for nth in 0..4 {
                    let codes = six_bits(uppers[nth], [bytes[0][nth], bytes[1][nth]]);
                    for of in 0..4 {
                        to.put(32 * half + 4 * part + nth + 8 * of, codes[of]);
                    }
                }
            }
        }
        for group in 0..16 {
            to.put_scale(group, _mm512_mul_ps(scale, signed_byte(groups[group / 4], group % 4)));
        }
    }
}

/// Formats that are taken apart eight rows at a time.
macro_rules! taken_apart {
    ($($format:ident)*) => { $(impl Wide for $format {})* };
}

taken_apart!(Q4_0 Q4_1 Q5_0 Q5_1 Iq4Nl Iq4Xs Mxfp4 Q2K Q3K);
