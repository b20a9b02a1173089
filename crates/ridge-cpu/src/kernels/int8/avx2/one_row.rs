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
use crate::interleave::Line;
use crate::simd;

/// How far ahead interleaved weights in blocks of a whole group are fetched, in bytes. While the second half of their rows is taken
/// apart, which takes as long as memory does, the processor fetches nothing by itself. Other distances are slower in
/// Q6_K, some by a third, and so are formats of smaller blocks if they are fetched at all (`benches/results/2026-11-26-cpu-levels.md`).
const AHEAD: usize = 9 << 10;

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
            let mut of_x = [0.0; GROUPS];
            for (of_x, sums) in of_x.iter_mut().zip(sums.chunks_exact(const { B::GROUP / SUMMED })) {
                *of_x = sums.iter().sum();
            }
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
                        if const { B::ELEMENTS == GROUP } {
                            // A half of what is so far ahead, for each half of the rows.
                            let half = unit / 2 * size_of::<Line>();
                            let from = AHEAD + first % SIDE / EIGHT * half;
                            simd::fetch_far(lines.as_ptr().cast::<u8>().wrapping_add(from), half);
                        }
                        products::<B>(InterleavedRows::<B>::new(lines, first % SIDE), codes, &of_x)
                    } else {
                        let from = weight.codes.bytes(elements.start);
                        products::<B>(BlockPointers::new(weight.data, first..these.end, stride, from), codes, &of_x)
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

/// What the products of eight rows with a group of K of x stand for but for the scale of x: `x` are its codes, `of_x` their sums
/// over what shares a scale.
///
/// # Safety
/// There is AVX2, and every row has as many elements as there are of x.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products<B: Interleaved>(rows: impl EightRows, x: &[[i8; 4]], of_x: &[f32; GROUPS]) -> __m256 {
    let groups = const { B::ELEMENTS / B::GROUP };
    let mut total = _mm256_setzero_ps();
    for (block, (x, of_x)) in x.chunks_exact(B::ELEMENTS / 4).zip(of_x.chunks_exact(groups)).enumerate() {
        let integers = [_mm256_setzero_si256(); GROUPS];
        let mut of = Products::<B> { x: x.as_ptr().cast(), of_x: of_x.as_ptr(), integers, total, of: PhantomData };
        // SAFETY: by the caller's promise.
        unsafe { B::unpack(rows.after(block * B::BYTES), &mut of) };
        total = of.total;
    }
    total
}

/// Products of a block of eight rows: integers of each group, until its scales come.
struct Products<B> {
    /// Four codes for each word, and their sums for each group.
    x: *const i32,
    of_x: *const f32,
    /// Of 16 bits where those hold a whole group.
    integers: [__m256i; GROUPS],
    /// What the groups before stand for.
    total: __m256,
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

    /// The sum of x's codes over a group.
    ///
    /// # Safety
    /// A block has so many groups.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn of_x(&self, group: usize) -> __m256 {
        // SAFETY: by the caller's promise.
        _mm256_set1_ps(unsafe { *self.of_x.add(group) })
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
        let mut integers = _mm256_cvtepi32_ps(self.integers(group));
        if const { above::<B>() } != 0 {
            let above = _mm256_set1_ps(f32::from(const { above::<B>() }));
            // SAFETY: by the caller's promise; so it is below.
            integers = _mm256_fnmadd_ps(above, unsafe { self.of_x(group) }, integers);
        }
        self.total = _mm256_fmadd_ps(integers, scales, self.total);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn minimum(&mut self, group: usize, minima: __m256) {
        // SAFETY: as above.
        self.total = _mm256_fnmadd_ps(minima, unsafe { self.of_x(group) }, self.total);
    }
}
