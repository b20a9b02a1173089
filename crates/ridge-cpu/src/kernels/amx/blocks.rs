//! Values of weights that are stored in blocks, rounded to bf16, as lines of tiles: the common formats with
//! instructions of their own, so that one row of x waits for memory and not for them.
//!
//! Codes of four and five bits are looked up in tables of the values that they stand for in their group.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_set1_epi16, _mm512_add_ps, _mm512_and_si512,
    _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtne2ps_pbh, _mm512_cvtph_ps,
    _mm512_fmsub_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_permutex2var_ps, _mm512_permutexvar_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setr_ps, _mm512_slli_epi32, _mm512_srl_epi32, _mm512_srli_epi32, _mm512_storeu_si512,
    _mm512_sub_epi32, _mm512_sub_ps,
};

use ridge_graph::format::{BlockFormat, Q4_0, Q4K, Q5K, Q6K, Q8_0};

use super::{DEPTH, SIDE, Words};
use crate::simd;

/// The same blocks of up to 16 rows.
pub(in crate::kernels) struct OfRows<'a> {
    /// From the blocks of the first row on.
    pub(in crate::kernels) data: &'a [u8],
    /// Bytes from a row to the next.
    pub(in crate::kernels) stride: usize,
    /// Bytes of the blocks of a row.
    pub(in crate::kernels) bytes: usize,
    pub(in crate::kernels) rows: usize,
}

/// Writes each row's values to its line of one tile after another.
pub(in crate::kernels) type ToTiles = fn(&OfRows<'_>, &mut [Words]);

/// How blocks of the format called `name` are brought to tiles, if there is a way of its own.
pub(in crate::kernels) fn to_tiles(name: &str) -> Option<ToTiles> {
    match name {
        Q8_0::NAME => Some(lines::<Q8_0>),
        Q4_0::NAME => Some(lines::<Q4_0>),
        Q4K::NAME => Some(lines::<Q4K>),
        Q5K::NAME => Some(lines::<Q5K>),
        Q6K::NAME => Some(lines::<Q6K>),
        _ => None,
    }
}

/// A format whose blocks are 32 values or a multiple of that.
trait Lanes: BlockFormat {
    /// Gives all values, 32 at a time.
    ///
    /// # Safety
    /// There is AVX-512, and the block is whole.
    unsafe fn each(block: &[u8], to: impl FnMut(usize, [__m512; 2]));
}

fn lines<B: Lanes>(blocks: &OfRows<'_>, to: &mut [Words]) {
    assert!(to.len() * DEPTH == blocks.bytes / B::BYTES * B::ELEMENTS && blocks.rows <= SIDE);
    // SAFETY: tiles are used where there is AMX, and then there is AVX-512 with instructions for bf16.
    unsafe { lines_of::<B>(blocks, to) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
fn lines_of<B: Lanes>(blocks: &OfRows<'_>, to: &mut [Words]) {
    for line in 0..blocks.rows {
        let of_row = &blocks.data[line * blocks.stride..][..blocks.bytes];
        // What follows in the row is needed next.
        simd::fetch(of_row.as_ptr_range().end, blocks.bytes);
        for (block, to) in of_row.chunks_exact(B::BYTES).zip(to.chunks_exact_mut(B::ELEMENTS / DEPTH)) {
            // SAFETY: the caller has AVX-512; a line is 64 bytes.
            unsafe {
                B::each(block, |i, [low, high]| {
                    let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                    _mm512_storeu_si512(to[i].as_mut_ptr().add(line * SIDE).cast(), rounded);
                });
            }
        }
    }
}

/// The f16 at byte `at`, in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn half(block: &[u8], at: usize) -> __m512 {
    _mm512_cvtph_ps(_mm256_set1_epi16(i16::from_le_bytes([block[at], block[at + 1]])))
}

/// 16 bytes from `at` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn bytes(block: &[u8], at: usize) -> __m512i {
    let bytes = &block[at..at + 16];
    // SAFETY: 16 bytes.
    _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// 0 to 15.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn codes() -> __m512 {
    _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.)
}

impl Lanes for Q8_0 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn each(block: &[u8], mut to: impl FnMut(usize, [__m512; 2])) {
        let scale = half(block, 0);
        let values = |at: usize| {
            let codes = &block[at..at + 16];
            // SAFETY: 16 bytes.
            let codes = _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
            _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale)
        };
        to(0, [values(2), values(18)]);
    }
}

impl Lanes for Q4_0 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn each(block: &[u8], mut to: impl FnMut(usize, [__m512; 2])) {
        let table = _mm512_mul_ps(half(block, 0), _mm512_sub_ps(codes(), _mm512_set1_ps(8.0)));
        let pairs = bytes(block, 2);
        // The look-up takes the lower four bits.
        let high = _mm512_srli_epi32::<4>(pairs);
        to(0, [_mm512_permutexvar_ps(pairs, table), _mm512_permutexvar_ps(high, table)]);
    }
}

/// Scale and minimum of group `group` of a block of Q4_K or Q5_K, of 6 bits each.
#[inline]
fn group(block: &[u8], group: usize) -> [f32; 2] {
    let packed = &block[4..16];
    let [scale, minimum] = if group < 4 {
        [packed[group] & 63, packed[group + 4] & 63]
    } else {
        let low = packed[group + 4];
        [low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4]
    };
    [scale, minimum].map(f32::from)
}

impl Lanes for Q4K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn each(block: &[u8], mut to: impl FnMut(usize, [__m512; 2])) {
        let (scale, minimum) = (half(block, 0), half(block, 2));
        let table = |nth: usize| {
            let [s, m] = group(block, nth).map(|x| _mm512_set1_ps(x));
            _mm512_fmsub_ps(_mm512_mul_ps(scale, s), codes(), _mm512_mul_ps(minimum, m))
        };
        for pair in 0..4 {
            let [low, high] = [bytes(block, 16 + 32 * pair), bytes(block, 32 + 32 * pair)];
            let of = table(2 * pair);
            to(2 * pair, [_mm512_permutexvar_ps(low, of), _mm512_permutexvar_ps(high, of)]);
            let of = table(2 * pair + 1);
            let [low, high] = [_mm512_srli_epi32::<4>(low), _mm512_srli_epi32::<4>(high)];
            to(2 * pair + 1, [_mm512_permutexvar_ps(low, of), _mm512_permutexvar_ps(high, of)]);
        }
    }
}

impl Lanes for Q5K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn each(block: &[u8], mut to: impl FnMut(usize, [__m512; 2])) {
        let (scale, minimum) = (half(block, 0), half(block, 2));
        let fifths = [bytes(block, 16), bytes(block, 32)];
        for nth in 0..8 {
            let [s, m] = group(block, nth).map(|x| _mm512_set1_ps(x));
            let (s, m) = (_mm512_mul_ps(scale, s), _mm512_mul_ps(minimum, m));
            let table = _mm512_fmsub_ps(s, codes(), m);
            let above = _mm512_fmsub_ps(s, _mm512_add_ps(codes(), _mm512_set1_ps(16.0)), m);
            let shift = |x: __m512i, by: usize| _mm512_srl_epi32(x, _mm_cvtsi32_si128(by as i32));
            let values = |i: usize| {
                let low = shift(bytes(block, 48 + nth / 2 * 32 + 16 * i), nth % 2 * 4);
                let low = _mm512_and_si512(low, _mm512_set1_epi32(15));
                let fifth = _mm512_and_si512(shift(fifths[i], nth), _mm512_set1_epi32(1));
                _mm512_permutex2var_ps(table, _mm512_or_si512(low, _mm512_slli_epi32::<4>(fifth)), above)
            };
            to(nth, [values(0), values(1)]);
        }
    }
}

impl Lanes for Q6K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn each(block: &[u8], mut to: impl FnMut(usize, [__m512; 2])) {
        let scale = half(block, 208);
        for half in 0..2 {
            let upper = [bytes(block, 128 + 32 * half), bytes(block, 144 + 32 * half)];
            for quarter in 0..4 {
                let values = |i: usize| {
                    let low = bytes(block, 64 * half + quarter % 2 * 32 + 16 * i);
                    let low = if quarter < 2 { low } else { _mm512_srli_epi32::<4>(low) };
                    let low = _mm512_and_si512(low, _mm512_set1_epi32(15));
                    let upper = _mm512_srl_epi32(upper[i], _mm_cvtsi32_si128(quarter as i32 * 2));
                    let upper = _mm512_slli_epi32::<4>(_mm512_and_si512(upper, _mm512_set1_epi32(3)));
                    let code = _mm512_sub_epi32(_mm512_or_si512(low, upper), _mm512_set1_epi32(32));
                    let of_group = f32::from(block[192 + 8 * half + 2 * quarter + i] as i8);
                    _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_mul_ps(scale, _mm512_set1_ps(of_group)))
                };
                to(4 * half + quarter, [values(0), values(1)]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use ridge_graph::sample::Rng;

    #[test]
    fn lines_are_the_rounded_values() {
        if crate::simd::isa() != crate::simd::Isa::Amx {
            return;
        }
        for format in ridge_graph::format::all() {
            let Some(to_tiles) = to_tiles(format.name()) else { continue };
            let mut rng = Rng::new(7);
            let values: Vec<f32> = (0..3 * 512).map(|_| rng.gauss() as f32).collect();
            let blocks = format.encode(&values, &[3, 512], None).remove(0);
            let stride = blocks.len() / 3;
            let mut tiles = vec![[0u32; SIDE * SIDE]; 512 / DEPTH];
            to_tiles(&OfRows { data: &blocks, stride, bytes: stride, rows: 3 }, &mut tiles);
            for (i, exact) in format.values(&[&blocks]).into_iter().enumerate() {
                let (row, i) = (i / 512, i % 512);
                let word = tiles[i / DEPTH][row * SIDE + i % DEPTH / 2];
                let got = bf16::from_bits((word >> (i % 2 * 16)) as u16).to_f32();
                assert!((got - exact).abs() <= exact.abs() / 255.0, "{}, {i}: {got}, {exact}", format.name());
            }
        }
    }
}
