//! DeepSeek V3.2 (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2): V3 with an indexer that chooses which tokens are attended to. It can
//! be planned and not run yet.

use super::deepseek::TENSORS;
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts};
use super::planned_config::{Channel, LatentConfig, Mixer, PlannedConfig};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;

/// Layers that predict further tokens are no part of the model that answers.
const HARMLESS: &[&str] = &["num_nextn_predict_layers"];

/// How V3.2 is registered.
pub(super) static DEEPSEEK_V32: FamilyDefinition = FamilyDefinition {
    name: "deepseek_v32",
    model_type: "deepseek_v32",
    class: Some("DeepseekV32ForCausalLM"),
    harmless: &[ROUTER_TRAINING, HARMLESS],
    read: ReadConfig::Planned(|f| read(f, DEEPSEEK_V32.model_type, true)),
    tensors: TENSORS,
    gguf: None,
};

/// The configuration for plans of V3 and its like, and of V3.2 where it is `indexed`.
pub(super) fn read(f: &mut Fields<'_>, family: &'static str, indexed: bool) -> Result<PlannedConfig> {
    f.harmless(HARMLESS);
    f.must_be("hidden_act", "silu")?;
    f.must_be("attention_bias", false)?;
    f.must_be("moe_layer_freq", 1)?;
    f.must_be("scoring_func", "sigmoid")?;
    f.must_be("topk_method", "noaux_tc")?;
    let latent = LatentConfig {
        q_rank: f.size("q_lora_rank", MAX_SIZE)?,
        kv_rank: f.size("kv_lora_rank", MAX_SIZE)?,
        nope: f.size("qk_nope_head_dim", MAX_SIZE)?,
        rope: f.size("qk_rope_head_dim", MAX_SIZE)?,
        value: f.size("v_head_dim", MAX_SIZE)?,
        index: match indexed {
            true => Some((
                f.size("index_n_heads", MAX_SIZE)?,
                f.size("index_head_dim", MAX_SIZE)?,
                f.size("index_topk", MAX_SIZE)?,
            )),
            false => None,
        },
    };
    let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
    decoder.head_dim = latent.rope;
    decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
    decoder.head_dim = latent.nope + latent.rope;
    let width = f.size("moe_intermediate_size", MAX_SIZE)?;
    let experts = ExpertsConfig {
        experts: f.size("n_routed_experts", MAX_SIZE)?,
        top_k: f.size("num_experts_per_tok", MAX_SIZE)?,
        intermediate_size: width,
        shared_size: width * f.optional_size("n_shared_experts", MAX_SIZE)?.unwrap_or(0),
        shared_gate: false,
        gated: true,
        sigmoid: true,
        weighs_inputs: false,
        normalise: f.optional("norm_topk_prob")?.unwrap_or(true),
        scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
        groups: Some((f.size("n_group", MAX_SIZE)?, f.size("topk_group", MAX_SIZE)?)),
        clamped: None,
    };
    check_experts(f, &experts)?;
    let dense = f.count("first_k_dense_replace")?.unwrap_or(0) as usize;
    let channel = |layer| if layer < dense { Channel::Gated } else { Channel::Experts };
    let layers = (0..decoder.num_hidden_layers).map(|layer| (Some(Mixer::Latent), Some(channel(layer)))).collect();
    Ok(PlannedConfig { family, decoder, layers, qk_norm: false, experts: Some(experts), latent: Some(latent) })
}
