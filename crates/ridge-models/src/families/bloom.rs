//! BLOOM (BigScience Workshop 2022, "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model", section 3.2): positions
//! by ALiBi, a norm behind the embedding, and biases everywhere.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, linear, mlp, slopes};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufMapping, LAYER_NORM_EPSILON};
use super::tensors::{Cut, INPUT_NORM, LM_HEAD, MLP_NORM, PLAIN_MLP, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields};
use crate::error::Result;

/// Every size and switch of a BLOOM model.
#[derive(Clone, Debug, PartialEq)]
pub struct BloomConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
}

impl BloomConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        // Published files have the older name of the width.
        let width = if f.has("n_embed") { "n_embed" } else { "hidden_size" };
        let older = f.has("num_attention_heads");
        let keys = DecoderKeys {
            hidden_size: width,
            intermediate_size: "intermediate_size",
            intermediate_factor: Some(4),
            num_hidden_layers: if f.has("num_hidden_layers") { "num_hidden_layers" } else { "n_layer" },
            num_attention_heads: if older { "num_attention_heads" } else { "n_head" },
            max_position_embeddings: "seq_length",
            positions: Some(2048),
            norm_eps: "layer_norm_epsilon",
            tie_word_embeddings: true,
            ..DECODER_KEYS
        };
        f.must_be("apply_residual_connection_post_layernorm", false)?;
        let decoder = DecoderConfig::read(f, &keys)?;
        f.must_be("hidden_size", decoder.hidden_size)?;
        Ok(Self { decoder })
    }
}

deref_to_decoder!(BloomConfig);

/// Training, and how others compute the same.
const HARMLESS: &[&str] = &[
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "hidden_dropout",
    "masked_softmax_fusion",
    "n_inner",
    "offset_alibi",
    "pretraining_tp",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
];

/// The norm behind the embedding.
const EMBEDDING_NORM: &str = "transformer.word_embeddings_layernorm";

/// How it is registered.
pub(super) static BLOOM: FamilyDefinition = FamilyDefinition {
    name: "bloom",
    model_type: "bloom",
    class: Some("BloomForCausalLM"),
    harmless: &[HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(BloomConfig::read(f)?))),
    tensors: TensorTable {
        embedding: TensorName::whole("transformer.word_embeddings", "token_embd"),
        layers: "transformer.h",
        attention: "self_attention",
        norm: TensorName::whole("transformer.ln_f", "output_norm"),
        head: LM_HEAD,
        others: &[TensorName::whole(EMBEDDING_NORM, "token_embd_norm")],
        layer: &[
            &[
                INPUT_NORM,
                TensorName::cut("self_attention.q_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("self_attention.k_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("self_attention.v_proj", Cut::Heads, "attn_qkv"),
                TensorName::cut("self_attention.dense", Cut::HeadTerms, "attn_output"),
                MLP_NORM,
            ],
            PLAIN_MLP,
        ],
        computed: &[],
    },
    gguf: Some(GgufMapping {
        keys: &[
            ("feed_forward_length", Some("intermediate_size")),
            (super::gguf_mapping::LAYERS_KEY, Some("n_layer")),
            ("attention.head_count", Some("n_head")),
            ("attention.head_count_kv", None),
            ("context_length", Some("seq_length")),
            (LAYER_NORM_EPSILON, Some("layer_norm_epsilon")),
        ],
        rope_theta: None,
        ..GgufMapping::new("bloom")
    }),
};

impl DecoderFamily for BloomConfig {
    fn embed(&self, g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        self.norm().apply(g, EMBEDDING_NORM, x)
    }

    fn norm(&self) -> NormKind {
        NormKind::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let scores = AttentionScores { slopes: Some(slopes(g, self.num_attention_heads, 8.0)?), ..at.scores() };
        let x = ResidualHalf::before(self.norm(), "input_layernorm").add(g, x, "self_attention", |g, x| {
            let qkv = at.project(g, x, QKV, true)?;
            let a = at.attend(g, qkv, &scores)?;
            linear(g, "dense", a, self.hidden_size, true)
        })?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| {
            mlp(g, x, ["dense_h_to_4h", "dense_4h_to_h"], self.intermediate_size, Gelu::Tanh, true)
        })
    }

    /// Each head's rows of queries, then of keys, then of values.
    fn parts(&self) -> Vec<Part> {
        let (dim, heads) = (self.head_dim, self.num_attention_heads);
        let part = |(i, name): (usize, &str), kind: &str| Part {
            of: format!("transformer.h.*.self_attention.query_key_value.{kind}"),
            name: format!("transformer.h.*.self_attention.{name}.{kind}"),
            transposed: false,
            rows: Some(Rows { first: i * dim, len: dim, stride: 3 * dim, blocks: heads }),
        };
        QKV.into_iter().enumerate().flat_map(|qkv| ["weight", "bias"].map(|kind| part(qkv, kind))).collect()
    }
}
