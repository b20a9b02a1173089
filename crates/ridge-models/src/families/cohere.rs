//! Command R and R+ (Cohere 2024), and Command R7B and A (Cohere 2025, "Command A: An Enterprise-Ready Large Language Model",
//! section 2): attention and MLP side by side behind one layer norm, rotations of neighbours, and in the newer ones local
//! layers that rotate and global ones that do not.

use ridge_files::checkpoint::Part;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, gated_mlp, linear, norm_per_head};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, LAYER_NORM_EPSILON, read_attention_bias, window_metadata};
use super::tensors::{ATTENTION, Cut, GATED_MLP, INPUT_NORM, LLAMA_TENSORS, QKV, TensorName, TensorTable};
use crate::config::{
    DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_POSITIONS, ROPE_KEYS, RopeKeys, layer_windows, read_rope,
    sliding_window,
};
use crate::error::Result;

/// Every size and switch of a Command model.
#[derive(Clone, Debug, PartialEq)]
pub struct CohereConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Are queries and keys normalised, with weights for each head?
    pub qk_norm: bool,
    /// Factor of the logits.
    pub logit_scale: f64,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// Do layers without a window rotate queries and keys?
    pub rotates_globally: bool,
}

const KEYS: DecoderKeys = DecoderKeys { norm_eps: "layer_norm_eps", tie_word_embeddings: true, ..DECODER_KEYS };
const LOGIT_SCALE: &str = "logit_scale";
/// The factor of the logits where the file does not say.
const DEFAULT_LOGIT_SCALE: f64 = 0.0625;
/// Every so manieth layer of the newer models sees everything.
const PATTERN: usize = 4;

impl CohereConfig {
    fn read_1(f: &mut Fields<'_>) -> Result<Self> {
        let rope = RopeKeys { default_theta: 500_000.0, ..ROPE_KEYS };
        let mut config = Self::read(f, &rope)?;
        config.qk_norm = f.optional("use_qk_norm")?.unwrap_or(false);
        Ok(config)
    }

    fn read_2(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("rotary_pct", 1)?;
        f.must_be("use_qk_norm", false)?;
        f.must_be("use_gated_activation", true)?;
        f.must_be("use_parallel_block", true)?;
        f.must_be("use_embedding_sharing", true)?;
        f.must_be("position_embedding_type", "rope_gptj")?;
        f.must_be("order_of_interleaved_layers", "local_attn_first")?;
        let mut config = Self::read(f, &ROPE_KEYS)?;
        let newer = f.optional_size("_sliding_window_pattern", MAX_POSITIONS)?;
        let pattern = f.optional_size("sliding_window_pattern", MAX_POSITIONS)?.or(newer).unwrap_or(PATTERN);
        let window = sliding_window(f, Some(4096))?;
        let layers = config.num_hidden_layers;
        config.windows = layer_windows(f, layers, window, |i| !(i + 1).is_multiple_of(pattern))?;
        config.rotates_globally = false;
        Ok(config)
    }

    fn read(f: &mut Fields<'_>, rope: &RopeKeys) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), rope)?);
        Ok(Self {
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            qk_norm: false,
            logit_scale: f.optional_positive(LOGIT_SCALE)?.unwrap_or(DEFAULT_LOGIT_SCALE),
            windows: vec![None; decoder.num_hidden_layers],
            rotates_globally: true,
            decoder,
        })
    }
}

deref_to_decoder!(CohereConfig);

/// Norms of queries and keys, head by head, as published and in the graph: those of other families have one weight for all
/// heads.
const HEAD_NORMS: [(&str, &str); 2] = [("q_norm", "q_head_norm"), ("k_norm", "k_head_norm")];

/// How Command R is registered.
pub(super) static COHERE: FamilyDefinition = FamilyDefinition {
    name: "cohere",
    model_type: "cohere",
    class: Some("CohereForCausalLM"),
    harmless: &[&["model_max_length", "pretraining_tp"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(CohereConfig::read_1(f)?))),
    tensors: TensorTable {
        layer: &[
            ATTENTION,
            GATED_MLP,
            &[
                TensorName::cut("self_attn.q_head_norm", Cut::Columns, "attn_q_norm"),
                TensorName::cut("self_attn.k_head_norm", Cut::Columns, "attn_k_norm"),
                INPUT_NORM,
            ],
        ],
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping {
        keys: &[(LAYER_NORM_EPSILON, Some("layer_norm_eps")), (LOGIT_SCALE, Some(LOGIT_SCALE))],
        read: |file, to| {
            to.insert("use_qk_norm".into(), file.has("blk.0.attn_q_norm.weight").into());
            read_attention_bias(file, to)
        },
        ..GgufMapping::new("command-r")
    }),
};

/// How Command R7B and A are registered.
pub(super) static COHERE2: FamilyDefinition = FamilyDefinition {
    name: "cohere2",
    model_type: "cohere2",
    class: Some("Cohere2ForCausalLM"),
    harmless: &[&["layer_switch", "use_parallel_embedding"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(CohereConfig::read_2(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, GATED_MLP, &[INPUT_NORM]], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping {
        keys: &[(LAYER_NORM_EPSILON, Some("layer_norm_eps")), (LOGIT_SCALE, Some(LOGIT_SCALE))],
        read: |file, to| {
            to.insert("sliding_window".into(), file.window().into());
            read_attention_bias(file, to)
        },
        ..GgufMapping::new("cohere2")
    }),
};

impl CohereConfig {
    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let [mut q, mut k, v] = at.project(g, x, QKV, self.attention_bias)?;
        if self.qk_norm {
            q = norm_per_head(g, HEAD_NORMS[0].1, q, self.norm_eps)?;
            k = norm_per_head(g, HEAD_NORMS[1].1, k, self.norm_eps)?;
        }
        let mut scores = AttentionScores { interleaved: true, ..at.scores() };
        if at.window.is_none() && !self.rotates_globally {
            scores.rope = None;
        }
        let a = at.attend(g, [q, k, v], &scores)?;
        linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
    }
}

impl DecoderFamily for CohereConfig {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn norm(&self) -> NormKind {
        NormKind::LayerUnbiased(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let h = self.norm().apply(g, "input_layernorm", x)?;
        let a = g.scoped("self_attn", |g| self.attention(g, h, at))?;
        let m = g.scoped("mlp", |g| gated_mlp(g, h, self.intermediate_size, MlpGate::Silu, false))?;
        let x = g.add(x, a)?;
        g.add(x, m)
    }

    fn logit_scale(&self) -> f64 {
        self.logit_scale
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(published, name): (&str, &str)| Part {
            of: format!("model.layers.*.self_attn.{published}.weight"),
            name: format!("model.layers.*.self_attn.{name}.weight"),
            transposed: false,
            rows: None,
        };
        if self.qk_norm { HEAD_NORMS.into_iter().map(part).collect() } else { Vec::new() }
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        let mut entries = vec![(LOGIT_SCALE, GgufEntry::F32(self.logit_scale as f32))];
        if !self.rotates_globally {
            let window = self.windows.iter().copied().flatten().next();
            if window.is_none() {
                return Err("none of its layers sees a window");
            }
            if !self.windows.iter().enumerate().all(|(i, window)| window.is_none() == (i + 1).is_multiple_of(PATTERN)) {
                return Err("its layers with windows are not where those of its family are");
            }
            entries.extend(window_metadata(window));
        }
        Ok(entries)
    }
}
