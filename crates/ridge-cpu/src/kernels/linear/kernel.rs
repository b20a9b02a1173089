//! What all ways to compute a linear share: its operands, how its work is cut, and from products to outputs.

use std::ops::Range;

use ridge_graph::DType;

#[cfg(target_arch = "x86_64")]
use super::float_codes::{CodeRows, FloatCodes};
use super::scales::WeightScales;
use super::tile;
#[cfg(target_arch = "x86_64")]
use crate::gemm::LaneProduct;
use crate::io::KernelIo;
use crate::kernels::{int8, quant};
use crate::simd::{self, LANES};

/// What is done to the product before it is rounded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    Nothing,
    /// Input 0 is added.
    Add,
    /// The first weight's product is the gate of the second's.
    Swiglu,
}

/// Bytes of an output from which on it is written past the caches: about a core's L2. Its lines, a row apart, would else
/// be read first and push out x, which costs a prompt's widest products a tenth.
#[cfg(target_arch = "x86_64")]
const STREAMED: usize = 2 << 20;

/// Tiles whose columns are multiplied together where x is one row, at most: each weight of several is then read in long runs,
/// which memory gives at a higher rate than short ones, and whose outputs stay in first-level cache.
const TILES_TOGETHER: usize = 128;

pub(super) struct LinearWeight {
    pub(super) columns: usize,
    pub(super) dtype: DType,
    /// How its rows are read, if it is stored in blocks and they are not multiplied as codes.
    pub(super) stored: Option<quant::BlockRows>,
    /// What products by its rows are multiplied by, if it is stored with scales.
    pub(super) scales: Option<WeightScales>,
    /// Are its rows codes that become pairs of bf16?
    #[cfg(target_arch = "x86_64")]
    pub(super) float_codes: bool,
    /// Input and dtype of the bias.
    pub(super) bias: Option<(usize, DType)>,
    /// Tiles of the weights before.
    pub(super) tiles_before: usize,
}

pub(super) struct LinearKernel {
    pub(super) rows: usize,
    pub(super) inner: usize,
    /// Dtype of x, of the residual and of the outputs.
    pub(super) dtype: DType,
    /// The input that is x; weights follow.
    pub(super) x: usize,
    pub(super) weights: Vec<LinearWeight>,
    pub(super) after: After,
    /// Tiles of columns, over all weights that have outputs of their own.
    pub(super) tiles: usize,
    /// Columns of a tile and rows of a block.
    pub(super) tile: usize,
    pub(super) row_block: usize,
    pub(super) nanos_per_piece: f64,
    /// How the rows of each weight are codes, if codes of x multiply them.
    pub(super) by_codes: Option<Vec<int8::WeightCodes>>,
    /// Where its scales begin, in bytes, if x is codes already.
    pub(super) scales_of_x: Option<usize>,
    /// Are the products those of matrix tiles?
    #[cfg(target_arch = "x86_64")]
    pub(super) on_tiles: bool,
    /// Are its weights packed?
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        expect(dead_code, reason = "only kernels of x86-64 and AArch64 differ by it")
    )]
    pub(super) packed: bool,
    /// Would its weights be taken packed?
    pub(super) takes_panels: bool,
    /// Are the products those of pairs of bf16?
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(super) in_pairs: bool,
    /// Is it one row by weights of f32?
    #[cfg(target_arch = "x86_64")]
    pub(super) by_one_row: bool,
    /// How panels of lanes are multiplied, if x is packed in them.
    #[cfg(target_arch = "x86_64")]
    pub(super) by_lane: Option<LaneProduct>,
}

impl LinearKernel {
    /// Are its weights panels of matrix tiles, or blocks that become such?
    #[cfg(target_arch = "x86_64")]
    pub(super) fn on_panels(&self) -> bool {
        self.packed || self.weights.iter().all(|w| w.stored.is_some() || w.float_codes)
    }

    /// Weight `which`, of codes that become pairs of bf16.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn float_codes<'a>(&self, io: &KernelIo<'a>, which: usize) -> FloatCodes<'a> {
        let input = self.x + 1 + which;
        let rows = if self.packed {
            CodeRows::Interleaved(io.input::<u32>(input).as_chunks().0)
        } else {
            CodeRows::Plain(io.input(input))
        };
        let scales = self.weights[which].scales.and_then(|scales| scales.of_blocks(io, [input, 0], self.inner));
        FloatCodes { rows, inner: self.inner, scales }
    }

    /// Must x be copied? It lies as sums want it if it is f32 and fills the lanes.
    pub(super) fn is_copied(&self) -> bool {
        self.dtype != DType::F32 || !self.inner.is_multiple_of(LANES)
    }

    /// Elements of a row of x as sums want it.
    pub(super) fn stride(&self) -> usize {
        self.inner.next_multiple_of(LANES)
    }

    /// The weight and its columns that tile `tile` is of.
    pub(super) fn place(&self, tile: usize) -> (usize, Range<usize>) {
        let which = match self.after {
            After::Swiglu => 0,
            After::Nothing | After::Add => {
                self.weights.iter().rposition(|w| w.tiles_before <= tile && w.columns > 0).unwrap_or(0)
            }
        };
        let begin = (tile - self.weights[which].tiles_before) * self.tile;
        (which, begin..(begin + self.tile).min(self.weights[which].columns))
    }

    /// Columns that are multiplied together, at most, by a thread that computes `pieces` pieces.
    pub(super) fn columns_together(&self, pieces: usize) -> usize {
        self.tile * if self.rows == 1 { pieces.clamp(1, TILES_TOGETHER) } else { 1 }
    }

    /// The weight and its columns that are multiplied together first of `pieces`, which are not none, and how many pieces that
    /// are: one, or of one row of x as many as follow one another in a weight.
    pub(super) fn run_of_pieces(&self, pieces: &Range<usize>) -> (usize, Range<usize>, usize) {
        let (which, mut columns) = self.place(pieces.start % self.tiles);
        let most = self.columns_together(pieces.len()) / self.tile;
        let follows = |piece: &usize| *piece < pieces.end && self.place(piece % self.tiles).0 == which;
        let more = (pieces.start + 1..pieces.start + most).take_while(follows).last();
        if let Some(last) = more {
            columns.end = self.place(last % self.tiles).1.end;
        }
        (which, columns, more.map_or(1, |last| last + 1 - pieces.start))
    }

    /// From the products of a tile to the output.
    pub(super) fn finish(
        &self,
        io: &KernelIo<'_>,
        which: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        [products, gated, line]: [&mut [f32]; 3],
    ) {
        let width = columns.len();
        self.scale(io, which, &columns, &mut products[..rows.len() * width]);
        self.add_bias(io, which, &columns, &mut products[..rows.len() * width], line);
        if self.after == After::Swiglu {
            self.scale(io, 1, &columns, &mut gated[..rows.len() * width]);
            self.add_bias(io, 1, &columns, &mut gated[..rows.len() * width], line);
        }
        let of_weight = self.weights[which].columns;
        let products = &mut products[..rows.len() * width];
        let at = rows.start * of_weight + columns.start;
        match self.after {
            After::Nothing => {}
            After::Add => simd::with_element!(self.dtype, T => {
                simd::add_rows(products, width, &io.input::<T>(0)[at..], of_weight);
            }),
            After::Swiglu => simd::swiglu(products, &gated[..rows.len() * width]),
        }
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles && self.rows * of_weight * self.dtype.size_bytes() >= STREAMED {
            // SAFETY: these columns of these rows are this piece's alone, and where there are tiles there is AVX-512.
            simd::with_element!(self.dtype, T => unsafe {
                simd::stream_rows(products, width, io.output::<T>(which), at, of_weight);
            });
            return;
        }
        // SAFETY: these columns of these rows are this piece's alone.
        simd::with_element!(self.dtype, T => unsafe {
            simd::store_rows(products, width, io.output::<T>(which), at, of_weight);
        });
    }

    /// Rows of x as f32, laid out as sums want them.
    pub(super) fn copy_x(&self, io: &KernelIo<'_>, rows: Range<usize>, to: &mut [f32]) {
        for (row, to) in rows.zip(to.chunks_exact_mut(self.stride().max(1))) {
            simd::load(io, self.x, self.dtype, row * self.inner, &mut to[..self.inner]);
            tile::fill(to, self.inner);
        }
    }

    fn scale(&self, io: &KernelIo<'_>, which: usize, columns: &Range<usize>, products: &mut [f32]) {
        if let Some(scales) = &self.weights[which].scales {
            scales.apply(io, [self.x + 1 + which, 0], columns, products);
        }
    }

    fn add_bias(
        &self,
        io: &KernelIo<'_>,
        which: usize,
        columns: &Range<usize>,
        products: &mut [f32],
        line: &mut [f32],
    ) {
        let Some((input, dtype)) = self.weights[which].bias else { return };
        let bias = simd::view(io, input, dtype, columns.start, &mut line[..columns.len()]);
        for row in products.chunks_exact_mut(columns.len()) {
            simd::add(row, bias);
        }
    }
}
