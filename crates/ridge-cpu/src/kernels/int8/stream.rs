//! Products of codes by vector instructions that multiply bytes (AVX-512 VNNI): rows of the weight pass by one row of x.
//!
//! Codes of weights are taken as bytes that are not negative, above what they are, and what that adds to each sum is what
//! sums begin with less. Four vectors of 16 sums are the 256 elements of a row; their lanes are added up within the row
//! until 16 integers are left, one for each 16 elements, and those of 16 rows are turned so that rows are lanes, where
//! scales are. The order of floats is that of `tiles.rs`.
//!
//! Floor: every block read once. Of arithmetic 64 elements take a product, a load or two and what takes their bits apart,
//! three instructions and a half of adding up, and their share of the scales: some 10, which is half of what one thread's
//! memory leaves time for.

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_load_ps, _mm512_load_si512, _mm512_set1_epi8, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_store_si512, _mm512_storeu_ps, _mm512_sub_epi32, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::ops::Range;

use super::scale::{GROUP, SIDE, SUMMED};
use super::unpack::{self, OfRows, PADDED, Scales, Vectors};
use super::weight::CodeWeight;
use super::x::ActivationCodes;
use crate::amx::transpose;
use crate::bytes::cast;
use crate::simd;

/// Memory to work in.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct StreamRoom {
    scales: Scales,
    /// Codes of x in the order of the weight's, and what sums begin with.
    x: [[i8; 64]; 4],
    begin: [[i32; SIDE]; 4],
    /// Sums of rows of the weight over 16 elements each.
    sums: [[u32; SIDE]; SIDE],
    /// The last blocks of a row.
    padded: [u8; PADDED],
}

// SAFETY: arrays of numbers, whose sizes are multiples of the alignment but for the last.
unsafe impl crate::bytes::Pod for StreamRoom {}

/// Bytes that [`stream`] works in.
pub(super) fn room() -> usize {
    size_of::<StreamRoom>()
}

/// The products of `rows` of the weight with the row of `x`.
pub(super) fn stream<B: Vectors>(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut [u8],
    out: &mut [f32],
) {
    let room = &mut cast::<StreamRoom>(room)[0];
    assert!(simd::isa() >= simd::Isa::Avx512Vnni && x.layout.side == 1 && x.layout.rows == 1);
    assert!(rows.end * weight.stride() <= weight.data.len() && x.layout.inner == weight.inner);
    assert!(weight.codes.block == [B::ELEMENTS, B::BYTES]);
    let out = &mut out[..rows.len()];
    for (first, out) in rows.clone().step_by(SIDE).zip(out.chunks_mut(SIDE)) {
        let these = first..(first + SIDE).min(rows.end);
        // SAFETY: the instructions are there, and rows are inside of the weight.
        let total = unsafe { sixteen::<B>(weight, &these, x, room) };
        out.copy_from_slice(&total[..these.len()]);
    }
}

/// The totals of at most 16 rows of the weight with x.
///
/// # Safety
/// There is AVX-512 with VNNI, and rows are inside of the weight.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn sixteen<B: Vectors>(
    weight: &CodeWeight<'_>,
    rows: &Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut StreamRoom,
) -> [f32; SIDE] {
    let stride = weight.stride();
    let groups = x.layout.groups();
    let mut total = _mm512_setzero_ps();
    for group in 0..groups {
        // A share of the next rows, which lie behind these.
        let end = weight.data.as_ptr().wrapping_add(rows.end * stride);
        simd::fetch_share(end, rows.len() * stride, group, groups);
        let elements = weight.elements(group);
        let from = rows.start * stride + weight.codes.bytes(elements.start);
        let data = &weight.data[from..rows.end * stride];
        let blocks = OfRows { data, stride, blocks: elements.len() / B::ELEMENTS, rows: rows.len() };
        unpack::check::<B>(&blocks);
        // SAFETY: the blocks were checked, and rows of x have the elements of each group.
        unsafe {
            B::scales(&blocks, &mut room.scales);
            arrange::<B>(&x.codes(0)[elements.clone()], &mut room.x, &mut room.begin);
            for row in 0..rows.len() {
                let at = data.as_ptr().add(row * stride);
                let codes = B::load(unpack::whole::<B>(at, blocks.blocks, &mut room.padded));
                let product = |j: usize| {
                    let begin = _mm512_load_si512(room.begin[j].as_ptr().cast());
                    let x = _mm512_load_si512(room.x[j].as_ptr().cast());
                    _mm512_dpbusd_epi32(begin, codes[j], x)
                };
                let sums = by_sixteen([product(0), product(1), product(2), product(3)]);
                _mm512_store_si512(room.sums[row].as_mut_ptr().cast(), sums);
            }
        }
        let of_x = &x.sums(0)[elements.start / SUMMED..];
        let sum = scaled::<B>(&room.sums, &room.scales, of_x, elements.len());
        total = _mm512_fmadd_ps(sum, _mm512_set1_ps(x.scales(0)[group]), total);
    }
    let mut totals = [0.0; SIDE];
    // SAFETY: 16 floats.
    unsafe { _mm512_storeu_ps(totals.as_mut_ptr(), total) };
    totals
}

/// Codes of x in the order of a format's, zeros behind them, and minus what the format's bytes are above codes times them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn arrange<B: Vectors>(codes: &[i8], to: &mut [[i8; 64]; 4], begin: &mut [[i32; SIDE]; 4]) {
    let mut padded;
    let codes = match codes.first_chunk::<GROUP>() {
        Some(codes) => codes,
        None => {
            padded = [0; GROUP];
            padded[..codes.len()].copy_from_slice(codes);
            &padded
        }
    };
    let units = codes.as_chunks::<SUMMED>().0;
    let above = _mm512_set1_epi8(B::ABOVE.cast_signed());
    for ((to, begin), order) in to.iter_mut().zip(begin).zip(B::ORDER.as_chunks::<4>().0) {
        for (to, unit) in to.as_chunks_mut::<SUMMED>().0.iter_mut().zip(order) {
            *to = units[*unit];
        }
        // SAFETY: 64 bytes each, aligned as the room is.
        unsafe {
            let x = _mm512_load_si512(to.as_ptr().cast());
            let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), above, x);
            _mm512_store_si512(begin.as_mut_ptr().cast(), _mm512_sub_epi32(_mm512_setzero_si512(), sums));
        }
    }
}

/// Sums over the four lanes of each quarter of four vectors: word `4 q + j` is of quarter `q` of vector `j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn by_sixteen([a, b, c, d]: [__m512i; 4]) -> __m512i {
    let pairs = |a: __m512i, b: __m512i| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (ab, cd) = (pairs(a, b), pairs(c, d));
    _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// What the sums of rows stand for, with the scales of rows and the sums of x's codes: floats added up in the order of K.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn scaled<B: Vectors>(sums: &[[u32; SIDE]; SIDE], scales: &Scales, of_x: &[f32], elements: usize) -> __m512 {
    let mut lines = [_mm512_setzero_si512(); SIDE];
    transpose(sums, |i, line| lines[i] = line);
    // The line of a unit of 16 elements: that which holds it is word `4 q + j` of its row.
    let line = |unit: usize| {
        let at = B::PLACES[unit];
        lines[at % 4 * 4 + at / 4]
    };
    let mut sum = _mm512_setzero_ps();
    for group in 0..elements / B::GROUP {
        let integers =
            if B::GROUP == SUMMED { line(group) } else { _mm512_add_epi32(line(2 * group), line(2 * group + 1)) };
        // SAFETY: lines of 64 bytes, on lines of the cache.
        unsafe {
            let scale = _mm512_load_ps(scales.scales[group].as_ptr());
            sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), scale, sum);
            if B::MINIMA {
                let of_x: f32 = of_x[group * (B::GROUP / SUMMED)..][..B::GROUP / SUMMED].iter().sum();
                let minimum = _mm512_load_ps(scales.minima[group].as_ptr());
                sum = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(of_x), sum);
            }
        }
    }
    sum
}
