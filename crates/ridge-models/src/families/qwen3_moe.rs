//! Qwen 3's mixtures of experts (2025, "Qwen3 Technical Report", section 2). They can be planned and not run yet.

use serde_json::Value;

use super::definition::{FamilyDefinition, ReadConfig};
use super::planned_config::{
    Channel, EXPERTS, ExpertsConfig, MAX_SIZE, Mixer, PlannedConfig, ROUTER_TRAINING, check_experts,
};
use super::tensors::{ATTENTION, LLAMA_TENSORS, QK_NORMS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;

/// How it is registered.
pub(super) static QWEN3_MOE: FamilyDefinition = FamilyDefinition {
    name: "qwen3_moe",
    model_type: "qwen3_moe",
    class: Some("Qwen3MoeForCausalLM"),
    harmless: &[ROUTER_TRAINING, &["max_window_layers"]],
    read: ReadConfig::Planned(read),
    tensors: TensorTable { layer: &[ATTENTION, QK_NORMS, EXPERTS], ..LLAMA_TENSORS },
    gguf: None,
};

fn read(f: &mut Fields<'_>) -> Result<PlannedConfig> {
    f.must_be("hidden_act", "silu")?;
    f.must_be("attention_bias", false)?;
    f.must_be("use_sliding_window", false)?;
    f.must_be("sliding_window", Value::Null)?;
    f.must_be("decoder_sparse_step", 1)?;
    f.must_be("mlp_only_layers", Vec::<Value>::new())?;
    let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
    decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
    let experts = ExpertsConfig {
        experts: f.size("num_experts", MAX_SIZE)?,
        top_k: f.size("num_experts_per_tok", MAX_SIZE)?,
        intermediate_size: f.size("moe_intermediate_size", MAX_SIZE)?,
        shared_size: 0,
        gated: true,
        sigmoid: false,
        normalise: f.optional("norm_topk_prob")?.unwrap_or(false),
        scale: 1.0,
        groups: None,
    };
    check_experts(f, &experts)?;
    let layers = vec![(Some(Mixer::Attention), Some(Channel::Experts)); decoder.num_hidden_layers];
    Ok(PlannedConfig {
        family: QWEN3_MOE.model_type,
        decoder,
        layers,
        qk_norm: true,
        experts: Some(experts),
        latent: None,
        mamba: None,
    })
}
