//! GLM-4 (GLM Team 2024, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools") in both published
//! forms: `glm` has norms before each half of a layer, `glm4` of 2025 behind it too. Half of each head is rotated, neighbours together.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufMapping, read_attention_bias, read_rotary_share};
use super::llama;
use super::tensors::{ATTENTION, Cut, INPUT_NORM, LLAMA_TENSORS, MLP_DOWN, MLP_NORM, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;

/// Every size and switch of a GLM-4 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm4Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the projections to queries, keys and values have biases?
    pub qkv_bias: bool,
    /// Are there norms behind each half of a layer?
    pub output_norms: bool,
}

/// The share of a head that is rotated.
const ROTATED: &str = "partial_rotary_factor";

impl Glm4Config {
    fn read(f: &mut Fields<'_>, output_norms: bool) -> Result<Self> {
        const ROPE: RopeKeys = RopeKeys { partial: Some(ROTATED), default_partial: 0.5, ..ROPE_KEYS };
        f.needs(&["num_key_value_heads", "head_dim", "attention_bias"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE)?);
        Ok(Self { decoder, qkv_bias: f.required("attention_bias")?, output_norms })
    }
}

deref_to_decoder!(Glm4Config);

/// Queries, keys, values and the MLP.
const LAYER: &[&[TensorName]] = &[
    ATTENTION,
    &[
        TensorName::cut("mlp.gate_proj", Cut::Columns, "ffn_up"),
        TensorName::cut("mlp.up_proj", Cut::Columns, "ffn_up"),
        MLP_DOWN,
        INPUT_NORM,
        MLP_NORM,
    ],
];

/// How the older form is registered.
pub(super) static GLM: FamilyDefinition = FamilyDefinition {
    name: "glm",
    model_type: "glm",
    class: Some("GlmForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Glm4Config::read(f, false)?))),
    tensors: TensorTable { layer: LAYER, ..LLAMA_TENSORS },
    // GGUF files of it are made from another form of the checkpoint.
    gguf: None,
};

/// How the newer form is registered.
pub(super) static GLM4: FamilyDefinition = FamilyDefinition {
    name: "glm4",
    model_type: "glm4",
    class: Some("Glm4ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Glm4Config::read(f, true)?))),
    tensors: TensorTable {
        layer: &[
            LAYER[0],
            LAYER[1],
            &[
                TensorName::whole("post_self_attn_layernorm", "post_attention_norm"),
                TensorName::whole("post_mlp_layernorm", "post_ffw_norm"),
            ],
        ],
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping {
        read: |file, to| {
            read_attention_bias(file, to)?;
            read_rotary_share(file, to, ROTATED)
        },
        ..GgufMapping::new("glm4")
    }),
};

impl DecoderFamily for Glm4Config {
    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let half = |before, after| ResidualHalf {
            norm: self.norm(),
            before: Some(before),
            after: Some(after).filter(|_| self.output_norms),
        };
        let scores = AttentionScores { interleaved: true, ..at.scores() };
        let x = half("input_layernorm", "post_self_attn_layernorm")
            .add(g, x, "self_attn", |g, x| llama::self_attention(self, g, x, at, [self.qkv_bias, false], &scores))?;
        half("post_attention_layernorm", "post_mlp_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }

    fn parts(&self) -> Vec<Part> {
        let inner = self.intermediate_size;
        let part = |name: &str, first| Part {
            of: "model.layers.*.mlp.gate_up_proj.weight".into(),
            name: format!("model.layers.*.mlp.{name}.weight"),
            transposed: false,
            rows: Some(Rows::range(first, inner)),
        };
        vec![part("gate_proj", 0), part("up_proj", inner)]
    }
}
