//! The registry of the composite ops.

use super::{
    accept_candidates, adafactor, adamw, adamw8, attention, cross_entropy, dropout, dry, embedding, expert_combine,
    expert_permutation, fold_key, forbid_tokens, gelu, grouped_linear, kv_write, layer_norm, linear, lion, log_softmax,
    logit_bias, moe_router, muon, penalties, quantize, ragged_attention, rms_norm, rope, sampling, sgd, softmax,
    swiglu, table_write, token_layout,
};
use crate::registry::{OpEntry, OpRegistry};

/// Every composite op. An op of another crate is added to it with [`OpRegistry::add`].
pub fn registry() -> OpRegistry {
    OpRegistry::new([
        OpEntry::new("accept_candidates", accept_candidates::samples),
        OpEntry::new("adafactor", adafactor::samples),
        OpEntry::new("adamw", adamw::samples),
        OpEntry::new("adamw8", adamw8::samples),
        OpEntry::new("attention", attention::samples),
        OpEntry::new("cross_entropy", cross_entropy::samples),
        OpEntry::new("cross_entropy_saving", cross_entropy::samples_saving),
        OpEntry::new("cross_entropy_backward", cross_entropy::samples_backward),
        OpEntry::new("dequantize", quantize::samples_dequantize),
        OpEntry::new("dropout", dropout::samples),
        OpEntry::new("dry", dry::samples),
        OpEntry::new("embedding", embedding::samples),
        OpEntry::new("expert_combine", expert_combine::samples),
        OpEntry::new("expert_permutation", expert_permutation::samples),
        OpEntry::new("fold_key", fold_key::samples),
        OpEntry::new("forbid_tokens", forbid_tokens::samples),
        OpEntry::new("gelu", gelu::samples),
        OpEntry::new("grouped_linear", grouped_linear::samples),
        OpEntry::new("kv_write", kv_write::samples),
        OpEntry::new("layer_norm", layer_norm::samples),
        OpEntry::new("linear", linear::samples),
        OpEntry::new("linear_group", linear::samples_group),
        OpEntry::new("lion", lion::samples),
        OpEntry::new("log_softmax", log_softmax::samples),
        OpEntry::new("log_softmax_backward", log_softmax::samples_backward),
        OpEntry::new("logit_bias", logit_bias::samples),
        OpEntry::new("moe_router", moe_router::samples),
        OpEntry::new("muon", muon::samples),
        OpEntry::new("penalties", penalties::samples),
        OpEntry::new("quantize", quantize::samples),
        OpEntry::new("ragged_attention", ragged_attention::samples),
        OpEntry::new("rms_norm", rms_norm::samples),
        OpEntry::new("rope", rope::samples),
        OpEntry::new("sample_token", sampling::samples),
        OpEntry::new("sgd", sgd::samples),
        OpEntry::new("softmax", softmax::samples),
        OpEntry::new("straight_through", quantize::samples_straight_through),
        OpEntry::new("swiglu", swiglu::samples),
        OpEntry::new("table_write", table_write::samples),
        OpEntry::new("token_layout", token_layout::samples),
    ])
}
