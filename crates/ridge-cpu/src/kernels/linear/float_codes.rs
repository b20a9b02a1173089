//! Weights of E4M3 codes as pairs of bf16, which hold every code exactly. 16 rows are interleaved word by word (`interleave.rs`), so
//! that a line has four elements of each; two tables of 128 bytes give both halves of a bf16 by the code without its sign.
//!
//! Floor: a line is read once, and takes two lookups, a merge of signs and two shuffles.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cvtne2ps_pbh,
    _mm512_loadu_si512, _mm512_mul_ps, _mm512_permutex2var_epi8, _mm512_permutexvar_epi16, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_shuffle_ps, _mm512_slli_epi32, _mm512_storeu_si512,
    _mm512_ternarylogic_epi32, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
};
use std::ops::Range;
use std::sync::LazyLock;

use half::bf16;
use ridge_graph::FormatRef;
use ridge_graph::format::{BLOCK, CodeType};

use super::scales::{BlockScales, scaled};
use crate::amx;
use crate::interleave::{Line, ROWS};
use crate::packing::has_float_codes;
use crate::simd;

/// Elements of a row that a line has.
pub(super) const FOUR: usize = 4;

/// Are weights in `format` with rows of `inner` elements multiplied as pairs of bf16 in this process?
pub(super) fn takes(format: &FormatRef, inner: usize) -> bool {
    has_float_codes(simd::isa())
        && inner.is_multiple_of(FOUR)
        && scaled(format).is_some_and(|format| format.codes == CodeType::F8E4M3)
}

/// A weight `[N, K]` of codes, K a multiple of four.
#[derive(Clone, Copy)]
pub(in crate::kernels::linear) struct FloatCodes<'a> {
    pub(super) rows: CodeRows<'a>,
    pub(super) inner: usize,
    /// Of each 128 by 128 codes, if it has such.
    pub(super) scales: Option<BlockScales<'a>>,
}

/// How codes lie.
#[derive(Clone, Copy)]
pub(in crate::kernels::linear) enum CodeRows<'a> {
    Plain(&'a [u8]),
    Interleaved(&'a [Line]),
}

impl<'a> FloatCodes<'a> {
    /// Elements `depth` of rows `rows`, at most 16 from a multiple of 16 on, as lines: those of the weight, or in `room`.
    pub(super) fn lines<'b>(&self, rows: &Range<usize>, depth: &Range<usize>, room: &'b mut [Line]) -> &'b [Line]
    where
        'a: 'b,
    {
        assert!(depth.start.is_multiple_of(FOUR) && depth.end.is_multiple_of(FOUR) && depth.end <= self.inner);
        let words = depth.start / FOUR..depth.end / FOUR;
        match self.rows {
            CodeRows::Interleaved(all) => &all[rows.start / ROWS * (self.inner / FOUR)..][words],
            CodeRows::Plain(all) => {
                let room = &mut room[..words.len()];
                if rows.len() < ROWS {
                    room.fill([0; ROWS]);
                }
                for (lane, row) in rows.clone().enumerate() {
                    let words = all[row * self.inner..][depth.clone()].as_chunks::<FOUR>().0;
                    for (word, line) in words.iter().zip(&mut *room) {
                        line[lane] = u32::from_ne_bytes(*word);
                    }
                }
                room
            }
        }
    }
}

/// Tiles for each step of K: of the first 16 rows of a panel, and of the others.
const ACROSS: usize = amx::COLUMNS / ROWS;

impl<'a> FloatCodes<'a> {
    /// Rows `rows`, at most 32, as part `steps` of K of a panel (`amx/panels.rs`): values rounded to bf16 where codes have scales of
    /// blocks, else the codes. Of rows that are not there it has whatever was there before. `room` has a part of 16 rows as lines.
    ///
    /// # Panics
    /// Where the machine has no such instructions, or rows or steps are not inside of the weight.
    pub(super) fn to_panel(self, rows: &Range<usize>, steps: &Range<usize>, room: &mut [Line], to: &mut [amx::Words]) {
        assert!(has_float_codes(simd::isa()) && rows.len() <= amx::COLUMNS && to.len() >= ACROSS * steps.len());
        for (half, first) in rows.clone().step_by(ROWS).enumerate() {
            let of_half = first..rows.end.min(first + ROWS);
            let lines = self.lines(&of_half, &(steps.start * amx::DEPTH..steps.end * amx::DEPTH), room);
            let scales = self.scales.map(|scales| &scales.of_row(first)[steps.start * amx::DEPTH / BLOCK..]);
            let from_block = steps.start % (BLOCK / amx::DEPTH);
            // SAFETY: the instructions are there.
            unsafe { to_tiles(lines, scales, from_block, to, half) };
        }
    }

    /// The lines that elements `depth` of at most 32 rows are: none of rows that are not interleaved.
    pub(super) fn memory(&self, rows: &Range<usize>, depth: &Range<usize>) -> [&'a [u32]; 2] {
        let CodeRows::Interleaved(all) = self.rows else { return [&[], &[]] };
        let of_group = self.inner / FOUR;
        let of_rows = |first: usize| match first < rows.end {
            true => all[first / ROWS * of_group..][depth.start / FOUR..depth.end / FOUR].as_flattened(),
            false => &[],
        };
        [of_rows(rows.start), of_rows(rows.start + ROWS)]
    }
}

/// Lines of codes as tile after tile of K, each the tile `half` of those that are side by side: times `scales`, of which the first
/// is of so many tiles less as `passed`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma,f16c")]
fn to_tiles(lines: &[Line], scales: Option<&[f32]>, passed: usize, to: &mut [amx::Words], half: usize) {
    let decoder = Decoder::new();
    let tiles = to.as_chunks_mut::<ACROSS>().0;
    for (step, (lines, tiles)) in lines.chunks_exact(amx::DEPTH / FOUR).zip(tiles).enumerate() {
        let tile = tiles[half].as_chunks_mut::<ROWS>().0;
        decoder.pairs(lines, tile);
        let Some(scales) = scales else { continue };
        let scale = _mm512_set1_ps(scales[(passed + step) / (BLOCK / amx::DEPTH)]);
        for line in tile {
            // SAFETY: a line is 64 bytes; vectors of one size, whose bits are any.
            unsafe {
                let pairs = _mm512_loadu_si512(line.as_ptr().cast());
                let upper = _mm512_and_si512(pairs, _mm512_set1_epi32(!0xffff));
                let of = |half: __m512i| _mm512_mul_ps(_mm512_castsi512_ps(half), scale);
                let rounded = _mm512_cvtne2ps_pbh(of(upper), of(_mm512_slli_epi32::<16>(pairs)));
                let rounded = std::mem::transmute::<__m512bh, __m512i>(rounded);
                _mm512_storeu_si512(line.as_mut_ptr().cast(), _mm512_permutexvar_epi16(side_by_side(), rounded));
            }
        }
    }
}

/// The places of 16-bit words that put those of the lower half of a vector beside those of the upper one.
#[inline]
#[target_feature(enable = "avx512f")]
fn side_by_side() -> __m512i {
    let places: [u16; 2 * ROWS] = std::array::from_fn(|at| (at / 2 + at % 2 * ROWS) as u16);
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(places.as_ptr().cast()) }
}

/// The halves of a bf16 by the code without its sign.
struct Tables {
    low: [u8; 128],
    high: [u8; 128],
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    let bits = |code: usize| bf16::from_f32(CodeType::F8E4M3.number(code as u8)).to_bits().to_le_bytes();
    Tables { low: std::array::from_fn(|code| bits(code)[0]), high: std::array::from_fn(|code| bits(code)[1]) }
});

/// [`Tables`] in registers.
#[derive(Clone, Copy)]
pub(super) struct Decoder {
    low: [__m512i; 2],
    high: [__m512i; 2],
}

impl Decoder {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub(super) fn new() -> Self {
        // SAFETY: a half of a table is 64 bytes.
        let load = |table: &[u8; 128]| unsafe {
            let at = table.as_ptr();
            [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())]
        };
        let tables = &*TABLES;
        Self { low: load(&tables.low), high: load(&tables.high) }
    }

    /// The four elements of each row of a line as bf16, side by side: of the first two rows of each four, and of the others.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub(super) fn fours(&self, codes: __m512i) -> [__m512i; 2] {
        const OR_AND: i32 = 0xf8;
        let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
        let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
        let high = _mm512_ternarylogic_epi32::<OR_AND>(high, codes, _mm512_set1_epi8(-128));
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }

    /// Lines of pairs of all rows in turn, two for each line of codes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub(super) fn pairs(&self, codes: &[Line], to: &mut [Line]) {
        for (codes, to) in codes.iter().zip(to.as_chunks_mut::<2>().0) {
            // SAFETY: lines have 64 bytes.
            unsafe {
                let [even, odd] = in_turn(self.fours(_mm512_loadu_si512(codes.as_ptr().cast())));
                _mm512_storeu_si512(to[0].as_mut_ptr().cast(), even);
                _mm512_storeu_si512(to[1].as_mut_ptr().cast(), odd);
            }
        }
    }
}

/// Of words of which each row has two side by side, the first of all rows and the second of all, where the halves of each four
/// rows come as [`Decoder::fours`] gives them.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn in_turn([first, last]: [__m512i; 2]) -> [__m512i; 2] {
    let [first, last] = [_mm512_castsi512_ps(first), _mm512_castsi512_ps(last)];
    in_turn_of_floats([first, last]).map(|of| _mm512_castps_si512(of))
}

/// As [`in_turn`], of floats.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn in_turn_of_floats([first, last]: [__m512; 2]) -> [__m512; 2] {
    [_mm512_shuffle_ps::<0x88>(first, last), _mm512_shuffle_ps::<0xdd>(first, last)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interleave::Interleaving;
    use crate::packing::FLOAT_CODES;

    #[test]
    fn every_code_is_the_bf16_that_it_stands_for() {
        if !has_float_codes(simd::isa()) {
            ridge_testing::skip!("this machine has no AVX512_BF16 with AVX512_VBMI, or RIDGE_CPU_ISA leaves it out");
        }
        // 16 rows of 16 elements have all 256 codes.
        let all: Vec<u8> = (0..=255).map(|code: u8| code.wrapping_mul(37)).collect();
        let codes = FloatCodes { rows: CodeRows::Plain(&all), inner: 16, scales: None };
        let (mut room, mut pairs) = ([[0; ROWS]; 4], [[0; ROWS]; 8]);
        let lines = codes.lines(&(0..16), &(0..16), &mut room);
        // SAFETY: the instructions are there.
        unsafe { Decoder::new().pairs(lines, &mut pairs) };
        for (row, k) in (0..16).flat_map(|row| (0..16).map(move |k| (row, k))) {
            let got = bf16::from_bits((pairs[k / 2][row] >> (k % 2 * 16)) as u16).to_f32();
            let code = all[row * 16 + k];
            let should = CodeType::F8E4M3.number(code);
            assert!(got.to_bits() == should.to_bits() || got.is_nan() && should.is_nan(), "{code}: {got}, {should}");
        }
    }

    #[test]
    fn panels_have_the_rounded_values() {
        if !has_float_codes(simd::isa()) {
            ridge_testing::skip!("this machine has no AVX512_BF16 with AVX512_VBMI, or RIDGE_CPU_ISA leaves it out");
        }
        let (rows, inner) = (amx::COLUMNS + 19, 11 * amx::DEPTH);
        let all: Vec<u8> = (0..rows * inner).map(|i| (i * i / 5 % 127 + i % 2 * 128) as u8).collect();
        let interleaving = Interleaving::new(inner, FLOAT_CODES);
        let mut lines = vec![[0; ROWS]; interleaving.bytes(rows) / size_of::<Line>()];
        interleaving.pack(&all, 0, &mut lines);
        let of_blocks = [1.3f32, 0.7, 2.1];
        for scales in [None, Some(BlockScales::new(&of_blocks, inner))] {
            for of_rows in [CodeRows::Plain(&all), CodeRows::Interleaved(&lines)] {
                let codes = FloatCodes { rows: of_rows, inner, scales };
                for (first, from) in [(0, 0), (amx::COLUMNS, 0), (amx::COLUMNS, 6)] {
                    let (of_panel, steps) = (first..rows.min(first + amx::COLUMNS), from..inner / amx::DEPTH);
                    let mut panel = vec![[0; ROWS * ROWS]; ACROSS * steps.len()];
                    let mut room = vec![[0; ROWS]; steps.len() * amx::DEPTH / FOUR];
                    codes.to_panel(&of_panel, &steps, &mut room, &mut panel);
                    for (row, k) in of_panel.flat_map(|row| (from * amx::DEPTH..inner).map(move |k| (row, k))) {
                        let (line, at) = ((k - from * amx::DEPTH) / 2, (row - first) % ROWS);
                        let tile = &panel[line / ROWS * ACROSS + (row - first) / ROWS];
                        let got = bf16::from_bits((tile[line % ROWS * ROWS + at] >> (k % 2 * 16)) as u16);
                        let scale = scales.map_or(1.0, |_| of_blocks[k / BLOCK]);
                        let exact = CodeType::F8E4M3.number(all[row * inner + k]) * scale;
                        assert_eq!(got.to_f32(), bf16::from_f32(exact).to_f32(), "row {row}, {k}: {exact}");
                    }
                }
            }
        }
    }
}
