//! Falcon (Almazrouei et al. 2023, "The Falcon Series of Open Language Models", section 4): attention and MLP side by side,
//! and one or a few heads of keys and values; in Falcon RW (Penedo et al. 2023, "The RefinedWeb Dataset", section 4.1) one
//! behind the other, with positions by ALiBi.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, linear, mlp, scaled, slopes};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, LAYER_NORM_EPSILON, MixRules};
use super::tensors::{Cut, INPUT_NORM, LM_HEAD, MLP_NORM, PLAIN_MLP, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY, ROPE_KEYS, read_rope};
use crate::error::Result;
use ridge_files::checkpoint::{Part, Rows};

/// Every size and switch of a Falcon model.
#[derive(Clone, Debug, PartialEq)]
pub struct FalconConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// Do all projections have biases?
    pub bias: bool,
    /// Are the rows of the fused projection grouped by key and value head, each with its queries?
    pub grouped_rows: bool,
    /// Have attention and MLP a norm each, rather than one together?
    pub two_norms: bool,
    /// Are they side by side, rather than one behind the other?
    pub parallel: bool,
    /// Are positions told by ALiBi, rather than by rotation?
    pub alibi: bool,
}

const KEYS: DecoderKeys = DecoderKeys {
    intermediate_size: "ffn_hidden_size",
    intermediate_factor: Some(4),
    num_key_value_heads: "num_kv_heads",
    positions: Some(2048),
    norm_eps: "layer_norm_epsilon",
    tie_word_embeddings: true,
    ..DECODER_KEYS
};

impl FalconConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("apply_residual_connection_post_layernorm", false)?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let alibi = f.optional("alibi")?.unwrap_or(false);
        let rope = read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?;
        decoder.rope = (!alibi).then_some(rope);
        let newer = f.optional("new_decoder_architecture")?.unwrap_or(false);
        let multi_query = f.optional("multi_query")?.unwrap_or(true);
        if !newer {
            decoder.num_key_value_heads = if multi_query { 1 } else { decoder.num_attention_heads };
        }
        let norms = f.count("num_ln_in_parallel_attn")?.unwrap_or(if newer { 2 } else { 1 });
        if !(1..=2).contains(&norms) {
            return Err(f.wrong("num_ln_in_parallel_attn", "is neither 1 nor 2", REMEDY));
        }
        let parallel = f.optional("parallel_attn")?.unwrap_or(true);
        if newer && !parallel {
            return Err(f.wrong("parallel_attn", "is not what the new decoder architecture has", REMEDY));
        }
        Ok(Self {
            decoder,
            parallel,
            alibi,
            activation: f.gelu("activation", Gelu::Erf)?,
            bias: f.optional("bias")?.unwrap_or(false),
            // One key and value head for each query head has rows grouped by head in the older models too.
            grouped_rows: newer || !multi_query,
            two_norms: newer && norms == 2,
        })
    }
}

deref_to_decoder!(FalconConfig);

/// What GGUF calls the norm of attention where the MLP has one of its own.
const SECOND_NORM: &str = "attn_norm_2";

/// How it is registered.
pub(super) static FALCON: FamilyDefinition = FamilyDefinition {
    name: "falcon",
    model_type: "falcon",
    class: Some("FalconForCausalLM"),
    harmless: &[&["hidden_dropout"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(FalconConfig::read(f)?))),
    tensors: TensorTable {
        embedding: TensorName::whole("transformer.word_embeddings", "token_embd"),
        layers: "transformer.h",
        attention: "self_attention",
        norm: TensorName::whole("transformer.ln_f", "output_norm"),
        head: LM_HEAD,
        others: &[],
        layer: &[
            &[
                INPUT_NORM,
                TensorName::cut("self_attention.q_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("self_attention.k_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("self_attention.v_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("self_attention.dense", Cut::HeadTerms, "attn_output"),
                // In Falcon RW, which GGUF does not have.
                MLP_NORM,
            ],
            PLAIN_MLP,
        ],
        computed: &[],
    },
    gguf: Some(GgufMapping {
        keys: &[
            ("feed_forward_length", Some("ffn_hidden_size")),
            ("attention.head_count_kv", Some("num_kv_heads")),
            (LAYER_NORM_EPSILON, Some("layer_norm_epsilon")),
        ],
        mix: MixRules::Falcon,
        read: |file, to| {
            let (heads, kv) = (file.int("attention.head_count")?, file.int("attention.head_count_kv")?);
            to.insert("new_decoder_architecture".into(), (kv.unwrap_or(1) > 1 && kv < heads).into());
            to.insert("multi_query".into(), (kv.unwrap_or(1) == 1).into());
            let two_norms = file.has(&format!("blk.0.{SECOND_NORM}.weight"));
            to.insert("num_ln_in_parallel_attn".into(), (1 + u8::from(two_norms)).into());
            to.insert("bias".into(), file.has("blk.0.attn_qkv.bias").into());
            Ok(())
        },
        ..GgufMapping::new("falcon")
    }),
};

impl FalconConfig {
    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let mut scores = at.scores();
        if self.alibi {
            // They are scaled as scores are.
            let slopes = slopes(g, self.num_attention_heads, 8.0)?;
            scores.slopes = Some(scaled(g, slopes, scores.scale)?);
        }
        let qkv = at.project(g, x, QKV, self.bias)?;
        let a = at.attend(g, qkv, &scores)?;
        linear(g, "dense", a, self.hidden_size, self.bias)
    }

    fn mlp(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        mlp(g, x, ["dense_h_to_4h", "dense_4h_to_h"], self.intermediate_size, self.activation, self.bias)
    }
}

impl DecoderFamily for FalconConfig {
    fn norm(&self) -> NormKind {
        NormKind::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        if !self.parallel {
            let x = ResidualHalf::before(norm, "input_layernorm")
                .add(g, x, "self_attention", |g, x| self.attention(g, x, at))?;
            return ResidualHalf::before(norm, "post_attention_layernorm").add(g, x, "mlp", |g, x| self.mlp(g, x));
        }
        let (to_attention, to_mlp) = if self.two_norms {
            (norm.apply(g, "ln_attn", x)?, norm.apply(g, "ln_mlp", x)?)
        } else {
            let h = norm.apply(g, "input_layernorm", x)?;
            (h, h)
        };
        let a = g.scoped("self_attention", |g| self.attention(g, to_attention, at))?;
        let m = g.scoped("mlp", |g| self.mlp(g, to_mlp))?;
        let both = g.add(m, a)?;
        g.add(x, both)
    }

    /// Rows of all queries, then of keys, then of values; or the same for each group of heads.
    fn parts(&self) -> Vec<Part> {
        let (dim, groups) = (self.head_dim, if self.grouped_rows { self.num_key_value_heads } else { 1 });
        let kv = dim * self.num_key_value_heads / groups;
        let q = dim * self.num_attention_heads / groups;
        let kinds = if self.bias { &["weight", "bias"][..] } else { &["weight"] };
        let mut parts = Vec::new();
        for (name, first, len) in [(QKV[0], 0, q), (QKV[1], q, kv), (QKV[2], q + kv, kv)] {
            for kind in kinds {
                parts.push(Part {
                    of: format!("transformer.h.*.self_attention.query_key_value.{kind}"),
                    name: format!("transformer.h.*.self_attention.{name}.{kind}"),
                    transposed: false,
                    rows: Some(Rows { first, len, stride: q + 2 * kv, blocks: groups }),
                });
            }
        }
        parts
    }

    fn layer_tensors(&self, mut usual: Vec<TensorName>) -> Vec<TensorName> {
        if self.two_norms {
            usual.retain(|tensor| *tensor != INPUT_NORM);
            usual.insert(0, TensorName::whole("ln_mlp", "attn_norm"));
            usual.push(TensorName::whole("ln_attn", SECOND_NORM));
        }
        usual
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        if self.alibi || !self.parallel {
            return Err("it has ALiBi, or its MLP behind attention");
        }
        match self.activation {
            // Queries, keys and values lie one after another, not by groups of heads.
            Gelu::Erf => Ok(vec![("tensor_data_layout", GgufEntry::Text("jploski"))]),
            Gelu::Tanh => Err("its activation is not that of its family"),
        }
    }
}
