//! Rows of x and their terms as tiles of columns, and sums back to rows.

use std::arch::x86_64::{
    __m512i, _mm512_loadu_si512, _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use half::{bf16, f16};
use ridge_graph::DType;

use super::{COPIED, DEPTH, SIDE, Words};
use crate::kernel::Pod;
use crate::simd;

/// A float dtype of x as terms of bf16.
pub(in super::super) trait Terms: Pod {
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
pub(in super::super) fn terms(dtype: DType) -> usize {
    match dtype {
        DType::BF16 => bf16::COUNT,
        DType::F16 => f16::COUNT,
        _ => f32::COUNT,
    }
}

/// Is x of this dtype and width multiplied on tiles?
pub(in super::super) fn takes(dtype: DType, inner: usize) -> bool {
    matches!(dtype, DType::BF16 | DType::F16 | DType::F32) && inner >= DEPTH
}

/// Rows of x that are multiplied by a copied block of the weight: 16 tiles of columns.
pub(in super::super) fn row_block(dtype: DType) -> usize {
    16 / terms(dtype) * SIDE
}

/// Words as the floats that they hold.
pub(in super::super) fn floats(words: &mut [u32]) -> &mut [f32] {
    // SAFETY: of the same size and alignment, and any bits are an f32.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

/// How rows of x and their terms lie in tiles of columns.
#[derive(Clone, Copy)]
pub(in super::super) struct Layout {
    rows: usize,
    terms: usize,
    /// Tiles of K.
    pub(super) depth: usize,
    /// Tiles of columns.
    pub(in super::super) tiles: usize,
}

impl Layout {
    pub(in super::super) fn new(rows: usize, inner: usize, terms: usize) -> Self {
        let compact = rows * terms <= SIDE;
        let tiles = if compact { 1 } else { rows.div_ceil(SIDE) * terms };
        Self { rows, terms, depth: inner.div_ceil(DEPTH), tiles }
    }

    /// Words of x as tiles.
    pub(in super::super) fn x_room(&self) -> usize {
        self.tiles * self.depth * SIDE * SIDE
    }

    /// Words of sums.
    pub(in super::super) fn sums_room(&self) -> usize {
        2 * self.tiles * SIDE * SIDE
    }

    /// Words of a copied block of the weight.
    pub(in super::super) fn weight_room() -> usize {
        2 * COPIED * SIDE * SIDE
    }

    fn compact(&self) -> bool {
        self.rows * self.terms <= SIDE
    }

    /// Row of x and term in column `column` of tile `tile`.
    fn column(&self, tile: usize, column: usize) -> Option<(usize, usize)> {
        let (row, term) = if self.compact() {
            (column / self.terms, column % self.terms)
        } else {
            (tile / self.terms * SIDE + column, tile % self.terms)
        };
        (row < self.rows).then_some((row, term))
    }

    /// Rows of x, `inner` elements each, as tiles: pairs of K down, columns across.
    pub(in super::super) fn pack_x<T: Terms>(&self, x: &[T], inner: usize, to: &mut [Words]) {
        for (at, to) in to[..self.tiles * self.depth].iter_mut().enumerate() {
            let (tile, step) = (at / self.depth, at % self.depth);
            let from = step * DEPTH;
            let len = DEPTH.min(inner - from);
            for (column, line) in to.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
                match self.column(tile, column) {
                    Some((row, term)) => split(&x[row * inner + from..][..len], term, line),
                    None => *line = [0; SIDE],
                }
            }
            // SAFETY: there is AMX, and every machine that has it has AVX-512.
            unsafe { transpose(to) };
        }
    }

    /// The sums of two tiles of weight rows as rows of x: `columns` elements each, `stride` apart.
    pub(in super::super) fn unpack(&self, sums: &mut [Words], columns: usize, stride: usize, out: &mut [f32]) {
        let (low, high) = sums[..2 * self.tiles].split_at_mut(self.tiles);
        for (half, sums) in [low, high].into_iter().enumerate() {
            let begin = half * SIDE;
            if begin >= columns {
                break;
            }
            let width = SIDE.min(columns - begin);
            if self.compact() {
                for (row, out) in out.chunks_mut(stride).take(self.rows).enumerate() {
                    for (n, out) in out[begin..][..width].iter_mut().enumerate() {
                        let of = |term: usize| f32::from_bits(sums[0][n * SIDE + row * self.terms + term]);
                        *out = (0..self.terms).rev().map(of).reduce(|sum, x| x + sum).unwrap_or(0.0);
                    }
                }
                continue;
            }
            for (group, sums) in sums.chunks_exact_mut(self.terms).enumerate() {
                let (first, others) = sums.split_at_mut(1);
                let [first] = first else { continue };
                if let Some((last, before)) = others.split_last_mut() {
                    for x in before.iter().rev() {
                        add(last, x);
                    }
                    add(first, last);
                }
                // SAFETY: there is AMX, and every machine that has it has AVX-512.
                unsafe { transpose(first) };
                let rows = SIDE.min(self.rows - group * SIDE);
                for (line, out) in
                    first.as_chunks::<SIDE>().0.iter().zip(out[group * SIDE * stride..].chunks_mut(stride)).take(rows)
                {
                    for (word, out) in line.iter().zip(&mut out[begin..][..width]) {
                        *out = f32::from_bits(*word);
                    }
                }
            }
        }
    }
}

simd::vectorised! {
    /// `x += y`, of words that are floats.
    fn add(x: &mut Words, y: &Words) {
        for (x, y) in x.iter_mut().zip(y) {
            *x = (f32::from_bits(*x) + f32::from_bits(*y)).to_bits();
        }
    }
}

/// Term `term` of up to [`DEPTH`] elements in pairs, zeros behind them.
pub(super) fn split<T: Terms>(x: &[T], term: usize, to: &mut [u32; SIDE]) {
    match term {
        0 => split_off::<T, 0>(x, to),
        1 => split_off::<T, 1>(x, to),
        _ => split_off::<T, 2>(x, to),
    }
}

/// [`split`] for a term that is known.
fn split_off<T: Terms, const TERM: usize>(x: &[T], to: &mut [u32; SIDE]) {
    let whole: [T; DEPTH];
    let x = match x.first_chunk::<DEPTH>() {
        Some(x) => x,
        None => {
            whole = std::array::from_fn(|i| x.get(i).copied().unwrap_or(T::ZERO));
            &whole
        }
    };
    // SAFETY: there is AMX, and every machine that has it has AVX-512.
    unsafe { pairs::<T, TERM>(x, to) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn pairs<T: Terms, const TERM: usize>(x: &[T; DEPTH], to: &mut [u32; SIDE]) {
    for (to, pair) in to.iter_mut().zip(x.as_chunks::<2>().0) {
        *to = u32::from(pair[0].term(TERM)) | u32::from(pair[1].term(TERM)) << 16;
    }
}

/// Makes rows of columns, in steps of 1, 2, 4 and 8 words.
#[target_feature(enable = "avx512f")]
fn transpose(words: &mut Words) {
    let lines = words.as_chunks_mut::<SIDE>().0;
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
    for (line, a) in lines.iter_mut().zip(a) {
        // SAFETY: each line is 64 bytes.
        unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), a) };
    }
}
