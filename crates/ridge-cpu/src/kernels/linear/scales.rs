//! Weights that are stored as 8-bit codes with scales of rows, of tensors or of blocks of 128 by 128. Products by the codes are
//! multiplied by the scales: at last where a row has one, else behind each block of K.
#![allow(clippy::inline_always)] // must compile with the instruction set of the tile

use std::ops::Range;

use ridge_graph::FormatRef;
use ridge_graph::format::{BLOCK, BlockFormat, CodeType, ScaleLayout, ScaledFormat, SignedBytes};

use super::source::{Lanes, Plain, Source, Streamed};
use crate::io::KernelIo;
use crate::kernel::OperandType;
use crate::packing::Packing;
use crate::simd::{self, Element, LANES, Vector};

/// Are rows of `inner` elements stored in `format` what kernels of block formats take as [`SignedBytes`], with scales behind
/// them?
pub(super) fn are_bytes(format: &FormatRef, inner: usize) -> bool {
    let format = scaled(format).filter(|format| format.codes == CodeType::Int8);
    format.is_some_and(|format| format.scales != ScaleLayout::Block) && inner.is_multiple_of(SignedBytes::ELEMENTS)
}

/// `format`, if its codes can be multiplied and scaled then.
pub(super) fn scaled(format: &FormatRef) -> Option<ScaledFormat> {
    let format = format.downcast::<ScaledFormat>().copied();
    let fits = |format: &ScaledFormat| {
        format.codes != CodeType::F8E5M2
            && matches!(format.scales, ScaleLayout::Row | ScaleLayout::Tensor | ScaleLayout::Block)
    };
    format.filter(fits)
}

/// A weight of codes: `[N, K]`, or a stack of such.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct WeightScales {
    pub(in crate::kernels) codes: CodeType,
    layout: ScaleLayout,
    /// N.
    rows: usize,
    /// Where scales begin, in bytes.
    at: usize,
}

impl WeightScales {
    /// Of a weight that may be packed, if it is stored so.
    ///
    /// # Errors
    /// When its extents are not known.
    pub(in crate::kernels) fn new(weight: &OperandType, packed: bool) -> Result<Option<Self>, String> {
        let Some(format) = weight.format.as_ref().and_then(scaled) else { return Ok(None) };
        let at = match Packing::of_operand(weight).filter(|_| packed) {
            Some(packing) => packing.bytes(weight.rows(), weight.last()),
            None => weight.component_offsets()?[1],
        };
        let rows = weight.shape[weight.shape.len().saturating_sub(2)];
        Ok(Some(Self { codes: format.codes, layout: format.scales, rows, at }))
    }

    /// Elements before matrix `nth` of rows of `inner` elements.
    pub(in crate::kernels) fn before(&self, nth: usize, inner: usize) -> usize {
        nth * self.rows * inner
    }

    /// The scales of blocks of matrix `nth` of the weight that is input `input`, where it has such.
    pub(in crate::kernels) fn of_blocks<'a>(
        &self,
        io: &KernelIo<'a>,
        [input, nth]: [usize; 2],
        inner: usize,
    ) -> Option<BlockScales<'a>> {
        let before = nth * self.rows.div_ceil(BLOCK) * inner.div_ceil(BLOCK);
        (self.layout == ScaleLayout::Block).then(|| BlockScales::new(&io.input_at(input, self.at)[before..], inner))
    }

    /// Multiplies rows of `products`, those by rows `columns` of matrix `nth` of the weight that is input `input`, by the scales
    /// of rows or the one of all.
    pub(in crate::kernels) fn apply(
        &self,
        io: &KernelIo<'_>,
        [input, nth]: [usize; 2],
        columns: &Range<usize>,
        products: &mut [f32],
    ) {
        if self.layout == ScaleLayout::Block {
            return;
        }
        let scales = io.input_at::<f32>(input, self.at);
        if self.layout == ScaleLayout::Tensor {
            return simd::scale(products, scales[0]);
        }
        for row in products.chunks_exact_mut(columns.len().max(1)) {
            simd::multiply(row, &scales[nth * self.rows..][columns.clone()]);
        }
    }
}

/// Scales of blocks of a weight.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct BlockScales<'a> {
    scales: &'a [f32],
    /// Blocks of K.
    across: usize,
}

impl<'a> BlockScales<'a> {
    /// Of a weight of rows of `inner` elements.
    pub(super) fn new(scales: &'a [f32], inner: usize) -> Self {
        Self { scales, across: inner.div_ceil(BLOCK) }
    }

    /// Those of row `row`, for each 128 elements.
    #[inline(always)]
    pub(super) fn of_row(&self, row: usize) -> &'a [f32] {
        &self.scales[row / BLOCK * self.across..][..self.across]
    }
}

/// Codes times the scales of their blocks.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct InBlocks<'a, T> {
    codes: Streamed<'a, T>,
    scales: BlockScales<'a>,
}

impl<'a, T: Element> InBlocks<'a, T> {
    pub(in crate::kernels) fn new(codes: Plain<'a, T>, scales: BlockScales<'a>) -> Self {
        Self { codes: Streamed(codes), scales }
    }
}

impl<'a, T: Element> Source for InBlocks<'a, T> {
    type Row = (<Streamed<'a, T> as Source>::Row, &'a [f32]);

    #[inline(always)]
    fn row(self, row: usize, vectors: usize) -> Self::Row {
        (self.codes.row(row, vectors), self.scales.of_row(row))
    }

    #[inline(always)]
    fn lanes((codes, scales): Self::Row, at: usize) -> Vector {
        let scale = scales[at / const { BLOCK / LANES }];
        let mut lanes = simd::lanes_of(Streamed::<T>::lanes(codes, at));
        lanes.iter_mut().for_each(|lane| *lane *= scale);
        simd::vector_of(&lanes)
    }

    /// What is left of K is within the last block.
    #[inline(always)]
    fn rest(self, row: usize) -> Lanes {
        let scale = self.scales.of_row(row)[self.scales.across - 1];
        self.codes.rest(row).map(|lane| lane * scale)
    }

    #[inline(always)]
    fn fetch(self, row: usize, at: usize) {
        self.codes.fetch(row, at);
    }
}

/// Runs `$body` with `$source` as the rows of `$inner` elements of a matrix of codes: that of `[input, nth]`, as `$scales` has it, times
/// the scales of their blocks if it has such.
macro_rules! with_codes {
    ($scales:expr, $io:expr, $place:expr, $inner:expr, $source:ident => $body:expr) => {{
        use ridge_graph::format::CodeType;

        use crate::kernels::linear::{scales::InBlocks, source::Plain, source::Streamed};

        let (scales, io, place, inner) = ($scales, $io, $place, $inner);
        let before = scales.before(place[1], inner);
        // Floats are of E4M3: `scaled` leaves others out.
        match (scales.codes == CodeType::Int8, scales.of_blocks(io, place, inner)) {
            (true, None) => {
                let $source = Streamed(Plain { data: &io.input::<i8>(place[0])[before..], inner });
                $body
            }
            (true, Some(of_blocks)) => {
                let $source = InBlocks::new(Plain { data: &io.input::<i8>(place[0])[before..], inner }, of_blocks);
                $body
            }
            (false, None) => {
                let data = &io.input::<crate::simd::E4M3>(place[0])[before..];
                let $source = Streamed(Plain { data, inner });
                $body
            }
            (false, Some(of_blocks)) => {
                let data = &io.input::<crate::simd::E4M3>(place[0])[before..];
                let $source = InBlocks::new(Plain { data, inner }, of_blocks);
                $body
            }
        }
    }};
}
pub(in crate::kernels) use with_codes;
