//! A vector of AVX2.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _mm_loadu_si128, _mm_packus_epi32, _mm256_and_si256, _mm256_broadcastsi128_si256,
    _mm256_castsi128_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmpeq_epi8, _mm256_cvtepi32_ps,
    _mm256_cvtph_ps, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_inserti128_si256, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_mul_ps, _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_shuffle_epi8, _mm256_slli_epi32, _mm256_sllv_epi32, _mm256_srai_epi32, _mm256_srli_epi32, _mm256_srlv_epi32,
    _mm256_store_ps, _mm256_store_si256, _mm256_storeu_ps, _mm256_sub_epi32, _mm256_unpackhi_epi32,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64, _mm256_xor_ps, _mm256_xor_si256,
};

use super::super::scale::EIGHT;

pub(in crate::kernels::int8) type Words = __m256i;
pub(in crate::kernels::int8) type Floats = __m256;

/// Defines functions that have AVX2.
macro_rules! functions {
    ($($(#[$meta:meta])* fn $name:ident $(<const $n:ident: i32>)? ($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$meta])*
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            pub(in crate::kernels::int8) fn $name $(<const $n: i32>)? ($($arg: $ty),*) $(-> $ret)? $body
        )*
    };
}

functions! {
    fn and(a: Words, b: Words) -> Words { _mm256_and_si256(a, b) }
    fn or(a: Words, b: Words) -> Words { _mm256_or_si256(a, b) }
    fn xor(a: Words, b: Words) -> Words { _mm256_xor_si256(a, b) }
    fn sub(a: Words, b: Words) -> Words { _mm256_sub_epi32(a, b) }
    /// All bits of bytes that are equal, none of others.
    fn equal_bytes(a: Words, b: Words) -> Words { _mm256_cmpeq_epi8(a, b) }
    fn left<const BITS: i32>(words: Words) -> Words { _mm256_slli_epi32::<BITS>(words) }
    fn right<const BITS: i32>(words: Words) -> Words { _mm256_srli_epi32::<BITS>(words) }
    fn right_signed<const BITS: i32>(words: Words) -> Words { _mm256_srai_epi32::<BITS>(words) }
    fn left_by(words: Words, bits: usize) -> Words { _mm256_sllv_epi32(words, _mm256_set1_epi32(bits as i32)) }
    fn right_by(words: Words, bits: usize) -> Words { _mm256_srlv_epi32(words, _mm256_set1_epi32(bits as i32)) }
    fn splat(word: i32) -> Words { _mm256_set1_epi32(word) }
    fn splat_bytes(byte: u8) -> Words { _mm256_set1_epi8(byte.cast_signed()) }
    /// In each half the bytes of that half that `at` names.
    fn shuffle_bytes(words: Words, at: [u8; 16]) -> Words { _mm256_shuffle_epi8(words, twice(at)) }
    /// The bytes of `entries` that the bytes of `at` name, which are below 16.
    fn table(entries: [u8; 16], at: Words) -> Words { _mm256_shuffle_epi8(twice(entries), at) }
    fn twice(bytes: [u8; 16]) -> Words {
        // SAFETY: 16 bytes.
        _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
    }
    /// The lower halves of words, which are f16.
    fn halves(words: Words) -> Floats {
        let words = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
        _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words)))
    }
    /// The values of signed integers.
    fn float(words: Words) -> Floats { _mm256_cvtepi32_ps(words) }
    fn as_floats(words: Words) -> Floats { _mm256_castsi256_ps(words) }
    fn mul(a: Floats, b: Floats) -> Floats { _mm256_mul_ps(a, b) }
    fn negate(a: Floats) -> Floats { _mm256_xor_ps(a, _mm256_set1_ps(-0.0)) }
}

/// Puts bytes that are `_above` what codes are, as they are: products take them so.
///
/// # Safety
/// There is AVX2, and `to` has room for a vector, on a multiple of its bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels::int8) unsafe fn put_codes(to: *mut u8, codes: Words, _above: u8) {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_store_si256(to.cast(), codes) };
}

/// # Safety
/// There is AVX2, and `to` has room for a vector, on a multiple of its bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels::int8) unsafe fn put_floats(to: *mut f32, floats: Floats) {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_store_ps(to, floats) };
}

/// # Safety
/// There is AVX2, and the words are there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels::int8) unsafe fn words(from: *const u32) -> Words {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_loadu_si256(from.cast()) }
}

/// Adds `floats`, multiplied by `factor`, to those of `to`, in one rounding.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels::int8) fn add_product(floats: Floats, factor: f32, to: &mut [f32; EIGHT]) {
    // SAFETY: 8 floats.
    unsafe {
        let total = _mm256_fmadd_ps(floats, _mm256_set1_ps(factor), _mm256_loadu_ps(to.as_ptr()));
        _mm256_storeu_ps(to.as_mut_ptr(), total);
    }
}

/// The four 32-bit words from each of `rows` on, each of all rows.
///
/// # Safety
/// There is AVX2, and 16 bytes of each row are there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::kernels::int8) unsafe fn transposed(rows: [*const u8; EIGHT]) -> [Words; 4] {
    // SAFETY: by the caller's promise.
    let of = |row: usize| unsafe { _mm_loadu_si128(rows[row].cast::<__m128i>()) };
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
