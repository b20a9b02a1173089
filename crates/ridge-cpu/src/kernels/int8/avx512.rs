//! Products of codes by AVX-512 VNNI for several rows of x: 16 rows of the weight are the lanes of a vector, 32 are taken
//! apart once and multiplied by all rows of x while they are in first-level cache.
//!
//! Codes of weights are bytes that are not negative, above what they are; what that adds to a sum is what its integer
//! begins with less. Floats are added up in the order of `lanes.rs`, to the same bits.
//!
//! Floor: for 4 elements of 16 rows of the weight and a row of x one product, one a cycle on Zen 4. 32 elements that share a
//! scale also take a conversion and one or two multiplications of floats, which leaves 73 to 80 % of that.
#![allow(clippy::needless_range_loop)] // several arrays of registers go by one index

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_ps, _mm512_cvtepi32_ps, _mm512_cvtps_epi32, _mm512_dpbusd_epi32, _mm512_fmadd_ps,
    _mm512_fnmadd_ps, _mm512_load_ps, _mm512_load_si512, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_mul_ps, _mm512_permute_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_store_ps, _mm512_store_si512, _mm512_storeu_ps,
};
use std::ops::Range;

mod apart;
mod panel;
mod rows;
mod wide;

use apart::take_apart;
pub(super) use panel::to_panel;
use rows::{FetchedRows, SixteenRows, StridedRows};
pub(super) use wide::Wide;
use wide::{ARRANGED, RowOfX, WideCodes};

use super::interleaved::Interleaved;
use super::rows::InterleavedRows;
use super::scale::{COLUMNS, GROUP, SIDE, SUMMED};
use super::weight::CodeWeight;
use super::x::{ActivationCodes, CodeLayout, FEW};
use crate::bytes::cast;
use crate::interleave::Line;
use crate::simd;

/// Rows of x that share a load of the weight's codes.
const ABREAST: usize = 4;

/// The most rows of x that take blocks apart each for itself: that takes less time than storing what they hold.
const ROW_BY_ROW: usize = 3;

/// How far ahead units of lines are fetched whose lines are not read in order: see [`FetchedRows`].
const UNIT_AHEAD: usize = 8 << 10;

/// What products with some rows of x need of their sums.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct OfX {
    /// Sums of codes over what shares a scale, at its first 16 elements.
    sums: [[f32; GROUP / SUMMED]; ABREAST],
    /// What integers begin with, as sums.
    begin: [[i32; GROUP / SUMMED]; ABREAST],
}

/// A whole group of K of a single row of x.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct GroupOfX {
    codes: [u8; ARRANGED],
    // Zeros up to the next line.
    _rest: [u8; ARRANGED.next_multiple_of(64) - ARRANGED],
    sums: [f32; GROUP / SUMMED],
    begin: [i32; GROUP / SUMMED],
}

/// Memory to work in.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Avx512Room {
    unpacked: [WideCodes; COLUMNS / SIDE],
    of_x: OfX,
}

// SAFETY: arrays of numbers, whose sizes are multiples of the alignment.
unsafe impl crate::bytes::Pod for Avx512Room {}

// SAFETY: arrays of numbers, whose sizes are multiples of the alignment.
unsafe impl crate::bytes::Pod for GroupOfX {}

/// Bytes that [`multiply`] works in.
pub(super) fn room(x: &CodeLayout) -> usize {
    size_of::<Avx512Room>() + if x.rows <= ROW_BY_ROW { x.rows * x.groups() * size_of::<GroupOfX>() } else { 0 }
}

/// The products of `rows` of the weight with the rows of `x`, one row of x after another.
///
/// # Panics
/// Where the machine has no AVX-512 VNNI, or a slice is too short.
pub(super) fn multiply<B: Wide>(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut [u8],
    out: &mut [f32],
) {
    let (room, of_rows) = room.split_at_mut(size_of::<Avx512Room>());
    let room = &mut cast::<Avx512Room>(room)[0];
    assert!(
        simd::isa() >= simd::Isa::Avx512Vnni
            && (weight.interleaved.is_some() || rows.end * weight.stride() <= weight.data.len())
    );
    assert!(weight.interleaved.is_none() || rows.start.is_multiple_of(SIDE));
    assert!(x.layout.inner == weight.inner && weight.inner.is_multiple_of(B::ELEMENTS));
    assert!(weight.codes.block == [B::ELEMENTS, B::BYTES]);
    let width = rows.len();
    let out = &mut out[..x.layout.rows * width];
    out.fill(0.0);
    if B::TAKEN_TOGETHER && x.layout.rows <= ROW_BY_ROW {
        let of_x = &mut cast::<GroupOfX>(of_rows)[..x.layout.rows * x.layout.groups()];
        // SAFETY: the instructions are there, and rows are inside of the weight.
        unsafe { row_by_row::<B>(weight, &rows, x, room, of_x, out) };
        return;
    }
    // Few rows of x wait for memory, which is read as few rows of the weight at a time as possible.
    let together = if x.layout.rows > FEW { COLUMNS } else { SIDE };
    for first in rows.clone().step_by(together) {
        let these = first..(first + together).min(rows.end);
        let out = &mut out[first - rows.start..];
        // SAFETY: the instructions are there, and rows are inside of the weight.
        unsafe {
            if these.len() > SIDE {
                columns::<B, 2>(weight, &these, x, 0, room, out, width);
            } else {
                columns::<B, 1>(weight, &these, x, 0, room, out, width);
            }
        }
    }
}

/// Adds the products of `rows` of the weight with the rows of x to `out`; each row of x takes the blocks apart for itself.
///
/// # Safety
/// There is AVX-512 VNNI, and rows are inside of the weight.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn row_by_row<B: Wide>(
    weight: &CodeWeight<'_>,
    rows: &Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut Avx512Room,
    of_x: &mut [GroupOfX],
    out: &mut [f32],
) {
    let (stride, width) = (weight.stride(), rows.len());
    let fetches = simd::isa() == simd::Isa::Amx;
    // Groups that are whole; what is behind them is taken apart before it is multiplied.
    let groups = weight.inner / GROUP;
    for (row, of_row) in of_x.chunks_exact_mut(x.layout.groups()).enumerate() {
        for (group, of_x) in of_row[..groups].iter_mut().enumerate() {
            let elements = weight.elements(group);
            if let Some(codes) = x.code_bytes(row).get(elements.clone()).and_then(|codes| codes.first_chunk()) {
                B::arrange(codes, &mut of_x.codes);
            }
            let sums = &x.sums(row)[elements.start / SUMMED..elements.end / SUMMED];
            sums_of::<B>(sums, &mut of_x.sums, &mut of_x.begin);
        }
    }
    for first in rows.clone().step_by(SIDE) {
        let these = first..(first + SIDE).min(rows.end);
        let to = &mut out[first - rows.start..];
        if weight.interleaved.is_none() && these.len() < SIDE {
            // SAFETY: by the caller's promise.
            unsafe { columns::<B, 1>(weight, &these, x, 0, room, to, width) };
            continue;
        }
        for (row, of_x) in of_x.chunks_exact(x.layout.groups()).enumerate() {
            let of_x = &of_x[..groups];
            // SAFETY: by the caller's promise; groups are whole.
            let total = unsafe {
                if let Some((lines, unit)) = weight.lines(first) {
                    let of_group = |group: usize| InterleavedRows::<B>::new(&lines[group * unit..], 0);
                    if fetches && B::IN_ORDER {
                        sixteen_rows::<B, _>(of_x, x.scales(row), |group| FetchedRows(of_group(group)))
                    } else if fetches {
                        let bytes = unit * size_of::<Line>();
                        sixteen_rows::<B, _>(of_x, x.scales(row), |group| {
                            simd::fetch_far(
                                lines.as_ptr().cast::<u8>().wrapping_add(group * bytes + UNIT_AHEAD),
                                bytes,
                            );
                            of_group(group)
                        })
                    } else {
                        sixteen_rows::<B, _>(of_x, x.scales(row), of_group)
                    }
                } else {
                    let data = &weight.data[first * stride..these.end * stride];
                    let end = weight.data.as_ptr().wrapping_add(these.end * stride);
                    let share = (these.len() * stride).div_ceil(groups.max(1));
                    sixteen_rows::<B, _>(of_x, x.scales(row), |group| {
                        // A share of the next rows, which lie behind these.
                        simd::fetch_far(end.wrapping_add(group * share), share);
                        StridedRows::new(data, stride, weight.codes.bytes(group * GROUP))
                    })
                }
            };
            let to = &mut to[row * width..][..these.len()];
            // SAFETY: as many floats as there are rows.
            unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), (u32::MAX >> (32 - to.len())) as u16, total) };
        }
        if groups < x.layout.groups() {
            // SAFETY: by the caller's promise.
            unsafe { columns::<B, 1>(weight, &these, x, groups, room, to, width) };
        }
    }
}

/// The products of 16 rows of the weight with whole groups of a row of x, whose scales are `scales`; `of_group` are
/// the rows from a group on.
///
/// # Safety
/// There is AVX-512 VNNI, and rows have as many groups as there are of x.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn sixteen_rows<B: Wide, R: SixteenRows>(
    of_x: &[GroupOfX],
    scales: &[f32],
    of_group: impl Fn(usize) -> R,
) -> __m512 {
    let mut total = _mm512_setzero_ps();
    for (group, of_x) in of_x.iter().enumerate() {
        let of_row = RowOfX { codes: &of_x.codes, sums: &of_x.sums, begin: &of_x.begin };
        // SAFETY: by the caller's promise.
        let sum = unsafe { B::sum(of_group(group), &of_row) };
        total = _mm512_fmadd_ps(sum, _mm512_set1_ps(scales[group]), total);
    }
    total
}

/// Adds the products of at most `16 C` rows of the weight, from group `begin` of K on, to `out`, of which every
/// `width`th is of the same row.
///
/// # Safety
/// There is AVX-512 VNNI, and rows are inside of the weight.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn columns<B: Wide, const C: usize>(
    weight: &CodeWeight<'_>,
    rows: &Range<usize>,
    x: &ActivationCodes<'_>,
    begin: usize,
    room: &mut Avx512Room,
    out: &mut [f32],
    width: usize,
) {
    let stride = weight.stride();
    let groups = x.layout.groups();
    let end = weight.data.as_ptr().wrapping_add(rows.end * stride);
    let share = (rows.len() * stride).div_ceil(groups);
    for group in begin..groups {
        // A share of the next rows, which lie behind these.
        simd::fetch_far(end.wrapping_add(group * share), share);
        for (first, to) in rows.clone().step_by(SIDE).zip(&mut room.unpacked) {
            // SAFETY: by the caller's promise.
            unsafe { take_apart::<B>(weight, &(first..(first + SIDE).min(rows.end)), group, to) };
        }
        let elements = weight.elements(group);
        let part = Part { group, elements, width, columns: rows.len() };
        // SAFETY: what is multiplied was unpacked just now.
        unsafe {
            let row = abreast::<B, ABREAST, C>(&part, x, 0, room, out);
            let row = abreast::<B, 2, C>(&part, x, row, room, out);
            abreast::<B, 1, C>(&part, x, row, room, out);
        }
    }
}

/// A group of K of some rows of the weight.
struct Part {
    group: usize,
    elements: Range<usize>,
    /// Floats from what is of one row of x to what is of the next.
    width: usize,
    /// Rows of the weight.
    columns: usize,
}

/// Sums of 16 codes each as sums of what shares a scale, and what integers begin with.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn sums_of<B: Interleaved>(sums: &[f32], to: &mut [f32; SIDE], begin: &mut [i32; SIDE]) {
    let mask = ((1u32 << sums.len().min(SIDE)) - 1) as u16;
    // SAFETY: only the sums that are there are read; both lines have 64 bytes, on lines of the cache.
    unsafe {
        let units = _mm512_maskz_loadu_ps(mask, sums.as_ptr());
        let sums = if B::GROUP == SUMMED { units } else { _mm512_add_ps(units, _mm512_permute_ps::<0xb1>(units)) };
        let above = _mm512_mul_ps(sums, _mm512_set1_ps(-f32::from(B::ABOVE)));
        _mm512_store_ps(to.as_mut_ptr(), sums);
        _mm512_store_si512(begin.as_mut_ptr().cast(), _mm512_cvtps_epi32(above));
    }
}

/// Adds the products of a part that is unpacked with the rows of x from row `first` on to `out`, `N` at a time. Gives the
/// first row that is left, of fewer than `N`.
///
/// # Safety
/// There is AVX-512 VNNI.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn abreast<B: Interleaved, const N: usize, const C: usize>(
    part: &Part,
    x: &ActivationCodes<'_>,
    mut first: usize,
    room: &mut Avx512Room,
    out: &mut [f32],
) -> usize {
    let Avx512Room { unpacked, of_x } = room;
    let elements = part.elements.clone();
    while first + N <= x.layout.rows {
        let (mut codes, mut scales): ([&[[i8; 4]]; N], _) = ([&[]; N], [0f32; N]);
        for nth in 0..N {
            let row = first + nth;
            codes[nth] = x.codes(row)[elements.clone()].as_chunks().0;
            scales[nth] = x.scales(row)[part.group];
            let sums = &x.sums(row)[elements.start / SUMMED..elements.end / SUMMED];
            sums_of::<B>(sums, &mut of_x.sums[nth], &mut of_x.begin[nth]);
        }
        // SAFETY: by the caller's promise.
        let sums = unsafe { products::<B, N, C>(unpacked, codes, of_x) };
        for nth in 0..N {
            let to = &mut out[(first + nth) * part.width..];
            let scale = _mm512_set1_ps(scales[nth]);
            for c in 0..C {
                let lanes = SIDE.min(part.columns - c * SIDE);
                let to = &mut to[c * SIDE..][..lanes];
                // SAFETY: as many floats as are read and written.
                unsafe {
                    if lanes == SIDE {
                        let total = _mm512_loadu_ps(to.as_ptr());
                        _mm512_storeu_ps(to.as_mut_ptr(), _mm512_fmadd_ps(sums[nth][c], scale, total));
                    } else {
                        let mask = (1u16 << lanes) - 1;
                        let total = _mm512_maskz_loadu_ps(mask, to.as_ptr());
                        _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, _mm512_fmadd_ps(sums[nth][c], scale, total));
                    }
                }
            }
        }
        first += N;
    }
    first
}

/// What the products of `16 C` rows of the weight with `N` of x stand for but for the scales of x.
///
/// # Panics
/// When a row of x has more than a group of K, or fewer elements than the first.
///
/// # Safety
/// There is AVX-512 VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn products<B: Interleaved, const N: usize, const C: usize>(
    unpacked: &[WideCodes; COLUMNS / SIDE],
    x: [&[[i8; 4]]; N],
    of_x: &OfX,
) -> [[__m512; C]; N] {
    let words = const { B::GROUP / 4 };
    assert!(C <= unpacked.len() && x.iter().all(|row| row.len() >= x[0].len()) && x[0].len() <= GROUP / 4);
    // Of a number that the compiler knows or can bound it unrolls the loop whole, and spills its registers. So there are no
    // bounds to check in it either.
    let groups = std::hint::black_box(x[0].len() / words);
    let x = x.map(|row| row.as_ptr().cast::<i32>());
    let mut sums = [[_mm512_setzero_ps(); C]; N];
    for group in 0..groups {
        let unit = group * (B::GROUP / SUMMED);
        let mut integers = [[_mm512_setzero_si512(); C]; N];
        for r in 0..N {
            if B::ABOVE != 0 {
                // SAFETY: a row has as many units as groups of K have.
                integers[r] = [_mm512_set1_epi32(unsafe { *of_x.begin[r].get_unchecked(unit) }); C];
            }
        }
        for word in group * words..(group + 1) * words {
            let mut codes = [_mm512_setzero_si512(); C];
            for c in 0..C {
                // SAFETY: a vector, aligned as what it lies in, of the words that there are.
                codes[c] = unsafe { load(unpacked[c].codes.get_unchecked(word)) };
            }
            for r in 0..N {
                // SAFETY: every row of x has so many words.
                let four = _mm512_set1_epi32(unsafe { x[r].add(word).read_unaligned() });
                for c in 0..C {
                    integers[r][c] = _mm512_dpbusd_epi32(integers[r][c], codes[c], four);
                }
            }
        }
        for c in 0..C {
            // SAFETY: vectors, aligned as what they lie in, of the groups that there are.
            let scale = unsafe { _mm512_load_ps(unpacked[c].scales.get_unchecked(group).as_ptr()) };
            for r in 0..N {
                sums[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[r][c]), scale, sums[r][c]);
            }
            if B::MINIMA {
                // SAFETY: as above.
                let minimum = unsafe { _mm512_load_ps(unpacked[c].minima.get_unchecked(group).as_ptr()) };
                for r in 0..N {
                    // SAFETY: a row has as many units as groups of K have.
                    let of_x = _mm512_set1_ps(unsafe { *of_x.sums[r].get_unchecked(unit) });
                    sums[r][c] = _mm512_fnmadd_ps(minimum, of_x, sums[r][c]);
                }
            }
        }
    }
    sums
}

/// # Safety
/// The bytes are on a line of the cache.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(bytes: &[u8; 4 * SIDE]) -> __m512i {
    // SAFETY: 64 bytes, aligned by the caller's promise.
    unsafe { _mm512_load_si512(bytes.as_ptr().cast()) }
}
