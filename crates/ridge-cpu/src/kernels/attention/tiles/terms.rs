//! Rows of keys and values as terms of bf16, and values turned into tiles.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_UNORD_Q, _mm512_abs_epi8, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi256_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16, _mm512_cvtne2ps_pbh, _mm512_fpclass_ps_mask,
    _mm512_inserti64x4, _mm512_loadu_si512, _mm512_mask_mov_ps, _mm512_mask_sub_ps, _mm512_maskz_mov_ps,
    _mm512_permutex2var_epi8, _mm512_permutexvar_epi64, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setr_epi64, _mm512_srli_epi32, _mm512_storeu_si512, _mm512_ternarylogic_epi32, _mm512_unpackhi_epi8,
    _mm512_unpacklo_epi8,
};

use half::bf16;

use super::softmax::words;
use super::span::{SPAN, STEP, STEPS};
use crate::amx::{self, SIDE, Words};
use crate::simd::Element;

/// Rows of `dim` elements as rows of `width` for each term, which are `term` elements apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma,f16c")]
pub(super) fn split_rows<T: Element, const TERMS: usize>(
    from: &[T],
    dim: usize,
    width: usize,
    term: usize,
    to: &mut [bf16],
) {
    let stored = if TERMS == 1 { T::as_bf16(from) } else { None };
    if let Some(from) = stored.filter(|_| dim == width) {
        return to[..from.len()].copy_from_slice(from);
    }
    let codes = if dim == width { T::as_codes(from) } else { None };
    if let Some(codes) = codes.filter(|_| dim.is_multiple_of(2 * STEP)) {
        for (from, to) in codes.as_chunks::<{ 2 * STEP }>().0.iter().zip(to.chunks_exact_mut(2 * STEP)) {
            let [low, high] = widen_codes(from);
            // SAFETY: 64 bytes each.
            unsafe {
                _mm512_storeu_si512(to.as_mut_ptr().cast(), low);
                _mm512_storeu_si512(to[STEP..].as_mut_ptr().cast(), high);
            }
        }
        return;
    }
    for (row, from) in from.chunks_exact(dim).enumerate() {
        let mut put = |at: usize, from: &[T; STEP]| {
            split_line::<T, TERMS>(from, |nth, line| {
                let to = &mut to[nth * term + row * width + at..][..STEP];
                // SAFETY: 64 bytes.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), line) };
            });
        };
        let (lines, rest) = from.as_chunks::<STEP>();
        lines.iter().enumerate().for_each(|(i, line)| put(i * STEP, line));
        if !rest.is_empty() {
            let mut line = [T::narrow(0.0); STEP];
            line[..rest.len()].copy_from_slice(rest);
            put(dim - rest.len(), &line);
        }
    }
}

/// The bytes of 0 to 127 in bf16, the low ones and the high ones.
const BYTES: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut i = 0;
    while i < 128 {
        let bits = (i as f32).to_bits() >> 16;
        (bytes[0][i], bytes[1][i]) = (bits as u8, (bits >> 8) as u8);
        i += 1;
    }
    bytes
};

/// 64 codes, -127 to 127, as bf16, which is exact: the bytes of magnitudes are looked up, and signs added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn widen_codes(codes: &[i8; 64]) -> [__m512i; 2] {
    // SAFETY: 64 bytes.
    let load = |bytes: *const u8| unsafe { _mm512_loadu_si512(bytes.cast()) };
    // Unpacking takes the first eight bytes of each 16, and then the others.
    let codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), load(codes.as_ptr().cast()));
    let magnitudes = _mm512_abs_epi8(codes);
    let look_up =
        |bytes: &[u8; 128]| _mm512_permutex2var_epi8(load(bytes.as_ptr()), magnitudes, load(bytes[64..].as_ptr()));
    let [low, high] = [look_up(&BYTES[0]), look_up(&BYTES[1])];
    // high | (codes & sign)
    let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(i8::MIN));
    [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
}

/// 32 elements, or 64 in two lines, rounded to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")]
pub(super) fn rounded_lines<T: Element, const LINES: usize>(from: &[T]) -> [__m512i; LINES] {
    if LINES == 2
        && let Some(codes) = T::as_codes(from)
    {
        let lines = widen_codes(codes.first_chunk().expect("64 codes"));
        return std::array::from_fn(|i| lines[i]);
    }
    let lines = from.as_chunks::<STEP>().0;
    std::array::from_fn(|i| rounded(&lines[i]))
}

/// 32 elements, rounded to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) fn rounded<T: Element>(from: &[T; STEP]) -> __m512i {
    if let Some(stored) = T::as_bf16(from) {
        // SAFETY: 64 bytes.
        return unsafe { _mm512_loadu_si512(stored.as_ptr().cast()) };
    }
    let [low, high] = from.as_chunks::<SIDE>().0 else { unreachable!("32 elements are two vectors") };
    // SAFETY: there is AVX-512.
    unsafe { words(_mm512_cvtne2ps_pbh(T::widen_vector(high), T::widen_vector(low))) }
}

/// The terms of 32 elements: one is rounded, several are cut off.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn split_line<T: Element, const TERMS: usize>(from: &[T; STEP], mut to: impl FnMut(usize, __m512i)) {
    if TERMS == 1 {
        return to(0, rounded(from));
    }
    let [low, high] = from.as_chunks::<SIDE>().0 else { unreachable!("32 elements are two vectors") };
    // SAFETY: there is AVX-512.
    let mut rest = unsafe { [T::widen_vector(low), T::widen_vector(high)] };
    // Cut off, NaN could become infinity. Both are the last term, which is multiplied by the first alone: a lower term may
    // be 0, and infinity times 0 is NaN.
    let finite = rest.map(|x| !_mm512_fpclass_ps_mask::<0x99>(x));
    rest = rest.map(|x| _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), _mm512_set1_ps(f32::NAN)));
    for term in 0..TERMS {
        let of_term = |x: __m512, finite| if term < TERMS - 1 { _mm512_maskz_mov_ps(finite, x) } else { x };
        let here = [of_term(rest[0], finite[0]), of_term(rest[1], finite[1])];
        let [low, high] = here.map(|x| _mm512_srli_epi32::<16>(_mm512_castps_si512(x)));
        let line =
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high));
        to(term, line);
        for (x, finite) in rest.iter_mut().zip(finite) {
            let cut = _mm512_and_si512(_mm512_castps_si512(*x), _mm512_set1_epi32(0xffff_0000_u32 as i32));
            *x = _mm512_mask_sub_ps(*x, finite, *x, _mm512_castsi512_ps(cut));
        }
    }
}

/// The `terms` terms of `steps` steps of values `[SPAN][width]` as tiles of transposed values, pairs of keys across.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(super) fn transpose_values(span: &[bf16], width: usize, terms: usize, steps: usize, to: &mut [Words]) {
    for (t, to) in to.chunks_exact_mut(width / SIDE * STEPS).enumerate().take(terms) {
        for (step, keys) in span[t * SPAN * width..].chunks_exact(STEP * width).enumerate().take(steps) {
            for d in 0..width / SIDE {
                let mut lines = [[0; SIDE]; SIDE];
                for (line, pair) in lines.iter_mut().zip(keys.chunks_exact(2 * width)) {
                    let (even, odd) = (&pair[d * SIDE..][..SIDE], &pair[width + d * SIDE..][..SIDE]);
                    for i in 0..SIDE {
                        line[i] = u32::from(even[i].to_bits()) | u32::from(odd[i].to_bits()) << 16;
                    }
                }
                amx::transpose_into(&lines, &mut to[d * STEPS + step]);
            }
        }
    }
}
