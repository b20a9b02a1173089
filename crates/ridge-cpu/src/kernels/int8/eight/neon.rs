//! Two vectors of NEON, which every processor of AArch64 has.
#![allow(clippy::inline_always)] // vectors are in memory where they are passed as arrays

use std::arch::aarch64::{
    float32x4_t, uint32x4_t, uint64x2_t, vandq_u32, vceqq_u8, vcvtq_f32_s32, vdupq_n_f32, vdupq_n_s32, vdupq_n_u8,
    vdupq_n_u32, veorq_u32, vfmaq_f32, vld1q_f32, vld1q_u8, vld1q_u32, vmulq_f32, vnegq_f32, vorrq_u32, vqtbl1q_u8,
    vreinterpretq_f32_u32, vreinterpretq_s32_u32, vreinterpretq_u8_u16, vreinterpretq_u8_u32, vreinterpretq_u16_u32,
    vreinterpretq_u32_s32, vreinterpretq_u32_u8, vreinterpretq_u32_u64, vreinterpretq_u64_u32, vshlq_n_u32, vshlq_u32,
    vshrq_n_s32, vshrq_n_u32, vst1q_f32, vst1q_u8, vsubq_u8, vsubq_u32, vtrn1q_u32, vtrn2q_u32, vuzp1q_u16, vzip1q_u64,
    vzip2q_u64,
};

use super::super::scale::EIGHT;
use crate::simd::halves_to_floats;

pub(in crate::kernels::int8) type Words = [uint32x4_t; 2];
pub(in crate::kernels::int8) type Floats = [float32x4_t; 2];

/// Defines functions of NEON.
macro_rules! functions {
    ($($(#[$meta:meta])* fn $name:ident $(<const $n:ident: i32>)? ($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$meta])*
            #[inline(always)]
            pub(in crate::kernels::int8) fn $name $(<const $n: i32>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: every processor of AArch64 has NEON.
                unsafe { $body }
            }
        )*
    };
}

/// What `of` makes of both halves.
#[inline(always)]
fn each<A: Copy, B>([low, high]: [A; 2], of: impl Fn(A) -> B) -> [B; 2] {
    [of(low), of(high)]
}

#[inline(always)]
fn pairs<A: Copy, B>(a: [A; 2], b: [A; 2], of: impl Fn(A, A) -> B) -> [B; 2] {
    [of(a[0], b[0]), of(a[1], b[1])]
}

functions! {
    fn and(a: Words, b: Words) -> Words { pairs(a, b, |a, b| vandq_u32(a, b)) }
    fn or(a: Words, b: Words) -> Words { pairs(a, b, |a, b| vorrq_u32(a, b)) }
    fn xor(a: Words, b: Words) -> Words { pairs(a, b, |a, b| veorq_u32(a, b)) }
    fn sub(a: Words, b: Words) -> Words { pairs(a, b, |a, b| vsubq_u32(a, b)) }
    /// All bits of bytes that are equal, none of others.
    fn equal_bytes(a: Words, b: Words) -> Words {
        pairs(a, b, |a, b| vreinterpretq_u32_u8(vceqq_u8(vreinterpretq_u8_u32(a), vreinterpretq_u8_u32(b))))
    }
    fn left<const BITS: i32>(words: Words) -> Words { each(words, |words| vshlq_n_u32::<BITS>(words)) }
    fn right<const BITS: i32>(words: Words) -> Words { each(words, |words| vshrq_n_u32::<BITS>(words)) }
    fn right_signed<const BITS: i32>(words: Words) -> Words {
        each(words, |words| vreinterpretq_u32_s32(vshrq_n_s32::<BITS>(vreinterpretq_s32_u32(words))))
    }
    fn left_by(words: Words, bits: usize) -> Words { each(words, |words| vshlq_u32(words, vdupq_n_s32(bits as i32))) }
    fn right_by(words: Words, bits: usize) -> Words { each(words, |words| vshlq_u32(words, vdupq_n_s32(-(bits as i32)))) }
    fn splat(word: i32) -> Words { [vdupq_n_u32(word.cast_unsigned()); 2] }
    fn splat_bytes(byte: u8) -> Words { [vreinterpretq_u32_u8(vdupq_n_u8(byte)); 2] }
    /// In each half the bytes of that half that `at` names.
    fn shuffle_bytes(words: Words, at: [u8; 16]) -> Words {
        let at = vld1q_u8(at.as_ptr());
        each(words, |words| vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(words), at)))
    }
    /// The bytes of `entries` that the bytes of `at` name, which are below 16.
    fn table(entries: [u8; 16], at: Words) -> Words {
        let entries = vld1q_u8(entries.as_ptr());
        each(at, |at| vreinterpretq_u32_u8(vqtbl1q_u8(entries, vreinterpretq_u8_u32(at))))
    }
    /// The lower halves of words, which are f16.
    fn halves(words: Words) -> Floats {
        let [low, high] = each(words, |words| vreinterpretq_u16_u32(words));
        halves_to_floats(vreinterpretq_u8_u16(vuzp1q_u16(low, high)))
    }
    /// The values of signed integers.
    fn float(words: Words) -> Floats { each(words, |words| vcvtq_f32_s32(vreinterpretq_s32_u32(words))) }
    fn as_floats(words: Words) -> Floats { each(words, |words| vreinterpretq_f32_u32(words)) }
    fn mul(a: Floats, b: Floats) -> Floats { pairs(a, b, |a, b| vmulq_f32(a, b)) }
    fn negate(a: Floats) -> Floats { each(a, |a| vnegq_f32(a)) }
    /// Adds `floats`, multiplied by `factor`, to those of `to`, in one rounding.
    fn add_product(floats: Floats, factor: f32, to: &mut [f32; EIGHT]) {
        for (to, floats) in to.as_chunks_mut::<4>().0.iter_mut().zip(floats) {
            vst1q_f32(to.as_mut_ptr(), vfmaq_f32(vld1q_f32(to.as_ptr()), floats, vdupq_n_f32(factor)));
        }
    }
}

/// Puts codes, of which the bytes are `above`: products take signed ones.
///
/// # Safety
/// `to` has room for 32 bytes.
#[inline(always)]
pub(in crate::kernels::int8) unsafe fn put_codes(to: *mut u8, codes: Words, above: u8) {
    for (half, codes) in codes.into_iter().enumerate() {
        // SAFETY: by the caller's promise.
        unsafe { vst1q_u8(to.add(16 * half), vsubq_u8(vreinterpretq_u8_u32(codes), vdupq_n_u8(above))) };
    }
}

/// # Safety
/// `to` has room for eight floats.
#[inline(always)]
pub(in crate::kernels::int8) unsafe fn put_floats(to: *mut f32, floats: Floats) {
    for (half, floats) in floats.into_iter().enumerate() {
        // SAFETY: by the caller's promise.
        unsafe { vst1q_f32(to.add(4 * half), floats) };
    }
}

/// # Safety
/// The words are there.
#[inline(always)]
pub(in crate::kernels::int8) unsafe fn words(from: *const u32) -> Words {
    // SAFETY: by the caller's promise.
    unsafe { [vld1q_u32(from), vld1q_u32(from.add(4))] }
}

/// The four 32-bit words from each of `rows` on, each of all rows.
///
/// # Safety
/// 16 bytes of each row are there.
#[inline(always)]
pub(in crate::kernels::int8) unsafe fn transposed(rows: [*const u8; EIGHT]) -> [Words; 4] {
    // SAFETY: by the caller's promise.
    let [low, high] =
        unsafe { [0, 4].map(|first| four([rows[first], rows[first + 1], rows[first + 2], rows[first + 3]])) };
    [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
}

/// As [`transposed`].
#[inline(always)]
unsafe fn four(rows: [*const u8; 4]) -> [uint32x4_t; 4] {
    // SAFETY: by the caller's promise.
    unsafe {
        let row = |nth: usize| vreinterpretq_u32_u8(vld1q_u8(rows[nth]));
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        let wide = |words: uint32x4_t| -> uint64x2_t { vreinterpretq_u64_u32(words) };
        // Words 0 and 2 of two rows, and 1 and 3.
        let (even, odd) = (vtrn1q_u32(a, b), vtrn2q_u32(a, b));
        let (even_of_last, odd_of_last) = (vtrn1q_u32(c, d), vtrn2q_u32(c, d));
        [
            vreinterpretq_u32_u64(vzip1q_u64(wide(even), wide(even_of_last))),
            vreinterpretq_u32_u64(vzip1q_u64(wide(odd), wide(odd_of_last))),
            vreinterpretq_u32_u64(vzip2q_u64(wide(even), wide(even_of_last))),
            vreinterpretq_u32_u64(vzip2q_u64(wide(odd), wide(odd_of_last))),
        ]
    }
}
