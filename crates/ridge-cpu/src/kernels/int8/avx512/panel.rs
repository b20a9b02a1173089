//! Blocks of 16 rows of a weight as tiles of bf16: their values, rounded. The lanes of a vector are rows, as in the second operand
//! of a tile product, so nothing is turned on the way.
//!
//! Floor: for 2 elements of 16 rows two bytes become floats by two or three instructions each, take a multiplication each, are rounded
//! together and put side by side: some 10 instructions, 16 times a tile. A tile of 16 rows of x takes 16 cycles for as many.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_castsi512_ps, _mm512_cvtne2ps_pbh, _mm512_fmsub_ps, _mm512_load_ps,
    _mm512_load_si512, _mm512_loadu_si512, _mm512_maskz_shuffle_epi8, _mm512_mul_ps, _mm512_permutexvar_epi16,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_set4_epi32, _mm512_setzero_ps, _mm512_srli_epi32, _mm512_storeu_si512,
    _mm512_sub_ps, _mm512_ternarylogic_epi32, _mm512_xor_si512,
};
use std::marker::PhantomData;
use std::ops::Range;

use ridge_graph::format::{BlockFormat, Q8_0};

use super::apart::take_apart;
use super::wide::{Wide, WideCodes, halves};
use crate::amx::{COLUMNS, DEPTH, Words};
use crate::interleave::Line;
use crate::kernels::int8::scale::{GROUP, SIDE, unit};
use crate::kernels::int8::weight::CodeWeight;
use crate::simd;

/// Tiles for each step of K: of the first 16 rows, and of the others.
const ACROSS: usize = COLUMNS / SIDE;

/// Lines of a tile that four elements of K are.
const LINES: usize = 2;

/// 2^23, whose lowest bits are a whole number of so many that is added.
const WHOLE: f32 = 8_388_608.0;

/// Rows `rows`, at most 32, of a weight as part `steps` of K of a panel (`amx/panels.rs`), from a group of K on. Of rows that are not
/// there it has whatever was there before.
///
/// # Panics
/// Where the machine has no instructions for bf16, or rows or steps are not inside of the weight.
pub(in crate::kernels::int8) fn to_panel<B: Wide>(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    steps: Range<usize>,
    to: &mut [Words],
) {
    assert!(simd::isa() >= simd::Isa::Avx512Bf16 && weight.codes.block == [B::ELEMENTS, B::BYTES]);
    assert!(rows.len() <= COLUMNS && to.len() >= ACROSS * steps.len() && steps.end * DEPTH <= weight.inner);
    assert!((steps.start * DEPTH).is_multiple_of(GROUP) && weight.inner.is_multiple_of(B::ELEMENTS));
    assert!(match weight.interleaved {
        Some(rows_of) => rows.start.is_multiple_of(SIDE) && rows_of.bytes(rows.end) <= weight.data.len(),
        None => rows.end * weight.stride() <= weight.data.len(),
    });
    let mut taken = WideCodes::new();
    for (half, first) in rows.clone().step_by(SIDE).enumerate() {
        let of_half = first..(first + SIDE).min(rows.end);
        for from in steps.clone().step_by(GROUP / DEPTH) {
            let tiles = from - steps.start..(from + GROUP / DEPTH).min(steps.end) - steps.start;
            let to = &mut to[ACROSS * tiles.start..ACROSS * tiles.end];
            let group = from * DEPTH / GROUP;
            let signed = weight.lines(first).filter(|_| B::NAME == Q8_0::NAME && tiles.len() == GROUP / DEPTH);
            // SAFETY: the instructions are there, and so are the rows and the group.
            unsafe {
                if let Some((lines, unit)) = signed {
                    signed_to_tiles(&lines[group * unit..][..unit], to, half);
                } else {
                    take_apart::<B>(weight, &of_half, group, &mut taken);
                    to_tiles::<B>(&taken, to, half);
                }
            }
        }
    }
}

/// The values of tile after tile of K, each the tile `half` of those that are side by side.
///
/// # Safety
/// There is AVX-512 with instructions for bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn to_tiles<B: Wide>(taken: &WideCodes, to: &mut [Words], half: usize) {
    let words = const { B::GROUP / 4 };
    let of_tile = DEPTH / B::GROUP;
    for (step, to) in to.as_chunks_mut::<ACROSS>().0.iter_mut().enumerate() {
        let lines = to[half].as_chunks_mut::<{ LINES * SIDE }>().0;
        let groups = step * of_tile..(step + 1) * of_tile;
        for (group, lines) in groups.zip(lines.chunks_exact_mut(words)) {
            let minima = if B::MINIMA { floats(&taken.minima[group]) } else { _mm512_setzero_ps() };
            let values = Values::<B>::new(0, floats(&taken.scales[group]), minima);
            for (codes, lines) in taken.codes[group * words..].iter().zip(lines) {
                // SAFETY: 64 bytes, aligned as they lie in a structure so aligned.
                let codes = unsafe { _mm512_load_si512(codes.as_ptr().cast()) };
                let lines = lines.as_chunks_mut::<SIDE>().0;
                values.put::<0>(codes, &mut lines[0]);
                values.put::<2>(codes, &mut lines[1]);
            }
        }
    }
}

/// As [`to_tiles`], of a whole group of interleaved rows of Q8_0, as they lie. Two blocks are 17 words: the scale of the first one is
/// half a word, and that of the second one the other half of its ninth, so that each two elements are a half of one word.
///
/// # Safety
/// As for [`to_tiles`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn signed_to_tiles(unit: &[Line], to: &mut [Words], half: usize) {
    let zero = _mm512_setzero_ps();
    // SAFETY: 64 bytes.
    let load = |line: &Line| unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
    let to = to.as_chunks_mut::<ACROSS>().0.as_chunks_mut::<2>().0;
    for (words, [first, second]) in unit.as_chunks::<17>().0.iter().zip(to) {
        let [first, second] = [first, second].map(|to| to[half].as_chunks_mut::<SIDE>().0);
        let shared = load(&words[8]);
        let values = Values::<Q8_0>::new(SIGN, halves(load(&words[0])), zero);
        values.put::<2>(load(&words[0]), &mut first[0]);
        for (word, lines) in words[1..8].iter().zip(first[1..].as_chunks_mut::<LINES>().0) {
            let codes = load(word);
            values.put::<0>(codes, &mut lines[0]);
            values.put::<2>(codes, &mut lines[1]);
        }
        values.put::<0>(shared, &mut first[SIDE - 1]);
        let values = Values::<Q8_0>::new(SIGN, halves(_mm512_srli_epi32::<16>(shared)), zero);
        for (word, lines) in words[9..].iter().zip(second.as_chunks_mut::<LINES>().0) {
            let codes = load(word);
            values.put::<0>(codes, &mut lines[0]);
            values.put::<2>(codes, &mut lines[1]);
        }
    }
}

/// The places of 16-bit words that put those of the lower half of a vector beside those of the upper one.
#[inline]
#[target_feature(enable = "avx512f")]
fn side_by_side() -> __m512i {
    let places: [u16; 2 * SIDE] = std::array::from_fn(|at| (at / 2 + at % 2 * SIDE) as u16);
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(places.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn floats(of_rows: &[f32; SIDE]) -> __m512 {
    // SAFETY: 64 bytes, on lines of the cache as they lie in a structure so aligned.
    unsafe { _mm512_load_ps(of_rows.as_ptr()) }
}

/// What makes a byte of a signed code one that is above it.
const SIGN: u32 = 128;

/// What codes of a group become.
struct Values<B> {
    scales: __m512,
    minima: __m512,
    /// [`WHOLE`], and what bytes are above codes once this is added without carry.
    whole: __m512i,
    side_by_side: __m512i,
    of: PhantomData<B>,
}

impl<B: Wide> Values<B> {
    /// Of bytes that are above codes once bits `flipped` of them are.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
    fn new(flipped: u32, scales: __m512, minima: __m512) -> Self {
        let whole = _mm512_set1_epi32((WHOLE.to_bits() ^ flipped).cast_signed());
        Self { scales, minima, whole, side_by_side: side_by_side(), of: PhantomData }
    }

    /// Writes the values of bytes `FIRST` and the next, 0 or 2, of each word.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
    fn put<const FIRST: i32>(&self, codes: __m512i, line: &mut [u32; SIDE]) {
        let [even, odd] = if FIRST == 0 {
            [self.of::<0>(codes), self.of::<1>(codes)]
        } else {
            [self.of::<2>(codes), self.of::<3>(codes)]
        };
        // SAFETY: vectors of one size, whose bits are any; 64 bytes of the tile.
        unsafe {
            let rounded = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
            let pairs = _mm512_permutexvar_epi16(self.side_by_side, rounded);
            _mm512_storeu_si512(line.as_mut_ptr().cast(), pairs);
        }
    }

    /// The values of byte `NTH` of each word: as [`WHOLE`] and the byte, whose difference from `WHOLE` and what bytes are
    /// above codes is the code.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
    fn of<const NTH: i32>(&self, codes: __m512i) -> __m512 {
        const AND_XOR: i32 = 0x6a;
        let added = if NTH == 0 {
            _mm512_ternarylogic_epi32::<AND_XOR>(codes, _mm512_set1_epi32(255), self.whole)
        } else {
            let from = const { [NTH, NTH + 4, NTH + 8, NTH + 12] };
            _mm512_xor_si512(_mm512_maskz_shuffle_epi8(0x1111_1111_1111_1111, codes, places(from)), self.whole)
        };
        let code = _mm512_sub_ps(_mm512_castsi512_ps(added), _mm512_set1_ps(WHOLE + f32::from(B::ABOVE)));
        if B::MINIMA {
            // Products of codes and scales, of at most 22 bits, are exact, so that this rounds as a product and a difference do.
            return _mm512_fmsub_ps(code, self.scales, self.minima);
        }
        let value = _mm512_mul_ps(code, self.scales);
        if unit::<B>() == 1.0 { value } else { _mm512_mul_ps(value, _mm512_set1_ps(unit::<B>())) }
    }
}

/// For the first byte of each word of 16 bytes one of theirs.
#[inline]
#[target_feature(enable = "avx512f")]
fn places(from: [i32; 4]) -> __m512i {
    _mm512_set4_epi32(from[3], from[2], from[1], from[0])
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use ridge_graph::FormatRef;
    use ridge_graph::format::SignedBytes;
    use ridge_graph::sample::Rng;

    use super::*;
    use crate::interleave::Interleaving;
    use crate::kernels::int8::{codes, codes_of_bytes};

    /// Rows of K that end within a group, where blocks are shorter than one.
    const ROWS: usize = COLUMNS + 19;

    #[test]
    fn panels_have_the_rounded_values() {
        if simd::isa() < simd::Isa::Avx512Bf16 {
            ridge_testing::skip!("this machine has no AVX512_BF16, or RIDGE_CPU_ISA leaves it out");
        }
        let mut rng = Rng::new(7);
        let bytes = FormatRef::new(SignedBytes);
        for format in ridge_graph::format::all().into_iter().chain([bytes]) {
            let of_format = codes(&format).unwrap_or_else(codes_of_bytes);
            let inner = 2 * GROUP + if of_format.block[0] == GROUP { 0 } else { 3 * DEPTH };
            let values: Vec<f32> = (0..ROWS * inner).map(|_| 40.0 * rng.gauss() as f32).collect();
            let data = format.encode(&values, &[ROWS, inner], None).remove(0);
            let exact = format.values(&[&data], &[ROWS, inner]);
            let interleaving = Interleaving::new(inner, of_format.block);
            let mut lines = vec![[0; SIDE]; interleaving.bytes(ROWS) / size_of::<Line>() + 1];
            interleaving.pack(&data, 0, &mut lines[..interleaving.bytes(ROWS) / size_of::<Line>()]);
            // SAFETY: words are bytes, as many as there are.
            let interleaved = unsafe { std::slice::from_raw_parts(lines.as_ptr().cast::<u8>(), size_of_val(&*lines)) };
            for (data, interleaved) in [(interleaved, Some(interleaving)), (&data, None)] {
                let weight = CodeWeight { data, codes: of_format, inner, interleaved };
                for (first, from) in [(0, 0), (COLUMNS, 0), (COLUMNS, GROUP / DEPTH)] {
                    let (rows, steps) = (first..ROWS.min(first + COLUMNS), from..inner / DEPTH);
                    let mut panel = vec![[0; SIDE * SIDE]; ACROSS * steps.len()];
                    (of_format.to_panel)(&weight, rows.clone(), steps.clone(), &mut panel);
                    for (row, k) in rows.flat_map(|row| (from * DEPTH..inner).map(move |k| (row, k))) {
                        let (line, at) = ((k - from * DEPTH) / 2, (row - first) % SIDE);
                        let tile = &panel[line / SIDE * ACROSS + (row - first) / SIDE];
                        let got = bf16::from_bits((tile[line % SIDE * SIDE + at] >> (k % 2 * 16)) as u16);
                        let exact = exact[row * inner + k];
                        assert_eq!(
                            got.to_f32(),
                            bf16::from_f32(exact).to_f32(),
                            "{}, row {row}, {k}: {exact}",
                            format.name()
                        );
                    }
                }
            }
        }
    }
}
