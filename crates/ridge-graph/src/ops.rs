//! The composite ops, one file each. To add one: write its file (copy the shape of `rms_norm.rs`), add it to
//! [`registry`], and it is tested on every backend, dtype and mesh by existing.
//!
//! What a transformer computes, in the order of a step: `token_layout` (where each token goes), `embedding`,
//! `rms_norm` or `layer_norm`, `linear`, `rope`, `kv_write`, `attention` (or `ragged_attention`, or
//! `index_topk` and `selected_attention`), `swiglu`, `clamped_swiglu` or `gelu`, or
//! `moe_router`, `expert_permutation`, `grouped_linear`, `grouped_bias` and `expert_combine`, `softmax` or `log_softmax`, then, when it
//! serves, `take_rows` (of the tokens whose logits are wanted), `history`, `logit_bias`, `penalties`, `dry`, `forbid_tokens`, `sampling` and `accept_candidates`, or `dropout`
//! (by keys of `fold_key`), `cross_entropy` and an optimiser (`adamw`, `adamw8`, `sgd`, `adafactor`, `lion`, `muon`)
//! when it trains. `planned` has what is for plans alone. `quantize` and `quantize_delayed` store values as codes with scales, which
//! `fp8_linear` multiplies when a model trains; `stochastic_round` stores weights in bf16.
//! `rope_scaling.rs`, `optimizer.rs`, `require.rs`, `paged_rows.rs` and `paging.rs` are no ops: they make rotary frequencies, hold what optimisers share, check
//! types, read a sequence's rows of a cache, and make the valid block tables of samples. `user_gradient.rs` is for graphs with gradients of their own. `builtin.rs` is the registry.

mod accept_candidates;
mod adafactor;
mod adamw;
mod adamw8;
mod adamw_update;
mod attention;
mod block_sparse_attention;
mod builtin;
mod causal_conv1d;
mod clamped_swiglu;
mod cross_entropy;
mod dropout;
mod dry;
mod embedding;
mod expert_combine;
mod expert_permutation;
mod fold_key;
mod forbid_tokens;
mod fp8_linear;
mod gated_recurrence;
mod gelu;
mod grouped_bias;
mod grouped_linear;
mod history;
mod index_topk;
mod kv_write;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod linear_gradient;
mod linear_group_gradient;
mod lion;
mod log_softmax;
mod logit_bias;
mod long_convolution;
mod moe_router;
mod muon;
mod norm_gradient;
mod norm_gradients;
mod optimizer;
mod paged_rows;
mod paging;
mod penalties;
pub mod planned;
mod quantize;
mod quantize_delayed;
mod ragged_attention;
mod ragged_attention_samples;
mod ragged_conv1d;
mod require;
mod rms_norm;
mod rope;
mod rope_scaling;
mod sampling;
mod selected_attention;
mod sgd;
mod softmax;
mod softplus;
mod stateful_conv1d;
mod stateful_recurrence;
mod stochastic_round;
mod swiglu;
mod table_write;
mod take_rows;
mod token_layout;
mod user_gradient;
mod wkv;

pub use accept_candidates::AcceptCandidates;
pub use adafactor::Adafactor;
pub use adamw::AdamW;
pub use adamw_update::AdamWUpdate;
pub use adamw8::AdamW8;
pub use attention::PagedAttention;
pub use block_sparse_attention::BlockSparseAttention;
pub use builtin::registry;
pub use causal_conv1d::CausalConv1d;
pub use clamped_swiglu::ClampedSwiglu;
pub use cross_entropy::{CrossEntropy, CrossEntropyBackward, CrossEntropySaving};
pub use dropout::Dropout;
pub use dry::Dry;
pub use embedding::Embedding;
pub use expert_combine::ExpertCombine;
pub use expert_permutation::ExpertPermutation;
pub use fold_key::FoldKey;
pub use forbid_tokens::ForbidTokens;
pub use fp8_linear::{Fp8Linears, Fp8LinearsBackward, Fp8Scaling};
pub use gated_recurrence::GatedRecurrence;
pub use gelu::{Gelu, GeluBackward};
pub use grouped_bias::GroupedBias;
pub use grouped_linear::GroupedLinear;
pub use index_topk::IndexTopK;
pub use kv_write::KvWrite;
pub use layer_norm::LayerNorm;
pub use linear::{Linear, LinearForward, LinearGroup, LinearGroupForward};
pub use linear_cross_entropy::{LinearCrossEntropy, LinearCrossEntropyBackward, LinearCrossEntropySaving};
pub use linear_gradient::{LinearBackward, LinearInputGradient, LinearWeightGradient, SumRows};
pub use linear_group_gradient::{LinearGroupBackward, LinearGroupInputGradient};
pub use lion::Lion;
pub use log_softmax::{LogSoftmax, LogSoftmaxBackward};
pub use logit_bias::LogitBias;
pub use long_convolution::LongConvolution;
pub use moe_router::{ExpertGroups, MoeRouter};
pub use muon::Muon;
pub use norm_gradient::{NormBackward, NormInputGradient, NormWeightGradient};
pub use norm_gradients::NormGradients;
pub use penalties::Penalties;
pub use quantize::{Dequantize, Quantize, StraightThrough};
pub use quantize_delayed::{QuantizeDelayed, QuantizeDelayedBackward};
pub use ragged_attention::{RaggedAttention, RaggedAttentionBackward, RaggedAttentionSaving, ShareDropout};
pub use ragged_conv1d::{RaggedConv1d, RaggedConv1dBackward};
pub use rms_norm::RmsNorm;
pub use rope::{Rope, RopeBackward};
pub use rope_scaling::{Yarn, linear_scaling, llama3_scaling, ntk_theta, rope_frequencies, yarn_scaling};
pub use sampling::SampleToken;
pub use selected_attention::SelectedAttention;
pub use sgd::Sgd;
pub use softmax::Softmax;
pub use softplus::{Softplus, SoftplusBackward};
pub use stateful_conv1d::StatefulConv1d;
pub use stateful_recurrence::StatefulRecurrence;
pub use stochastic_round::StochasticRound;
pub use swiglu::{Swiglu, SwigluBackward};
pub use table_write::TableWrite;
pub use take_rows::TakeRows;
pub use token_layout::TokenLayout;
pub use user_gradient::UserGradient;
pub use wkv::Wkv;
