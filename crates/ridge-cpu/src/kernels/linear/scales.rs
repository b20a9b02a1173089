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

/// A weight `[N, K]` of codes.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightScales {
    pub(super) codes: CodeType,
    layout: ScaleLayout,
    /// Where scales begin, in bytes.
    at: usize,
}

impl WeightScales {
    /// Of a weight that may be packed, if it is stored so.
    ///
    /// # Errors
    /// When its extents are not known.
    pub(super) fn new(weight: &OperandType, packed: bool) -> Result<Option<Self>, String> {
        let Some(format) = weight.format.as_ref().and_then(scaled) else { return Ok(None) };
        let at = match Packing::of_operand(weight).filter(|_| packed) {
            Some(packing) => packing.bytes(weight.rows(), weight.last()),
            None => weight.component_offsets()?[1],
        };
        Ok(Some(Self { codes: format.codes, layout: format.scales, at }))
    }

    /// The scales of each 128 elements of rows `row / 128 * 128` and so on of the weight that is input `input`, where it has such.
    pub(super) fn of_blocks<'a>(&self, io: &KernelIo<'a>, input: usize, inner: usize) -> Option<BlockScales<'a>> {
        (self.layout == ScaleLayout::Block).then(|| BlockScales::new(io.input_at(input, self.at), inner))
    }

    /// Multiplies rows of `products`, those by rows `columns` of the weight that is input `input`, by what each has one of.
    pub(super) fn apply(&self, io: &KernelIo<'_>, input: usize, columns: &Range<usize>, products: &mut [f32]) {
        if self.layout == ScaleLayout::Block {
            return;
        }
        let scales = io.input_at::<f32>(input, self.at);
        if self.layout == ScaleLayout::Tensor {
            return simd::scale(products, scales[0]);
        }
        for row in products.chunks_exact_mut(columns.len().max(1)) {
            simd::multiply(row, &scales[columns.clone()]);
        }
    }
}

/// Scales of blocks of a weight.
#[derive(Clone, Copy)]
pub(super) struct BlockScales<'a> {
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
pub(super) struct InBlocks<'a, T> {
    codes: Streamed<'a, T>,
    scales: BlockScales<'a>,
}

impl<'a, T: Element> InBlocks<'a, T> {
    pub(super) fn new(codes: Plain<'a, T>, scales: BlockScales<'a>) -> Self {
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

/// Runs `$body` with `$source` as the rows of `$inner` elements of the weight that is input `$input`, of codes as `$scales` has it,
/// times the scales of their blocks if it has such.
macro_rules! with_codes {
    ($scales:expr, $io:expr, $input:expr, $inner:expr, $source:ident => $body:expr) => {{
        use ridge_graph::format::CodeType;

        use crate::kernels::linear::{scales::InBlocks, source::Plain, source::Streamed};

        let (scales, io, input, inner) = ($scales, $io, $input, $inner);
        match (scales.codes, scales.of_blocks(io, input, inner)) {
            (CodeType::Int8, None) => {
                let $source = Streamed(Plain { data: io.input::<i8>(input), inner });
                $body
            }
            (CodeType::Int8, Some(of_blocks)) => {
                let $source = InBlocks::new(Plain { data: io.input::<i8>(input), inner }, of_blocks);
                $body
            }
            (CodeType::F8E4M3 | CodeType::F8E5M2, None) => {
                let $source = Streamed(Plain { data: io.input::<crate::simd::E4M3>(input), inner });
                $body
            }
            (CodeType::F8E4M3 | CodeType::F8E5M2, Some(of_blocks)) => {
                let $source = InBlocks::new(Plain { data: io.input::<crate::simd::E4M3>(input), inner }, of_blocks);
                $body
            }
        }
    }};
}
pub(super) use with_codes;
