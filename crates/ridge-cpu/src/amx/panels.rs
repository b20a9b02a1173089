//! Weights of bf16 repacked once into panels, and x in tiles of its rows.
//!
//! A panel is 32 rows of the weight, for every 32 elements of K two tiles that lie together: pairs of K down, rows
//! across. So a tile is 16 cache lines in a row where in the weight it would be a line of each of 16 rows, and the sums
//! are rows of the output as they are written: x comes as it is, and nothing is transposed but the weight, once.
//!
//! Floor: as in `amx.rs`. Three tiles of x by two of a panel ask L2 for five tiles for six products, where two by two ask
//! for four for four, and loads from L2 are what a prompt waits for.

use std::arch::asm;
use std::ops::Range;

use half::bf16;

use super::ahead::Ahead;
use super::columns::{Terms, line, store, transpose};
use super::config::{self, COLUMNS, DEPTH, LINE, SIDE, TileSession, Words};
use crate::simd;

/// Tiles of a panel for each step of K.
const ACROSS: usize = COLUMNS / SIDE;

/// Steps of K for which rows of x are laid out in turn.
const STEPS: usize = 8;

/// Bytes of a weight `[N, K]` in panels; the last one is filled up with rows of zeros, and K with zeros.
pub(crate) fn bytes([rows, inner]: [usize; 2]) -> usize {
    rows.div_ceil(COLUMNS) * panel_tiles(inner) * size_of::<Words>()
}

/// Tiles of a panel.
pub(crate) fn panel_tiles(inner: usize) -> usize {
    inner.div_ceil(DEPTH) * ACROSS
}

/// Where steps of K are in a panel.
pub(crate) fn of_steps(steps: &Range<usize>) -> Range<usize> {
    steps.start * ACROSS..steps.end * ACROSS
}

/// Rows of a weight `[N, inner]` as as many panels as `to` has room for, from panel `first` on.
pub(crate) fn pack(weight: &[bf16], inner: usize, first: usize, to: &mut [Words]) {
    for (panel, to) in (first..).zip(to.chunks_exact_mut(panel_tiles(inner))) {
        for half in 0..ACROSS {
            let first = panel * COLUMNS + half * SIDE;
            let rows: [&[bf16]; SIDE] =
                std::array::from_fn(|row| weight.get((first + row) * inner..(first + row + 1) * inner).unwrap_or(&[]));
            // SAFETY: panels are made where there is AMX, and every machine that has it has AVX-512.
            unsafe { pack_half(&rows, to, half) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn pack_half(rows: &[&[bf16]; SIDE], to: &mut [Words], half: usize) {
    for (step, to) in to.as_chunks_mut::<ACROSS>().0.iter_mut().enumerate() {
        let mut lines = [[0; SIDE]; SIDE];
        for (row, to) in rows.iter().zip(&mut lines) {
            line(row.get(step * DEPTH..).unwrap_or(&[]), 0, to);
        }
        transpose(&lines, |i, line| store(line, &mut to[half].as_chunks_mut::<SIDE>().0[i]));
    }
}

/// The rows that [`pack`] was given, back again.
pub(crate) fn unpack(panels: &[Words], inner: usize, to: &mut [bf16]) {
    let tiles = panel_tiles(inner);
    for (row, to) in to.chunks_exact_mut(inner).enumerate() {
        let panel = &panels[row / COLUMNS * tiles..][..tiles];
        for (k, to) in to.iter_mut().enumerate() {
            let tile = &panel[k / DEPTH * ACROSS + row % COLUMNS / SIDE];
            let word = tile[k % DEPTH / 2 * SIDE + row % SIDE];
            *to = bf16::from_bits((word >> (k % 2 * 16)) as u16);
        }
    }
}

/// How rows of x and their terms lie in tiles: 16 rows of one term after another, or all that there is in one tile.
#[derive(Clone, Copy)]
pub(crate) struct RowTiles {
    rows: usize,
    terms: usize,
    /// Do all rows and terms fit into one tile?
    pub(crate) compact: bool,
    /// Steps of K.
    pub(crate) depth: usize,
    pub(crate) tiles: usize,
    /// Lines of a tile.
    lines: usize,
}

impl RowTiles {
    pub(crate) fn new(rows: usize, inner: usize, terms: usize) -> Self {
        let compact = rows * terms <= SIDE;
        let (tiles, lines) = if compact { (1, rows * terms) } else { (rows.div_ceil(SIDE) * terms, SIDE) };
        Self { rows, terms, compact, depth: inner.div_ceil(DEPTH), tiles, lines }
    }

    /// As this, for `rows` of its rows from a whole tile on.
    pub(crate) fn of_rows(&self, rows: usize) -> Self {
        let tiles = if self.compact { 1 } else { rows.div_ceil(SIDE) * self.terms };
        Self { rows, tiles, ..*self }
    }

    /// Words of a tile for all of K.
    fn apart(&self) -> usize {
        self.depth * self.lines * SIDE
    }

    /// Words of x as tiles.
    pub(crate) fn room(&self) -> usize {
        self.tiles * self.apart()
    }

    /// Words before the tiles of row `row`, a multiple of 16.
    pub(crate) fn before(&self, row: usize) -> usize {
        row / SIDE * self.terms * self.apart()
    }

    /// Sums of a tile, for a panel.
    pub(crate) fn sums_of_tile(&self) -> usize {
        self.lines * COLUMNS
    }

    /// Of `steps` of K, share `nth` of `shares` of the tiles.
    pub(crate) fn share<'a>(
        &self,
        x: &'a [u32],
        steps: Range<usize>,
        nth: usize,
        shares: usize,
    ) -> impl Iterator<Item = &'a [u32]> + Clone + use<'a> {
        let (apart, of_step) = (self.apart(), self.lines * SIDE);
        let tiles = self.tiles * nth / shares..self.tiles * (nth + 1) / shares;
        tiles.map(move |tile| &x[tile * apart..][steps.start * of_step..steps.end * of_step])
    }

    /// Tiles that are multiplied together.
    pub(crate) fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        config::groups(self.tiles, self.terms)
    }

    /// Rows that the tiles of a group hold.
    pub(crate) fn rows_of(&self, group: &Range<usize>) -> Range<usize> {
        if self.compact {
            return 0..self.rows;
        }
        group.start / self.terms * SIDE..(group.end / self.terms * SIDE).min(self.rows)
    }

    /// Tiles configured for this: all of 16 lines, or those of x and of its sums that one tile of x needs of fewer.
    pub(crate) fn configure(&self) -> TileSession {
        let (whole, some) = ([SIDE, LINE], [self.lines.max(1), LINE]);
        TileSession::with([some, some, some, some, whole, whole, whole, some])
    }

    /// Rows of x, `inner` elements each.
    pub(crate) fn pack<T: Terms>(&self, x: &[T], inner: usize, to: &mut [u32]) {
        let compact = self.compact;
        let of_group = self.terms * self.apart();
        let to = &mut to[..self.room()];
        for (group, x) in x[..self.rows * inner].chunks(SIDE * inner).enumerate() {
            let to = if compact { &mut *to } else { &mut to[group * of_group..][..of_group] };
            if x.len() < SIDE * inner && !compact {
                to.fill(0);
            }
            let to = to.as_chunks_mut().0;
            // SAFETY: there is AMX, and every machine that has it has AVX-512.
            unsafe { pack_lines(x, inner, if compact { self.lines } else { 0 }, self.depth, to) };
        }
    }

    /// Sums of the tiles of `group` as rows of `width` elements that lie together.
    pub(crate) fn rows<'a>(
        &self,
        group: &Range<usize>,
        sums: &'a mut [f32],
        width: usize,
        room: &'a mut [f32],
    ) -> &'a mut [f32] {
        if self.terms == 1 && width == COLUMNS {
            return sums;
        }
        let sums = sums.as_chunks::<COLUMNS>().0;
        for (row, out) in self.rows_of(group).zip(room.chunks_exact_mut(width)) {
            let (first, apart) = match self.compact {
                true => (row * self.terms, 1),
                false => (row / SIDE * self.terms * SIDE - group.start * SIDE + row % SIDE, SIDE),
            };
            out.copy_from_slice(&sums[first + (self.terms - 1) * apart][..width]);
            for term in (0..self.terms - 1).rev() {
                simd::add(out, &sums[first + term * apart][..width]);
            }
        }
        room
    }
}

/// Lines of up to 16 rows: of each term a tile, or of all of them one of `compact` lines.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn pack_lines<T: Terms>(x: &[T], inner: usize, compact: usize, depth: usize, to: &mut [[u32; SIDE]]) {
    // A few steps of all rows at a time, so that tiles are filled while they are in L1.
    for from in (0..depth).step_by(STEPS) {
        for (row, x) in x.chunks_exact(inner).enumerate() {
            for step in from..depth.min(from + STEPS) {
                for term in 0..T::COUNT {
                    let at = match compact {
                        0 => (term * depth + step) * SIDE + row,
                        lines => step * lines + row * T::COUNT + term,
                    };
                    line(&x[step * DEPTH..], term, &mut to[at]);
                }
            }
        }
    }
}

/// Multiplies tiles `group` of x, from step `from` on, by part of a panel, and adds to their sums, [`COLUMNS`] for each
/// line, or sets them.
pub(crate) fn multiply(
    _configured: &TileSession,
    layout: &RowTiles,
    (x, group): (&[u32], &Range<usize>),
    (panel, from): (&[Words], usize),
    sums: &mut [f32],
    fresh: bool,
    ahead: &mut Ahead,
) {
    let steps = panel.len() / ACROSS;
    let (apart, of_step) = (layout.apart(), layout.lines * SIDE);
    assert!(steps > 0 && from + steps <= layout.depth && group.start < group.end && group.end <= layout.tiles);
    assert!(group.len() == 1 || layout.lines == SIDE);
    assert!(x.len() >= layout.room() && sums.len() >= group.len() * layout.sums_of_tile());
    let x = x[group.start * apart + from * of_step..].as_ptr();
    let ahead = ahead.take(steps);
    macro_rules! product {
        (
            zero: [$($zero:literal,)*] load: [$($load:literal,)*] body: [$($body:literal,)*] store: [$($store:literal,)*]
            $($name:ident: $operand:expr,)*
        ) => {
            asm!(
                "test {c:e}, {c:e}",
                "jz 2f",
                $($zero,)*
                "jmp 3f",
                "2:",
                $($load,)*
                "3:",
                $($body,)*
                "mov {c:e}, {streams:e}",
                "mov {fetch}, {ahead}",
                "test {c:e}, {c:e}",
                "jz 5f",
                "4:",
                "prefetcht1 [{fetch}]",
                "add {fetch}, {apart}",
                "dec {c:e}",
                "jnz 4b",
                "5:",
                "add {ahead}, 64",
                "add {w}, 2048",
                "dec {n:e}",
                "jnz 3b",
                $($store,)*
                c = inout(reg) u64::from(fresh) => _,
                sums = in(reg) sums.as_mut_ptr(),
                line = in(reg) LINE,
                w = inout(reg) panel.as_ptr() => _,
                n = inout(reg) steps => _,
                fetch = out(reg) _,
                ahead = inout(reg) ahead.at => _,
                apart = in(reg) ahead.apart,
                streams = in(reg) ahead.count,
                $($name = inout(reg) $operand => _,)*
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    // SAFETY: the tiles are configured for this layout; the panel, x and the sums have what is read and written of them,
    // as just checked, where all tiles but a single one have 16 lines; fetching ahead touches nothing, and the tile
    // registers are used by nothing else.
    unsafe {
        match group.len() {
            1 => product!(
                zero: ["tilezero tmm0", "tilezero tmm1",]
                load: [
                    "tileloadd tmm0, [{sums} + {line}*2]",
                    "tileloadd tmm1, [{sums} + {line}*2 + 64]",
                ]
                body: [
                    "tileloadd tmm7, [{x} + {line}*1]",
                    "tileloadd tmm4, [{w} + {line}*1]",
                    "tdpbf16ps tmm0, tmm7, tmm4",
                    "tileloadd tmm5, [{w} + {line}*1 + 1024]",
                    "tdpbf16ps tmm1, tmm7, tmm5",
                    "add {x}, {of_step}",
                ]
                store: [
                    "tilestored [{sums} + {line}*2], tmm0",
                    "tilestored [{sums} + {line}*2 + 64], tmm1",
                ]
                x: x,
                of_step: of_step * size_of::<u32>(),
            ),
            2 => product!(
                zero: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",]
                load: [
                    "tileloadd tmm0, [{sums} + {line}*2]",
                    "tileloadd tmm1, [{sums} + {line}*2 + 64]",
                    "tileloadd tmm2, [{sums} + {line}*2 + 2048]",
                    "tileloadd tmm3, [{sums} + {line}*2 + 2112]",
                ]
                body: [
                    "tileloadd tmm4, [{w} + {line}*1]",
                    "tileloadd tmm6, [{x} + {line}*1]",
                    "tdpbf16ps tmm0, tmm6, tmm4",
                    "tileloadd tmm7, [{y} + {line}*1]",
                    "tdpbf16ps tmm2, tmm7, tmm4",
                    "tileloadd tmm5, [{w} + {line}*1 + 1024]",
                    "tdpbf16ps tmm1, tmm6, tmm5",
                    "tdpbf16ps tmm3, tmm7, tmm5",
                    "add {x}, 1024",
                    "add {y}, 1024",
                ]
                store: [
                    "tilestored [{sums} + {line}*2], tmm0",
                    "tilestored [{sums} + {line}*2 + 64], tmm1",
                    "tilestored [{sums} + {line}*2 + 2048], tmm2",
                    "tilestored [{sums} + {line}*2 + 2112], tmm3",
                ]
                x: x,
                y: x.wrapping_add(apart),
            ),
            3 => product!(
                zero: [
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2",
                    "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
                ]
                load: [
                    "tileloadd tmm0, [{sums} + {line}*2]",
                    "tileloadd tmm1, [{sums} + {line}*2 + 64]",
                    "tileloadd tmm2, [{sums} + {line}*2 + 2048]",
                    "tileloadd tmm3, [{sums} + {line}*2 + 2112]",
                    "tileloadd tmm4, [{sums} + {line}*2 + 4096]",
                    "tileloadd tmm5, [{sums} + {line}*2 + 4160]",
                ]
                body: [
                    "tileloadd tmm6, [{w} + {line}*1]",
                    "tileloadd tmm7, [{x} + {line}*1]",
                    "tdpbf16ps tmm0, tmm7, tmm6",
                    "tileloadd tmm7, [{y} + {line}*1]",
                    "tdpbf16ps tmm2, tmm7, tmm6",
                    "tileloadd tmm7, [{z} + {line}*1]",
                    "tdpbf16ps tmm4, tmm7, tmm6",
                    "tileloadd tmm6, [{w} + {line}*1 + 1024]",
                    "tdpbf16ps tmm5, tmm7, tmm6",
                    "tileloadd tmm7, [{y} + {line}*1]",
                    "tdpbf16ps tmm3, tmm7, tmm6",
                    "tileloadd tmm7, [{x} + {line}*1]",
                    "tdpbf16ps tmm1, tmm7, tmm6",
                    "add {x}, 1024",
                    "add {y}, 1024",
                    "add {z}, 1024",
                ]
                store: [
                    "tilestored [{sums} + {line}*2], tmm0",
                    "tilestored [{sums} + {line}*2 + 64], tmm1",
                    "tilestored [{sums} + {line}*2 + 2048], tmm2",
                    "tilestored [{sums} + {line}*2 + 2112], tmm3",
                    "tilestored [{sums} + {line}*2 + 4096], tmm4",
                    "tilestored [{sums} + {line}*2 + 4160], tmm5",
                ]
                x: x,
                y: x.wrapping_add(apart),
                z: x.wrapping_add(2 * apart),
            ),
            count => unreachable!("a group of {count} tiles"),
        }
    }
}
