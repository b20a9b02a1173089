//! Nemotron-H (2025, "Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models") and Nemotron 3: layers
//! that are a scan, attention, an MLP or experts each. They can be planned and not run yet.

use serde_json::Value;

use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERTS, check_experts};
use super::planned_config::{Channel, LayerKind, MambaConfig, Mixer, PlannedConfig};
use super::tensors::{ATTENTION, Cut, GATED_MLP, LLAMA_TENSORS, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY};
use crate::error::Result;

/// Training, initial values, how others compute the scan, and the rotation that the published code does not apply.
const HARMLESS: &[&str] = &[
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_ssm_cache_dtype",
    "num_logits_to_keep",
    "partial_rotary_factor",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rope_theta",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "use_mamba_kernels",
    "norm_eps",
    "rms_norm_eps",
];

/// Projections in and out of a scan.
const SCAN: &[TensorName] =
    &[TensorName::planned("mixer.in_proj", Cut::Columns), TensorName::planned("mixer.out_proj", Cut::Terms)];

/// How it is registered.
pub(super) static NEMOTRON_H: FamilyDefinition = FamilyDefinition {
    name: "nemotron_h",
    model_type: "nemotron_h",
    class: Some("NemotronHForCausalLM"),
    harmless: &[ROUTER_TRAINING, HARMLESS],
    read: ReadConfig::Planned(read),
    tensors: TensorTable { layer: &[SCAN, ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS], ..LLAMA_TENSORS },
    gguf: None,
};

fn read(f: &mut Fields<'_>) -> Result<PlannedConfig> {
    f.must_be("mlp_hidden_act", "relu2")?;
    f.must_be("mamba_hidden_act", "silu")?;
    for key in ["attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"] {
        f.must_be(key, false)?;
    }
    f.must_be("use_conv_bias", true)?;
    f.must_be("sliding_window", Value::Null)?;
    let pattern: &str = f.required("hybrid_override_pattern")?;
    let layer = |kind| match kind {
        'M' => Some((Some(Mixer::Mamba), None)),
        '*' => Some((Some(Mixer::Attention), None)),
        '-' => Some((None, Some(Channel::Squared))),
        'E' => Some((None, Some(Channel::Experts))),
        _ => None,
    };
    let layers: Option<Vec<LayerKind>> = pattern.chars().map(layer).collect();
    let keys = DecoderKeys { norm_eps: "layer_norm_epsilon", ..DECODER_KEYS };
    let mut decoder = DecoderConfig::read(f, &keys)?;
    if let Some(dim) = f.optional_size("attention_head_dim", MAX_SIZE)? {
        decoder.head_dim = dim;
    }
    let layers = layers.filter(|layers| layers.len() == decoder.num_hidden_layers).ok_or_else(|| {
        let problem = format!("is not {} of M, *, - and E, one a layer", decoder.num_hidden_layers);
        f.wrong("hybrid_override_pattern", problem, REMEDY)
    })?;
    let experts = match f.optional_size("n_routed_experts", MAX_SIZE)? {
        None => None,
        Some(experts) => Some(ExpertsConfig {
            experts,
            top_k: f.size("num_experts_per_tok", MAX_SIZE)?,
            intermediate_size: f.size("moe_intermediate_size", MAX_SIZE)?,
            shared_size: f.optional_size("moe_shared_expert_intermediate_size", MAX_SIZE)?.unwrap_or(0)
                * f.optional_size("n_shared_experts", MAX_SIZE)?.unwrap_or(1),
            shared_gate: false,
            gated: false,
            sigmoid: true,
            weighs_inputs: false,
            normalise: f.optional("norm_topk_prob")?.unwrap_or(true),
            scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
            groups: Some((f.size("n_group", MAX_SIZE)?, f.size("topk_group", MAX_SIZE)?)),
            clamped: None,
        }),
    };
    match &experts {
        Some(experts) => check_experts(f, experts)?,
        None if layers.contains(&(None, Some(Channel::Experts))) => {
            return Err(f.wrong("hybrid_override_pattern", "has layers of experts and the file has none", REMEDY));
        }
        None => {}
    }
    let mamba = MambaConfig {
        heads: f.size("mamba_num_heads", MAX_SIZE)?,
        head_dim: f.size("mamba_head_dim", MAX_SIZE)?,
        groups: f.size("n_groups", MAX_SIZE)?,
        state: f.size("ssm_state_size", MAX_SIZE)?,
        kernel: f.size("conv_kernel", MAX_SIZE)?,
    };
    Ok(PlannedConfig {
        family: NEMOTRON_H.model_type,
        decoder,
        layers,
        qk_norm: false,
        experts,
        latent: None,
        mamba: Some(mamba),
    })
}
