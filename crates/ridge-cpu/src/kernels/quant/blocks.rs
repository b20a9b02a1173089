//! Weights in blocks as tiles of bf16: their values, rounded.
//!
//! Floor: of 64 elements the codes take some three instructions (`unpack.rs`), values five for each 16 and a rounding for
//! each 32, which is 30 in all, beside the 16 cycles that a tile of 16 rows of x takes for as many.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm_load_si128, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtne2ps_pbh, _mm512_mul_ps,
    _mm512_set1_epi8, _mm512_set1_ps, _mm512_store_si512, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_sub_ps,
};

use crate::amx::{DEPTH, SHORT, SIDE, Words};
use crate::kernels::int8::unit;
use crate::kernels::int8::unpack::{self, OfRows, PADDED, Scales, Vectors};
use crate::simd;

/// Writes each row's values to its line of one tile after another.
pub(in crate::kernels) type ToTiles = fn(&OfRows<'_>, &mut Taken, &mut [Words]);

/// The codes of a row.
#[repr(C, align(64))]
struct Line([i8; SHORT]);

/// What blocks are taken apart into on the way.
pub(in crate::kernels) struct Taken {
    scales: Scales,
    line: Line,
    padded: [u8; PADDED],
}

impl Taken {
    pub(in crate::kernels) fn new() -> Self {
        const LINES: [[f32; SIDE]; SHORT / 16] = [[0.0; SIDE]; SHORT / 16];
        Self { scales: Scales { scales: LINES, minima: LINES }, line: Line([0; SHORT]), padded: [0; PADDED] }
    }
}

/// [`ToTiles`] for blocks of a format, of which `to` are as many tiles of K.
pub(in crate::kernels) fn to_tiles<B: Vectors>(blocks: &OfRows<'_>, taken: &mut Taken, to: &mut [Words]) {
    unpack::check::<B>(blocks);
    assert!(to.len() * DEPTH == blocks.blocks * B::ELEMENTS);
    // SAFETY: tiles are used where there is AMX, and then there is AVX-512 with instructions for bf16; the blocks are
    // there.
    unsafe { lines::<B>(blocks, taken, to) };
}

/// # Safety
/// There is AVX-512, and the blocks are inside of the data.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn lines<B: Vectors>(blocks: &OfRows<'_>, taken: &mut Taken, to: &mut [Words]) {
    let Taken { scales, line, padded } = taken;
    let above = _mm512_set1_epi8(B::ABOVE.cast_signed());
    // SAFETY: by the caller's promise.
    unsafe { B::scales(blocks, scales) };
    for row in 0..blocks.rows {
        let at = blocks.data[row * blocks.stride..].as_ptr();
        // What follows in the row is needed next.
        let bytes = blocks.blocks * B::BYTES;
        simd::fetch(at.wrapping_add(bytes), bytes);
        // SAFETY: the blocks are inside of the data, 64 bytes each of the line, and 16 in each of its places.
        unsafe {
            let codes = B::load(unpack::whole::<B>(at, blocks.blocks, padded));
            for (nth, codes) in codes.into_iter().enumerate() {
                _mm512_store_si512(line.0.as_mut_ptr().add(64 * nth).cast(), _mm512_sub_epi8(codes, above));
            }
            for (tile, to) in to.iter_mut().enumerate() {
                let values = |unit_of_16: usize| {
                    let group = unit_of_16 * 16 / B::GROUP;
                    let codes = _mm_load_si128(line.0.as_ptr().add(16 * B::PLACES[unit_of_16]).cast());
                    let codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
                    let mut values = _mm512_mul_ps(codes, _mm512_set1_ps(scales.scales[group][row]));
                    if unit::<B>() != 1.0 {
                        values = _mm512_mul_ps(values, _mm512_set1_ps(unit::<B>()));
                    }
                    if B::MINIMA {
                        values = _mm512_sub_ps(values, _mm512_set1_ps(scales.minima[group][row]));
                    }
                    values
                };
                let rounded = _mm512_cvtne2ps_pbh(values(2 * tile + 1), values(2 * tile));
                let rounded = std::mem::transmute::<__m512bh, __m512i>(rounded);
                _mm512_storeu_si512(to.as_mut_ptr().add(row * SIDE).cast(), rounded);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use ridge_graph::format::BlockFormat;
    use ridge_graph::sample::Rng;
    use ridge_graph::with_block_format;

    #[test]
    fn lines_are_the_rounded_values() {
        if crate::simd::isa() != crate::simd::Isa::Amx {
            ridge_testing::skip!("this machine has no AMX");
        }
        for format in ridge_graph::format::all() {
            let mut rng = Rng::new(7);
            let values: Vec<f32> = (0..3 * SHORT).map(|_| rng.gauss() as f32).collect();
            let blocks = format.encode(&values, &[3, SHORT], None).remove(0);
            let stride = blocks.len() / 3;
            let mut tiles = vec![[0u32; SIDE * SIDE]; SHORT / DEPTH];
            with_block_format!(format.name(), B => {
                to_tiles::<B>(&OfRows { data: &blocks, stride, blocks: SHORT / B::ELEMENTS, rows: 3 }, &mut Taken::new(), &mut tiles);
            }, _ => panic!("{} has no blocks", format.name()));
            for (i, exact) in format.values(&[&blocks], &[3, SHORT]).into_iter().enumerate() {
                let (row, i) = (i / SHORT, i % SHORT);
                let word = tiles[i / DEPTH][row * SIDE + i % DEPTH / 2];
                let got = bf16::from_bits((word >> (i % 2 * 16)) as u16);
                assert_eq!(got.to_f32(), bf16::from_f32(exact).to_f32(), "{}, {i}: {exact}", format.name());
            }
        }
    }
}
