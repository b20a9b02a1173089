//! Weights in blocks as tiles of bf16: their values, rounded.
//!
//! Floor: of 64 elements the codes take some three instructions (`unpack.rs`), values five for each 16 and a rounding for
//! each 32, which is 30 in all, beside the 16 cycles that a tile of 16 rows of x takes for as many.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm_load_si128, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtne2ps_pbh, _mm512_mul_ps,
    _mm512_set1_epi8, _mm512_set1_ps, _mm512_store_si512, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_sub_ps,
};

use ridge_graph::format::{BlockFormat, Q8_0};

use crate::amx::{DEPTH, SHORT, SIDE, Words, transpose};
use crate::interleave::{Line, place};
use crate::kernels::int8::unit;
use crate::kernels::int8::unpack::{self, OfRows, PADDED, Scales, Vectors};
use crate::simd;

/// Writes each row's values to its line of one tile after another.
pub(in crate::kernels) type ToTiles = fn(&OfRows<'_>, &mut Taken, &mut [Words]);

/// The codes of a row.
#[repr(C, align(64))]
struct RowCodes([i8; SHORT]);

/// What blocks are taken apart into on the way.
pub(in crate::kernels) struct Taken {
    scales: Scales,
    line: RowCodes,
    padded: [u8; PADDED],
}

impl Taken {
    pub(in crate::kernels) fn new() -> Self {
        const LINES: [[f32; SIDE]; SHORT / 16] = [[0.0; SIDE]; SHORT / 16];
        Self { scales: Scales { scales: LINES, minima: LINES }, line: RowCodes([0; SHORT]), padded: [0; PADDED] }
    }
}

/// [`ToTiles`] for blocks of a format, of which `to` are as many tiles of K.
pub(in crate::kernels) fn to_tiles<B: Vectors>(blocks: &OfRows<'_>, taken: &mut Taken, to: &mut [Words]) {
    unpack::check::<B>(blocks);
    assert!(to.len() * DEPTH == blocks.blocks * B::ELEMENTS);
    assert!(simd::isa() >= simd::Isa::Avx512Bf16);
    // SAFETY: there is AVX-512 with instructions for bf16, and the blocks are there.
    unsafe { lines::<B>(blocks, taken, to) };
}

/// As [`ToTiles`], for so many elements of a unit of 16 interleaved rows.
pub(in crate::kernels) type UnitToTiles = fn(&[Line], usize, &mut Taken, &mut [Words]);

/// [`UnitToTiles`] for blocks of a format.
pub(in crate::kernels) fn unit_to_tiles<B: Vectors>(
    unit: &[Line],
    elements: usize,
    taken: &mut Taken,
    to: &mut [Words],
) {
    let mut rows = UnitRows::new();
    rows.fill(unit, [B::ELEMENTS, B::BYTES], elements);
    let blocks =
        OfRows { data: rows.0.as_flattened(), stride: UnitRows::STRIDE, blocks: elements / B::ELEMENTS, rows: SIDE };
    to_tiles::<B>(&blocks, taken, to);
}

/// A unit of interleaved rows, one row after another.
#[repr(C, align(64))]
struct UnitRows([[u8; UnitRows::STRIDE]; SIDE]);

impl UnitRows {
    /// Words of a row that there is room for: whole vectors, as many as eight blocks of Q8_0 have at most.
    const WORDS: usize = (8 * Q8_0::BYTES).div_ceil(4 * SIDE) * SIDE;

    /// Bytes from a row to the next.
    const STRIDE: usize = 4 * Self::WORDS;

    fn new() -> Self {
        Self([[0; Self::STRIDE]; SIDE])
    }

    /// Puts the first `elements` elements of the rows of `unit` there, which are in blocks of `block` elements and bytes.
    fn fill(&mut self, unit: &[Line], block: [usize; 2], elements: usize) {
        let words = (elements / block[0] * block[1]).div_ceil(4);
        assert!(words <= unit.len() && words <= Self::WORDS && simd::isa() >= simd::Isa::Avx512);
        for first in (0..words).step_by(SIDE) {
            let square: [Line; SIDE] = std::array::from_fn(|nth| match first + nth {
                word if word < words => unit[place(block, word)],
                _ => [0; SIDE],
            });
            // SAFETY: there is AVX-512.
            unsafe { self.turn(&square, first) };
        }
    }

    /// Puts 16 words of each row, given by words, from word `first` on.
    ///
    /// # Safety
    /// There is AVX-512.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    unsafe fn turn(&mut self, square: &[Line; SIDE], first: usize) {
        transpose(square, |row, words| {
            let to = &mut self.0[row][4 * first..][..4 * SIDE];
            // SAFETY: 64 bytes.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), words) };
        });
    }
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
    use ridge_graph::FormatRef;
    use ridge_graph::sample::Rng;
    use ridge_graph::with_block_format;

    use crate::bytes::cast;
    use crate::interleave::Interleaving;

    /// Are the tiles of interleaved rows those of the same rows one after another, of whole units and of the part at the end of K?
    fn interleaved(format: &FormatRef, rng: &mut Rng) -> bool {
        with_block_format!(format.name(), B => {
            let inner = 2 * SHORT + if B::ELEMENTS == SHORT { 0 } else { 3 * DEPTH };
            let values: Vec<f32> = (0..SIDE * inner).map(|_| rng.gauss() as f32).collect();
            let rows = format.encode(&values, &[SIDE, inner], None).remove(0);
            let interleaving = Interleaving::new(inner, [B::ELEMENTS, B::BYTES]);
            let mut bytes = vec![0u8; interleaving.bytes(SIDE) + 64];
            let from = bytes.as_ptr().align_offset(64);
            let lines: &mut [Line] = cast::<u32>(&mut bytes[from..][..interleaving.bytes(SIDE)]).as_chunks_mut().0;
            interleaving.pack(&rows, 0, lines);
            let stride = rows.len() / SIDE;
            (0..inner).step_by(SHORT).all(|first| {
                let elements = SHORT.min(inner - first);
                let mut tiles = [(); 2].map(|()| vec![[0u32; SIDE * SIDE]; elements / DEPTH]);
                let data = &rows[first / B::ELEMENTS * B::BYTES..];
                let blocks = OfRows { data, stride, blocks: elements / B::ELEMENTS, rows: SIDE };
                to_tiles::<B>(&blocks, &mut Taken::new(), &mut tiles[0]);
                let unit = &lines[first / SHORT * interleaving.unit_lines()..];
                unit_to_tiles::<B>(unit, elements, &mut Taken::new(), &mut tiles[1]);
                tiles[0] == tiles[1]
            })
        }, _ => false)
    }

    #[test]
    fn lines_are_the_rounded_values() {
        if simd::isa() < simd::Isa::Avx512Bf16 {
            ridge_testing::skip!("this machine has no AVX512_BF16, or RIDGE_CPU_ISA leaves it out");
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
            assert!(interleaved(&format, &mut rng), "{}", format.name());
            for (i, exact) in format.values(&[&blocks], &[3, SHORT]).into_iter().enumerate() {
                let (row, i) = (i / SHORT, i % SHORT);
                let word = tiles[i / DEPTH][row * SIDE + i % DEPTH / 2];
                let got = bf16::from_bits((word >> (i % 2 * 16)) as u16);
                assert_eq!(got.to_f32(), bf16::from_f32(exact).to_f32(), "{}, {i}: {exact}", format.name());
            }
        }
    }
}
