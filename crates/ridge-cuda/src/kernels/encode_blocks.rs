//! Weights made into blocks of the formats of GGUF files: `kernels/encode_blocks.cu`.

use std::sync::Arc;

use ridge_graph::{DType, FormatRef};

use crate::kernel::{CudaSource, KernelText, name};

pub(super) const ENCODE: KernelText<'_> = KernelText::new(include_str!("../../kernels/encode_blocks.cu"));

/// Threads of a block, each of which makes a group of values.
pub(crate) const ENCODER_THREADS: usize = 128;

/// The formats that the kernel makes, each with the values of a group.
const FORMATS: [(&str, usize); 13] = [
    ("q8_0", 32),
    ("q4_0", 32),
    ("q4_1", 32),
    ("q5_0", 32),
    ("q5_1", 32),
    ("q2_k", 16),
    ("q3_k", 16),
    ("q4_k", 32),
    ("q5_k", 32),
    ("q6_k", 16),
    ("iq4_nl", 32),
    ("iq4_xs", 32),
    ("mxfp4", 32),
];

/// Values of a group of blocks of `format`, if the kernel makes them.
pub(crate) fn encoded_group(format: &FormatRef) -> Option<usize> {
    FORMATS.iter().find(|(name, _)| *name == format.name()).map(|(_, group)| *group)
}

/// What makes values of `dtype` into blocks of `format`, which has an [`encoded_group`].
pub(crate) fn block_encoder(format: &FormatRef, dtype: DType) -> Arc<CudaSource> {
    CudaSource::new("encode_blocks", &[("D", name(dtype)), ("FORMAT", &format.name().to_uppercase())], &ENCODE)
}
