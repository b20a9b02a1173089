//! Squares of words, transposed in registers.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, _mm_castps_pd, _mm_loadu_ps, _mm_movehl_ps, _mm_store_ss, _mm_storel_pd, _mm_storeu_ps,
    _mm256_castps128_ps256, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_insertf128_ps, _mm256_shuffle_ps,
    _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Isa};

/// Lines and words that are turned at a time: a cache line of words.
pub(crate) const TURN: usize = 16;

pub(crate) type Square = [[u32; TURN]; TURN];

/// The first `wide` words of each of the first `rows` columns of `square`, to rows of `to` that are `stride` words apart.
#[inline]
pub(crate) fn turn(square: &Square, rows: usize, wide: usize, stride: usize, to: &mut [u32]) {
    assert!(rows <= TURN && wide <= TURN && (rows == 0 || to.len() >= (rows - 1) * stride + wide));
    #[cfg(target_arch = "x86_64")]
    match simd::isa() {
        // SAFETY: there are the instructions, and each row of `to` has `wide` words, as just checked.
        Isa::Avx2 | Isa::AvxVnni => return unsafe { turn_eights(square, rows, wide, stride, to.as_mut_ptr()) },
        // SAFETY: as above.
        isa if isa >= Isa::Avx512 => return unsafe { turn_sixteen(square, rows, wide, stride, to.as_mut_ptr()) },
        _ => {}
    }
    for (column, to) in to.chunks_mut(stride.max(1)).take(rows).enumerate() {
        for (to, line) in to[..wide].iter_mut().zip(square) {
            *to = line[column];
        }
    }
}

/// # Safety
/// As asserted in [`turn`], with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn turn_sixteen(square: &Square, rows: usize, wide: usize, stride: usize, to: *mut u32) {
    use std::arch::x86_64::_mm512_mask_storeu_epi32;
    if wide == 0 {
        return;
    }
    let mask = u16::MAX >> (TURN - wide);
    crate::amx::transpose(square, |row, words| {
        if row < rows {
            // SAFETY: of the words of this row only `wide` are written, which are in `to` by the caller's promise.
            unsafe { _mm512_mask_storeu_epi32(to.add(row * stride).cast(), mask, words) };
        }
    });
}

/// # Safety
/// As asserted in [`turn`], with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn turn_eights(square: &Square, rows: usize, wide: usize, stride: usize, to: *mut u32) {
    for first in (0..rows).step_by(8) {
        for left in (0..wide).step_by(8) {
            let turned = eight(square, left, first);
            for (row, words) in turned.into_iter().enumerate().take(rows - first) {
                // SAFETY: of the words of this row only `wide` are written, which are in `to` by the caller's promise.
                unsafe { store(words, wide - left, to.add((first + row) * stride + left).cast()) };
            }
        }
    }
}

/// The first `count` words, if there are so many: in parts, as masked stores are slow on some processors.
///
/// # Safety
/// There is AVX2, and `to` has so many words.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(words: __m256, count: usize, to: *mut f32) {
    // SAFETY: by the caller's promise.
    unsafe {
        if count >= 8 {
            return _mm256_storeu_ps(to, words);
        }
        let (mut rest, mut to) = (_mm256_castps256_ps128(words), to);
        if count & 4 != 0 {
            _mm_storeu_ps(to, rest);
            (rest, to) = (_mm256_extractf128_ps::<1>(words), to.add(4));
        }
        if count & 2 != 0 {
            _mm_storel_pd(to.cast(), _mm_castps_pd(rest));
            (rest, to) = (_mm_movehl_ps(rest, rest), to.add(2));
        }
        if count & 1 != 0 {
            _mm_store_ss(to, rest);
        }
    }
}

/// Columns `column..column + 8` of lines `line..line + 8`, as rows. Both are at most 8.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight(square: &Square, line: usize, column: usize) -> [__m256; 8] {
    // Words `at..at + 4` of lines `i` and `i + 4`.
    let load = |i: usize, at: usize| {
        let [low, high] = [line + i, line + i + 4].map(|line| square[line][column + at..][..4].as_ptr().cast::<f32>());
        // SAFETY: four words each.
        unsafe {
            let low = _mm256_castps128_ps256(_mm_loadu_ps(low));
            _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(high))
        }
    };
    let mut rows = [load(0, 0); 8];
    for half in 0..2 {
        let [a, b, c, d] = std::array::from_fn(|i| load(i, 4 * half));
        let [ab, cd] = [_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d)];
        rows[4 * half] = _mm256_shuffle_ps::<0x44>(ab, cd);
        rows[4 * half + 1] = _mm256_shuffle_ps::<0xee>(ab, cd);
        let [ab, cd] = [_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d)];
        rows[4 * half + 2] = _mm256_shuffle_ps::<0x44>(ab, cd);
        rows[4 * half + 3] = _mm256_shuffle_ps::<0xee>(ab, cd);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_rows_and_nothing_else_is_written() {
        let square: Square = std::array::from_fn(|line| std::array::from_fn(|word| (line * TURN + word) as u32));
        for (rows, wide, stride) in
            [(16, 16, 16), (16, 6, 6), (16, 12, 30), (7, 16, 17), (3, 1, 4), (0, 5, 5), (9, 0, 2)]
        {
            let mut to = vec![u32::MAX; TURN * stride + TURN];
            turn(&square, rows, wide, stride, &mut to);
            for (at, word) in to.iter().enumerate() {
                let (row, line) = (at / stride, at % stride);
                let expected = if row < rows && line < wide { square[line][row] } else { u32::MAX };
                assert_eq!(*word, expected, "{rows} rows of {wide}, {stride} apart, word {at}");
            }
        }
    }
}
