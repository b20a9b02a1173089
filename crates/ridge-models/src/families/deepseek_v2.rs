//! DeepSeek V2 (DeepSeek-AI 2024, "DeepSeek-V2", sections 2.1 and 2.2): keys and values of all heads from one latent a token,
//! and a few experts of many beside some that all tokens take.
//!
//! Attention is that of section 2.1.2: queries are taken to the space of latents, and results out of it, so that all heads
//! attend to what the cache has. A row of the cache is the rotated part of the keys, then the latent; it is kept as a
//! key and as a value.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear, weight};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::deepseek::TENSORS;
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts_and_shared, stacks};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;
use crate::model::symbols;

/// Every size and switch of a DeepSeek V2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepseekV2Config {
    /// What every decoder has. The one head of keys and values, and the width of a head, are those of the cache.
    pub decoder: DecoderConfig,
    /// Width of the queries' latent, if they have one.
    pub q_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head that are not rotated.
    pub nope: usize,
    /// Elements that are.
    pub rope: usize,
    /// Elements of a value.
    pub value: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// So many layers in front have an MLP.
    pub dense_layers: usize,
}

impl DeepseekV2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("attention_bias", false)?;
        f.must_be("mlp_bias", false)?;
        f.must_be("moe_layer_freq", 1)?;
        f.must_be("scoring_func", "softmax")?;
        f.must_be("topk_method", "greedy")?;
        f.must_be("norm_topk_prob", false)?;
        let q_rank = f.optional_size("q_lora_rank", MAX_SIZE)?;
        let kv_rank = f.size("kv_lora_rank", MAX_SIZE)?;
        let nope = f.size("qk_nope_head_dim", MAX_SIZE)?;
        let rope = f.size("qk_rope_head_dim", MAX_SIZE)?;
        let value = f.size("v_head_dim", MAX_SIZE)?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.head_dim = rope;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        decoder.head_dim = rope + kv_rank;
        decoder.num_key_value_heads = 1;
        let width = f.size("moe_intermediate_size", MAX_SIZE)?;
        let counts = [f.size("n_routed_experts", MAX_SIZE)?, f.size("num_experts_per_tok", MAX_SIZE)?];
        let experts = ExpertsConfig {
            shared_size: width * f.optional_size("n_shared_experts", MAX_SIZE)?.unwrap_or(0),
            normalise: false,
            scale: f.optional_positive("routed_scaling_factor")?.unwrap_or(1.0),
            ..ExpertsConfig::softmax(counts[0], counts[1], width)
        };
        check_experts(f, &experts)?;
        let temper = read_temper(f)?;
        Ok(Self {
            decoder,
            q_rank,
            kv_rank,
            nope,
            rope,
            value,
            scale: temper * temper / ((nope + rope) as f64).sqrt(),
            experts,
            dense_layers: f.count("first_k_dense_replace")?.unwrap_or(0) as usize,
        })
    }
}

/// By what queries and keys are multiplied besides, where the context is stretched (the released code).
fn read_temper(f: &mut Fields<'_>) -> Result<f64> {
    for key in ["rope_scaling", "rope_parameters"] {
        if let Some(mut block) = f.object(key)?
            && let (Some(factor), Some(mscale)) =
                (block.optional_positive("factor")?, block.optional_positive("mscale_all_dim")?)
            && factor > 1.0
        {
            return Ok(0.1 * mscale * factor.ln() + 1.0);
        }
    }
    Ok(1.0)
}

deref_to_decoder!(DeepseekV2Config);

/// Groups of experts, which the choice from all of them does not look at, a sum of other keys, and training.
const HARMLESS: &[&str] = &["aux_loss_alpha", "n_group", "pretraining_tp", "qk_head_dim", "seq_aux", "topk_group"];

/// How it is registered.
pub(super) static DEEPSEEK_V2: FamilyDefinition = FamilyDefinition {
    name: "deepseek_v2",
    model_type: "deepseek_v2",
    class: Some("DeepseekV2ForCausalLM"),
    harmless: &[ROUTER_TRAINING, HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(DeepseekV2Config::read(f)?))),
    tensors: TENSORS,
    gguf: None,
};

/// The layers with experts.
const SPARSE: &str = "experts";

/// The epsilon of the norms of latents, which the configuration does not have.
const LATENT_EPS: f64 = 1e-6;

impl DeepseekV2Config {
    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (heads, rank, tokens) = (self.num_attention_heads, self.kv_rank, Dim::sym(symbols::TOKENS));
        let norm = NormKind::Rms(LATENT_EPS);
        let dtype = g.ty(x)?.dtype;
        let width = heads * (self.nope + self.rope);
        let q = match self.q_rank {
            None => linear(g, "q_proj", x, width, false)?,
            Some(q_rank) => {
                let latent = linear(g, "q_a_proj", x, q_rank, false)?;
                let latent = norm.apply(g, "q_a_layernorm", latent)?;
                linear(g, "q_b_proj", latent, width, false)?
            }
        };
        let q = g.reshape(q, [tokens.clone(), heads.into(), (self.nope + self.rope).into()])?;
        let (plain, turned) = (g.slice(q, 2, 0, self.nope)?, g.slice(q, 2, self.nope, self.rope)?);

        let row = linear(g, "kv_a_proj_with_mqa", x, rank + self.rope, false)?;
        let (latent, key) = (g.slice(row, 1, 0, rank)?, g.slice(row, 1, rank, self.rope)?);
        let latent = norm.apply(g, "kv_a_layernorm", latent)?;
        let row = g.concat(&[key, latent], 1)?;
        let row = g.reshape(row, [tokens.clone(), 1.into(), (rank + self.rope).into()])?;

        // Of each head, from a latent to the part of keys that is not rotated, and to values.
        let both = self.nope + self.value;
        let w = g.scoped("kv_b_proj", |g| weight(g, "weight", [heads * both, rank]))?;
        let w = g.cast(w, DType::F32)?;
        let w = g.reshape(w, [heads.into(), both.into(), Dim::from(rank)])?;
        let (to_keys, to_values) = (g.slice(w, 1, 0, self.nope)?, g.slice(w, 1, self.nope, self.value)?);
        let plain = g.cast(plain, DType::F32)?;
        let plain = g.transpose(plain, &[1, 0, 2])?;
        let absorbed = g.matmul(plain, to_keys, false, false, DType::F32)?;
        let absorbed = g.transpose(absorbed, &[1, 0, 2])?;
        let absorbed = g.cast(absorbed, dtype)?;
        let q = g.concat(&[turned, absorbed], 2)?;

        let scores = AttentionScores { scale: self.scale, interleaved: true, ..at.scores() };
        let a = at.attend(g, [q, row, row], &scores)?;
        let a = g.reshape(a, [tokens.clone(), heads.into(), (rank + self.rope).into()])?;
        let a = g.slice(a, 2, self.rope, rank)?;
        let a = g.cast(a, DType::F32)?;
        let a = g.transpose(a, &[1, 0, 2])?;
        let y = g.matmul(a, to_values, false, true, DType::F32)?;
        let y = g.transpose(y, &[1, 0, 2])?;
        let y = g.reshape(y, [tokens, (heads * self.value).into()])?;
        let y = g.cast(y, dtype)?;
        linear(g, "o_proj", y, self.hidden_size, false)
    }
}

impl DecoderFamily for DeepseekV2Config {
    fn kind(&self, index: usize) -> &'static str {
        if index < self.dense_layers { "" } else { SPARSE }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = ResidualHalf::before(self.norm(), "input_layernorm")
            .add(g, x, "self_attn", |g, x| self.attention(g, x, at))?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| match at.kind {
            SPARSE => experts_and_shared(g, x, &self.experts, "shared_experts"),
            _ => gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false),
        })
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("mlp.experts", ["gate_proj", "up_proj", "down_proj"], self.experts.experts)
    }
}
