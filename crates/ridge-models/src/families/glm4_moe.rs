//! GLM-4.5 and 4.6 (GLM-4.5 Team 2025, "GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models", section 2.1): half of
//! each head is rotated, and all but the first layers have a few experts of many and one that all tokens take.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::deepseek::read_prediction_layers;
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERTS, check_experts, experts_and_shared, stacks,
};
use super::prediction::{PredictionScopes, unused_tensors};
use super::qwen;
use super::tensors::{ATTENTION, GATED_MLP, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QK_NORMS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;

/// Every size and switch of a GLM-4.5 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm4MoeConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the projections to queries, keys and values have biases?
    pub qkv_bias: bool,
    /// Are queries and keys normalised, head by head?
    pub qk_norm: bool,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// So many layers in front have an MLP.
    pub dense_layers: usize,
    /// Modules behind the last layer that predict further tokens, of which the first can draft.
    pub prediction_layers: usize,
}

impl Glm4MoeConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const ROPE: RopeKeys = RopeKeys { partial: Some("partial_rotary_factor"), default_partial: 0.5, ..ROPE_KEYS };
        f.needs(&["num_key_value_heads", "head_dim"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE)?);
        let count = match f.optional_size("n_routed_experts", MAX_SIZE)? {
            Some(count) => count,
            None => f.size("num_local_experts", MAX_SIZE)?,
        };
        let (top_k, width) = (f.size("num_experts_per_tok", MAX_SIZE)?, f.size("moe_intermediate_size", MAX_SIZE)?);
        let experts = ExpertsConfig {
            shared_size: width * f.size("n_shared_experts", MAX_SIZE)?,
            sigmoid: true,
            normalise: f.optional("norm_topk_prob")?.unwrap_or(true),
            scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
            groups: Some((f.size("n_group", MAX_SIZE)?, f.size("topk_group", MAX_SIZE)?)),
            ..ExpertsConfig::softmax(count, top_k, width)
        };
        check_experts(f, &experts)?;
        Ok(Self {
            decoder,
            qkv_bias: f.optional("attention_bias")?.unwrap_or(false),
            qk_norm: f.optional("use_qk_norm")?.unwrap_or(false),
            experts,
            dense_layers: f.count("first_k_dense_replace")?.unwrap_or(1) as usize,
            prediction_layers: read_prediction_layers(f)?,
        })
    }
}

deref_to_decoder!(Glm4MoeConfig);

/// How it is registered.
pub(super) static GLM4_MOE: FamilyDefinition = FamilyDefinition {
    name: "glm4_moe",
    model_type: "glm4_moe",
    class: Some("Glm4MoeForCausalLM"),
    harmless: &[ROUTER_TRAINING],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Glm4MoeConfig::read(f)?))),
    tensors: TensorTable {
        layer: &[ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS, QK_NORMS, &[INPUT_NORM, MLP_NORM]],
        ..LLAMA_TENSORS
    },
    gguf: None,
};

/// The layers with experts.
const SPARSE: &str = "experts";

impl DecoderFamily for Glm4MoeConfig {
    fn kind(&self, index: usize) -> &'static str {
        if index < self.dense_layers { "" } else { SPARSE }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = qwen::attention(self, g, x, at, [self.qkv_bias, false], self.qk_norm)?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| match at.kind {
            SPARSE => experts_and_shared(g, x, &self.experts, "shared_experts"),
            _ => gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false),
        })
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("mlp.experts", ["gate_proj", "up_proj", "down_proj"], self.experts.experts)
    }

    fn prediction(&self) -> Option<PredictionScopes> {
        (self.prediction_layers > 0).then(|| PredictionScopes::behind(self.num_hidden_layers))
    }

    fn unused(&self, drafts: bool) -> Vec<String> {
        unused_tensors(self.num_hidden_layers, self.prediction_layers, drafts)
    }
}
