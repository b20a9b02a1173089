//! Products of two matrices of many rows, columns and terms, as training has them: packed, blocked for the caches
//! (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"; Van Zee and van de Geijn 2015,
//! "BLIS").
//!
//! The operand of fewer lines is packed once, by all threads. The other is packed where it is used, a block of lines and a part
//! of the inner extent at a time: it stays in L2 while panels of the first pass by, and is read from memory once. f32 results
//! are computed where they lie. An element is a sum over the inner extent in order, in f32, so its bits depend on its row of
//! A and its column of B alone.
//!
//! Read `gemm/micro.rs` for the innermost product, then `gemm/pack.rs` and `gemm/block.rs`; `gemm/tile_product.rs` has products
//! of tiles, which a thread packs by itself (attention), `gemm/lane_product.rs` products whose sums are those of lanes (inference).

pub(crate) mod block;
mod exact;
#[cfg(target_arch = "x86_64")]
mod lane_product;
mod micro;
mod pack;
mod tile_product;
mod turn;
mod words;

#[cfg(target_arch = "x86_64")]
pub(crate) use lane_product::{LaneProduct, SLOTS};
pub(crate) use pack::Lines;
pub(crate) use tile_product::TileProduct;
#[cfg(target_arch = "x86_64")]
pub(crate) use turn::{Square, TURN, turn};

use std::ops::Range;

use half::bf16;
use ridge_graph::DType;

use crate::io::KernelIo;
use crate::kernel::Preparation;
use crate::simd;
use micro::Micro;
use pack::Part;
use words::Words;

/// An operand: input `input` of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub(crate) input: usize,
    pub(crate) dtype: DType,
    pub(crate) lines: Lines,
}

impl Operand {
    /// `[lines, inner]`, row by row.
    pub(crate) fn by_line(input: usize, dtype: DType, lines: usize, inner: usize) -> Self {
        Self { input, dtype, lines: Lines { lines, line_stride: inner, step_stride: 1 } }
    }

    /// `[inner, lines]`, row by row.
    pub(crate) fn by_step(input: usize, dtype: DType, lines: usize) -> Self {
        Self { input, dtype, lines: Lines { lines, line_stride: 1, step_stride: lines } }
    }
}

/// Sums of products, `C_s = sum of A_t B_st` over the terms `t`: lines of A are rows of every C, lines of `B_st` columns of
/// `C_s`. All terms of an element are one sum.
pub(crate) struct Gemm {
    terms: Vec<Term>,
    /// The columns of each result.
    columns: Vec<usize>,
    micro: Micro,
    /// The operand that is packed once.
    packed: Side,
    /// How its lines are cut into pieces.
    group: Cut,
    /// The parts of the inner extent that a block is packed for.
    depths: Vec<Depth>,
}

/// A part of the inner extent: some of A, and of the B of each result.
pub(crate) struct Term {
    pub(crate) inner: usize,
    pub(crate) a: Operand,
    pub(crate) b: Vec<Operand>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// Lines of the operand that is packed where it is used: a block of it stays in L2 beside its part of the result.
const BLOCK: usize = 96;

/// Words of the inner extent that a block is packed for at once.
const DEPTH: usize = 1024;

/// Lines of the operand that is packed once for a piece: for many lines, and where there would be fewer pieces than
/// [`PIECES`].
const GROUP: usize = 192;
const SMALL_GROUP: usize = 96;
const PIECES: usize = 64;

/// Into how many blocks an extent is cut, each a multiple of `unit` and of about `most`.
#[derive(Clone, Copy)]
struct Cut {
    extent: usize,
    size: usize,
}

impl Cut {
    fn new(extent: usize, unit: usize, most: usize) -> Self {
        let size = extent.div_ceil(extent.div_ceil(most).max(1)).next_multiple_of(unit);
        Self { extent, size: size.max(unit) }
    }

    fn count(self) -> usize {
        self.extent.div_ceil(self.size)
    }

    /// Blocks `first..end`.
    fn range(self, blocks: Range<usize>) -> Range<usize> {
        blocks.start * self.size..(blocks.end * self.size).min(self.extent)
    }
}

/// A part of the inner extent: some of the steps of a term, and the words that they take.
struct Depth {
    term: usize,
    steps: Range<usize>,
    words: Range<usize>,
    /// Words of the terms before, and of this one.
    before: usize,
    of_term: usize,
}

/// Parts of the inner extent, each within a term, of nearly as many words.
fn depths(micro: Micro, terms: &[Term]) -> Vec<Depth> {
    let (mut before, mut depths) = (0, Vec::new());
    let per = micro.words.steps();
    for (term, Term { inner, .. }) in terms.iter().enumerate() {
        let of_term = micro.words_of(*inner);
        let cut = Cut::new(of_term, micro.together, DEPTH);
        for part in 0..cut.count() {
            let words = cut.range(part..part + 1);
            let steps = (words.start * per).min(*inner)..(words.end * per).min(*inner);
            depths.push(Depth { term, steps, words, before, of_term });
        }
        before += of_term;
    }
    depths
}

impl Gemm {
    /// One product.
    pub(crate) fn new(a: Operand, b: Operand, inner: usize) -> Self {
        Self::of(vec![Term { inner, a, b: vec![b] }])
    }

    /// Terms of as many rows and results, one or more.
    pub(crate) fn of(terms: Vec<Term>) -> Self {
        let narrow = |operand: &Operand| operand.dtype == DType::BF16;
        let all = terms.iter().all(|term| narrow(&term.a) && term.b.iter().all(narrow));
        let words = if all && Micro::multiplies_pairs() { Words::Pairs } else { Words::F32 };
        Self::by(Micro::new(words), terms)
    }

    fn by(micro: Micro, terms: Vec<Term>) -> Self {
        let rows = terms[0].a.lines.lines;
        let columns: Vec<usize> = terms[0].b.iter().map(|b| b.lines.lines).collect();
        let packed = if columns.len() == 1 && columns[0] < rows { Side::B } else { Side::A };
        let (lines, unit) = if packed == Side::A { (rows, micro.rows) } else { (columns[0], micro.columns) };
        let (depths, group) = (depths(micro, &terms), Cut::new(lines, unit, GROUP));
        let mut of = Self { terms, columns, micro, packed, group, depths };
        if of.pieces() < PIECES {
            of.group = Cut::new(lines, unit, SMALL_GROUP);
        }
        of
    }

    fn rows(&self) -> usize {
        self.terms[0].a.lines.lines
    }

    fn words(&self) -> usize {
        self.terms.iter().map(|term| self.micro.words_of(term.inner)).sum()
    }

    /// Lines of a panel of one operand.
    fn width(&self, side: Side) -> usize {
        if side == Side::A { self.micro.rows } else { self.micro.columns }
    }

    /// The operand that is packed where it is used.
    fn other(&self) -> Side {
        if self.packed == Side::A { Side::B } else { Side::A }
    }

    fn panels(&self) -> usize {
        self.group.extent.div_ceil(self.width(self.packed))
    }

    /// The packing of one operand, of a panel each piece.
    pub(crate) fn preparation(&self) -> Preparation {
        let words = self.words() * self.width(self.packed);
        Preparation {
            bytes: self.panels() * words * size_of::<u32>(),
            pieces: self.panels(),
            nanos_per_piece: 50.0 + words as f64 * 0.3,
        }
    }

    /// Packs panels `pieces` into the room.
    pub(crate) fn pack(&self, io: &KernelIo<'_>, pieces: Range<usize>) {
        let (width, words) = (self.width(self.packed), self.words());
        for panel in pieces {
            let mut at = panel * width * words;
            for term in &self.terms {
                let of_term = width * self.micro.words_of(term.inner);
                // SAFETY: this panel is this piece's alone.
                let to = unsafe { io.room::<u32>().part(at..at + of_term) };
                at += of_term;
                let operand = if self.packed == Side::A { &term.a } else { &term.b[0] };
                self.pack_panel(io, self.packed, operand, panel * width, 0..term.inner, to);
            }
        }
    }

    /// Packs steps `steps` of a panel of `operand` that begins with line `first`.
    fn pack_panel(
        &self,
        io: &KernelIo<'_>,
        side: Side,
        operand: &Operand,
        first: usize,
        steps: Range<usize>,
        to: &mut [u32],
    ) {
        let of = operand.lines;
        if steps.is_empty() {
            return;
        }
        if side == Side::A && self.micro.together > 1 {
            let from = io.input::<bf16>(operand.input);
            return pack::pack_blocks(&Part { from, of, first, width: self.micro.rows, steps }, to);
        }
        let width = if side == Side::A { self.micro.rows } else { self.micro.lanes };
        let words = self.micro.words_of(steps.len());
        for (nth, to) in to.chunks_exact_mut(width * words).enumerate() {
            let (first, steps) = (first + nth * width, steps.clone());
            match self.micro.words {
                Words::Pairs => {
                    let part = Part { from: io.input::<bf16>(operand.input), of, first, width, steps };
                    let (to, rest) = to.split_at_mut(width * Words::Pairs.count(part.steps.len()));
                    pack::pack_pairs(&part, to);
                    rest.fill(0);
                }
                Words::F32 => simd::with_element!(operand.dtype, T => {
                    pack::pack_f32(&Part { from: io.input::<T>(operand.input), of, first, width, steps }, to);
                }),
            }
        }
    }
}

#[cfg(test)]
mod tests;
