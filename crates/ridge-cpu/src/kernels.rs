//! The patterns that hand-written kernels of this crate claim, one file a subject.

mod accept_candidates;
mod adamw;
mod adamw8;
mod attention;
mod block_sparse_attention;
mod convolution;
mod cross_entropy;
mod embedding;
mod experts;
mod grouped_linear;
mod history;
mod int8;
mod kv_write;
mod linear;
mod linear_gradient;
mod long_convolution;
mod norm;
mod norm_gradient;
mod penalties;
mod quant;
mod quantize;
mod ragged_attention;
mod rope;
mod sampling;
mod softmax;
mod swiglu;
mod table_write;
#[cfg(target_arch = "x86_64")]
mod tile_product;
mod token_layout;
mod training_attention;
mod wkv;

use crate::kernel::KernelEntry;

/// The kernels of this crate.
pub(crate) fn builtin() -> Vec<KernelEntry> {
    let mut entries = Vec::new();
    entries.extend(accept_candidates::entries());
    entries.extend(adamw::entries());
    entries.extend(adamw8::entries());
    entries.extend(attention::entries());
    entries.extend(block_sparse_attention::entries());
    entries.extend(convolution::entries());
    entries.extend(cross_entropy::entries());
    entries.extend(embedding::entries());
    entries.extend(experts::entries());
    entries.extend(grouped_linear::entries());
    entries.extend(kv_write::entries());
    entries.extend(linear::entries());
    entries.extend(linear_gradient::entries());
    entries.extend(long_convolution::entries());
    entries.extend(norm::entries());
    entries.extend(norm_gradient::entries());
    entries.extend(penalties::entries());
    entries.extend(quantize::entries());
    entries.extend(ragged_attention::entries());
    entries.extend(rope::entries());
    entries.extend(sampling::entries());
    entries.extend(softmax::entries());
    entries.extend(swiglu::entries());
    entries.extend(table_write::entries());
    entries.extend(token_layout::entries());
    entries.extend(training_attention::entries());
    entries.extend(wkv::entries());
    entries
}
