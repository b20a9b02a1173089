//! Groups of K of at most 16 rows of a weight taken apart, wherever the rows lie: 16 interleaved ones at once where the format has it,
//! others eight at a time.

use std::ops::Range;

use super::super::interleaved::{Interleaved, InterleavedPlace};
use super::super::rows::{BlockPointers, EightRows, InterleavedRows};
use super::super::scale::{EIGHT, GROUP, SIDE};
use super::super::weight::CodeWeight;
use super::wide::{Wide, WideCodes};

/// Takes apart group `group` of K of `rows` of the weight, at most 16, which begin a group of interleaved ones if they are so.
///
/// # Safety
/// There is AVX-512 VNNI, and rows are inside of the weight.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn take_apart<B: Wide>(
    weight: &CodeWeight<'_>,
    rows: &Range<usize>,
    group: usize,
    to: &mut WideCodes,
) {
    let elements = weight.elements(group);
    let lines = weight.lines(rows.start).map(|(lines, unit)| &lines[group * unit..]);
    if let Some(lines) = lines.filter(|_| B::TAKEN_TOGETHER && elements.len() == GROUP) {
        // SAFETY: blocks are inside of the weight.
        unsafe { B::unpack_sixteen(InterleavedRows::<B>::new(lines, 0), to) };
        return;
    }
    for (first, lane) in rows.clone().step_by(EIGHT).zip([0, EIGHT]) {
        // SAFETY: blocks are inside of their rows, which are inside of the weight.
        unsafe {
            if let Some(lines) = lines {
                unpack::<B>(InterleavedRows::<B>::new(lines, lane), elements.len(), to, lane);
            } else {
                let from = weight.codes.bytes(elements.start);
                let of_rows = BlockPointers::new(weight.data, first..rows.end, weight.stride(), from);
                unpack::<B>(of_rows, elements.len(), to, lane);
            }
        }
    }
}

/// Takes apart `elements` elements of eight rows, into the lanes from `lane` on.
///
/// # Safety
/// There is AVX2, and the rows have so many elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<B: Interleaved>(rows: impl EightRows, elements: usize, to: &mut WideCodes, lane: usize) {
    for block in 0..elements / B::ELEMENTS {
        let (word, unit) = (block * B::ELEMENTS / 4, block * B::ELEMENTS / B::GROUP);
        let mut to = InterleavedPlace::<B, SIDE>::new(
            to.codes[word..].as_mut_ptr().cast::<u8>().wrapping_add(4 * lane),
            to.scales[unit..].as_mut_ptr().cast::<f32>().wrapping_add(lane),
            to.minima[unit..].as_mut_ptr().cast::<f32>().wrapping_add(lane),
        );
        // SAFETY: by the caller's promise, and `to` has room for eight lanes of a block.
        unsafe { B::unpack(rows.after(block * B::BYTES), &mut to) };
    }
}
