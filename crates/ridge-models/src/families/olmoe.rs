//! OLMoE (Muennighoff et al. 2024, "OLMoE: Open Mixture-of-Experts Language Models", section 2): norms of queries and keys
//! over all heads together, and a few experts of many for an MLP.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts, experts_metadata, read_experts, stacks,
};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_attention_bias};
use super::olmo2;
use super::tensors::{ATTENTION, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QK_NORMS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;

/// Every size and switch of an OLMoE model.
#[derive(Clone, Debug, PartialEq)]
pub struct OlmoeConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Queries, keys and values stay within this.
    pub clip_qkv: Option<f64>,
    /// The experts of each layer.
    pub experts: ExpertsConfig,
}

impl OlmoeConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        // The newer spelling is that of other families.
        let count = match f.optional_size("num_experts", MAX_SIZE)? {
            Some(count) => count,
            None => f.size("num_local_experts", MAX_SIZE)?,
        };
        let top_k = f.size("num_experts_per_tok", MAX_SIZE)?;
        let experts = ExpertsConfig {
            normalise: f.optional("norm_topk_prob")?.unwrap_or(false),
            ..ExpertsConfig::softmax(count, top_k, decoder.intermediate_size)
        };
        check_experts(f, &experts)?;
        Ok(Self {
            decoder,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            clip_qkv: f.optional_positive("clip_qkv")?,
            experts,
        })
    }
}

deref_to_decoder!(OlmoeConfig);

/// How it is registered.
pub(super) static OLMOE: FamilyDefinition = FamilyDefinition {
    name: "olmoe",
    model_type: "olmoe",
    class: Some("OlmoeForCausalLM"),
    harmless: &[ROUTER_TRAINING],
    read: ReadConfig::Decoder(|f| Ok(Box::new(OlmoeConfig::read(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS, QK_NORMS, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping {
        read: |file, to| {
            to.insert("norm_topk_prob".into(), false.into());
            read_attention_bias(file, to)?;
            read_experts(file, to, "num_experts")
        },
        ..GgufMapping::new("olmoe")
    }),
};

impl DecoderFamily for OlmoeConfig {
    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = ResidualHalf::before(self.norm(), "input_layernorm").add(g, x, "self_attn", |g, x| {
            olmo2::attention(self, g, x, at, self.attention_bias, self.clip_qkv, &at.scores())
        })?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| experts(g, x, &self.experts))
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("mlp.experts", ["gate_proj", "up_proj", "down_proj"], self.experts.experts)
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        if self.experts.normalise || self.clip_qkv.is_some() {
            return Err("it divides the weights of experts by their sum, or clips queries, keys and values");
        }
        Ok(experts_metadata(&self.experts))
    }
}
