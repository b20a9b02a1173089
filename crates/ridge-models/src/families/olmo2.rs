//! OLMo 2: norms after attention and MLP instead of before, and norms of queries and keys over all heads together
//! (2024, "2 OLMo 2 Furious", section 2.1); and OLMo 3, most of whose layers see a window (2025, "Olmo 3", section 3.2).

use ridge_graph::{Builder, Result as GraphResult, Var};
use serde_json::Value;

use super::blocks::{MlpGate, NormKind, ResidualHalf, clipped, gated_mlp, linear};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_attention_bias, window_metadata};
use super::tensors::{ATTENTION, GATED_MLP, LLAMA_TENSORS, OUTPUT_NORMS, QK_NORMS, QKV, TensorTable};
use crate::config::{
    DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, RopeConfig, RopeKeys, layer_windows, read_rope, read_two_ropes,
    sliding_window,
};
use crate::error::Result;

/// Every size and switch of an OLMo 2 or 3 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Olmo2Config {
    /// What every decoder has; its rotation is that of the layers that see everything.
    pub decoder: DecoderConfig,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// The rotation in layers with a window.
    pub local_rope: RopeConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
}

/// Every so manieth layer of OLMo 3 sees everything where its configuration does not say.
const PATTERN: usize = 4;

impl Olmo2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        let mut decoder = Self::read_decoder(f)?;
        let rope = read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?;
        decoder.rope = Some(rope.clone());
        Self::new(f, decoder, rope, None)
    }

    fn read_3(f: &mut Fields<'_>) -> Result<Self> {
        const ROPE: RopeKeys = RopeKeys { default_theta: 500_000.0, ..ROPE_KEYS };
        let mut decoder = Self::read_decoder(f)?;
        let (global, local) = read_two_ropes(f, decoder.rope_sizes(), &ROPE, &ROPE)?;
        decoder.rope = Some(global);
        let window = sliding_window(f, Some(4096))?;
        Self::new(f, decoder, local, window)
    }

    fn read_decoder(f: &mut Fields<'_>) -> Result<DecoderConfig> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("clip_qkv", Value::Null)?;
        DecoderConfig::read(f, &DECODER_KEYS)
    }

    fn new(f: &mut Fields<'_>, decoder: DecoderConfig, local_rope: RopeConfig, window: Option<usize>) -> Result<Self> {
        let windows = match window {
            None => vec![None; decoder.num_hidden_layers],
            _ => layer_windows(f, decoder.num_hidden_layers, window, |i| !(i + 1).is_multiple_of(PATTERN))?,
        };
        let attention_bias = f.optional("attention_bias")?.unwrap_or(false);
        Ok(Self { decoder, windows, local_rope, attention_bias })
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
    gguf: Some(GgufMapping {
        applies: |file| file.window().is_none(),
        read: read_attention_bias,
        ..GgufMapping::new("olmo2")
    }),
};

/// How OLMo 3 is registered.
pub(super) static OLMO3: FamilyDefinition = FamilyDefinition {
    name: "olmo3",
    model_type: "olmo3",
    class: Some("Olmo3ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Olmo2Config::read_3(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, GATED_MLP, QK_NORMS, OUTPUT_NORMS], ..LLAMA_TENSORS },
    // GGUF has it as an OLMo 2 with a window.
    gguf: Some(GgufMapping {
        applies: |file| file.window().is_some(),
        read: |file, to| {
            to.insert("sliding_window".into(), file.window().into());
            read_attention_bias(file, to)
        },
        ..GgufMapping::new("olmo2")
    }),
};

impl DecoderFamily for Olmo2Config {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let half = |after| ResidualHalf { norm, before: None, after: Some(after) };
        let x = half("post_attention_layernorm").add(g, x, "self_attn", |g, x| {
            let mut scores = at.scores();
            if at.window.is_some() {
                scores.rope = Some(at.rope(&self.local_rope));
            }
            attention(self, g, x, at, self.attention_bias, None, &scores)
        })?;
        half("post_feedforward_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        let window = self.windows.iter().copied().flatten().next();
        let usual = |(i, window): (usize, &Option<usize>)| window.is_none() == (i + 1).is_multiple_of(PATTERN);
        if window.is_some() && !self.windows.iter().enumerate().all(usual) {
            return Err("its layers with windows are not where those of its family are");
        }
        if self.rope.as_ref().is_some_and(|rope| rope.theta != self.local_rope.theta)
            || self.local_rope.scaling.is_some()
        {
            return Err("its local layers have frequencies of their own");
        }
        Ok(window_metadata(window))
    }
}

/// Attention to `x` with norms of queries and keys over all heads together; queries, keys and values stay within `clip`.
pub(super) fn attention(
    config: &DecoderConfig,
    g: &mut Builder,
    x: Var,
    at: &DecoderLayer<'_>,
    bias: bool,
    clip: Option<f64>,
    scores: &AttentionScores,
) -> GraphResult<Var> {
    let norm = NormKind::Rms(config.norm_eps);
    let [q, k, v] = at.project(g, x, QKV, bias)?;
    let q = at.across_heads(g, q, |g, q| norm.apply(g, "q_norm", q))?;
    let k = at.across_heads(g, k, |g, k| norm.apply(g, "k_norm", k))?;
    let qkv = [clipped(g, q, clip)?, clipped(g, k, clip)?, clipped(g, v, clip)?];
    let a = at.attend(g, qkv, scores)?;
    linear(g, "o_proj", a, config.hidden_size, bias)
}
