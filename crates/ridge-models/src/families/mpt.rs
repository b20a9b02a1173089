//! MPT (MosaicML 2023, "Introducing MPT-7B"): positions by ALiBi, layer norms and projections without biases.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};
use serde_json::Value;

use super::blocks::{NormKind, ResidualHalf, clipped, linear, mlp, slopes};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::tensors::{Cut, LM_HEAD, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields};
use crate::error::Result;

/// Every size and switch of an MPT model.
#[derive(Clone, Debug, PartialEq)]
pub struct MptConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Queries, keys and values stay within this.
    pub clip_qkv: Option<f64>,
    /// Factor of the scores; one over the root of a head's width if `None`.
    pub softmax_scale: Option<f64>,
}

impl MptConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            hidden_size: "d_model",
            intermediate_size: "intermediate_size",
            intermediate_factor: Some(4),
            num_hidden_layers: "n_layers",
            num_attention_heads: "n_heads",
            max_position_embeddings: "max_seq_len",
            norm_eps: "layer_norm_epsilon",
            default_eps: Some(1e-5),
            tie_word_embeddings: true,
            ..DECODER_KEYS
        };
        f.must_be("no_bias", true)?;
        f.must_be("expansion_ratio", 4)?;
        f.must_be("embedding_fraction", 1.0)?;
        f.must_be("logit_scale", Value::Null)?;
        f.must_be("norm_type", "low_precision_layernorm")?;
        let (mut clip_qkv, mut softmax_scale) = (None, None);
        if let Some(mut attention) = f.object("attn_config")? {
            attention.must_be("attn_type", "multihead_attention")?;
            attention.must_be("alibi", true)?;
            attention.must_be("prefix_lm", false)?;
            attention.must_be("qk_ln", false)?;
            attention.must_be("attn_uses_sequence_id", false)?;
            attention.must_be("model_type", "")?;
            attention.harmless(&["architectures", "attn_impl", "attn_pdrop"]);
            // The published code has slopes of this alone.
            attention.must_be("alibi_bias_max", 8)?;
            clip_qkv = attention.optional_positive("clip_qkv")?;
            softmax_scale = attention.optional_positive("softmax_scale")?;
            crate::config::read_common(&mut attention)?;
            attention.finish()?;
        }
        Ok(Self { decoder: DecoderConfig::read(f, &KEYS)?, clip_qkv, softmax_scale })
    }
}

deref_to_decoder!(MptConfig);

/// Training, and how others compute the same.
const HARMLESS: &[&str] =
    &["emb_pdrop", "init_config", "init_device", "learned_pos_emb", "resid_pdrop", "tokenizer_name", "verbose"];

/// How it is registered.
pub(super) static MPT: FamilyDefinition = FamilyDefinition {
    name: "mpt",
    model_type: "mpt",
    class: Some("MptForCausalLM"),
    harmless: &[HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(MptConfig::read(f)?))),
    tensors: TensorTable {
        embedding: TensorName::whole("transformer.wte", "token_embd"),
        layers: "transformer.blocks",
        attention: "attn",
        norm: TensorName::whole("transformer.norm_f", "output_norm"),
        head: LM_HEAD,
        others: &[],
        layer: &[&[
            TensorName::whole("norm_1", "attn_norm"),
            TensorName::cut("attn.q_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("attn.k_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("attn.v_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("attn.out_proj", Cut::HeadTerms, "attn_output"),
            TensorName::whole("norm_2", "ffn_norm"),
            TensorName::cut("ffn.up_proj", Cut::Columns, "ffn_up"),
            TensorName::cut("ffn.down_proj", Cut::Terms, "ffn_down"),
        ]],
        computed: &[],
    },
    gguf: None,
};

impl DecoderFamily for MptConfig {
    fn norm(&self) -> NormKind {
        NormKind::LayerUnbiased(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let usual = at.scores();
        let scores = AttentionScores {
            slopes: Some(slopes(g, self.num_attention_heads, 8.0)?),
            scale: self.softmax_scale.unwrap_or(usual.scale),
            ..usual
        };
        let x = ResidualHalf::before(self.norm(), "norm_1").add(g, x, "attn", |g, x| {
            let mut qkv = at.project(g, x, QKV, false)?;
            for side in &mut qkv {
                *side = clipped(g, *side, self.clip_qkv)?;
            }
            let a = at.attend(g, qkv, &scores)?;
            linear(g, "out_proj", a, self.hidden_size, false)
        })?;
        ResidualHalf::before(self.norm(), "norm_2")
            .add(g, x, "ffn", |g, x| mlp(g, x, ["up_proj", "down_proj"], self.intermediate_size, Gelu::Erf, false))
    }

    fn parts(&self) -> Vec<Part> {
        let width = self.hidden_size;
        let part = |(i, name): (usize, &str)| Part {
            of: "transformer.blocks.*.attn.Wqkv.weight".into(),
            name: format!("transformer.blocks.*.attn.{name}.weight"),
            transposed: false,
            rows: Some(Rows::range(i * width, width)),
        };
        QKV.into_iter().enumerate().map(part).collect()
    }
}
