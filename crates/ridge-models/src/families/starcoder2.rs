//! StarCoder 2 (Lozhkov et al. 2024, "StarCoder 2 and The Stack v2", section 6.1): layer norms, biases everywhere, an MLP
//! without a gate, and a window in some models.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, LAYER_NORM_EPSILON};
use super::llama;
use super::tensors::{ATTENTION, Cut, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, ROPE_KEYS, read_rope, sliding_window};
use crate::error::Result;

/// Every size and switch of a StarCoder 2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Starcoder2Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// Do all projections have biases?
    pub bias: bool,
    /// How many tokens a token sees, itself included; all if `None`.
    pub sliding_window: Option<usize>,
}

impl Starcoder2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys { norm_eps: "norm_epsilon", tie_word_embeddings: true, ..DECODER_KEYS };
        f.needs(&["num_key_value_heads"])?;
        // Older files name kinds of what there is one of by now.
        f.must_be("mlp_type", "default")?;
        f.must_be("norm_type", "layer_norm")?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        f.must_be("layer_norm_epsilon", decoder.norm_eps)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        Ok(Self {
            decoder,
            activation: f.gelu("hidden_act", Gelu::Tanh)?,
            bias: f.optional("use_bias")?.unwrap_or(true),
            sliding_window: sliding_window(f, None)?,
        })
    }
}

deref_to_decoder!(Starcoder2Config);

/// How it is registered.
pub(super) static STARCODER2: FamilyDefinition = FamilyDefinition {
    name: "starcoder2",
    model_type: "starcoder2",
    class: Some("Starcoder2ForCausalLM"),
    harmless: &[&[
        "activation_function",
        "attention_softmax_in_fp32",
        "embedding_dropout",
        "residual_dropout",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
    ]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Starcoder2Config::read(f)?))),
    tensors: TensorTable {
        layer: &[
            ATTENTION,
            &[
                TensorName::cut("mlp.c_fc", Cut::Columns, "ffn_up"),
                TensorName::cut("mlp.c_proj", Cut::Terms, "ffn_down"),
                INPUT_NORM,
                MLP_NORM,
            ],
        ],
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping {
        keys: &[(LAYER_NORM_EPSILON, Some("norm_epsilon"))],
        read: |file, to| {
            to.insert("use_bias".into(), file.has("blk.0.attn_q.bias").into());
            Ok(())
        },
        ..GgufMapping::new("starcoder2")
    }),
};

impl DecoderFamily for Starcoder2Config {
    fn window(&self, _index: usize) -> Option<usize> {
        self.sliding_window
    }

    fn norm(&self) -> NormKind {
        NormKind::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = ResidualHalf::before(self.norm(), "input_layernorm")
            .add(g, x, "self_attn", |g, x| llama::self_attention(self, g, x, at, [self.bias; 2], &at.scores()))?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| mlp(g, x, ["c_fc", "c_proj"], self.intermediate_size, self.activation, self.bias))
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        match (self.sliding_window, self.activation) {
            (None, Gelu::Tanh) => Ok(Vec::new()),
            (Some(_), _) => Err("its layers see a window only"),
            (_, Gelu::Erf) => Err("its activation is not that of its family"),
        }
    }
}
