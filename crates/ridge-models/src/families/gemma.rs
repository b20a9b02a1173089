//! Gemma 2 (Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size", section 2) and Gemma 3
//! (2025, "Gemma 3 Technical Report", section 2): local and global layers in turn, norms on both sides of each half,
//! and soft caps in the one or norms of queries and keys in the other.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};
use serde_json::{Map, Value as Json};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, GgufMetadata, LAYERS_KEY, window_metadata};
use super::tensors::{
    ATTENTION, GATED_MLP, GEMMA_INPUT_NORMS, LLAMA_TENSORS, OUTPUT_NORMS, QK_NORMS, QKV, TensorTable,
};
use crate::config::{
    DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_POSITIONS, ROPE_KEYS, RopeConfig, RopeKeys, layer_windows,
    read_rope, read_two_ropes,
};
use crate::error::Result;

/// Every size and switch of a Gemma model.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmaConfig {
    /// What every decoder has; its rotation is that of the layers that see everything.
    pub decoder: DecoderConfig,
    /// The rotation in layers with a window.
    pub local_rope: RopeConfig,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// Scores are divided by its root; above 0.
    pub query_pre_attn_scalar: f64,
    /// Scores stay within this, by a hyperbolic tangent. In Gemma 2 only.
    pub attn_logit_softcapping: Option<f64>,
    /// So do logits.
    pub final_logit_softcapping: Option<f64>,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Are queries and keys normalised, head by head? In Gemma 3.
    pub qk_norm: bool,
    /// Do tokens see those behind them too, in windows on both sides? In encoders.
    pub bidirectional: bool,
}

/// Every so manieth layer of Gemma 2 sees everything.
const GEMMA2_PATTERN: usize = 2;
/// The same of Gemma 3, where its configuration does not say.
const GEMMA3_PATTERN: usize = 6;
/// The keys of the caps of scores and of logits.
const SOFT_CAPS: [&str; 2] = ["attn_logit_softcapping", "final_logit_softcapping"];
/// The caps of Gemma 2 where its configuration has no such key; null means that there is none.
const GEMMA2_SOFT_CAPS: [f64; 2] = [50.0, 30.0];

const KEYS: DecoderKeys = DecoderKeys { tie_word_embeddings: true, ..DECODER_KEYS };

impl GemmaConfig {
    fn read_2(f: &mut Fields<'_>) -> Result<Self> {
        // Every other layer is local, the first one too.
        f.must_be("use_bidirectional_attention", false)?;
        let mut config = Self::read(f, false, GEMMA2_PATTERN, |f, decoder| {
            let rope = read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?;
            Ok((rope.clone(), rope))
        })?;
        let cap = |i: usize| (!f.has(SOFT_CAPS[i])).then_some(GEMMA2_SOFT_CAPS[i]);
        config.attn_logit_softcapping = config.attn_logit_softcapping.or(cap(0));
        config.final_logit_softcapping = config.final_logit_softcapping.or(cap(1));
        Ok(config)
    }

    fn read_3(f: &mut Fields<'_>) -> Result<Self> {
        let newer = f.optional_size("_sliding_window_pattern", MAX_POSITIONS)?;
        let pattern = f.optional_size("sliding_window_pattern", MAX_POSITIONS)?.or(newer).unwrap_or(GEMMA3_PATTERN);
        let bidirectional = f.optional("use_bidirectional_attention")?.unwrap_or(false);
        let mut config = Self::read(f, true, pattern, two_ropes)?;
        if bidirectional {
            // The file counts the tokens on both sides together.
            config.windows.iter_mut().flatten().for_each(|window| *window = *window / 2 + 1);
        }
        // The configuration class inherits the key of the cap from Gemma 2; the model's code never reads it.
        Ok(Self { attn_logit_softcapping: None, bidirectional, ..config })
    }

    /// `pattern`: every so manieth layer sees everything.
    fn read(
        f: &mut Fields<'_>,
        qk_norm: bool,
        pattern: usize,
        ropes: impl Fn(&mut Fields<'_>, &DecoderConfig) -> Result<(RopeConfig, RopeConfig)>,
    ) -> Result<Self> {
        f.needs(&["num_key_value_heads", "head_dim", "sliding_window"])?;
        f.must_be("hidden_act", "gelu_pytorch_tanh")?;
        f.must_be("hidden_activation", "gelu_pytorch_tanh")?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let (global, local_rope) = ropes(f, &decoder)?;
        decoder.rope = Some(global);
        let window = f.optional_size("sliding_window", MAX_POSITIONS)?;
        // Older files have it twice.
        f.must_be("sliding_window_size", window)?;
        Ok(Self {
            local_rope,
            windows: layer_windows(f, decoder.num_hidden_layers, window, |i| !(i + 1).is_multiple_of(pattern))?,
            query_pre_attn_scalar: f.positive("query_pre_attn_scalar")?,
            attn_logit_softcapping: f.optional_positive("attn_logit_softcapping")?,
            final_logit_softcapping: f.optional_positive("final_logit_softcapping")?,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            qk_norm,
            bidirectional: false,
            decoder,
        })
    }
}

/// The rotations of global and local layers.
fn two_ropes(f: &mut Fields<'_>, decoder: &DecoderConfig) -> Result<(RopeConfig, RopeConfig)> {
    const GLOBAL: RopeKeys = RopeKeys { default_theta: 1_000_000.0, ..ROPE_KEYS };
    const LOCAL: RopeKeys = RopeKeys { theta: "rope_local_base_freq", ..ROPE_KEYS };
    read_two_ropes(f, decoder.rope_sizes(), &GLOBAL, &LOCAL)
}

deref_to_decoder!(GemmaConfig);

const TENSORS: TensorTable =
    TensorTable { layer: &[ATTENTION, GATED_MLP, QK_NORMS, OUTPUT_NORMS, GEMMA_INPUT_NORMS], ..LLAMA_TENSORS };

/// How Gemma 2 is registered.
pub(super) static GEMMA2: FamilyDefinition = FamilyDefinition {
    name: "gemma2",
    model_type: "gemma2",
    class: Some("Gemma2ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GemmaConfig::read_2(f)?))),
    tensors: TENSORS,
    gguf: Some(GgufMapping {
        norms_plus_one: true,
        read: |file, to| read_gguf(file, to, 46),
        ..GgufMapping::new("gemma2")
    }),
};

/// How Gemma 3 is registered.
pub(super) static GEMMA3: FamilyDefinition = FamilyDefinition {
    name: "gemma3",
    model_type: "gemma3_text",
    class: Some("Gemma3ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GemmaConfig::read_3(f)?))),
    tensors: TENSORS,
    gguf: Some(GgufMapping {
        norms_plus_one: true,
        read: |file, to| {
            read_gguf(file, to, 62)?;
            let local = file.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
            to.insert("rope_local_base_freq".into(), local.into());
            let pattern = file.int("attention.sliding_window_pattern")?;
            to.insert("sliding_window_pattern".into(), pattern.unwrap_or(GEMMA3_PATTERN as u64).into());
            Ok(())
        },
        ..GgufMapping::new("gemma3")
    }),
};

/// Adds what both have. The largest model, of `largest` layers, divides scores by the width of a head of the residual
/// stream, the others by that of a head.
fn read_gguf(file: &dyn GgufMetadata, to: &mut Map<String, Json>, largest: u64) -> Result<()> {
    to.insert("sliding_window".into(), file.window_or_zero().unwrap_or(4096).into());
    to.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
    for key in SOFT_CAPS {
        if let Some(cap) = file.float(key)? {
            to.insert(key.into(), cap.into());
        }
    }
    let layers = file.int(LAYERS_KEY)?.unwrap_or_default();
    let (hidden, heads) = (file.int("embedding_length")?, file.int("attention.head_count")?);
    let scalar = match (layers == largest, hidden, heads) {
        (true, Some(hidden), Some(heads)) if heads > 0 => Some(hidden / heads),
        _ => file.int("attention.key_length")?,
    };
    // A converter of Ridge's says what it is.
    let said = file.float("attention.query_pre_attn_scalar")?;
    to.insert("query_pre_attn_scalar".into(), said.map_or_else(|| scalar.into(), Json::from));
    Ok(())
}

impl DecoderFamily for GemmaConfig {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn sees_both_ways(&self) -> bool {
        self.bidirectional
    }

    fn embed(&self, g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        // The factor is rounded to the dtype of activations, as in training.
        let scale = g.constant_like(x, (self.hidden_size as f64).sqrt())?;
        g.mul(x, scale)
    }

    fn norm(&self) -> NormKind {
        NormKind::RmsPlusOne(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let half = |before, after| ResidualHalf { norm, before: Some(before), after: Some(after) };
        let x = half("input_layernorm", "post_attention_layernorm").add(g, x, "self_attn", |g, x| {
            let [mut q, mut k, v] = at.project(g, x, QKV, self.attention_bias)?;
            if self.qk_norm {
                (q, k) = (norm.apply(g, "q_norm", q)?, norm.apply(g, "k_norm", k)?);
            }
            let mut scores = AttentionScores {
                scale: 1.0 / self.query_pre_attn_scalar.sqrt(),
                softcap: self.attn_logit_softcapping,
                ..at.scores()
            };
            if at.window.is_some() {
                scores.rope = Some(at.rope(&self.local_rope));
            }
            let a = at.attend(g, [q, k, v], &scores)?;
            linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
        })?;
        half("pre_feedforward_layernorm", "post_feedforward_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Gelu(Gelu::Tanh), false))
    }

    fn logit_softcap(&self) -> Option<f64> {
        self.final_logit_softcapping
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        let mut entries = window_metadata(self.windows.iter().copied().flatten().next());
        entries.push(("attention.query_pre_attn_scalar", GgufEntry::F32(self.query_pre_attn_scalar as f32)));
        for (name, cap) in SOFT_CAPS.into_iter().zip([self.attn_logit_softcapping, self.final_logit_softcapping]) {
            if cap.is_none() && !self.qk_norm {
                return Err("it has no soft caps, and GGUF takes a missing cap for the family's default");
            }
            entries.extend(cap.map(|cap| (name, GgufEntry::F32(cap as f32))));
        }
        let every = self.windows.iter().position(Option::is_none).map_or(0, |first| first + 1);
        let usual = if self.qk_norm { GEMMA3_PATTERN } else { GEMMA2_PATTERN };
        let fits = |period: usize| self.windows.iter().enumerate().all(|(i, w)| w.is_none() == ((i + 1) % period == 0));
        if every != 0 && !fits(usual) {
            if !self.qk_norm || !fits(every) {
                return Err("its layers with windows are not where those of its family are");
            }
            entries.push(("attention.sliding_window_pattern", GgufEntry::U32(every as u32)));
        }
        if self.qk_norm {
            if self.local_rope.scaling.is_some() {
                return Err("its local layers have scaled frequencies");
            }
            entries.push(("rope.freq_base_swa", GgufEntry::F32(self.local_rope.theta as f32)));
        }
        Ok(entries)
    }
}
