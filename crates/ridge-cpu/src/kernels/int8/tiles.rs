//! Products of codes on the matrix tiles of x86 (AMX, 8-bit integers). 16 rows of the weight, taken apart, times 16 rows
//! of x: a tile product for each group of weights that share a scale, whose integers go to memory, become floats and are
//! added up there in registers, while the next tiles are multiplied.
//!
//! Floor: 16 cycles for 16 x 16 x 32, in which the 16 lines of integers must also be stored, loaded, converted and added
//! up.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_cvtepi32_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_load_ps, _mm512_load_si512,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_store_ps,
};
use std::ops::Range;

use super::scale::{COLUMNS, GROUP, SIDE, SUMMED};
use super::unpack::{OfRows, Unpacked};
use super::weight::CodeWeight;
use super::x::{ActivationCodes, CodeLayout};
use crate::amx;
use crate::bytes::cast;
use crate::simd;

/// Bytes of a line of a tile.
const LINE: usize = 64;

/// Groups of K whose weights are taken apart before they are multiplied by all rows of x: those of 32 rows, the integers of
/// two units and codes of x stay in L1 together.
const TOGETHER: usize = 1;

/// 16 rows of the weight by 16 rows of x.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct StripSums([[f32; SIDE]; SIDE]);

/// The integers of one group of K.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Integers([[[i32; SIDE]; SIDE]; GROUP / 16]);

/// Memory to work in.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct TileRoom {
    /// By 16 rows, and by groups of K.
    unpacked: [[Unpacked; TOGETHER]; 2],
    /// Of the group that is multiplied, and of the one before.
    integers: [Integers; 2],
}

// SAFETY: an array of numbers.
unsafe impl crate::bytes::Pod for StripSums {}
// SAFETY: arrays of numbers, whose sizes are multiples of the alignment.
unsafe impl crate::bytes::Pod for TileRoom {}

/// One group of K of 16 rows of the weight and of x.
#[derive(Clone, Copy)]
struct TileUnit<'a> {
    weights: &'a Unpacked,
    /// Of the weight, elements that share a scale, and how many such there are.
    group: usize,
    count: usize,
    /// From the group's codes, scales and sums on.
    codes: &'a [i8],
    scales: &'a [f32],
    sums: &'a [f32],
}

/// Bytes that [`multiply`] works in.
pub(super) fn room(x: &CodeLayout) -> usize {
    size_of::<TileRoom>() + 2 * x.strips() * size_of::<StripSums>()
}

/// The products of `rows` of the weight, at most 32, with the rows of `x`, one row of x after another.
pub(super) fn multiply(
    weight: &CodeWeight<'_>,
    rows: Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut [u8],
    out: &mut [f32],
) {
    let (room, sums) = room.split_at_mut(size_of::<TileRoom>());
    let (room, sums) = (&mut cast::<TileRoom>(room)[0], cast::<StripSums>(sums));
    assert!(!rows.is_empty() && rows.len() <= COLUMNS && rows.end * weight.stride() <= weight.data.len());
    assert!(x.layout.inner == weight.inner && out.len() >= x.layout.rows * rows.len());
    assert!(x.layout.side == SIDE);
    let (of_sums, group) = ([SIDE, LINE], weight.codes.group);
    let (of_weight, of_x) = ([SIDE, group], [group / 4, LINE]);
    let tiles = [of_sums, of_sums, of_sums, of_sums, of_weight, of_weight, of_x, of_x];
    let _configured = amx::TileSession::with(tiles);
    let halves = rows.clone().step_by(SIDE).map(|from| from..(from + SIDE).min(rows.end));
    // SAFETY: there are tiles, configured so, and every machine that has them has AVX-512; the rest is checked above.
    unsafe {
        if weight.codes.minima {
            many::<true>(weight, &rows, x, room, sums);
        } else {
            many::<false>(weight, &rows, x, room, sums);
        }
        for strip in 0..x.layout.strips() {
            let of_x = SIDE.min(x.layout.rows - strip * SIDE);
            for (nth, half) in halves.clone().enumerate() {
                let out = &mut out[strip * SIDE * rows.len() + nth * SIDE..];
                let words = &*(&raw const sums[2 * strip + nth]).cast::<amx::Words>();
                amx::unpack_tile(&[words], [of_x, half.len()], rows.len(), out);
            }
        }
    }
}

/// Takes group `group` of K of at most 16 rows apart, and brings what comes later to cache.
fn unpack(weight: &CodeWeight<'_>, rows: &Range<usize>, group: usize, to: &mut Unpacked) {
    let elements = weight.elements(group);
    let stride = weight.stride();
    let first = rows.start * stride + weight.codes.bytes(elements.start);
    let data = &weight.data[first..rows.end * stride];
    // A share of the rows that come after these and the other half.
    let groups = weight.inner.div_ceil(GROUP);
    let next = weight.data.as_ptr().wrapping_add((rows.start + COLUMNS) * stride);
    simd::fetch_share(next, rows.len() * stride, group, groups);
    let blocks = elements.len() / weight.codes.block[0];
    (weight.codes.unpack)(&OfRows { data, stride, blocks, rows: rows.len() }, to);
}

impl<'a> TileUnit<'a> {
    fn new(
        weight: &CodeWeight<'_>,
        weights: &'a Unpacked,
        x: &ActivationCodes<'a>,
        strip: usize,
        group: usize,
    ) -> Self {
        let elements = weight.elements(group);
        Self {
            weights,
            group: weight.codes.group,
            count: elements.len() / weight.codes.group,
            codes: &x.codes(strip)[elements.start * SIDE..elements.end * SIDE],
            scales: &x.scales(strip)[group * SIDE..][..SIDE],
            sums: &x.sums(strip)[elements.start / SUMMED * SIDE..elements.end / SUMMED * SIDE],
        }
    }

    /// The sums of the codes of x of group `nth`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    fn sum_lines(&self, nth: usize) -> __m512 {
        let lines = self.sums.as_chunks::<SIDE>().0;
        // SAFETY: lines of 64 bytes, on lines of the cache.
        let line = |i: usize| unsafe { _mm512_load_ps(lines[i].as_ptr()) };
        if self.group == SUMMED { line(nth) } else { _mm512_add_ps(line(2 * nth), line(2 * nth + 1)) }
    }

    /// Multiplies the tiles of group `nth` into tile register `nth % 4`, where it stays until [`store`]d.
    ///
    /// # Safety
    /// The tiles are configured for this unit.
    #[inline(always)]
    unsafe fn multiply(&self, nth: usize) {
        assert!(nth < self.count);
        // SAFETY: the tiles are configured as their rows are; `nth` groups of both are inside of the slices; tile
        // registers are used by nothing else, so sums stay in them.
        unsafe {
            let w = self.weights.codes.as_ptr().cast::<i8>().add(nth * self.group);
            let x = self.codes.as_ptr().add(nth * self.group * SIDE);
            macro_rules! product {
                ($sums:literal, $w:tt, $x:tt) => {
                    asm!(
                        concat!("tilezero ", $sums),
                        concat!("tileloadd ", $w, ", [{w} + {w_stride}*1]"),
                        concat!("tileloadd ", $x, ", [{x} + {line}*1]"),
                        concat!("tdpbssd ", $sums, ", ", $w, ", ", $x),
                        w = in(reg) w,
                        w_stride = in(reg) GROUP,
                        x = in(reg) x,
                        line = in(reg) LINE,
                        out($w) _, out($x) _,
                        options(nostack, readonly),
                    )
                };
            }
            match nth % 4 {
                0 => product!("tmm0", "tmm4", "tmm6"),
                1 => product!("tmm1", "tmm5", "tmm7"),
                2 => product!("tmm2", "tmm4", "tmm6"),
                _ => product!("tmm3", "tmm5", "tmm7"),
            }
        }
    }
}

/// Stores the integers of group `nth`, which [`TileUnit::multiply`] left in their register.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn store(nth: usize, integers: &mut Integers) {
    let to = integers.0[nth].as_mut_ptr();
    macro_rules! store {
        ($sums:literal) => {
            asm!(
                concat!("tilestored [{to} + {line}*1], ", $sums),
                to = in(reg) to,
                line = in(reg) LINE,
                options(nostack),
            )
        };
    }
    // SAFETY: 16 lines of 64 bytes, one after another, are a tile of integers.
    unsafe {
        match nth % 4 {
            0 => store!("tmm0"),
            1 => store!("tmm1"),
            2 => store!("tmm2"),
            _ => store!("tmm3"),
        }
    }
}

/// Products that are under way before the first of them is stored: a store waits for its product, and what is behind it
/// for the store.
const UNDER_WAY: usize = 2;

/// Multiplies and stores all groups of a unit.
///
/// # Safety
/// The tiles are configured for this unit.
#[inline(always)]
unsafe fn multiply_all(unit: &TileUnit<'_>, integers: &mut Integers) {
    // SAFETY: by the caller's promise; what is stored was multiplied last but one.
    unsafe {
        for nth in 0..unit.count + UNDER_WAY {
            if nth < unit.count {
                unit.multiply(nth);
            }
            if nth >= UNDER_WAY {
                store(nth - UNDER_WAY, integers);
            }
        }
    }
}

/// 16 rows of x after another by at most 32 of the weight.
///
/// # Safety
/// The tiles are configured for 16 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn many<const MINIMA: bool>(
    weight: &CodeWeight<'_>,
    rows: &Range<usize>,
    x: &ActivationCodes<'_>,
    room: &mut TileRoom,
    sums: &mut [StripSums],
) {
    let TileRoom { unpacked, integers: [now, before] } = room;
    let (mut now, mut before) = (now, before);
    let halves = rows.len().div_ceil(SIDE);
    let groups = x.layout.groups();
    sums[..2 * x.layout.strips()].fill(StripSums([[0.0; SIDE]; SIDE]));
    for from in (0..groups).step_by(TOGETHER) {
        let together = from..(from + TOGETHER).min(groups);
        for (half, unpacked) in unpacked.iter_mut().enumerate().take(halves) {
            let first = rows.start + half * SIDE;
            let of_half = first..(first + SIDE).min(rows.end);
            for group in together.clone() {
                unpack(weight, &of_half, group, &mut unpacked[group - from]);
            }
        }
        // The unit whose integers wait, and where its sums are.
        let mut waiting: Option<(TileUnit<'_>, usize)> = None;
        for strip in 0..x.layout.strips() {
            for half in 0..halves {
                for group in together.clone() {
                    let unit = TileUnit::new(weight, &unpacked[half][group - from], x, strip, group);
                    // SAFETY: the tiles are configured for 16 columns.
                    unsafe {
                        match waiting {
                            Some((last, at)) => {
                                // What is needed when both halves are done with these rows of x.
                                let later = (strip + 1).min(x.layout.strips() - 1);
                                let of_later =
                                    TileUnit::new(weight, &unpacked[half][group - from], x, later, group).codes;
                                let share = of_later.len() / halves;
                                let ahead = &of_later[half * share..][..share];
                                let sums_ahead = sums.as_ptr().wrapping_add(2 * later + half);
                                let total = &mut sums[at];
                                step::<MINIMA, true>(&last, before, total, Some((&unit, now)), ahead, sums_ahead);
                            }
                            None => multiply_all(&unit, now),
                        }
                    }
                    waiting = Some((unit, 2 * strip + half));
                    std::mem::swap(&mut now, &mut before);
                }
            }
        }
        if let Some((last, at)) = waiting {
            // SAFETY: as above.
            unsafe { step::<MINIMA, false>(&last, before, &mut sums[at], None, &[], std::ptr::null()) };
        }
    }
}

/// Adds up what the integers of one unit stand for, while the next one's are made.
///
/// # Safety
/// The tiles are configured for 16 columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn step<const MINIMA: bool, const NEXT: bool>(
    unit: &TileUnit<'_>,
    integers: &Integers,
    total: &mut StripSums,
    mut next: Option<(&TileUnit<'_>, &mut Integers)>,
    ahead: &[i8],
    sums_ahead: *const StripSums,
) {
    let mut sums = [_mm512_setzero_ps(); SIDE];
    let after = next.as_ref().map_or(0, |(unit, _)| unit.count + UNDER_WAY);
    for nth in 0..unit.count.max(after) {
        if NEXT && let Some((next, to)) = &mut next {
            // SAFETY: by the caller's promise; what is stored was multiplied last but one.
            unsafe {
                if nth < next.count {
                    next.multiply(nth);
                    let part = ahead.len() / next.count;
                    simd::fetch(ahead.as_ptr().wrapping_add(nth * part).cast(), part);
                    simd::fetch(sums_ahead.wrapping_byte_add(nth * 64).cast(), 64);
                }
                if (UNDER_WAY..after).contains(&nth) {
                    store(nth - UNDER_WAY, to);
                }
            }
        }
        if nth >= unit.count {
            continue;
        }
        let (lines, scales, minima) =
            (&integers.0[nth], &unit.weights.scales.scales[nth], &unit.weights.scales.minima[nth]);
        let of_x = if MINIMA { unit.sum_lines(nth) } else { _mm512_setzero_ps() };
        for row in 0..SIDE {
            // SAFETY: lines of 64 bytes, on lines of the cache.
            let line = _mm512_cvtepi32_ps(unsafe { _mm512_load_si512(lines[row].as_ptr().cast()) });
            sums[row] = _mm512_fmadd_ps(line, _mm512_set1_ps(scales[row]), sums[row]);
            if MINIMA {
                sums[row] = _mm512_fnmadd_ps(of_x, _mm512_set1_ps(minima[row]), sums[row]);
            }
        }
    }
    // SAFETY: lines of 64 bytes, on lines of the cache.
    unsafe {
        let scales = _mm512_load_ps(unit.scales.as_ptr());
        for (total, sum) in total.0.iter_mut().zip(sums) {
            _mm512_store_ps(total.as_mut_ptr(), _mm512_fmadd_ps(sum, scales, _mm512_load_ps(total.as_ptr())));
        }
    }
}
