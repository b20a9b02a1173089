//! Scales of weights that are stored as codes with one for each row, or one for all: products by the codes are multiplied by them.

use std::ops::Range;

use ridge_graph::FormatRef;
use ridge_graph::format::{BlockFormat, CodeType, ScaleLayout, ScaledFormat, SignedBytes};

use crate::io::KernelIo;
use crate::kernel::OperandType;
use crate::packing::Packing;
use crate::simd;

/// Are rows of `inner` elements stored in `format` what kernels of block formats take as [`SignedBytes`], with scales behind
/// them?
pub(super) fn are_bytes(format: &FormatRef, inner: usize) -> bool {
    let format = format.downcast::<ScaledFormat>();
    format.is_some_and(|format| format.codes == CodeType::Int8 && once(*format))
        && inner.is_multiple_of(SignedBytes::ELEMENTS)
}

/// Is every product multiplied by one scale?
fn once(format: ScaledFormat) -> bool {
    matches!(format.scales, ScaleLayout::Row | ScaleLayout::Tensor)
}

/// Where the scales of a weight are.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightScales {
    /// In bytes.
    at: usize,
    /// Is there one for each row?
    by_row: bool,
}

impl WeightScales {
    /// Of a weight that may be packed, if it has scales that products are multiplied by.
    ///
    /// # Errors
    /// When its extents are not known.
    pub(super) fn new(weight: &OperandType, packed: bool) -> Result<Option<Self>, String> {
        let format = weight.format.as_ref().and_then(|format| format.downcast::<ScaledFormat>().copied());
        let Some(format) = format.filter(|format| once(*format)) else { return Ok(None) };
        let at = match Packing::of_operand(weight).filter(|_| packed) {
            Some(packing) => packing.bytes(weight.rows(), weight.last()),
            None => weight.component_offsets()?[1],
        };
        Ok(Some(Self { at, by_row: format.scales == ScaleLayout::Row }))
    }

    /// Multiplies rows of `products`, those by rows `columns` of the weight that is input `input`.
    pub(super) fn apply(&self, io: &KernelIo<'_>, input: usize, columns: &Range<usize>, products: &mut [f32]) {
        let scales = io.input_at::<f32>(input, self.at);
        if !self.by_row {
            return simd::scale(products, scales[0]);
        }
        for row in products.chunks_exact_mut(columns.len().max(1)) {
            simd::multiply(row, &scales[columns.clone()]);
        }
    }
}
