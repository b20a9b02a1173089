//! Weights repacked so that 16 rows are interleaved by words of 32 bits: a vector of 512 bits holds the same word of 16 rows, one of
//! 256 bits that of 8.
//!
//! One row of x multiplies such vectors as they come, without shuffles, from one stream of memory; the shuffles that
//! row-major weights need cost as much time as the memory itself (`benches/results/2026-11-24-cpu-levels.md`). Kernels for
//! many rows of x read the same bytes, so there is one copy of a weight.
//!
//! The bytes of a row are cut into units of 256 elements, each padded to whole words. For all 16 rows of a group one unit
//! follows another, and one group follows another. The last group is filled up with rows of zeros. Within a unit words lie in
//! the order in which one row of x needs them ([`place`]), so that memory is read line after line: processors fetch such a
//! stream ahead by themselves at the rate of memory, and three streams within a unit at a third of it.

use std::ops::Range;

use ridge_graph::format::{BlockFormat, Q6K};

/// Rows that are interleaved.
pub(crate) const ROWS: usize = 16;

/// Elements of a unit: a whole number of blocks of every format.
const UNIT: usize = 256;

/// The same word of the rows of a group.
pub(crate) type Line = [u32; ROWS];

/// Where in a unit of blocks of `block` elements and bytes word `nth` of a row lies. Blocks of Q6_K have upper bits behind the
/// lower ones, and scales at the end: here come 5 words of scales, then of each word of upper bits that word and the two words of
/// lower bits that it completes.
#[inline]
pub(crate) const fn place(block: [usize; 2], nth: usize) -> usize {
    const SCALES: usize = 48;
    const UPPER: usize = 32;
    if block[1] != Q6K::BYTES || block[0] != Q6K::ELEMENTS {
        return nth;
    }
    if nth >= SCALES {
        return nth - SCALES;
    }
    let behind_scales = Q6K::BYTES.div_ceil(4) - SCALES;
    if nth >= UPPER {
        behind_scales + 3 * (nth - UPPER)
    } else {
        behind_scales + 3 * (nth / 16 * 8 + nth % 8) + 1 + nth % 16 / 8
    }
}

/// How the rows of a weight `[N, inner]` are interleaved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interleaving {
    block: [usize; 2],
    /// Bytes of a row as they are without it.
    row: usize,
    /// Bytes of a unit without padding.
    unit: usize,
    /// Lines of a unit, and of a group of rows.
    lines: [usize; 2],
}

impl Interleaving {
    /// Of rows of `inner` elements in blocks of `elements` elements and `bytes` bytes.
    pub(crate) fn new(inner: usize, block: [usize; 2]) -> Self {
        let [elements, bytes] = block;
        let (row, unit) = (inner / elements * bytes, UNIT / elements * bytes);
        let of_unit = unit.div_ceil(4);
        Self { block, row, unit, lines: [of_unit, row / unit * of_unit + (row % unit).div_ceil(4)] }
    }

    /// Lines from the beginning of a unit to that of the next.
    pub(crate) fn unit_lines(&self) -> usize {
        self.lines[0]
    }

    /// Lines of a group of rows.
    pub(crate) fn group_lines(&self) -> usize {
        self.lines[1]
    }

    /// Bytes of `rows` rows so laid out.
    pub(crate) fn bytes(&self, rows: usize) -> usize {
        rows.div_ceil(ROWS) * self.group_lines() * size_of::<Line>()
    }

    /// The bytes of each unit of a row, and the lines that have them within a group.
    fn units(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (row, unit, lines) = (self.row, self.unit, self.unit_lines());
        (0..row).step_by(unit.max(1)).enumerate().map(move |(nth, from)| {
            let bytes = from..(from + unit).min(row);
            let first = nth * lines;
            (bytes.clone(), first..first + bytes.len().div_ceil(4))
        })
    }

    /// Interleaves the rows of `from`, row-major, into groups from group `first` on, as many as `to` holds.
    pub(crate) fn pack(&self, from: &[u8], first: usize, to: &mut [Line]) {
        for (group, to) in (first..).zip(to.chunks_exact_mut(self.group_lines().max(1))) {
            for lane in 0..ROWS {
                let row = group * ROWS + lane;
                let Some(row) = from.get(row * self.row..(row + 1) * self.row) else { continue };
                for (bytes, lines) in self.units() {
                    let (words, rest) = row[bytes].as_chunks::<4>();
                    let to = &mut to[lines];
                    for (nth, word) in words.iter().enumerate() {
                        to[place(self.block, nth)][lane] = u32::from_ne_bytes(*word);
                    }
                    if !rest.is_empty() {
                        let mut last = [0; 4];
                        last[..rest.len()].copy_from_slice(rest);
                        to[place(self.block, words.len())][lane] = u32::from_ne_bytes(last);
                    }
                }
            }
        }
    }

    /// Row `row` of an interleaved weight as it was.
    ///
    /// # Panics
    /// When there is no such row.
    pub(crate) fn row(&self, from: &[Line], row: usize, to: &mut [u8]) {
        let group = &from[row / ROWS * self.group_lines()..][..self.group_lines()];
        for (bytes, lines) in self.units() {
            let lines = &group[lines];
            for (nth, to) in to[bytes].chunks_mut(4).enumerate() {
                let word = lines[place(self.block, nth)][row % ROWS];
                to.copy_from_slice(&word.to_ne_bytes()[..to.len()]);
            }
        }
    }

    /// Bytes of a row without interleaving.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_what_they_were() {
        // Units of whole words and such that are padded, rows that end within a unit, groups that are not full.
        for (inner, block, rows) in
            [(512, [32, 34], 16), (288, [32, 18], 33), (256, [256, 210], 5), (768, [256, 110], 17), (301, [1, 2], 20)]
        {
            let of = Interleaving::new(inner, block);
            let weight: Vec<u8> = (0..rows * of.row).map(|i| (i * i / 7 + i) as u8).collect();
            let mut lines = vec![[0; ROWS]; of.bytes(rows) / size_of::<Line>()];
            let (first, rest) = lines.split_at_mut(of.group_lines());
            of.pack(&weight, 0, first);
            of.pack(&weight, 1, rest);
            let mut row = vec![0; of.row];
            for (nth, should) in weight.chunks_exact(of.row).enumerate() {
                of.row(&lines, nth, &mut row);
                assert!(row == should, "row {nth} of {rows} of {inner} elements in blocks of {block:?}");
            }
            // The first word of the second unit of row 3.
            if of.row > of.unit && rows > 3 {
                let word = &weight[3 * of.row + of.unit..][..4];
                assert_eq!(lines[of.unit.div_ceil(4) + place(block, 0)][3].to_ne_bytes(), word);
            }
        }
    }

    #[test]
    fn words_of_a_unit_have_places_of_their_own() {
        for block in [[32, 34], [256, 210], [256, 144]] {
            let words = (UNIT / block[0] * block[1]).div_ceil(4);
            let mut places: Vec<usize> = (0..words).map(|nth| place(block, nth)).collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..words), "{block:?}");
        }
    }
}
