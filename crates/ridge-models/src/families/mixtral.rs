//! Mixtral (Jiang et al. 2024, "Mixtral of Experts", section 2): Llama's layers with a few experts of many for an MLP. It can
//! be planned and not run yet.

use serde_json::Value;

use super::definition::{FamilyDefinition, ReadConfig};
use super::planned_config::{
    Channel, EXPERTS, ExpertsConfig, MAX_SIZE, Mixer, PlannedConfig, ROUTER_TRAINING, check_experts,
};
use super::tensors::{ATTENTION, LLAMA_TENSORS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;

/// How it is registered.
pub(super) static MIXTRAL: FamilyDefinition = FamilyDefinition {
    name: "mixtral",
    model_type: "mixtral",
    class: Some("MixtralForCausalLM"),
    harmless: &[ROUTER_TRAINING, &["router_jitter_noise"]],
    read: ReadConfig::Planned(read),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS], ..LLAMA_TENSORS },
    gguf: None,
};

fn read(f: &mut Fields<'_>) -> Result<PlannedConfig> {
    f.must_be("hidden_act", "silu")?;
    f.must_be("sliding_window", Value::Null)?;
    let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
    decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
    let experts = ExpertsConfig {
        experts: f.size("num_local_experts", MAX_SIZE)?,
        top_k: f.size("num_experts_per_tok", MAX_SIZE)?,
        intermediate_size: decoder.intermediate_size,
        shared_size: 0,
        gated: true,
        sigmoid: false,
        normalise: true,
        scale: 1.0,
        groups: None,
    };
    check_experts(f, &experts)?;
    let layers = vec![(Some(Mixer::Attention), Some(Channel::Experts)); decoder.num_hidden_layers];
    Ok(PlannedConfig {
        family: MIXTRAL.model_type,
        decoder,
        layers,
        qk_norm: false,
        experts: Some(experts),
        latent: None,
        mamba: None,
    })
}
