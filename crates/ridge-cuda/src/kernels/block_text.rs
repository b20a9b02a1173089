//! The block formats of GGUF as the texts of kernels have them: `kernels/blocks.cuh`.

use ridge_graph::FormatRef;
use ridge_graph::format::{self, BlockFormat, CodeType, ScaledFormat};

/// Elements of a column that a warp takes at a time: `CHUNK` of the text.
pub(super) const CHUNK: usize = 256;
/// A format as the text has it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockText {
    /// Its struct.
    pub(super) name: &'static str,
    /// Bytes of a chunk.
    pub(super) bytes: usize,
    /// Scales of a chunk.
    scales: usize,
    /// Elements at whose multiples a chunk can be entered: `UNIT` of the text, which counts groups of 32.
    pub(super) unit: usize,
}

impl BlockText {
    const fn of<F: BlockFormat>(name: &'static str) -> Self {
        Self {
            name,
            bytes: CHUNK / F::ELEMENTS * F::BYTES,
            scales: CHUNK / F::GROUP,
            unit: if F::ELEMENTS == 32 { 128 } else { CHUNK },
        }
    }

    /// Codes with scales, which a text of their own decodes; `None` for those that it does not have.
    pub(super) fn of_codes(format: &FormatRef) -> Option<Self> {
        let name = match format.downcast::<ScaledFormat>()?.codes {
            CodeType::F8E4M3 => "Codes<F8E4M3>",
            CodeType::Int8 => "Codes<I8>",
            CodeType::F8E5M2 => return None,
        };
        Some(Self { name, bytes: CHUNK, scales: 0, unit: CHUNK })
    }

    pub(super) fn find(format: &FormatRef) -> Option<Self> {
        let is = |text: Self, found: bool| found.then_some(text);
        is(Self::of::<format::Q8_0>("Q8_0"), format.downcast::<format::Q8_0>().is_some())
            .or_else(|| is(Self::of::<format::Q4_0>("Q4_0"), format.downcast::<format::Q4_0>().is_some()))
            .or_else(|| is(Self::of::<format::Q4_1>("Q4_1"), format.downcast::<format::Q4_1>().is_some()))
            .or_else(|| is(Self::of::<format::Q5_0>("Q5_0"), format.downcast::<format::Q5_0>().is_some()))
            .or_else(|| is(Self::of::<format::Q5_1>("Q5_1"), format.downcast::<format::Q5_1>().is_some()))
            .or_else(|| is(Self::of::<format::Mxfp4>("MXFP4"), format.downcast::<format::Mxfp4>().is_some()))
            .or_else(|| is(Self::of::<format::Q4K>("Q4K"), format.downcast::<format::Q4K>().is_some()))
            .or_else(|| is(Self::of::<format::Q5K>("Q5K"), format.downcast::<format::Q5K>().is_some()))
            .or_else(|| is(Self::of::<format::Q6K>("Q6K"), format.downcast::<format::Q6K>().is_some()))
    }

    /// Do chunks lie at multiples of 16 bytes, so that memory and not decoding is the limit?
    pub(super) fn is_light(self) -> bool {
        self.bytes.is_multiple_of(16)
    }

    /// Does its text for single rows take elements of both halves of a group in turn?
    pub(super) fn is_paired(self) -> bool {
        self.name == "MXFP4"
    }

    /// Are scales of groups of 32 small integers, with which codes have no more bits than f16 has?
    pub(super) fn is_exact_in_f16(self) -> bool {
        matches!(self.name, "Q4K" | "Q5K")
    }

    /// Bytes of a stage of a warp's ring: 16 columns, an odd number of 16-byte pieces apart.
    pub(super) fn stage_bytes(self) -> usize {
        let skew = if self.bytes.is_multiple_of(16) { 0 } else { 14 };
        16 * 16 * ((self.bytes + skew).div_ceil(16) | 1)
    }

    /// The same where columns begin at any address.
    pub(super) fn grouped_stage_bytes(self) -> usize {
        16 * 16 * ((self.bytes + 15).div_ceil(16) | 1)
    }

    /// The same as [`BlockText::ring_bytes`] where columns begin at any address.
    pub(super) fn grouped_ring_bytes(self, stages: usize) -> usize {
        stages * self.grouped_stage_bytes() + 16 * 8 * self.scales
    }

    /// Bytes of a warp's ring of so many stages, with the scales of a chunk.
    pub(super) fn ring_bytes(self, stages: usize) -> usize {
        stages * self.stage_bytes() + 16 * 8 * self.scales
    }
}

/// The formats of a launch's weights.
pub(super) struct Formats {
    of_weights: Vec<BlockText>,
    distinct: Vec<BlockText>,
}

impl Formats {
    pub(super) fn new(of_weights: Vec<BlockText>) -> Self {
        let mut distinct: Vec<BlockText> = Vec::new();
        for format in &of_weights {
            if !distinct.contains(format) {
                distinct.push(*format);
            }
        }
        Self { of_weights, distinct }
    }

    pub(super) fn distinct(&self) -> impl Iterator<Item = BlockText> {
        self.distinct.iter().copied()
    }

    /// `EACH_FORMAT` of the texts.
    pub(super) fn each(&self) -> String {
        let each: Vec<String> = self.distinct.iter().enumerate().map(|(i, f)| format!("F({i}, {})", f.name)).collect();
        each.join(" ")
    }

    /// `FORMATS` of the texts.
    pub(super) fn places(&self) -> String {
        let place = |format: &BlockText| self.distinct.iter().position(|d| d == format).unwrap_or(0).to_string();
        let places: Vec<String> = self.of_weights.iter().map(place).collect();
        places.join(", ")
    }
}
