//! Operands in panels: the lines (rows of A, columns of B) of a panel side by side, step by step of the inner extent.
#![allow(clippy::inline_always)] // must compile with the instruction set of the loop

use half::bf16;

use super::words::Words;
use crate::simd::{Element, vectorised};

/// An operand in memory: element `step` of line `line` is at `line * line_stride + step * step_stride`, and one of the
/// strides is 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    pub(crate) lines: usize,
    pub(crate) line_stride: usize,
    pub(crate) step_stride: usize,
}

/// Steps that are turned at a time: a cache line of f32.
const TURN: usize = 16;

/// Packs lines `first..first + width` of `from`, steps `0..inner`, as f32: what is missing is 0.
pub(super) fn pack_f32<T: Element>(from: &[T], of: Lines, first: usize, width: usize, inner: usize, to: &mut [u32]) {
    let count = width.min(of.lines - first);
    if of.line_stride == 1 {
        beside(from, of, first, count, width, inner, to);
    } else {
        turned(from, of, first, count, width, inner, to);
    }
}

vectorised! {
    fn beside<T: Element>(from: &[T], of: Lines, first: usize, count: usize, width: usize, inner: usize, to: &mut [u32]) {
        for (step, to) in to.chunks_exact_mut(width).take(inner).enumerate() {
            let from = &from[first + step * of.step_stride..][..count];
            for (to, x) in to[..count].iter_mut().zip(from) {
                *to = x.widen().to_bits();
            }
            to[count..].fill(0);
        }
    }
}

vectorised! {
    fn turned<T: Element>(from: &[T], of: Lines, first: usize, count: usize, width: usize, inner: usize, to: &mut [u32]) {
        for begin in (0..inner).step_by(TURN) {
            let steps = TURN.min(inner - begin);
            let to = &mut to[begin * width..][..steps * width];
            for line in 0..count {
                let from = &from[(first + line) * of.line_stride + begin..][..steps];
                for (x, to) in from.iter().zip(to[line..].iter_mut().step_by(width)) {
                    *to = x.widen().to_bits();
                }
            }
            for to in to.chunks_exact_mut(width) {
                to[count..].fill(0);
            }
        }
    }
}

/// The same as pairs of steps, the first in the lower half of a word.
pub(super) fn pack_pairs(from: &[bf16], of: Lines, first: usize, width: usize, inner: usize, to: &mut [u32]) {
    let count = width.min(of.lines - first);
    let pair = |low: bf16, high: bf16| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
    if of.line_stride == 1 {
        for (step, to) in to.chunks_exact_mut(width).take(inner.div_ceil(2)).enumerate() {
            let row = |step: usize| &from[first + step * of.step_stride..][..count];
            let low = row(2 * step);
            if 2 * step + 1 < inner {
                interleave(low, row(2 * step + 1), &mut to[..count]);
            } else {
                to.iter_mut().zip(low).for_each(|(to, low)| *to = pair(*low, bf16::ZERO));
            }
            to[count..].fill(0);
        }
        return;
    }
    let words = inner.div_ceil(2);
    for begin in (0..words).step_by(TURN) {
        let steps = TURN.min(words - begin);
        let to = &mut to[begin * width..][..steps * width];
        for line in 0..count {
            let from = &from[(first + line) * of.line_stride + 2 * begin..];
            let from = &from[..(2 * steps).min(inner - 2 * begin)];
            let (pairs, rest) = from.as_chunks::<2>();
            for (x, to) in pairs.iter().zip(to[line..].iter_mut().step_by(width)) {
                *to = pair(x[0], x[1]);
            }
            if let [last] = rest {
                to[pairs.len() * width + line] = pair(*last, bf16::ZERO);
            }
        }
        for to in to.chunks_exact_mut(width) {
            to[count..].fill(0);
        }
    }
}

vectorised! {
    fn interleave(low: &[bf16], high: &[bf16], to: &mut [u32]) {
        for ((to, low), high) in to.iter_mut().zip(low).zip(high) {
            *to = u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
        }
    }
}

/// Words that `inner` steps take.
pub(super) fn words_of(words: Words, inner: usize) -> usize {
    match words {
        Words::F32 => inner,
        Words::Pairs => inner.div_ceil(2),
    }
}
