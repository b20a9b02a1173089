//! Decoders of one build whose mixers are linear recurrences, as the flash-linear-attention library publishes them: RetNet (Sun et
//! al. 2023, "Retentive Network", section 2), gated linear attention (Yang et al. 2024, "Gated Linear Attention Transformers with
//! Hardware-Efficient Training", section 4) and linear attention without decay (Katharopoulos et al. 2020, "Transformers are
//! RNNs", section 3). Each layer is a mixer and a gated MLP.

use ridge_files::checkpoint::Part;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Var};
use serde_json::Value as Json;

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear, scaled};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::recurrent::{flat, gated_recurrence, heads_of};
use super::tensors::{Cut, GATED_MLP, LLAMA_TENSORS, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY, RopeConfig};
use crate::error::Result;
use crate::model::{BuildOptions, symbols};

/// Every size and switch of a decoder of this build.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearAttentionConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Width of a query or key.
    pub key: usize,
    /// Width of a value.
    pub value: usize,
    /// What distinguishes its mixers.
    pub mixer: LinearMixer,
}

/// The kinds of mixers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinearMixer {
    /// Each head decays at its own constant rate; queries and keys are rotated; the output is gated.
    Retention {
        /// Are norm and gate one module, which names the norm's weight?
        fused_norm: bool,
    },
    /// Each channel of a key decays by a function of the token; the output is gated.
    Gated {
        /// As in [`LinearMixer::Retention`].
        fused_norm: bool,
        /// Logarithms of decays are no less than this.
        least: Option<f64>,
    },
    /// Nothing decays.
    Plain(FeatureMap),
}

/// What queries and keys go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureMap {
    /// Nothing.
    Identity,
    /// Zero below zero.
    Relu,
    /// The exponential below zero, one more than itself above.
    Elu,
    /// The product of two projections of a head.
    Product,
}

/// The scope of a mixer, which is published as `attn`, a name whose projections other families cut over ranks.
const MIXER: &str = "linear_attn";

/// Rank of the projection that makes the decays of gated linear attention, and what their logarithms are divided by: the
/// configuration has no keys for them (section 4.4).
const GATE_RANK: usize = 16;
const GATE_NORMALIZER: f64 = 16.0;

/// Which kernels others use, and training.
pub(super) const LINEAR_HARMLESS: &[&str] = &[
    "attn_mode",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_swiglu",
    "use_l2warp",
    // Of short convolutions, which there are none of, and of keys that older versions had.
    "conv_size",
    "use_gk",
    "use_gv",
];

/// Width of a head of the keys or values that are so many times as wide as the residual stream.
pub(super) fn head_width(f: &mut Fields<'_>, decoder: &DecoderConfig, key: &'static str, usual: f64) -> Result<usize> {
    let heads = decoder.num_attention_heads;
    let all = decoder.hidden_size as f64 * f.optional_positive(key)?.unwrap_or(usual);
    let whole = all.round() as usize;
    match (whole as f64 - all).abs() < 1e-6 && whole.is_multiple_of(heads) && whole > 0 && whole < MAX_SIZE {
        true => Ok(whole / heads),
        false => Err(f.wrong(key, format!("times hidden_size is no multiple of num_heads = {heads}"), REMEDY)),
    }
}

impl LinearAttentionConfig {
    fn read(f: &mut Fields<'_>, mixer: LinearMixer, expand: [f64; 2], ratio: f64) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            // The library computes it from a ratio where the file has none.
            intermediate_factor: Some(4),
            num_attention_heads: "num_heads",
            num_key_value_heads: "num_kv_heads",
            positions: Some(2048),
            norm_eps: "norm_eps",
            default_eps: Some(1e-6),
            ..DECODER_KEYS
        };
        for key in ["attn", "attnres_block_size"] {
            f.must_be(key, Json::Null)?;
        }
        f.must_be("hidden_act", "swish")?;
        f.must_be("elementwise_affine", true)?;
        f.must_be("use_short_conv", false)?;
        f.must_be("use_output_gate", true)?;
        let given = f.raw("intermediate_size").is_some();
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let ratio = f.optional_positive("hidden_ratio")?.unwrap_or(ratio);
        if !given {
            // Two thirds of the ratio, rounded up to a multiple of 256.
            decoder.intermediate_size =
                ((decoder.hidden_size as f64 * ratio * 2.0 / 3.0) as usize).next_multiple_of(256);
        }
        if decoder.num_key_value_heads != decoder.num_attention_heads {
            return Err(f.wrong("num_kv_heads", "differs from num_heads", "Ridge runs models where they are equal"));
        }
        let key = head_width(f, &decoder, "expand_k", expand[0])?;
        let value = head_width(f, &decoder, "expand_v", expand[1])?;
        if matches!(mixer, LinearMixer::Retention { .. }) {
            if !key.is_multiple_of(2) {
                return Err(f.wrong(
                    "expand_k",
                    format!("makes heads of {key}, which is odd: rotations turn pairs"),
                    REMEDY,
                ));
            }
            decoder.rope = Some(RopeConfig { theta: 10_000.0, rotary_dim: key, scaling: None });
        }
        Ok(Self { decoder, key, value, mixer })
    }

    fn fused_norm(f: &mut Fields<'_>) -> Result<bool> {
        f.must_be("feature_map", Json::Null)?;
        Ok(f.optional("fuse_norm")?.unwrap_or(true))
    }

    fn read_retnet(f: &mut Fields<'_>) -> Result<Self> {
        let fused_norm = Self::fused_norm(f)?;
        Self::read(f, LinearMixer::Retention { fused_norm }, [1.0, 2.0], 2.0)
    }

    fn read_gla(f: &mut Fields<'_>) -> Result<Self> {
        let (fused_norm, least) = (Self::fused_norm(f)?, f.optional("clamp_min")?);
        Self::read(f, LinearMixer::Gated { fused_norm, least }, [0.5, 1.0], 4.0)
    }

    fn read_plain(f: &mut Fields<'_>) -> Result<Self> {
        for key in ["norm_q", "norm_k", "norm_feature_map", "tie_feature_map_qk"] {
            f.must_be(key, false)?;
        }
        f.harmless(&["fuse_norm"]);
        let map = match f.optional("feature_map")?.unwrap_or("elementwise_product") {
            "identity" => FeatureMap::Identity,
            "relu" => FeatureMap::Relu,
            "elu" => FeatureMap::Elu,
            "elementwise_product" => FeatureMap::Product,
            _ => {
                let remedy = "Ridge knows \"identity\", \"relu\", \"elu\" and \"elementwise_product\"";
                return Err(f.wrong("feature_map", "is not supported", remedy));
            }
        };
        Self::read(f, LinearMixer::Plain(map), [1.0, 1.0], 4.0)
    }

    /// The mixer of `x`, `[tokens, hidden]`.
    fn mix(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (heads, dtype) = (self.num_attention_heads, g.ty(x)?.dtype);
        let mut qkv = [x; 3];
        for ((y, name), width) in qkv.iter_mut().zip(QKV).zip([self.key, self.key, self.value]) {
            let projected = linear(g, name, x, heads * width, false)?;
            *y = heads_of(g, projected, heads)?;
        }
        let [mut q, mut k, v] = qkv;
        if let LinearMixer::Plain(map) = self.mixer {
            (q, k) = (map.apply(g, "feature_map_q", q)?, map.apply(g, "feature_map_k", k)?);
        }
        if let Some(rope) = self.rope.as_ref().map(|rope| at.rope(rope)) {
            (q, k) = (g.rope(q, at.positions(), &rope)?, g.rope(k, at.positions(), &rope)?);
        }
        let decay = self.decay(g, x)?;
        // The factor of the queries may as well be that of what is added to the state: without it, the sums of a long text may exceed the
        // range of f16.
        let scale = (self.key as f64).sqrt().recip();
        let weight = self.of_heads(g, &vec![scale; heads])?;
        let y = gated_recurrence(g, at, [q, k, v, weight, decay], false)?;
        let y = g.cast(y, DType::F32)?;
        let y = NormKind::Rms(self.norm_eps).apply(g, self.norm_scope(), y)?;
        let mut y = flat(g, y)?;
        if !matches!(self.mixer, LinearMixer::Plain(_)) {
            let gate = linear(g, "g_proj", x, heads * self.value, false)?;
            let gate = g.cast(gate, DType::F32)?;
            y = g.swiglu(gate, y)?;
        }
        let y = g.cast(y, dtype)?;
        linear(g, "o_proj", y, self.hidden_size, false)
    }

    /// The scope of the norm of each head's output.
    fn norm_scope(&self) -> &'static str {
        match self.mixer {
            LinearMixer::Plain(_) => "norm",
            LinearMixer::Gated { fused_norm, .. } | LinearMixer::Retention { fused_norm } => match fused_norm {
                true => "g_norm_swish_gate",
                false => "g_norm",
            },
        }
    }

    /// A number for each head, `[tokens, heads, 1]`.
    fn of_heads(&self, g: &mut Builder, table: &[f64]) -> GraphResult<Var> {
        let heads = self.num_attention_heads;
        let table = g.table(DType::F32, table)?;
        let table = g.reshape(table, Shape::new([1, heads, 1]))?;
        g.broadcast(table, Shape(vec![Dim::sym(symbols::TOKENS), heads.into(), 1.into()]))
    }

    /// The logarithms of decays: f32 `[tokens, heads, key]`, or 1 for all of a head.
    fn decay(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let heads = self.num_attention_heads;
        match self.mixer {
            LinearMixer::Plain(_) => self.of_heads(g, &vec![0.0; heads]),
            LinearMixer::Retention { .. } => {
                let rates: Vec<f64> = (0..heads).map(|head| (-(-5.0 - head as f64).exp2()).ln_1p()).collect();
                self.of_heads(g, &rates)
            }
            LinearMixer::Gated { least, .. } => {
                let low = linear(g, "gk_proj.0", x, GATE_RANK, false)?;
                let gate = linear(g, "gk_proj.1", low, heads * self.key, true)?;
                let gate = g.cast(gate, DType::F32)?;
                // The logarithm of a sigmoid.
                let closed = scaled(g, gate, -1.0)?;
                let closed = g.softplus(closed)?;
                let mut decay = scaled(g, closed, -1.0 / GATE_NORMALIZER)?;
                if let Some(least) = least {
                    let least = g.constant(DType::F32, least)?;
                    decay = g.max(decay, least)?;
                }
                heads_of(g, decay, heads)
            }
        }
    }
}

impl FeatureMap {
    fn apply(self, g: &mut Builder, scope: &str, x: Var) -> GraphResult<Var> {
        let zero = g.constant_like(x, 0.0)?;
        match self {
            Self::Identity => Ok(x),
            Self::Relu => g.max(x, zero),
            Self::Elu => {
                // Of what is not below zero the exponential is one.
                let above = g.max(x, zero)?;
                let below = g.min(x, zero)?;
                let below = g.exp(below)?;
                g.add(above, below)
            }
            Self::Product => g.scoped(scope, |g| {
                let width = g.ty(x)?.shape.last().as_const().unwrap_or_default();
                let [a, b] = ["layer1", "layer2"].map(|name| linear(g, name, x, width, true));
                g.mul(a?, b?)
            }),
        }
    }
}

deref_to_decoder!(LinearAttentionConfig);

const TENSORS: TensorTable = TensorTable {
    embedding: TensorName { scope: "model.embeddings", cut: None, gguf: None },
    attention: MIXER,
    norm: TensorName { scope: "model.norm", cut: None, gguf: None },
    head: TensorName::planned("lm_head", Cut::Vocabulary),
    layer: &[GATED_MLP],
    ..LLAMA_TENSORS
};

/// How RetNet is registered.
pub(super) static RETNET: FamilyDefinition = FamilyDefinition {
    name: "retnet",
    model_type: "retnet",
    class: Some("RetNetForCausalLM"),
    harmless: &[LINEAR_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(LinearAttentionConfig::read_retnet(f)?))),
    tensors: TENSORS,
    gguf: None,
};

/// How gated linear attention is registered.
pub(super) static GLA: FamilyDefinition = FamilyDefinition {
    name: "gla",
    model_type: "gla",
    class: Some("GLAForCausalLM"),
    harmless: &[LINEAR_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(LinearAttentionConfig::read_gla(f)?))),
    tensors: TENSORS,
    gguf: None,
};

/// How linear attention is registered.
pub(super) static LINEAR_ATTENTION: FamilyDefinition = FamilyDefinition {
    name: "linear_attn",
    model_type: "linear_attn",
    class: Some("LinearAttentionForCausalLM"),
    harmless: &[LINEAR_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(LinearAttentionConfig::read_plain(f)?))),
    tensors: TENSORS,
    gguf: None,
};

impl DecoderFamily for LinearAttentionConfig {
    fn states(&self, _index: usize, _options: &BuildOptions) -> LayerStates {
        LayerStates::none().with_recurrence(MIXER, [self.num_attention_heads, self.key, self.value])
    }

    fn parts(&self) -> Vec<Part> {
        let mut names: Vec<String> = QKV.iter().chain(&["o_proj"]).map(|name| format!("{name}.weight")).collect();
        names.push(format!("{}.weight", self.norm_scope()));
        if !matches!(self.mixer, LinearMixer::Plain(_)) {
            names.push("g_proj.weight".into());
        }
        match self.mixer {
            LinearMixer::Gated { .. } => {
                names.extend(["gk_proj.0.weight", "gk_proj.1.weight", "gk_proj.1.bias"].map(str::to_owned));
            }
            LinearMixer::Plain(FeatureMap::Product) => {
                for map in
                    ["feature_map_q.layer1", "feature_map_q.layer2", "feature_map_k.layer1", "feature_map_k.layer2"]
                {
                    names.extend(["weight", "bias"].map(|kind| format!("{map}.{kind}")));
                }
            }
            _ => {}
        }
        let part = |name: &String| Part {
            of: format!("model.layers.*.attn.{name}"),
            name: format!("model.layers.*.{MIXER}.{name}"),
            transposed: false,
            rows: None,
        };
        names.iter().map(part).collect()
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = ResidualHalf::before(self.norm(), "attn_norm").add(g, x, MIXER, |g, x| self.mix(g, x, at))?;
        ResidualHalf::before(self.norm(), "mlp_norm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }
}
