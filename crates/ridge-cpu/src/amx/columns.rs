//! Rows of x and their terms as tiles of columns, and sums back to rows.

use std::arch::x86_64::{
    __m512i, _mm512_loadu_si512, _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::ops::Range;

use half::{bf16, f16};
use ridge_graph::DType;

use super::config::{self, BLOCK, DEPTH, SIDE, Words};
use crate::bytes::Pod;
use crate::simd;

/// A float dtype of x as terms of bf16.
pub(crate) trait Terms: Pod {
    /// How many.
    const COUNT: usize;
    /// Nothing.
    const ZERO: Self;
    /// Bits of term `term`.
    fn term(self, term: usize) -> u16;
}

impl Terms for bf16 {
    const COUNT: usize = 1;
    const ZERO: Self = Self::ZERO;
    #[inline(always)]
    fn term(self, _term: usize) -> u16 {
        self.to_bits()
    }
}

impl Terms for f16 {
    const COUNT: usize = 2;
    const ZERO: Self = Self::ZERO;
    #[inline(always)]
    fn term(self, term: usize) -> u16 {
        simd::Element::widen(self).term(term)
    }
}

impl Terms for f32 {
    const COUNT: usize = 3;
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn term(self, term: usize) -> u16 {
        // Eight bits of significand each, cut off and not rounded, so that what is left is exact.
        let high = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        let mut rest = self;
        for _ in 0..term {
            // Of infinity and NaN nothing is left.
            rest = if self.is_finite() { rest - high(rest) } else { 0.0 };
        }
        (rest.to_bits() >> 16) as u16
    }
}

/// Terms of `dtype`.
pub(crate) fn terms(dtype: DType) -> usize {
    match dtype {
        DType::BF16 => bf16::COUNT,
        DType::F16 => f16::COUNT,
        _ => f32::COUNT,
    }
}

/// Is x of this dtype and width multiplied on tiles?
pub(crate) fn takes(dtype: DType, inner: usize) -> bool {
    matches!(dtype, DType::BF16 | DType::F16 | DType::F32) && inner >= DEPTH
}

/// Of `rows` rows of x, those that are multiplied together: at most 18 tiles of columns, all blocks alike.
pub(crate) fn rows_together(dtype: DType, rows: usize) -> usize {
    let most = 18 / terms(dtype) * SIDE;
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(SIDE).max(SIDE)
}

/// Words as the floats that they hold.
pub(crate) fn floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: of the same size and alignment, and any bits are an f32.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

/// Words as elements of `T`, of which each takes a word at most.
pub(crate) fn elements<T: Terms>(words: &mut [u32]) -> &mut [T] {
    assert!(size_of::<T>() <= size_of::<u32>() && align_of::<T>() <= align_of::<u32>());
    let len = size_of_val(words) / size_of::<T>();
    // SAFETY: inside of the words, aligned as just checked, and any bits are an element.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}

/// Tiles as the halves of their words.
pub(crate) fn halves(tiles: &[Words]) -> &[bf16] {
    // SAFETY: the same memory, and any bits are a bf16.
    unsafe { std::slice::from_raw_parts(tiles.as_ptr().cast(), size_of_val(tiles) / size_of::<bf16>()) }
}

/// How rows of x and their terms lie in tiles of columns.
#[derive(Clone, Copy)]
pub(crate) struct ColumnLayout {
    rows: usize,
    pub(crate) terms: usize,
    /// Do all rows and terms fit into one tile of columns?
    pub(crate) compact: bool,
    /// Tiles of K.
    pub(crate) depth: usize,
    /// Tiles of columns.
    pub(crate) tiles: usize,
}

impl ColumnLayout {
    pub(crate) fn new(rows: usize, inner: usize, terms: usize) -> Self {
        let compact = rows * terms <= SIDE;
        let tiles = if compact { 1 } else { rows.div_ceil(SIDE) * terms };
        Self { rows, terms, compact, depth: inner.div_ceil(DEPTH), tiles }
    }

    /// With tiles of their own for each term, however few rows there are.
    pub(crate) fn of_whole_tiles(rows: usize, inner: usize, terms: usize) -> Self {
        Self { compact: false, tiles: rows.div_ceil(SIDE) * terms, ..Self::new(rows, inner, terms) }
    }

    /// As this, for a block of `rows` of its rows.
    pub(crate) fn of_rows(&self, rows: usize) -> Self {
        let tiles = if self.compact { 1 } else { rows.div_ceil(SIDE) * self.terms };
        Self { rows, tiles, ..*self }
    }

    /// Words of x as tiles.
    pub(crate) fn x_room(&self) -> usize {
        self.tiles * self.depth * SIDE * SIDE
    }

    /// Words of x as tiles before those of row `row`, a multiple of 16, where rows take whole tiles.
    pub(crate) fn x_before(&self, row: usize) -> usize {
        row * self.terms * self.depth * SIDE
    }

    /// Words of sums.
    pub(crate) fn sums_room(&self) -> usize {
        2 * self.tiles * SIDE * SIDE
    }

    /// Words of a copied block of the weight.
    pub(crate) fn weight_room() -> usize {
        2 * BLOCK / DEPTH * SIDE * SIDE
    }

    /// Rows of x, `inner` elements each, as tiles: pairs of K down, columns across.
    pub(crate) fn pack_x<T: Terms>(&self, x: &[T], inner: usize, to: &mut [Words]) {
        assert!(x.len() >= self.rows * inner && self.depth == inner.div_ceil(DEPTH));
        let tiles = if self.compact { 1 } else { self.terms };
        for (group, to) in to[..self.tiles * self.depth].chunks_exact_mut(tiles * self.depth).enumerate() {
            let rows = group * SIDE..self.rows.min((group + 1) * SIDE);
            // SAFETY: there is AMX, and every machine that has it has AVX-512.
            unsafe { pack_tiles(&x[rows.start * inner..rows.end * inner], inner, self.compact, to) };
        }
    }

    /// Of `steps` of K, share `nth` of `shares` of the tiles of columns.
    pub(crate) fn share<'a>(
        &self,
        x: &'a [Words],
        steps: Range<usize>,
        nth: usize,
        shares: usize,
    ) -> impl Iterator<Item = &'a [u32]> + Clone + use<'a> {
        let depth = self.depth;
        let tiles = self.tiles * nth / shares..self.tiles * (nth + 1) / shares;
        tiles.map(move |tile| x[tile * depth..][steps.clone()].as_flattened())
    }

    /// Tiles of columns that are multiplied together.
    pub(crate) fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        config::groups(self.tiles, self.terms)
    }

    /// Rows of x that the tiles of a group hold.
    pub(crate) fn rows_of(&self, group: &Range<usize>) -> Range<usize> {
        if self.compact {
            return 0..self.rows;
        }
        group.start / self.terms * SIDE..(group.end / self.terms * SIDE).min(self.rows)
    }

    /// The sums of a group, by 16 rows of the weight and by tiles of columns, as rows of x: `columns` elements each,
    /// which lie together.
    pub(crate) fn unpack(&self, group: &Range<usize>, sums: &[Words], columns: usize, out: &mut [f32]) {
        let rows = self.rows_of(group).len();
        for (half, sums) in sums.chunks_exact(group.len()).enumerate().take(columns.div_ceil(SIDE)) {
            let begin = half * SIDE;
            let width = SIDE.min(columns - begin);
            if self.compact {
                for (row, out) in out.chunks_mut(columns).take(rows).enumerate() {
                    for (n, out) in out[begin..][..width].iter_mut().enumerate() {
                        let of = |term: usize| f32::from_bits(sums[0][n * SIDE + row * self.terms + term]);
                        *out = (0..self.terms).rev().map(of).reduce(|sum, x| x + sum).unwrap_or(0.0);
                    }
                }
                continue;
            }
            for (nth, terms) in sums.chunks_exact(self.terms).enumerate() {
                let terms = [&terms[0], &terms[1.min(self.terms - 1)], &terms[self.terms - 1]];
                let rows = SIDE.min(rows - nth * SIDE);
                let out = &mut out[nth * SIDE * columns + begin..];
                // SAFETY: there is AMX, and every machine that has it has AVX-512.
                unsafe { unpack_tile(&terms[..self.terms], [rows, width], columns, out) };
            }
        }
    }
}

/// [`ColumnLayout::pack_x`] for as many rows as one tile of columns for each term has, or one tile for all terms.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn pack_tiles<T: Terms>(x: &[T], inner: usize, compact: bool, to: &mut [Words]) {
    let depth = inner.div_ceil(DEPTH);
    for step in 0..depth {
        let mut lines = [[[0; SIDE]; SIDE]; 3];
        for (row, x) in x.chunks_exact(inner).enumerate() {
            for term in 0..T::COUNT {
                let to = if compact { &mut lines[0][row * T::COUNT + term] } else { &mut lines[term][row] };
                line(&x[step * DEPTH..], term, to);
            }
        }
        for (tile, lines) in lines.iter().enumerate().take(to.len() / depth) {
            transpose(lines, |i, line| store(line, &mut to[tile * depth + step].as_chunks_mut::<SIDE>().0[i]));
        }
    }
}

/// A tile of sums as rows: `rows` columns of it, `width` elements each, `stride` apart.
pub(crate) fn unpack_columns(sums: &Words, size: [usize; 2], stride: usize, out: &mut [f32]) {
    // SAFETY: there is AMX, and every machine that has it has AVX-512.
    unsafe { unpack_tile(&[sums], size, stride, out) };
}

/// Columns of `lines` as lines.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(crate) fn transpose_into(lines: &[[u32; SIDE]; SIDE], to: &mut Words) {
    transpose(lines, |i, line| store(line, &mut to.as_chunks_mut::<SIDE>().0[i]));
}

/// The sum of tiles that are terms of one, as `rows` rows of `width` elements, `stride` apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn unpack_tile(terms: &[&Words], [rows, width]: [usize; 2], stride: usize, out: &mut [f32]) {
    let mut sum = *terms[terms.len() - 1];
    for term in terms.iter().rev().skip(1) {
        for (x, y) in sum.iter_mut().zip(*term) {
            *x = (f32::from_bits(*x) + f32::from_bits(*y)).to_bits();
        }
    }
    transpose(sum.as_chunks().0.first_chunk().expect("a tile has 16 lines"), |i, line| {
        if i >= rows {
            return;
        }
        match out[i * stride..].first_chunk_mut::<SIDE>() {
            // SAFETY: of the same size, and any bits are an f32.
            Some(to) if width == SIDE => store(line, unsafe { &mut *std::ptr::from_mut(to).cast() }),
            _ => {
                let mut words = [0; SIDE];
                store(line, &mut words);
                for (to, word) in out[i * stride..][..width].iter_mut().zip(words) {
                    *to = f32::from_bits(word);
                }
            }
        }
    });
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn store(line: __m512i, to: &mut [u32; SIDE]) {
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), line) };
}

/// Term `term` of the first [`DEPTH`] elements of `x` in pairs, zeros where there are fewer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(crate) fn line<T: Terms>(x: &[T], term: usize, to: &mut [u32; SIDE]) {
    match (x.first_chunk::<DEPTH>(), term) {
        (Some(x), 0) => pairs::<T, 0>(x, to),
        (Some(x), 1) => pairs::<T, 1>(x, to),
        (Some(x), _) => pairs::<T, 2>(x, to),
        (None, _) => rest(x, term, to),
    }
}

/// [`line()`] at the end of a row.
#[cold]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn rest<T: Terms>(x: &[T], term: usize, to: &mut [u32; SIDE]) {
    let whole: [T; DEPTH] = std::array::from_fn(|i| x.get(i).copied().unwrap_or(T::ZERO));
    line(&whole, term, to);
}

/// The first term of up to [`DEPTH`] elements in pairs, zeros behind them.
pub(crate) fn split<T: Terms>(x: &[T], to: &mut [u32; SIDE]) {
    // SAFETY: there is AMX, and every machine that has it has AVX-512.
    unsafe { line(x, 0, to) }
}

/// Term `TERM` of 32 elements, in pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn pairs<T: Terms, const TERM: usize>(x: &[T; DEPTH], to: &mut [u32; SIDE]) {
    if size_of::<T>() == size_of::<bf16>() && T::COUNT == 1 {
        // SAFETY: it is bf16, of which 32 are 16 words, any bits of which are such.
        *to = unsafe { x.as_ptr().cast::<[u32; SIDE]>().read_unaligned() };
        return;
    }
    for (to, pair) in to.iter_mut().zip(x.as_chunks::<2>().0) {
        *to = u32::from(pair[0].term(TERM)) | u32::from(pair[1].term(TERM)) << 16;
    }
}

/// Gives columns of these rows, in steps of 1, 2, 4 and 8 words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
pub(crate) fn transpose(lines: &[[u32; SIDE]; SIDE], mut to: impl FnMut(usize, __m512i)) {
    // SAFETY: each line is 64 bytes.
    let load = |line: &[u32; SIDE]| unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
    let mut a: [__m512i; SIDE] = std::array::from_fn(|i| load(&lines[i]));
    let mut b = a;
    for i in (0..SIDE).step_by(2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for i in (0..SIDE).step_by(4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Now `a[4 i + j]` has columns `j`, `j + 4`, `j + 8`, `j + 12` of rows `4 i` to `4 i + 3`, a quarter each.
    for j in 0..4 {
        b[j] = _mm512_shuffle_i32x4::<0x88>(a[j], a[4 + j]);
        b[4 + j] = _mm512_shuffle_i32x4::<0xdd>(a[j], a[4 + j]);
        b[8 + j] = _mm512_shuffle_i32x4::<0x88>(a[8 + j], a[12 + j]);
        b[12 + j] = _mm512_shuffle_i32x4::<0xdd>(a[8 + j], a[12 + j]);
    }
    for j in 0..4 {
        a[j] = _mm512_shuffle_i32x4::<0x88>(b[j], b[8 + j]);
        a[8 + j] = _mm512_shuffle_i32x4::<0xdd>(b[j], b[8 + j]);
        a[4 + j] = _mm512_shuffle_i32x4::<0x88>(b[4 + j], b[12 + j]);
        a[12 + j] = _mm512_shuffle_i32x4::<0xdd>(b[4 + j], b[12 + j]);
    }
    for (i, line) in a.into_iter().enumerate() {
        to(i, line);
    }
}
