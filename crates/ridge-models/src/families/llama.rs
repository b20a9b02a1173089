//! Llama 2, Llama 3 and the many checkpoints that share their layers: pre-norm decoder layers with grouped-query
//! attention and a gated MLP (Touvron et al. 2023, "Llama 2"; "The Llama 3 Herd of Models", 2024).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufMapping, MixRules};
use super::tensors::{LLAMA_TENSORS, QKV};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;
use crate::model::{BuildOptions, Model};
use ridge_files::json;

/// Every size and switch of a Llama model, checked against each other.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Do the three projections of the MLP have biases?
    pub mlp_bias: bool,
}

impl LlamaConfig {
    /// Reads the text of a `config.json`. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// An error that names file, key, value and remedy if the text is not JSON, a needed key is missing, a value is
    /// impossible or contradicts another, the model is of another family or asks for something that Ridge does not
    /// do, or there is a key that Ridge does not know.
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let mut f = Fields::new(file, &map);
        if f.required::<&str>("model_type")? != LLAMA.model_type {
            let remedy = "choose a checkpoint of the family \"llama\"";
            return Err(f.wrong("model_type", "is not a family that Ridge reads here", remedy));
        }
        LLAMA.begin(&mut f)?;
        let config = Self::read(&mut f)?;
        f.finish()?;
        Ok(config)
    }

    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("activation", "swiglu")?;
        f.must_be("pretraining_tp", 1)?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        Ok(Self {
            decoder,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mlp_bias: f.optional("mlp_bias")?.unwrap_or(false),
        })
    }
}

deref_to_decoder!(LlamaConfig);

/// How it is registered.
pub(super) static LLAMA: FamilyDefinition = FamilyDefinition {
    name: "llama",
    model_type: "llama",
    class: Some("LlamaForCausalLM"),
    harmless: &[&["is_llama_config", "max_sequence_length"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(LlamaConfig::read(f)?))),
    tensors: LLAMA_TENSORS,
    gguf: Some(GgufMapping {
        // With a window it is a Mistral, with experts a Mixtral.
        applies: |file| file.window().is_none() && file.experts() == 0,
        interleaved: true,
        mix: MixRules::Llama,
        read: |file, to| {
            to.insert("attention_bias".into(), file.has("blk.0.attn_q.bias").into());
            to.insert("mlp_bias".into(), file.has("blk.0.ffn_up.bias").into());
            Ok(())
        },
        ..GgufMapping::new("llama")
    }),
};

impl DecoderFamily for LlamaConfig {
    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        layer(self, g, x, at, self.attention_bias, self.mlp_bias)
    }
}

/// The layer of a Llama.
pub(super) fn layer(
    config: &DecoderConfig,
    g: &mut Builder,
    x: Var,
    at: &DecoderLayer<'_>,
    attention_bias: bool,
    mlp_bias: bool,
) -> GraphResult<Var> {
    let x = attention(config, g, x, at, attention_bias)?;
    ResidualHalf::before(NormKind::Rms(config.norm_eps), "post_attention_layernorm")
        .add(g, x, "mlp", |g, x| gated_mlp(g, x, config.intermediate_size, MlpGate::Silu, mlp_bias))
}

/// The first half of the layer of a Llama.
pub(super) fn attention(
    config: &DecoderConfig,
    g: &mut Builder,
    x: Var,
    at: &DecoderLayer<'_>,
    bias: bool,
) -> GraphResult<Var> {
    ResidualHalf::before(NormKind::Rms(config.norm_eps), "input_layernorm")
        .add(g, x, "self_attn", |g, x| self_attention(config, g, x, at, [bias; 2], &at.scores()))
}

/// Llama's attention to `x`, with biases of queries, keys and values and of the output projection as said.
pub(super) fn self_attention(
    config: &DecoderConfig,
    g: &mut Builder,
    x: Var,
    at: &DecoderLayer<'_>,
    [qkv_bias, output_bias]: [bool; 2],
    scores: &AttentionScores,
) -> GraphResult<Var> {
    let qkv = at.project(g, x, QKV, qkv_bias)?;
    let a = at.attend(g, qkv, scores)?;
    linear(g, "o_proj", a, config.hidden_size, output_bias)
}

/// Builds the graph of a Llama; see [`ModelConfig::build`](super::ModelConfig::build).
///
/// # Errors
/// A mistake of ours: `config` has been checked.
pub fn llama(config: &LlamaConfig, options: &BuildOptions) -> GraphResult<Model> {
    LLAMA.build(config, options)
}
