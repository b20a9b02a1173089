//! Configurations of families whose graphs can be planned and not run yet: mixtures of experts, latent attention and
//! hybrids with Mamba. The rule of every configuration holds: what is read is understood, the rest is refused.

use serde_json::Value;

use super::decoder::{self, DecoderConfig, Keys};
use super::fields::Fields;
use super::rope;
use crate::error::Result;
use ridge_files::json;

/// What a layer does with the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Grouped-query attention, with norms of queries and keys where `qk_norm` says.
    Attention,
    /// Multi-head latent attention.
    Latent,
    /// A state-space scan.
    Mamba,
}

/// What a layer does with each token alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// `down(silu(gate(x)) * up(x))`.
    Gated,
    /// `down(relu(up(x))^2)`.
    Squared,
    /// A few experts of many.
    Experts,
}

/// A layer: one of both halves or both.
pub type LayerKind = (Option<Mixer>, Option<Channel>);

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub experts: usize,
    /// How many a token takes.
    pub top_k: usize,
    /// Width of one.
    pub intermediate_size: usize,
    /// Width of those that all tokens take, together; 0 without.
    pub shared_size: usize,
    /// Are they gated, or squared?
    pub gated: bool,
    /// Scores are sigmoids with a bias for the choice; else their softmax.
    pub sigmoid: bool,
    /// Are the weights divided by their sum?
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// `(groups, kept)`, see [`ridge_graph::ops::MoeRouter`].
    pub groups: Option<(usize, usize)>,
}

/// Latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentConfig {
    /// Width of the queries' latent.
    pub q_rank: usize,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head that are not rotated.
    pub nope: usize,
    /// Elements that are.
    pub rope: usize,
    /// Elements of a value.
    pub value: usize,
    /// `(heads, dim, top_k)` of the indexer that chooses which tokens are attended to.
    pub index: Option<(usize, usize, usize)>,
}

/// The scan of Mamba-2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MambaConfig {
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups.
    pub groups: usize,
    /// Elements of the state of a channel.
    pub state: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
}

/// A model that can be planned.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedConfig {
    /// Its name in configurations.
    pub family: &'static str,
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// The layers in order.
    pub layers: Vec<LayerKind>,
    /// Are queries and keys normalised, head by head?
    pub qk_norm: bool,
    /// Where a layer has [`Channel::Experts`].
    pub experts: Option<ExpertsConfig>,
    /// Where a layer has [`Mixer::Latent`].
    pub latent: Option<LatentConfig>,
    /// Where a layer has [`Mixer::Mamba`].
    pub mamba: Option<MambaConfig>,
}

const MOST: usize = 1 << 22;
/// Routing that training alone does.
const TRAINING: &[&str] = &["router_aux_loss_coef", "output_router_logits", "ep_size"];

impl PlannedConfig {
    /// The families that can be planned and not run yet.
    pub const FAMILIES: [&'static str; 5] = ["deepseek_v3", "deepseek_v32", "mixtral", "nemotron_h", "qwen3_moe"];

    /// Reads the text of a `config.json` of one of [`PlannedConfig::FAMILIES`]. `file` names it in errors. How the
    /// published weights are quantised is not read: a plan says itself how they are stored.
    ///
    /// # Errors
    /// As for [`super::ModelConfig::from_json`].
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        // Python writes numbers that JSON does not have. The one known such value bounds a step of time.
        let mut map = json::object(file, text.replace("Infinity", "1e308").as_bytes())?;
        map.remove("quantization_config");
        let mut f = Fields::new(file, &map);
        let config = match f.required::<&str>("model_type")? {
            "mixtral" => mixtral(&mut f)?,
            "qwen3_moe" => qwen3_moe(&mut f)?,
            "deepseek_v3" => deepseek(&mut f, "deepseek_v3")?,
            "deepseek_v32" => deepseek(&mut f, "deepseek_v32")?,
            "nemotron_h" => nemotron_h(&mut f)?,
            _ => {
                let remedy = format!("Ridge plans {} besides the families that it runs", Self::FAMILIES.join(", "));
                return Err(f.wrong("model_type", "is not a family that Ridge plans", remedy));
            }
        };
        f.finish()?;
        Ok(config)
    }
}

fn mixtral(f: &mut Fields<'_>) -> Result<PlannedConfig> {
    f.architecture("MixtralForCausalLM")?;
    f.harmless(TRAINING);
    f.harmless(&["router_jitter_noise"]);
    f.must_be("hidden_act", "silu")?;
    f.must_be("sliding_window", Value::Null)?;
    let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
    decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
    let experts = ExpertsConfig {
        experts: f.size("num_local_experts", MOST)?,
        top_k: f.size("num_experts_per_tok", MOST)?,
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
        family: "mixtral",
        decoder,
        layers,
        qk_norm: false,
        experts: Some(experts),
        latent: None,
        mamba: None,
    })
}

fn qwen3_moe(f: &mut Fields<'_>) -> Result<PlannedConfig> {
    f.architecture("Qwen3MoeForCausalLM")?;
    f.harmless(TRAINING);
    f.harmless(&["max_window_layers"]);
    f.must_be("hidden_act", "silu")?;
    f.must_be("attention_bias", false)?;
    f.must_be("use_sliding_window", false)?;
    f.must_be("sliding_window", Value::Null)?;
    f.must_be("decoder_sparse_step", 1)?;
    f.must_be("mlp_only_layers", Vec::<Value>::new())?;
    let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
    decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
    let experts = ExpertsConfig {
        experts: f.size("num_experts", MOST)?,
        top_k: f.size("num_experts_per_tok", MOST)?,
        intermediate_size: f.size("moe_intermediate_size", MOST)?,
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
        family: "qwen3_moe",
        decoder,
        layers,
        qk_norm: true,
        experts: Some(experts),
        latent: None,
        mamba: None,
    })
}

fn deepseek(f: &mut Fields<'_>, family: &'static str) -> Result<PlannedConfig> {
    let indexed = family == "deepseek_v32";
    f.architecture(if indexed { "DeepseekV32ForCausalLM" } else { "DeepseekV3ForCausalLM" })?;
    f.harmless(TRAINING);
    // Layers that predict further tokens are no part of the model that answers.
    f.harmless(&["num_nextn_predict_layers"]);
    f.must_be("hidden_act", "silu")?;
    f.must_be("attention_bias", false)?;
    f.must_be("moe_layer_freq", 1)?;
    f.must_be("scoring_func", "sigmoid")?;
    f.must_be("topk_method", "noaux_tc")?;
    let latent = LatentConfig {
        q_rank: f.size("q_lora_rank", MOST)?,
        kv_rank: f.size("kv_lora_rank", MOST)?,
        nope: f.size("qk_nope_head_dim", MOST)?,
        rope: f.size("qk_rope_head_dim", MOST)?,
        value: f.size("v_head_dim", MOST)?,
        index: match indexed {
            true => {
                Some((f.size("index_n_heads", MOST)?, f.size("index_head_dim", MOST)?, f.size("index_topk", MOST)?))
            }
            false => None,
        },
    };
    let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
    decoder.head_dim = latent.rope;
    decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
    decoder.head_dim = latent.nope + latent.rope;
    let width = f.size("moe_intermediate_size", MOST)?;
    let experts = ExpertsConfig {
        experts: f.size("n_routed_experts", MOST)?,
        top_k: f.size("num_experts_per_tok", MOST)?,
        intermediate_size: width,
        shared_size: width * f.optional_size("n_shared_experts", MOST)?.unwrap_or(0),
        gated: true,
        sigmoid: true,
        normalise: f.optional("norm_topk_prob")?.unwrap_or(true),
        scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
        groups: Some((f.size("n_group", MOST)?, f.size("topk_group", MOST)?)),
    };
    check_experts(f, &experts)?;
    let dense = f.count("first_k_dense_replace")?.unwrap_or(0) as usize;
    let channel = |layer| if layer < dense { Channel::Gated } else { Channel::Experts };
    let layers = (0..decoder.num_hidden_layers).map(|layer| (Some(Mixer::Latent), Some(channel(layer)))).collect();
    Ok(PlannedConfig {
        family,
        decoder,
        layers,
        qk_norm: false,
        experts: Some(experts),
        latent: Some(latent),
        mamba: None,
    })
}

fn nemotron_h(f: &mut Fields<'_>) -> Result<PlannedConfig> {
    f.architecture("NemotronHForCausalLM")?;
    f.harmless(TRAINING);
    // Training, initial values, how others compute the scan, and the rotation that the published code does not apply.
    f.harmless(&[
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
    ]);
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
    let keys = Keys { norm_eps: "layer_norm_epsilon", ..decoder::USUAL };
    let mut decoder = DecoderConfig::read(f, &keys)?;
    if let Some(dim) = f.optional_size("attention_head_dim", MOST)? {
        decoder.head_dim = dim;
    }
    let layers = layers.filter(|layers| layers.len() == decoder.num_hidden_layers).ok_or_else(|| {
        let problem = format!("is not {} of M, *, - and E, one a layer", decoder.num_hidden_layers);
        f.wrong("hybrid_override_pattern", problem, decoder::REMEDY)
    })?;
    let experts = match f.optional_size("n_routed_experts", MOST)? {
        None => None,
        Some(experts) => Some(ExpertsConfig {
            experts,
            top_k: f.size("num_experts_per_tok", MOST)?,
            intermediate_size: f.size("moe_intermediate_size", MOST)?,
            shared_size: f.optional_size("moe_shared_expert_intermediate_size", MOST)?.unwrap_or(0)
                * f.optional_size("n_shared_experts", MOST)?.unwrap_or(1),
            gated: false,
            sigmoid: true,
            normalise: f.optional("norm_topk_prob")?.unwrap_or(true),
            scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
            groups: Some((f.size("n_group", MOST)?, f.size("topk_group", MOST)?)),
        }),
    };
    match &experts {
        Some(experts) => check_experts(f, experts)?,
        None if layers.contains(&(None, Some(Channel::Experts))) => {
            return Err(f.wrong(
                "hybrid_override_pattern",
                "has layers of experts and the file has none",
                decoder::REMEDY,
            ));
        }
        None => {}
    }
    let mamba = MambaConfig {
        heads: f.size("mamba_num_heads", MOST)?,
        head_dim: f.size("mamba_head_dim", MOST)?,
        groups: f.size("n_groups", MOST)?,
        state: f.size("ssm_state_size", MOST)?,
        kernel: f.size("conv_kernel", MOST)?,
    };
    Ok(PlannedConfig {
        family: "nemotron_h",
        decoder,
        layers,
        qk_norm: false,
        experts,
        latent: None,
        mamba: Some(mamba),
    })
}

/// What the choice of experts needs.
fn check_experts(f: &Fields<'_>, e: &ExpertsConfig) -> Result<()> {
    let (groups, kept) = e.groups.unwrap_or((1, 1));
    if !e.experts.is_multiple_of(groups) || kept > groups {
        return Err(f.wrong(
            "n_group",
            format!("does not divide {} experts with {kept} kept", e.experts),
            decoder::REMEDY,
        ));
    }
    if e.top_k > e.experts / groups * kept {
        let problem = format!("is above the {} experts that a token chooses from", e.experts / groups * kept);
        return Err(f.wrong("num_experts_per_tok", problem, decoder::REMEDY));
    }
    Ok(())
}
