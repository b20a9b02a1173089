//! Where 32-bit words of eight rows of a weight come from, each vector the same word of all rows: shuffled together from rows
//! that lie one after another, or loaded from interleaved ones ([`Interleaving`](crate::interleave::Interleaving)).

use std::marker::PhantomData;
use std::ops::Range;

use ridge_graph::format::BlockFormat;

use super::eight::{self, Words, left_by, or, right_by};
use super::scale::{EIGHT, SIDE};
use crate::interleave::{self, Line};

/// Eight rows from a block on.
pub(super) trait EightRows: Copy {
    /// `bytes` bytes further on in each row.
    fn after(self, bytes: usize) -> Self;

    /// The four 32-bit words from byte `at` on, each of all rows.
    ///
    /// # Safety
    /// There are the instructions, and the 16 bytes are inside of every row's block.
    unsafe fn words(self, at: usize) -> [Words; 4];
}

/// Where a block of each row begins.
#[derive(Clone, Copy)]
pub(super) struct BlockPointers([*const u8; EIGHT]);

impl BlockPointers {
    /// Those at byte `from` of the first eight of `rows`, which begin every `stride` bytes of `data`; in place of rows that
    /// are not there the last one.
    #[inline]
    pub(super) fn new(data: &[u8], rows: Range<usize>, stride: usize, from: usize) -> Self {
        let mut pointers = [data.as_ptr(); EIGHT];
        for (nth, row) in pointers.iter_mut().enumerate() {
            *row = row.wrapping_add((rows.start + nth).min(rows.end - 1) * stride + from);
        }
        Self(pointers)
    }
}

impl EightRows for BlockPointers {
    #[inline]
    fn after(self, bytes: usize) -> Self {
        Self(self.0.map(|row| row.wrapping_add(bytes)))
    }

    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn words(self, at: usize) -> [Words; 4] {
        // SAFETY: by the caller's promise.
        unsafe { eight::transposed(self.0.map(|row| row.wrapping_add(at))) }
    }
}

/// Interleaved rows of blocks of `B`: the lanes of lines. Words that begin within those of the lines are two lines shifted
/// together, whose second one is inside of the unit too, since blocks do not end with the first of their bytes.
pub(super) struct InterleavedRows<B> {
    /// The first lane of the first line.
    first: *const u32,
    /// Bytes of each row that are passed by.
    pub(super) at: usize,
    format: PhantomData<B>,
}

impl<B> Clone for InterleavedRows<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for InterleavedRows<B> {}

impl<B: BlockFormat> InterleavedRows<B> {
    /// The rows from lane `lane` on of the unit that begins with the first of `lines`.
    pub(super) fn new(lines: &[Line], lane: usize) -> Self {
        Self { first: lines.as_ptr().cast::<u32>().wrapping_add(lane), at: 0, format: PhantomData }
    }

    #[inline]
    pub(super) fn line(self, nth: usize) -> *const u32 {
        self.first.wrapping_add(interleave::place([B::ELEMENTS, B::BYTES], nth) * SIDE)
    }
}

impl<B: BlockFormat> EightRows for InterleavedRows<B> {
    #[inline]
    fn after(self, bytes: usize) -> Self {
        Self { at: self.at + bytes, ..self }
    }

    #[inline]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn words(self, at: usize) -> [Words; 4] {
        let at = self.at + at;
        // SAFETY: by the caller's promise.
        let line = |nth: usize| unsafe { eight::words(self.line(at / 4 + nth)) };
        let words = [line(0), line(1), line(2), line(3)];
        let bits = at % 4 * 8;
        if bits == 0 {
            return words;
        }
        let next = [words[1], words[2], words[3], line(4)];
        let mut shifted = words;
        for ((word, next), to) in words.into_iter().zip(next).zip(&mut shifted) {
            *to = or(right_by(word, bits), left_by(next, 32 - bits));
        }
        shifted
    }
}
