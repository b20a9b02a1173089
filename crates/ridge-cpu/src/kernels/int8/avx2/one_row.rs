//! Products of codes with one row of x: blocks of eight rows of the weight are multiplied as they are taken apart, so that
//! nothing of them goes through memory. Bits are those of [`Pairs`](super::Pairs).
//!
//! Floor: every block read once.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_cvtepi32_ps, _mm256_fmadd_ps,
    _mm256_fnmadd_ps, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_sign_epi8, _mm256_storeu_ps, _mm256_xor_si256,
};
use std::marker::PhantomData;
use std::ops::Range;

use super::super::interleaved::{Interleaved, TakenApart};
use super::super::rows::{BlockPointers, EightRows, InterleavedRows};
use super::super::scale::{Above, EIGHT, GROUP, SIDE, SUMMED};
use super::super::weight::CodeWeight;
use super::super::x::ActivationCodes;
use super::pairs::{above, pairs};
use crate::simd;

/// What the groups of a block can be at most.
const GROUPS: usize = GROUP / SUMMED;

/// The products of `rows` of the weight, which are inside of it, with the row of `x`.
///
/// # Safety
/// There is AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply<B: Interleaved>(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    out: &mut [f32],
) {
    let stride = weight.stride();
    for (first, out) in rows.clone().step_by(SIDE).zip(out[..rows.len()].chunks_mut(SIDE)) {
        let these = first..rows.end.min(first + SIDE);
        let lines = weight.lines(first);
        let mut totals = [_mm256_setzero_ps(); SIDE / EIGHT];
        for (group, scale) in x.scales(0).iter().enumerate().take(x.layout.groups()) {
            let elements = weight.elements(group);
            let codes = x.codes(0)[elements.clone()].as_chunks().0;
            let sums = &x.sums(0)[elements.start / SUMMED..elements.end / SUMMED];
            if lines.is_none() {
                // A share of the next rows, which lie behind these.
                let end = weight.data.as_ptr().wrapping_add(these.end * stride);
                simd::fetch_share(end, these.len() * stride, group, x.layout.groups());
            }
            for (first, total) in these.clone().step_by(EIGHT).zip(&mut totals) {
                // SAFETY: blocks are inside of their rows, which are inside of the weight.
                let sum = unsafe {
                    if let Some((lines, unit)) = lines {
                        let lines = &lines[group * unit..];
                        products::<B>(InterleavedRows::<B>::new(lines, first % SIDE), codes, sums)
                    } else {
                        let from = weight.codes.bytes(elements.start);
                        products::<B>(BlockPointers::new(weight.data, first..these.end, stride, from), codes, sums)
                    }
                };
                *total = _mm256_fmadd_ps(sum, _mm256_set1_ps(*scale), *total);
            }
        }
        let mut lanes = [0.0; SIDE];
        for (to, total) in lanes.as_chunks_mut::<EIGHT>().0.iter_mut().zip(totals) {
            // SAFETY: eight floats.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), total) };
        }
        out.copy_from_slice(&lanes[..out.len()]);
    }
}

/// What the products of eight rows with a group of K of x stand for but for the scale of x: `x` are its codes, `sums` the sums of
/// sixteen each.
///
/// # Safety
/// There is AVX2, and every row has as many elements as there are of x.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products<B: Interleaved>(rows: impl EightRows, x: &[[i8; 4]], sums: &[f32]) -> __m256 {
    let groups = const { B::ELEMENTS / B::GROUP };
    let of_block = const { B::ELEMENTS / SUMMED };
    let mut total = _mm256_setzero_ps();
    for (block, (x, sums)) in x.chunks_exact(B::ELEMENTS / 4).zip(sums.chunks_exact(of_block)).enumerate() {
        let mut of = Products::<B> {
            x: x.as_ptr().cast(),
            integers: [_mm256_setzero_si256(); GROUPS],
            scales: [_mm256_setzero_ps(); GROUPS],
            minima: [_mm256_setzero_ps(); GROUPS],
            of: PhantomData,
        };
        // SAFETY: by the caller's promise.
        unsafe { B::unpack(rows.after(block * B::BYTES), &mut of) };
        for group in 0..groups {
            let of_x = sums[group * (B::GROUP / SUMMED)..][..B::GROUP / SUMMED].iter().sum();
            let of_x = _mm256_set1_ps(of_x);
            let mut integers = _mm256_cvtepi32_ps(of.integers(group));
            if const { above::<B>() } != 0 {
                integers = _mm256_fnmadd_ps(_mm256_set1_ps(f32::from(const { above::<B>() })), of_x, integers);
            }
            total = _mm256_fmadd_ps(integers, of.scales[group], total);
            if B::MINIMA {
                total = _mm256_fnmadd_ps(of.minima[group], of_x, total);
            }
        }
    }
    total
}

/// Products of a block of eight rows, each group's for itself.
struct Products<B> {
    /// Four codes for each word.
    x: *const i32,
    /// Of 16 bits where those hold a whole group.
    integers: [__m256i; GROUPS],
    scales: [__m256; GROUPS],
    minima: [__m256; GROUPS],
    of: PhantomData<B>,
}

impl<B: Interleaved> Products<B> {
    /// Do 16 bits hold the products of a group?
    const SIXTEEN: bool = pairs::<B>() >= B::GROUP / 4;

    /// The sum of a group's products.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn integers(&self, group: usize) -> __m256i {
        let sums = self.integers[group];
        if Self::SIXTEEN { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) } else { sums }
    }
}

impl<B: Interleaved + Above> TakenApart<B> for Products<B> {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn codes(&mut self, first: usize, codes: [__m256i; 4]) {
        let mut products = [_mm256_setzero_si256(); 4];
        for nth in 0..4 {
            // SAFETY: a block has so many elements, and so has x.
            let x = _mm256_set1_epi32(unsafe { self.x.add(first + nth).read_unaligned() });
            products[nth] = if const { pairs::<B>() } == 0 {
                let codes = _mm256_xor_si256(codes[nth], _mm256_set1_epi8(B::ABOVE.cast_signed()));
                _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
            } else {
                _mm256_maddubs_epi16(codes[nth], x)
            };
        }
        let [a, b, c, d] = products;
        let sum = &mut self.integers[first / (B::GROUP / 4)];
        let wide = |sixteen| _mm256_madd_epi16(sixteen, _mm256_set1_epi16(1));
        *sum = match const { pairs::<B>() } {
            0 | 1 => {
                let [low, high] = [_mm256_add_epi32(wide(a), wide(b)), _mm256_add_epi32(wide(c), wide(d))];
                _mm256_add_epi32(*sum, _mm256_add_epi32(low, high))
            }
            2 => {
                let [low, high] = [wide(_mm256_add_epi16(a, b)), wide(_mm256_add_epi16(c, d))];
                _mm256_add_epi32(*sum, _mm256_add_epi32(low, high))
            }
            _ => {
                let four = _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d));
                if Self::SIXTEEN { _mm256_add_epi16(*sum, four) } else { _mm256_add_epi32(*sum, wide(four)) }
            }
        };
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scale(&mut self, group: usize, scales: __m256) {
        self.scales[group] = scales;
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn minimum(&mut self, group: usize, minima: __m256) {
        self.minima[group] = minima;
    }
}
