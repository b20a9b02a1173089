//! Granite 3 (IBM 2024, "Granite 3.0 Language Models", section 2): Llama's layers with factors of the embedding, of scores, of
//! what each half of a layer adds, and of logits.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, scaled};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, GgufMetadata};
use super::llama;
use super::tensors::LLAMA_TENSORS;
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;
use serde_json::{Map, Value as Json};

/// The factors of a Granite model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GraniteFactors {
    /// Of the embedded tokens.
    pub embedding: f64,
    /// Of scores.
    pub attention: f64,
    /// Of what a half of a layer adds.
    pub residual: f64,
    /// Logits are divided by it.
    pub logits: f64,
}

impl GraniteFactors {
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        let mut values = [1.0; FACTORS.len()];
        for ((_, key), value) in FACTORS.into_iter().zip(&mut values) {
            *value = f.optional_positive(key)?.unwrap_or(*value);
        }
        let [embedding, attention, residual, logits] = values;
        Ok(Self { embedding, attention, residual, logits })
    }

    /// What GGUF has of them.
    pub(super) fn metadata(&self) -> Vec<(&'static str, GgufEntry)> {
        let values = [self.embedding, self.attention, self.residual, self.logits];
        FACTORS.iter().zip(values).map(|((name, _), value)| (*name, GgufEntry::F32(value as f32))).collect()
    }

    /// Adds them to a configuration.
    pub(super) fn read_gguf(file: &dyn GgufMetadata, to: &mut Map<String, Json>) -> Result<()> {
        for (theirs, ours) in FACTORS {
            if let Some(value) = file.float(theirs)? {
                to.insert(ours.into(), value.into());
            }
        }
        Ok(())
    }

    /// The usual scores with the factor of these.
    pub(super) fn scores(&self, at: &DecoderLayer<'_>) -> AttentionScores {
        AttentionScores { scale: self.attention, ..at.scores() }
    }
}

/// Names of the factors in GGUF and in configurations.
pub(super) const FACTORS: [(&str, &str); 4] = [
    ("embedding_scale", "embedding_multiplier"),
    ("attention.scale", "attention_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
];

/// Every size and switch of a Granite model.
#[derive(Clone, Debug, PartialEq)]
pub struct GraniteConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Do the three projections of the MLP have biases?
    pub mlp_bias: bool,
    /// Its factors.
    pub factors: GraniteFactors,
}

impl GraniteConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        Ok(Self {
            decoder,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mlp_bias: f.optional("mlp_bias")?.unwrap_or(false),
            factors: GraniteFactors::read(f)?,
        })
    }
}

deref_to_decoder!(GraniteConfig);

/// How it is registered.
pub(super) static GRANITE: FamilyDefinition = FamilyDefinition {
    name: "granite",
    model_type: "granite",
    class: Some("GraniteForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GraniteConfig::read(f)?))),
    tensors: LLAMA_TENSORS,
    gguf: Some(GgufMapping {
        interleaved: true,
        read: |file, to| {
            to.insert("attention_bias".into(), file.has("blk.0.attn_q.bias").into());
            to.insert("mlp_bias".into(), file.has("blk.0.ffn_up.bias").into());
            GraniteFactors::read_gguf(file, to)
        },
        ..GgufMapping::new("granite")
    }),
};

impl DecoderFamily for GraniteConfig {
    fn embed(&self, g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        scaled(g, x, self.factors.embedding)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let factors = &self.factors;
        let x = ResidualHalf::before(self.norm(), "input_layernorm").add(g, x, "self_attn", |g, x| {
            let a = llama::self_attention(self, g, x, at, [self.attention_bias; 2], &factors.scores(at))?;
            scaled(g, a, factors.residual)
        })?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| {
            let m = gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, self.mlp_bias)?;
            scaled(g, m, factors.residual)
        })
    }

    fn logit_scale(&self) -> f64 {
        1.0 / self.factors.logits
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        Ok(self.factors.metadata())
    }
}
