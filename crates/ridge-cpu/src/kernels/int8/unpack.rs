//! Blocks of 16 rows of a weight taken apart into codes and scales, for the common formats with instructions of their
//! own, so that one row of x waits for memory and not for them.

use std::arch::x86_64::{
    __m512, __m512i, _mm_loadu_si128, _mm_srli_epi16, _mm256_and_si256, _mm256_loadu_si256, _mm256_or_si256,
    _mm256_set_m128i, _mm256_set1_epi8, _mm256_slli_epi16, _mm256_srli_epi16, _mm256_storeu_si256, _mm256_sub_epi8,
    _mm512_and_si512, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_i32gather_epi32,
    _mm512_loadu_si512, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi32, _mm512_sllv_epi32, _mm512_srai_epi32,
    _mm512_srli_epi32, _mm512_storeu_ps,
};

use ridge_graph::format::{BlockFormat, Q4_0, Q4K, Q6K, Q8_0};

use super::{GROUP, SIDE};
use crate::simd;

/// The same blocks of up to 16 rows, of one group of K or the last part of one.
pub(super) struct OfRows<'a> {
    /// From the blocks of the first row on.
    pub(super) data: &'a [u8],
    /// Bytes from a row to the next.
    pub(super) stride: usize,
    /// Blocks of a row.
    pub(super) blocks: usize,
    pub(super) rows: usize,
}

/// What they hold.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Unpacked {
    /// Of each row.
    pub(super) codes: [[i8; GROUP]; SIDE],
    /// Of the rows, for each 16 or 32 elements that share one.
    pub(super) scales: [[f32; SIDE]; GROUP / 16],
    /// As scales, where the format has them.
    pub(super) minima: [[f32; SIDE]; GROUP / 16],
}

/// Takes blocks apart. Rows that are not there are left as they are.
pub(super) type Unpack = fn(&OfRows<'_>, &mut Unpacked);

/// How blocks of a format are taken apart.
pub(super) fn of<B: BlockFormat>() -> Unpack {
    match B::NAME {
        Q8_0::NAME => checked::<Q8_0>,
        Q4_0::NAME => checked::<Q4_0>,
        Q4K::NAME => checked::<Q4K>,
        Q6K::NAME => checked::<Q6K>,
        _ => each::<B>,
    }
}

/// A format with instructions of its own.
trait Rows: BlockFormat {
    /// # Safety
    /// There is AVX-512, all blocks are inside of the data, and there is a row at least.
    unsafe fn unpack(blocks: &OfRows<'_>, to: &mut Unpacked);
}

fn checked<B: Rows>(blocks: &OfRows<'_>, to: &mut Unpacked) {
    assert!((1..=SIDE).contains(&blocks.rows) && blocks.blocks * B::ELEMENTS <= GROUP);
    assert!(blocks.data.len() >= (blocks.rows - 1) * blocks.stride + blocks.blocks * B::BYTES);
    assert!(blocks.stride < 1 << 26);
    // SAFETY: what is unpacked so is multiplied on tiles, and every machine that has them has AVX-512.
    unsafe { B::unpack(blocks, to) };
}

simd::vectorised! {
    fn each<B: BlockFormat>(blocks: &OfRows<'_>, to: &mut Unpacked) {
        for row in 0..blocks.rows {
            let of_row = &blocks.data[row * blocks.stride..][..blocks.blocks * B::BYTES];
            for (nth, (block, codes)) in
                of_row.chunks_exact(B::BYTES).zip(to.codes[row].chunks_exact_mut(B::ELEMENTS)).enumerate()
            {
                let (mut scales, mut minima) = ([0.0; GROUP / 16], [0.0; GROUP / 16]);
                B::codes(block, codes, &mut scales, &mut minima);
                let groups = B::ELEMENTS / B::GROUP;
                for group in 0..groups {
                    to.scales[nth * groups + group][row] = scales[group];
                    to.minima[nth * groups + group][row] = minima[group];
                }
            }
        }
    }
}

/// The 32-bit word at byte `at` of each row; of a row that is not there that of the last one.
///
/// # Safety
/// The words are inside of the data.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn words(blocks: &OfRows<'_>, at: usize) -> __m512i {
    let places: [i32; SIDE] = std::array::from_fn(|row| (row.min(blocks.rows - 1) * blocks.stride) as i32);
    // SAFETY: inside of the data by the caller's promise.
    unsafe {
        let places = _mm512_loadu_si512(places.as_ptr().cast());
        _mm512_i32gather_epi32::<1>(places, blocks.data.as_ptr().add(at).cast())
    }
}

/// The lower halves of words, which are f16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn halves(words: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
}

/// Bits of words as floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn small(words: __m512i, mask: i32) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(mask)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn put(to: &mut [f32; SIDE], values: __m512) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) };
}

impl Rows for Q8_0 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn unpack(blocks: &OfRows<'_>, to: &mut Unpacked) {
        for row in 0..blocks.rows {
            for nth in 0..blocks.blocks {
                // SAFETY: a block is 34 bytes inside of the data, a row of codes as many blocks of 32.
                unsafe {
                    let from = blocks.data.as_ptr().add(row * blocks.stride + nth * Self::BYTES + 2);
                    let codes = _mm256_loadu_si256(from.cast());
                    _mm256_storeu_si256(to.codes[row].as_mut_ptr().add(32 * nth).cast(), codes);
                }
            }
        }
        for nth in 0..blocks.blocks {
            // SAFETY: a block has more than four bytes.
            put(&mut to.scales[nth], halves(unsafe { words(blocks, nth * Self::BYTES) }));
        }
    }
}

impl Rows for Q4_0 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn unpack(blocks: &OfRows<'_>, to: &mut Unpacked) {
        let (low, eight) = (_mm256_set1_epi8(15), _mm256_set1_epi8(8));
        for row in 0..blocks.rows {
            for nth in 0..blocks.blocks {
                // SAFETY: a block is 18 bytes inside of the data, a row of codes as many blocks of 32.
                unsafe {
                    let from = blocks.data.as_ptr().add(row * blocks.stride + nth * Self::BYTES + 2);
                    let pairs = _mm_loadu_si128(from.cast());
                    let pairs = _mm256_set_m128i(_mm_srli_epi16::<4>(pairs), pairs);
                    let codes = _mm256_sub_epi8(_mm256_and_si256(pairs, low), eight);
                    _mm256_storeu_si256(to.codes[row].as_mut_ptr().add(32 * nth).cast(), codes);
                }
            }
        }
        for nth in 0..blocks.blocks {
            // SAFETY: a block has more than four bytes.
            put(&mut to.scales[nth], halves(unsafe { words(blocks, nth * Self::BYTES) }));
        }
    }
}

impl Rows for Q4K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn unpack(blocks: &OfRows<'_>, to: &mut Unpacked) {
        let low = _mm256_set1_epi8(15);
        for row in 0..blocks.rows {
            for pair in 0..4 {
                // SAFETY: a block is 144 bytes inside of the data, a row of codes 256.
                unsafe {
                    let from = blocks.data.as_ptr().add(row * blocks.stride + 16 + 32 * pair);
                    let pairs = _mm256_loadu_si256(from.cast());
                    let to = to.codes[row].as_mut_ptr().add(64 * pair);
                    _mm256_storeu_si256(to.cast(), _mm256_and_si256(pairs, low));
                    _mm256_storeu_si256(to.add(32).cast(), _mm256_and_si256(_mm256_srli_epi16::<4>(pairs), low));
                }
            }
        }
        // SAFETY: the first 16 bytes of a block.
        unsafe { packed_scales(blocks, to) };
    }
}

/// Scales and minima of Q4_K: an f16 of each, then 6 bits for each group.
///
/// # Safety
/// A block of at least 16 bytes of each row is inside of the data.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn packed_scales(blocks: &OfRows<'_>, to: &mut Unpacked) {
    // SAFETY: by the caller's promise.
    let [both, scales, minima, rest] = [0, 4, 8, 12].map(|at| unsafe { words(blocks, at) });
    let (scale, minimum) = (halves(both), halves(_mm512_srli_epi32::<16>(both)));
    // Byte `i` of each word is of groups `i` and `i + 4`.
    let (nibble, upper) = (_mm512_set1_epi32(0x0f0f_0f0f), _mm512_set1_epi32(0x3030_3030));
    let above = |packed: __m512i| _mm512_and_si512(_mm512_srli_epi32::<2>(packed), upper);
    let of_last = |rest: __m512i, packed: __m512i| _mm512_or_si512(_mm512_and_si512(rest, nibble), above(packed));
    let quads = [[scales, of_last(rest, scales)], [minima, of_last(_mm512_srli_epi32::<4>(rest), minima)]];
    for (i, [of_scales, of_minima]) in [[quads[0][0], quads[1][0]], [quads[0][1], quads[1][1]]].into_iter().enumerate()
    {
        let byte = |words: __m512i, nth: usize| match nth {
            0 => small(words, 63),
            1 => small(_mm512_srli_epi32::<8>(words), 63),
            2 => small(_mm512_srli_epi32::<16>(words), 63),
            _ => small(_mm512_srli_epi32::<24>(words), 63),
        };
        for nth in 0..4 {
            put(&mut to.scales[4 * i + nth], _mm512_mul_ps(scale, byte(of_scales, nth)));
            put(&mut to.minima[4 * i + nth], _mm512_mul_ps(minimum, byte(of_minima, nth)));
        }
    }
}

impl Rows for Q6K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn unpack(blocks: &OfRows<'_>, to: &mut Unpacked) {
        let (low, pair, middle) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30), _mm256_set1_epi8(32));
        for row in 0..blocks.rows {
            for half in 0..2 {
                // SAFETY: a block is 210 bytes inside of the data, a row of codes 256.
                unsafe {
                    let from = blocks.data.as_ptr().add(row * blocks.stride);
                    let upper = _mm256_loadu_si256(from.add(128 + 32 * half).cast());
                    let lower = [0, 32].map(|at| _mm256_loadu_si256(from.add(64 * half + at).cast()));
                    let to = to.codes[row].as_mut_ptr().add(128 * half);
                    let codes = |lower, upper| {
                        let codes = _mm256_or_si256(_mm256_and_si256(lower, low), _mm256_and_si256(upper, pair));
                        _mm256_sub_epi8(codes, middle)
                    };
                    let store = |nth: usize, codes| _mm256_storeu_si256(to.add(32 * nth).cast(), codes);
                    store(0, codes(lower[0], _mm256_slli_epi16::<4>(upper)));
                    store(1, codes(lower[1], _mm256_slli_epi16::<2>(upper)));
                    store(2, codes(_mm256_srli_epi16::<4>(lower[0]), upper));
                    store(3, codes(_mm256_srli_epi16::<4>(lower[1]), _mm256_srli_epi16::<2>(upper)));
                }
            }
        }
        // The f16 is in the block's last two bytes.
        // SAFETY: bytes 192 to 210 of a block.
        let scale = halves(_mm512_srli_epi32::<16>(unsafe { words(blocks, 206) }));
        for quad in 0..4 {
            // SAFETY: as above.
            let packed = unsafe { words(blocks, 192 + 4 * quad) };
            for nth in 0..4 {
                let above = _mm512_sllv_epi32(packed, _mm512_set1_epi32(24 - 8 * nth as i32));
                let of_group = _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(above));
                put(&mut to.scales[4 * quad + nth], _mm512_mul_ps(scale, of_group));
            }
        }
    }
}
