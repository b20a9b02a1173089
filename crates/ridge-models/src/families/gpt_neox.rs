//! GPT-NeoX (Black et al. 2022, "GPT-NeoX-20B", section 2.1) and Pythia: attention and MLP side by side, and rotation
//! of a part of each head.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, linear, mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, LAYER_NORM_EPSILON, read_rotary_share};
use super::tensors::{Cut, INPUT_NORM, MLP_NORM, PLAIN_MLP, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;
use ridge_files::checkpoint::{Part, Rows};

/// Every size and switch of a GPT-NeoX model.
#[derive(Clone, Debug, PartialEq)]
pub struct GptNeoxConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// Do the projections of attention have biases?
    pub attention_bias: bool,
    /// Do attention and MLP read the same residual stream, rather than one after the other?
    pub use_parallel_residual: bool,
}

impl GptNeoxConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys { norm_eps: "layer_norm_eps", ..DECODER_KEYS };
        const ROPE: RopeKeys =
            RopeKeys { theta: "rotary_emb_base", partial: Some("rotary_pct"), default_partial: 0.25, ..ROPE_KEYS };
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE)?);
        Ok(Self {
            decoder,
            activation: f.gelu("hidden_act", Gelu::Erf)?,
            attention_bias: f.optional("attention_bias")?.unwrap_or(true),
            use_parallel_residual: f.optional("use_parallel_residual")?.unwrap_or(true),
        })
    }
}

deref_to_decoder!(GptNeoxConfig);

/// How it is registered.
pub(super) static GPT_NEOX: FamilyDefinition = FamilyDefinition {
    name: "gpt_neox",
    model_type: "gpt_neox",
    class: Some("GPTNeoXForCausalLM"),
    harmless: &[&["classifier_dropout", "hidden_dropout"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GptNeoxConfig::read(f)?))),
    tensors: TensorTable {
        embedding: TensorName::whole("gpt_neox.embed_in", "token_embd"),
        layers: "gpt_neox.layers",
        attention: "attention",
        norm: TensorName::whole("gpt_neox.final_layer_norm", "output_norm"),
        head: TensorName::cut("embed_out", Cut::Vocabulary, "output"),
        others: &[],
        layer: &[
            &[
                INPUT_NORM,
                TensorName::cut("attention.q_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("attention.k_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("attention.v_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("attention.dense", Cut::HeadTerms, "attn_output"),
                MLP_NORM,
            ],
            PLAIN_MLP,
        ],
        computed: &["*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"],
    },
    gguf: Some(GgufMapping {
        keys: &[("attention.head_count_kv", None), (LAYER_NORM_EPSILON, Some("layer_norm_eps"))],
        rope_theta: Some("rotary_emb_base"),
        read: |file, to| {
            let parallel = file.flag("use_parallel_residual")?;
            to.insert("use_parallel_residual".into(), parallel.unwrap_or(true).into());
            to.insert("attention_bias".into(), file.has("blk.0.attn_qkv.bias").into());
            read_rotary_share(file, to, "rotary_pct")
        },
        ..GgufMapping::new("gptneox")
    }),
};

impl GptNeoxConfig {
    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let qkv = at.project(g, x, QKV, self.attention_bias)?;
        let a = at.attend(g, qkv, &at.scores())?;
        linear(g, "dense", a, self.hidden_size, self.attention_bias)
    }

    fn mlp(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        mlp(g, x, ["dense_h_to_4h", "dense_4h_to_h"], self.intermediate_size, self.activation, true)
    }
}

impl DecoderFamily for GptNeoxConfig {
    fn norm(&self) -> NormKind {
        NormKind::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let (attend, feed) =
            (ResidualHalf::before(norm, "input_layernorm"), ResidualHalf::before(norm, "post_attention_layernorm"));
        let attended = attend.add(g, x, "attention", |g, x| self.attention(g, x, at))?;
        if !self.use_parallel_residual {
            return feed.add(g, attended, "mlp", |g, x| self.mlp(g, x));
        }
        let h = norm.apply(g, "post_attention_layernorm", x)?;
        let m = g.scoped("mlp", |g| self.mlp(g, h))?;
        g.add(attended, m)
    }

    /// Each head's rows of queries, then of keys, then of values.
    fn parts(&self) -> Vec<Part> {
        let (dim, heads) = (self.head_dim, self.num_attention_heads);
        let kinds = if self.attention_bias { &["weight", "bias"][..] } else { &["weight"] };
        let part = |i: usize, name: &str, kind: &str| Part {
            of: format!("gpt_neox.layers.*.attention.query_key_value.{kind}"),
            name: format!("gpt_neox.layers.*.attention.{name}.{kind}"),
            transposed: false,
            rows: Some(Rows { first: i * dim, len: dim, stride: 3 * dim, blocks: heads }),
        };
        let of = |(i, name): (usize, &'static str)| kinds.iter().map(move |kind| part(i, name, kind));
        QKV.into_iter().enumerate().flat_map(of).collect()
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        match self.activation {
            Gelu::Erf => Ok(vec![("use_parallel_residual", GgufEntry::Bool(self.use_parallel_residual))]),
            Gelu::Tanh => Err("its activation is not that of its family"),
        }
    }
}
