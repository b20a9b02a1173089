//! OLMo 2: norms after attention and MLP instead of before, and norms of queries and keys over all heads together
//! (2024, "2 OLMo 2 Furious", section 2.1).

use ridge_graph::{Builder, Result as GraphResult, Var};
use serde_json::Value;

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufMapping, read_attention_bias};
use super::tensors::{ATTENTION, GATED_MLP, LLAMA_TENSORS, OUTPUT_NORMS, QK_NORMS, QKV, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;

/// Every size and switch of an OLMo 2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Olmo2Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
}

impl Olmo2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("clip_qkv", Value::Null)?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        Ok(Self { decoder, attention_bias: f.optional("attention_bias")?.unwrap_or(false) })
    }
}

deref_to_decoder!(Olmo2Config);

/// How it is registered.
pub(super) static OLMO2: FamilyDefinition = FamilyDefinition {
    name: "olmo2",
    model_type: "olmo2",
    class: Some("Olmo2ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Olmo2Config::read(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, GATED_MLP, QK_NORMS, OUTPUT_NORMS], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping { read: read_attention_bias, ..GgufMapping::new("olmo2") }),
};

impl DecoderFamily for Olmo2Config {
    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let half = |after| ResidualHalf { norm, before: None, after: Some(after) };
        let x = half("post_attention_layernorm").add(g, x, "self_attn", |g, x| {
            let [q, k, v] = at.project(g, x, QKV, self.attention_bias)?;
            let q = at.across_heads(g, q, |g, q| norm.apply(g, "q_norm", q))?;
            let k = at.across_heads(g, k, |g, k| norm.apply(g, "k_norm", k))?;
            let a = at.attend(g, [q, k, v], &at.scores())?;
            linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
        })?;
        half("post_feedforward_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }
}
