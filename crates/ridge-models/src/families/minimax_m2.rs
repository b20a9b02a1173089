//! MiniMax M2 (MiniMax 2025): norms of queries and keys over all heads together, half of each head rotated, and a few experts
//! of many, chosen by sigmoids with a bias for the choice.

use ridge_files::checkpoint::{Part, Stack};
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts, stacks};
use super::olmo2;
use super::tensors::{ATTENTION, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QK_NORMS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;

/// Every size and switch of a MiniMax M2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct MiniMaxM2Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// The experts of each layer.
    pub experts: ExpertsConfig,
}

impl MiniMaxM2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const ROPE: RopeKeys =
            RopeKeys { default_theta: 5_000_000.0, partial: Some("partial_rotary_factor"), ..ROPE_KEYS };
        f.needs(&["num_key_value_heads", "head_dim"])?;
        f.must_be("hidden_act", "silu")?;
        f.must_be("scoring_func", "sigmoid")?;
        f.must_be("use_routing_bias", true)?;
        f.must_be("use_qk_norm", true)?;
        f.must_be("qk_norm_type", "per_layer")?;
        f.must_be("shared_intermediate_size", 0)?;
        f.must_be("sliding_window", serde_json::Value::Null)?;
        for factor in ["layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"] {
            f.must_be(factor, 1.0)?;
        }
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        let mut rope = read_rope(f, decoder.rope_sizes(), &ROPE)?;
        // Published files have the number of elements.
        if let Some(rotated) = f.optional_size("rotary_dim", decoder.head_dim / 2 * 2)? {
            rope.rotary_dim = rotated / 2 * 2;
        }
        decoder.rope = Some(rope);
        let counts = [f.size("num_local_experts", MAX_SIZE)?, f.size("num_experts_per_tok", MAX_SIZE)?];
        let experts =
            ExpertsConfig { sigmoid: true, ..ExpertsConfig::softmax(counts[0], counts[1], decoder.intermediate_size) };
        check_experts(f, &experts)?;
        Ok(Self { decoder, experts })
    }
}

deref_to_decoder!(MiniMaxM2Config);

/// Layers that predict further tokens, kinds of attention of which there is one, and MLPs of which there is none.
const HARMLESS: &[&str] = &[
    "attn_type_list",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "router_jitter_noise",
    "shared_moe_mode",
    "use_mtp",
];

/// How it is registered.
pub(super) static MINIMAX_M2: FamilyDefinition = FamilyDefinition {
    name: "minimax_m2",
    model_type: "minimax_m2",
    class: Some("MiniMaxM2ForCausalLM"),
    harmless: &[ROUTER_TRAINING, HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(MiniMaxM2Config::read(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS, QK_NORMS, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    gguf: None,
};

impl DecoderFamily for MiniMaxM2Config {
    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = ResidualHalf::before(self.norm(), "input_layernorm")
            .add(g, x, "self_attn", |g, x| olmo2::attention(self, g, x, at, false, None, &at.scores()))?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| experts(g, x, &self.experts))
    }

    fn parts(&self) -> Vec<Part> {
        let part = |of: &str, name: &str| Part {
            of: format!("model.layers.*.block_sparse_moe.{of}"),
            name: format!("model.layers.*.mlp.gate.{name}"),
            transposed: false,
            rows: None,
        };
        vec![part("gate.weight", "weight"), part("e_score_correction_bias", "e_score_correction_bias")]
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("block_sparse_moe.experts", ["w1", "w3", "w2"], self.experts.experts)
    }
}
