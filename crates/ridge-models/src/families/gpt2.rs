//! GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3): learned positions,
//! layer norms, biases everywhere, and matrices that are published transposed.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, linear, mlp, weight};
use super::decoder::{DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, LAYER_NORM_EPSILON, LAYERS_KEY};
use super::tensors::{Cut, LM_HEAD, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields};
use crate::error::Result;
use ridge_files::checkpoint::{Part, Rows};

/// Every size and switch of a GPT-2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// What every decoder has. Its positions are learned, so `max_position_embeddings` is a limit.
    pub decoder: DecoderConfig,
    /// Activation of the MLP.
    pub activation: Gelu,
}

impl Gpt2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            hidden_size: "n_embd",
            intermediate_size: "n_inner",
            intermediate_factor: Some(4),
            num_hidden_layers: "n_layer",
            num_attention_heads: "n_head",
            max_position_embeddings: "n_positions",
            norm_eps: "layer_norm_epsilon",
            attention_dropout: "attn_pdrop",
            tie_word_embeddings: true,
            ..DECODER_KEYS
        };
        f.must_be("scale_attn_weights", true)?;
        f.must_be("scale_attn_by_inverse_layer_idx", false)?;
        Ok(Self { decoder: DecoderConfig::read(f, &KEYS)?, activation: f.gelu("activation_function", Gelu::Tanh)? })
    }
}

deref_to_decoder!(Gpt2Config);

/// Dropout, heads for other tasks, and a way to compute the same in another precision.
const HARMLESS: &[&str] = &[
    "embd_pdrop",
    "resid_pdrop",
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

/// How it is registered.
pub(super) static GPT2: FamilyDefinition = FamilyDefinition {
    name: "gpt2",
    model_type: "gpt2",
    class: Some("GPT2LMHeadModel"),
    harmless: &[HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Gpt2Config::read(f)?))),
    tensors: TensorTable {
        embedding: TensorName::whole("transformer.wte", "token_embd"),
        layers: "transformer.h",
        attention: "attn",
        norm: TensorName::whole("transformer.ln_f", "output_norm"),
        head: LM_HEAD,
        others: &[TensorName::whole("transformer.wpe", "position_embd")],
        layer: &[&[
            TensorName::whole("ln_1", "attn_norm"),
            TensorName::cut("attn.q_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("attn.k_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("attn.v_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("attn.c_proj", Cut::HeadTerms, "attn_output"),
            TensorName::whole("ln_2", "ffn_norm"),
            TensorName::cut("mlp.c_fc", Cut::Columns, "ffn_up"),
            TensorName::cut("mlp.c_proj", Cut::Terms, "ffn_down"),
        ]],
        computed: &["*.attn.bias", "*.attn.masked_bias"],
    },
    gguf: Some(GgufMapping {
        keys: &[
            ("embedding_length", Some("n_embd")),
            ("feed_forward_length", Some("n_inner")),
            (LAYERS_KEY, Some("n_layer")),
            ("attention.head_count", Some("n_head")),
            ("attention.head_count_kv", None),
            ("context_length", Some("n_positions")),
            (LAYER_NORM_EPSILON, Some("layer_norm_epsilon")),
        ],
        rope_theta: None,
        ..GgufMapping::new("gpt2")
    }),
};

impl DecoderFamily for Gpt2Config {
    fn embed(&self, g: &mut Builder, x: Var, inputs: &mut LayerInputs) -> GraphResult<Var> {
        let dtype = g.ty(x)?.dtype;
        g.scoped("transformer.wpe", |g| {
            let table = weight(g, "weight", [self.max_position_embeddings, self.hidden_size])?;
            let place = g.embedding(table, inputs.positions, dtype)?;
            g.add(x, place)
        })
    }

    fn norm(&self) -> NormKind {
        NormKind::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let x = ResidualHalf::before(norm, "ln_1").add(g, x, "attn", |g, x| {
            let qkv = at.project(g, x, QKV, true)?;
            let a = at.attend(g, qkv, &at.scores())?;
            linear(g, "c_proj", a, self.hidden_size, true)
        })?;
        ResidualHalf::before(norm, "ln_2")
            .add(g, x, "mlp", |g, x| mlp(g, x, ["c_fc", "c_proj"], self.intermediate_size, self.activation, true))
    }

    fn parts(&self) -> Vec<Part> {
        let width = self.num_attention_heads * self.head_dim;
        let part = |of: &str, name: &str, rows: Option<Rows>| Part {
            of: format!("transformer.h.*.{of}"),
            name: format!("transformer.h.*.{name}"),
            transposed: true,
            rows,
        };
        let mut parts: Vec<Part> = ["attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
            .into_iter()
            .map(|whole| part(whole, whole, None))
            .collect();
        for (i, name) in QKV.into_iter().enumerate() {
            for kind in ["weight", "bias"] {
                let rows = Rows::range(i * width, width);
                parts.push(part(&format!("attn.c_attn.{kind}"), &format!("attn.{name}.{kind}"), Some(rows)));
            }
        }
        parts
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        match self.activation {
            Gelu::Tanh => Ok(Vec::new()),
            Gelu::Erf => Err("its activation is not that of its family"),
        }
    }
}
