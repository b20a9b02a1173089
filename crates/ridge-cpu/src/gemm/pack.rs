//! Operands in panels: the lines (rows of A, columns of B) of a panel side by side, word by word of the inner extent; or, for
//! matrix tiles, blocks of [`TURN`] words of each line after another.
//!
//! Floor: each element read and each word written once. What lies along the inner extent is turned in blocks of 16 x 16 words.
#![allow(clippy::inline_always)] // must compile with the instruction set of the loop
#![allow(clippy::needless_range_loop)] // several rows of registers go by one index

use std::ops::Range;

use half::bf16;

use super::turn::{Square, TURN, turn};
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

/// Lines `first..first + width` of an operand, steps `steps`, of which whole words begin with the first.
pub(super) struct Part<'a, T> {
    pub(super) from: &'a [T],
    pub(super) of: Lines,
    pub(super) first: usize,
    pub(super) width: usize,
    pub(super) steps: Range<usize>,
}

impl<'a, T> Part<'a, T> {
    /// Lines that there are.
    #[inline(always)]
    fn count(&self) -> usize {
        self.width.min(self.of.lines.saturating_sub(self.first))
    }

    #[inline(always)]
    fn are_beside(&self) -> bool {
        self.of.line_stride == 1
    }

    /// Its lines at step `step`, counted from its first, if they are beside each other.
    #[inline(always)]
    fn at_step(&self, step: usize) -> &'a [T] {
        let count = self.count();
        if count == 0 {
            return &[];
        }
        &self.from[self.first + (self.steps.start + step) * self.of.step_stride..][..count]
    }

    /// Steps from `begin` on of line `line`, at most `most`, if they are beside each other.
    #[inline(always)]
    fn of_line(&self, line: usize, begin: usize, most: usize) -> &'a [T] {
        let begin = self.steps.start + begin;
        &self.from[(self.first + line) * self.of.line_stride + begin..][..most.min(self.steps.end - begin)]
    }
}

vectorised! {
    /// Packs as f32: what is missing is 0.
    pub(super) fn pack_f32<T: Element>(part: &Part<'_, T>, to: &mut [u32]) {
        let (count, width) = (part.count(), part.width);
        if part.are_beside() {
            let rows = to.chunks_exact_mut(width).take(part.steps.len()).enumerate();
            // Rows of a known length are copied in registers, others by calls.
            return match if count == width { width } else { 0 } {
                12 => rows.for_each(|(step, to)| widen_row::<T, 12>(part.at_step(step), to)),
                16 => rows.for_each(|(step, to)| widen_row::<T, 16>(part.at_step(step), to)),
                32 => rows.for_each(|(step, to)| widen_row::<T, 32>(part.at_step(step), to)),
                _ => rows.for_each(|(step, to)| {
                    widen(part.at_step(step), &mut to[..count]);
                    to[count..].fill(0);
                }),
            };
        }
        turned(part.steps.len(), count, width, to, |line, begin, to| {
            let from = part.of_line(line, begin, TURN);
            if from.len() == TURN { widen_row::<T, TURN>(from, to) } else { widen(from, to) }
        });
    }
}

vectorised! {
    /// Packs pairs of steps, the first in the lower half of a word: what is missing is 0.
    pub(super) fn pack_pairs(part: &Part<'_, bf16>, to: &mut [u32]) {
        let (count, width) = (part.count(), part.width);
        if part.are_beside() {
            let whole = if count == width { part.steps.len() / 2 } else { 0 };
            let (rows, rest) = to.split_at_mut(whole * width);
            let rows = rows.chunks_exact_mut(width).enumerate();
            match width {
                12 => rows.for_each(|(word, to)| pair_rows::<12>(part, word, to)),
                16 => rows.for_each(|(word, to)| pair_rows::<16>(part, word, to)),
                32 => rows.for_each(|(word, to)| pair_rows::<32>(part, word, to)),
                _ => rows.for_each(|(word, to)| pair_lines(part, word, to)),
            }
            let words = Words::Pairs.count(part.steps.len());
            for (word, to) in (whole..words).zip(rest.chunks_exact_mut(width)) {
                pair_lines(part, word, &mut to[..count]);
                to[count..].fill(0);
            }
            return;
        }
        let words = Words::Pairs.count(part.steps.len());
        turned(words, count, width, to, |line, begin, to| pairs_of(part.of_line(line, 2 * begin, 2 * TURN), to));
    }
}

vectorised! {
    /// The same of numbers that are rounded to bf16, along the inner extent.
    pub(super) fn pack_rounded(part: &Part<'_, f32>, to: &mut [u32]) {
        let words = Words::Pairs.count(part.steps.len());
        turned(words, part.count(), part.width, to, |line, begin, to| {
            let from = part.of_line(line, 2 * begin, 2 * TURN);
            let mut rounded = [bf16::ZERO; 2 * TURN];
            rounded.iter_mut().zip(from).for_each(|(to, x)| *to = Element::narrow(*x));
            pairs_of(&rounded[..from.len()], to);
        });
    }
}

vectorised! {
    /// Packs pairs for matrix tiles: blocks of [`TURN`] words, of each line one after another, the last filled up with 0.
    pub(super) fn pack_blocks(part: &Part<'_, bf16>, to: &mut [u32]) {
        let (count, width) = (part.count(), part.width);
        let words = Words::Pairs.count(part.steps.len());
        let mut square: Square = [[0; TURN]; TURN];
        for (block, to) in to.chunks_exact_mut(width * TURN).take(words.div_ceil(TURN)).enumerate() {
            let begin = block * TURN;
            let to = to.as_chunks_mut::<TURN>().0;
            to[count..].fill([0; TURN]);
            if !part.are_beside() {
                for (line, to) in to[..count].iter_mut().enumerate() {
                    to.fill(0);
                    pairs_of(part.of_line(line, 2 * begin, 2 * TURN), to);
                }
                continue;
            }
            for first in (0..count).step_by(TURN) {
                let lines = TURN.min(count - first);
                square.as_flattened_mut().fill(0);
                let (here, steps) = (part.first + first, part.steps.clone());
                let here = Part { from: part.from, of: part.of, first: here, width: lines, steps };
                for (word, to) in square.iter_mut().enumerate().take(words - begin) {
                    pair_lines(&here, begin + word, &mut to[..lines]);
                }
                turn(&square, lines, TURN, TURN, to[first..].as_flattened_mut());
            }
        }
    }
}

/// Word `word` of each line of `part`, whose lines are beside each other.
#[inline(always)]
fn pair_lines(part: &Part<'_, bf16>, word: usize, to: &mut [u32]) {
    let low = part.at_step(2 * word);
    if 2 * word + 1 < part.steps.len() {
        for ((to, low), high) in to.iter_mut().zip(low).zip(part.at_step(2 * word + 1)) {
            *to = pair(*low, *high);
        }
    } else {
        to.iter_mut().zip(low).for_each(|(to, low)| *to = pair(*low, bf16::ZERO));
    }
}

/// The same of `W` lines, with a step that is the second of a pair.
#[inline(always)]
fn pair_rows<const W: usize>(part: &Part<'_, bf16>, word: usize, to: &mut [u32]) {
    let [low, high] = [part.at_step(2 * word), part.at_step(2 * word + 1)].map(|row| row.first_chunk::<W>());
    if let (Some(low), Some(high), Some(to)) = (low, high, to.first_chunk_mut::<W>()) {
        for i in 0..W {
            to[i] = pair(low[i], high[i]);
        }
    }
}

#[inline(always)]
fn widen_row<T: Element, const W: usize>(from: &[T], to: &mut [u32]) {
    if let (Some(from), Some(to)) = (from.first_chunk::<W>(), to.first_chunk_mut::<W>()) {
        for i in 0..W {
            to[i] = from[i].widen().to_bits();
        }
    }
}

/// The words of steps of one line, those that there are.
#[inline(always)]
fn pairs_of(from: &[bf16], to: &mut [u32; TURN]) {
    // A whole block is copied in registers, the last of a line perhaps by a call.
    if let Some(from) = from.first_chunk::<{ 2 * TURN }>() {
        for i in 0..TURN {
            to[i] = pair(from[2 * i], from[2 * i + 1]);
        }
        return;
    }
    let (pairs, rest) = from.as_chunks::<2>();
    for (to, x) in to.iter_mut().zip(pairs) {
        *to = pair(x[0], x[1]);
    }
    if let [last] = rest {
        to[pairs.len()] = pair(*last, bf16::ZERO);
    }
}

#[inline(always)]
fn pair(low: bf16, high: bf16) -> u32 {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

#[inline(always)]
fn widen<T: Element>(from: &[T], to: &mut [u32]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = x.widen().to_bits();
    }
}

/// Packs `count` lines of `words` words, whose words from a given one on `read` gives, side by side in rows of `width`.
#[inline(always)]
fn turned(words: usize, count: usize, width: usize, to: &mut [u32], read: impl Fn(usize, usize, &mut [u32; TURN])) {
    let mut square: Square = [[0; TURN]; TURN];
    for begin in (0..words).step_by(TURN) {
        let steps = TURN.min(words - begin);
        let to = &mut to[begin * width..][..steps * width];
        for first in (0..width).step_by(TURN) {
            let wide = TURN.min(width - first);
            for (line, row) in square.iter_mut().enumerate().take(wide) {
                if first + line < count {
                    read(first + line, begin, row);
                } else {
                    row.fill(0);
                }
            }
            turn(&square, steps, wide, width, &mut to[first..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of numbers that say where they are, in either order in memory, and how many each step or line takes.
    fn operand(lines: usize, steps: usize, beside: bool) -> (Vec<bf16>, Lines) {
        let of = if beside {
            Lines { lines, line_stride: 1, step_stride: lines }
        } else {
            Lines { lines, line_stride: steps, step_stride: 1 }
        };
        let mut from = vec![bf16::ZERO; lines * steps];
        for line in 0..lines {
            for step in 0..steps {
                from[line * of.line_stride + step * of.step_stride] = number(line, step);
            }
        }
        (from, of)
    }

    fn number(line: usize, step: usize) -> bf16 {
        bf16::from_bits((1 + line * 97 + step) as u16)
    }

    #[test]
    fn every_element_is_where_its_layout_says_and_the_rest_is_zero() {
        for (lines, steps, width, beside) in [
            (5, 7, 12, false),
            (5, 7, 12, true),
            (40, 70, 32, false),
            (40, 70, 32, true),
            (33, 31, 16, true),
            (33, 31, 16, false),
        ] {
            let (from, of) = operand(lines, steps, beside);
            for first in (0..lines).step_by(width) {
                for begin in [0, 2] {
                    let part = Part { from: &from, of, first, width, steps: begin..steps };
                    let words = Words::Pairs.count(steps - begin);
                    let expected = |line: usize, word: usize| {
                        let at = |step: usize| {
                            let there = first + line < lines && begin + step < steps;
                            if there { number(first + line, begin + step) } else { bf16::ZERO }
                        };
                        pair(at(2 * word), at(2 * word + 1))
                    };
                    let mut pairs = vec![u32::MAX; words * width];
                    pack_pairs(&part, &mut pairs);
                    for (i, got) in pairs.iter().enumerate() {
                        assert_eq!(*got, expected(i % width, i / width), "{lines} x {steps}, {i}");
                    }
                    let mut blocks = vec![u32::MAX; words.next_multiple_of(TURN) * width];
                    pack_blocks(&part, &mut blocks);
                    for (i, got) in blocks.iter().enumerate() {
                        let (block, line, word) = (i / TURN / width, i / TURN % width, i % TURN);
                        assert_eq!(*got, expected(line, block * TURN + word), "{lines} x {steps}, {i} in blocks");
                    }
                    let mut floats = vec![u32::MAX; (steps - begin) * width];
                    pack_f32(&part, &mut floats);
                    for (i, got) in floats.iter().enumerate() {
                        let (line, step) = (first + i % width, begin + i / width);
                        let wanted = if line < lines { u32::from(number(line, step).to_bits()) << 16 } else { 0 };
                        assert_eq!(*got, wanted, "{lines} x {steps}, {i} as f32");
                    }
                }
            }
        }
    }
}
