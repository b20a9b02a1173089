//! The composite ops, one file each. To add one: write its file (copy the shape of `rms_norm.rs`), add it to
//! [`registry`], and it is tested on every backend, dtype and mesh by existing.
//!
//! What a transformer computes, in the order of a step: `token_layout` (where each token goes), `embedding`,
//! `rms_norm` or `layer_norm`, `linear`, `rope`, `kv_write`, `attention` (or `ragged_attention`), `swiglu` or `gelu`, or
//! `moe_router` and `grouped_linear`, `softmax`, then, when it serves, `history`, `logit_bias`, `penalties`, `dry`,
//! `forbid_tokens` and `sampling`, or `cross_entropy` and `adamw` when it trains. `planned` has ops that can be planned and not run yet.
//! `activations.rs`, `rope_scaling.rs` and `paging.rs` are no ops: they round what products take, make rotary frequencies, and the valid block tables of samples.

mod activations;
mod adamw;
mod attention;
mod cross_entropy;
mod dry;
mod embedding;
mod forbid_tokens;
mod gelu;
mod grouped_linear;
mod history;
mod kv_write;
mod layer_norm;
mod linear;
mod logit_bias;
mod moe_router;
mod paging;
mod penalties;
pub mod planned;
mod ragged_attention;
mod rms_norm;
mod rope;
mod rope_scaling;
mod sampling;
mod softmax;
mod swiglu;
mod token_layout;

pub use activations::Activations;
pub use adamw::AdamW;
pub use attention::PagedAttention;
pub use cross_entropy::{CrossEntropy, CrossEntropyBackward, CrossEntropySaving};
pub use dry::Dry;
pub use embedding::Embedding;
pub use forbid_tokens::ForbidTokens;
pub use gelu::Gelu;
pub use grouped_linear::GroupedLinear;
pub use history::HistoryWrite;
pub use kv_write::KvWrite;
pub use layer_norm::LayerNorm;
pub use linear::{Linear, LinearGroup};
pub use logit_bias::LogitBias;
pub use moe_router::MoeRouter;
pub use penalties::Penalties;
pub use ragged_attention::RaggedAttention;
pub use rms_norm::RmsNorm;
pub use rope::Rope;
pub use rope_scaling::{Yarn, linear_scaling, llama3_scaling, ntk_theta, rope_frequencies, yarn_scaling};
pub use sampling::SampleToken;
pub use softmax::Softmax;
pub use swiglu::Swiglu;
pub use token_layout::TokenLayout;

use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Why;
use crate::sample::{Rng, Sample};
use crate::types::{Shape, Type};

/// An op's name and its sample generator.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The op's name.
    pub name: &'static str,
    /// Valid random instances, edge cases included (extents 0 and 1, ragged, off any tile), whose float tensors have
    /// the given dtype. Some 2 MFLOP at most each.
    pub samples: fn(&mut Rng, DType) -> Vec<Sample>,
}

/// Every composite op.
pub fn registry() -> &'static [Entry] {
    &[
        Entry { name: "adamw", samples: adamw::samples },
        Entry { name: "attention", samples: attention::samples },
        Entry { name: "cross_entropy", samples: cross_entropy::samples },
        Entry { name: "cross_entropy_saving", samples: cross_entropy::samples_saving },
        Entry { name: "cross_entropy_backward", samples: cross_entropy::samples_backward },
        Entry { name: "dry", samples: dry::samples },
        Entry { name: "embedding", samples: embedding::samples },
        Entry { name: "forbid_tokens", samples: forbid_tokens::samples },
        Entry { name: "gelu", samples: gelu::samples },
        Entry { name: "grouped_linear", samples: grouped_linear::samples },
        Entry { name: "history_write", samples: history::samples },
        Entry { name: "kv_write", samples: kv_write::samples },
        Entry { name: "layer_norm", samples: layer_norm::samples },
        Entry { name: "linear", samples: linear::samples },
        Entry { name: "linear_group", samples: linear::samples_group },
        Entry { name: "logit_bias", samples: logit_bias::samples },
        Entry { name: "moe_router", samples: moe_router::samples },
        Entry { name: "penalties", samples: penalties::samples },
        Entry { name: "ragged_attention", samples: ragged_attention::samples },
        Entry { name: "rms_norm", samples: rms_norm::samples },
        Entry { name: "rope", samples: rope::samples },
        Entry { name: "sample_token", samples: sampling::samples },
        Entry { name: "softmax", samples: softmax::samples },
        Entry { name: "swiglu", samples: swiglu::samples },
        Entry { name: "token_layout", samples: token_layout::samples },
    ]
}

/// Requires a plain float tensor.
fn want_float(name: &str, ty: &Type) -> Result<(), Why> {
    if ty.dtype.is_float() && ty.is_plain() {
        Ok(())
    } else {
        Err(format!("{name} must be a plain float tensor, got {ty}"))
    }
}

/// Requires a float parameter, plain or stored in a format, of the axes that `axes` names, such as `[N, K]`.
fn want_weight(name: &str, ty: &Type, rank: usize, axes: &str) -> Result<(), Why> {
    if ty.dtype.is_float() && !ty.state && ty.shape.rank() == rank {
        Ok(())
    } else {
        Err(format!("{name} must be a float parameter {axes}, got {ty}"))
    }
}

/// Requires a plain float tensor of the axes that `axes` names, such as `[tokens, heads, dim]`.
fn want_floats(name: &str, ty: &Type, rank: usize, axes: &str) -> Result<(), Why> {
    if ty.dtype.is_float() && ty.is_plain() && ty.shape.rank() == rank {
        Ok(())
    } else {
        Err(format!("{name} must be a plain float tensor {axes}, got {ty}"))
    }
}

/// Requires exactly this plain tensor.
fn want(name: &str, ty: &Type, dtype: DType, shape: impl Into<Shape>) -> Result<(), Why> {
    let wanted = Type::tensor(dtype, shape);
    if *ty == wanted { Ok(()) } else { Err(format!("{name} must be {wanted}, got {ty}")) }
}

/// Why a wrong number of inputs is refused.
fn takes(names: &str, inputs: &[Type]) -> Why {
    format!("takes {names}, got {} inputs", inputs.len())
}

/// The product of extents of which at most one is symbolic.
fn flat(dims: &[Dim]) -> Result<Dim, Why> {
    dims.iter()
        .try_fold(Dim::from(1), |product, dim| product.times(dim))
        .ok_or_else(|| format!("axes {} cannot be taken as one, since more than one is symbolic", Shape(dims.to_vec())))
}
