//! Gemma 4 (text; Google 2026, the released model card and code): Gemma 3's layers with wider heads where a layer sees everything,
//! whose values may be its keys, and in the small models an embedding of the token for each layer and layers that attend to keys and
//! values of earlier ones; in others a mixture of experts beside each MLP.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::ops::{Gelu, Rope, rope_frequencies};
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Var};
use serde_json::{Map, Value as Json};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear, scaled, unit_rms, weight};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{ExpertsConfig, MAX_SIZE, dispatch, router};
use super::gemma4_gguf;
use super::layer_states::LayerStates;
use super::per_layer::{PER_LAYER, PER_LAYER_MODEL, PerLayerInputs, SHARING, SharedKeys, queries};
use super::tensors::{
    ATTENTION, Cut, GATED_MLP, GEMMA_INPUT_NORMS, LLAMA_TENSORS, OUTPUT_NORMS, QK_NORMS, QKV, TensorName, TensorTable,
};
use crate::config::{
    DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_HEADS, MAX_POSITIONS, REMEDY, layer_windows,
};
use crate::error::Result;
use crate::model::{BuildOptions, symbols};

/// Every size and switch of a Gemma 4 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Config {
    /// What every decoder has; its heads are those of layers with a window, the others those of layers that see everything.
    pub decoder: DecoderConfig,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// The base of rotations in layers that see everything, and the share of each head that turns: the first pairs, at the
    /// frequencies that they have where all turn.
    pub global_rope: (f64, f64),
    /// The base of those in layers with a window.
    pub local_theta: f64,
    /// Are keys the values too, before norm and rotation, in layers that see everything?
    pub keys_are_values: bool,
    /// Embeddings of tokens for each layer.
    pub per_layer: Option<PerLayerInputs>,
    /// Layers that attend to keys and values of earlier ones.
    pub shared_keys: SharedKeys,
    /// Experts beside each MLP.
    pub experts: Option<ExpertsConfig>,
    /// Are MLPs of layers with keys of earlier ones twice as wide?
    pub double_mlp: bool,
    /// Logits stay within this, by a hyperbolic tangent.
    pub final_logit_softcapping: Option<f64>,
    /// Do the projections of attention have biases?
    pub attention_bias: bool,
}

/// What gates go through.
const GATE: MlpGate = MlpGate::Gelu(Gelu::Tanh);
/// Every so manieth layer sees everything, where the file does not say.
const PATTERN: usize = 6;

impl Gemma4Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys { tie_word_embeddings: true, ..DECODER_KEYS };
        f.needs(&["num_key_value_heads", "head_dim", "sliding_window"])?;
        f.must_be("hidden_activation", "gelu_pytorch_tanh")?;
        if f.optional::<&str>("use_bidirectional_attention")?.is_some_and(|tokens| tokens != "vision") {
            let remedy = "Ridge runs models whose texts are causal";
            return Err(f.wrong("use_bidirectional_attention", "is not supported", remedy));
        }
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let window = f.optional_size("sliding_window", MAX_POSITIONS)?;
        let mut windows = layer_windows(f, decoder.num_hidden_layers, window, |i| !(i + 1).is_multiple_of(PATTERN))?;
        // Whatever the file says, the last layer sees everything.
        windows.iter_mut().rev().take(1).for_each(|window| *window = None);
        let keys_are_values = f.optional("attention_k_eq_v")?.unwrap_or(false);
        let (global_rope, local_theta) = read_ropes(f)?;
        decoder.other_heads = Some(read_global_heads(f, &decoder, &windows, keys_are_values)?);
        Ok(Self {
            global_rope,
            local_theta,
            keys_are_values,
            per_layer: PerLayerInputs::read(f)?,
            shared_keys: SharedKeys::read(f, &windows, 0)?,
            windows,
            experts: read_experts(f)?,
            double_mlp: f.optional("use_double_wide_mlp")?.unwrap_or(false),
            final_logit_softcapping: f.optional_positive("final_logit_softcapping")?,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            decoder,
        })
    }

    /// Key and value heads of a layer with this window, and their width.
    fn heads(&self, window: Option<usize>) -> [usize; 2] {
        let local = [self.num_key_value_heads, self.head_dim];
        if window.is_some() { local } else { self.other_heads.unwrap_or(local) }
    }

    /// The rotation in a layer with this window.
    fn rope(&self, window: Option<usize>) -> Rope {
        let [_, dim] = self.heads(window);
        let inv_freq = match window {
            Some(_) => rope_frequencies(self.local_theta, dim),
            None => {
                let (theta, share) = self.global_rope;
                let turned = (share * dim as f64 / 2.0) as usize;
                let all = rope_frequencies(theta, dim);
                all.into_iter().enumerate().map(|(i, freq)| if i < turned { freq } else { 0.0 }).collect()
            }
        };
        Rope { inv_freq: inv_freq.into(), scale: 1.0 }
    }

    /// What experts make of `x`, `[tokens, hidden]`, which they and their router normalise each by itself.
    fn mixture(&self, g: &mut Builder, x: Var, e: &ExpertsConfig) -> GraphResult<Var> {
        let (tokens, dtype) = (Dim::sym(symbols::TOKENS), g.ty(x)?.dtype);
        let chosen: GraphResult<[Var; 2]> = g.scoped("router", |g| {
            let y = unit_rms(g, x, self.norm_eps)?;
            let factors = weight(g, "scale", [self.hidden_size])?;
            let factors = g.cast(factors, dtype)?;
            let y = g.mul(y, factors)?;
            let y = scaled(g, y, 1.0 / (self.hidden_size as f64).sqrt())?;
            let logits = linear(g, "proj", y, e.experts, false)?;
            let (ids, share) = g.moe_router(logits, None, router(e))?;
            let of_experts = weight(g, "per_expert_scale", [e.experts])?;
            let of_experts = g.cast(of_experts, DType::F32)?;
            let each = g.reshape(ids, Shape(vec![tokens.clone() * e.top_k as i64]))?;
            let factors = g.gather(of_experts, each, 0)?;
            let factors = g.reshape(factors, Shape(vec![tokens, e.top_k.into()]))?;
            Ok([ids, g.mul(share, factors)?])
        });
        let h = self.norm().apply(g, "pre_feedforward_layernorm_2", x)?;
        let y = dispatch(g, h, e, chosen?, GATE)?;
        self.norm().apply(g, "post_feedforward_layernorm_2", y)
    }

    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (norm, bias) = (self.norm(), self.attention_bias);
        let scores = AttentionScores { scale: 1.0, rope: Some(self.rope(at.window)), ..at.scores() };
        let q = queries(g, x, at, norm, bias)?;
        let a = if at.kind == SHARING {
            at.attend_lent(g, q, &scores)?
        } else {
            let [_, heads, dim] = at.cache;
            let [_, keys, values] = QKV;
            let project = |g: &mut Builder, name| {
                let y = linear(g, name, x, heads * dim, bias)?;
                at.split_heads(g, y)
            };
            let k = project(g, keys)?;
            let v = if self.keys_are_values && at.window.is_none() { k } else { project(g, values)? };
            let (k, v) = (norm.apply(g, "k_norm", k)?, unit_rms(g, v, self.norm_eps)?);
            at.lend([k, v]);
            at.attend(g, [q, k, v], &scores)?
        };
        linear(g, "o_proj", a, self.hidden_size, bias)
    }
}

/// The experts beside each MLP, if there are any.
fn read_experts(f: &mut Fields<'_>) -> Result<Option<ExpertsConfig>> {
    const KEYS: [&str; 3] = ["num_experts", "top_k_experts", "moe_intermediate_size"];
    if !f.optional("enable_moe_block")?.unwrap_or(false) {
        f.harmless(&KEYS);
        return Ok(None);
    }
    let [count, top_k, inner] = KEYS.map(|key| f.size(key, MAX_SIZE));
    let experts = ExpertsConfig::softmax(count?, top_k?, inner?);
    if experts.top_k > experts.experts {
        return Err(f.wrong("top_k_experts", format!("is above num_experts = {}", experts.experts), REMEDY));
    }
    Ok(Some(experts))
}

/// The base and share of rotations in layers that see everything, and the base in the others.
fn read_ropes(f: &mut Fields<'_>) -> Result<((f64, f64), f64)> {
    let Some(mut both) = f.object("rope_parameters")? else { return Ok(((1_000_000.0, 0.25), 10_000.0)) };
    let mut global = both.required_object("full_attention")?;
    // Without it all of a head turns, at other frequencies.
    global.required::<&str>("rope_type")?;
    global.must_be("rope_type", "proportional")?;
    global.must_be("factor", 1)?;
    let share = global.optional_positive("partial_rotary_factor")?.unwrap_or(1.0);
    if share > 1.0 {
        return Err(global.wrong("partial_rotary_factor", "is above 1", REMEDY));
    }
    let theta = global.positive("rope_theta")?;
    global.finish()?;
    let mut local = both.required_object("sliding_attention")?;
    local.must_be("rope_type", "default")?;
    let local_theta = local.positive("rope_theta")?;
    local.finish()?;
    both.finish()?;
    Ok(((theta, share), local_theta))
}

/// Key and value heads of layers that see everything, and their width: keys of the whole, or in the newer spelling an object for
/// each of these layers. The spellings may not contradict each other.
fn read_global_heads(
    f: &mut Fields<'_>,
    decoder: &DecoderConfig,
    windows: &[Option<usize>],
    keys_are_values: bool,
) -> Result<[usize; 2]> {
    const KEYS: [&str; 2] = ["num_global_key_value_heads", "global_head_dim"];
    let of_all = [f.optional_size(KEYS[0], MAX_HEADS)?, f.optional_size(KEYS[1], MAX_HEAD_DIM)?];
    let layers = f.optional::<&Map<String, Json>>(LAYERS)?;
    let (heads, source) = match layers {
        Some(layers) => (read_layer_heads(f, decoder, windows, layers)?, LAYERS),
        // Null is no layer that differs.
        None if f.has(LAYERS) => ([decoder.num_key_value_heads, decoder.head_dim], LAYERS),
        None => {
            let kv_heads = of_all[0].filter(|_| keys_are_values).unwrap_or(decoder.num_key_value_heads);
            ([kv_heads, of_all[1].unwrap_or(512)], "num_key_value_heads without attention_k_eq_v")
        }
    };
    let [kv_heads, dim] = heads;
    let cannot_be = [
        kv_heads == 0 || !decoder.num_attention_heads.is_multiple_of(kv_heads),
        dim == 0 || !dim.is_multiple_of(2) || dim > MAX_HEAD_DIM,
    ];
    for nth in [0, 1] {
        if of_all[nth].is_some_and(|given| given != heads[nth]) {
            return Err(f.wrong(KEYS[nth], format!("contradicts the {} of {source}", heads[nth]), REMEDY));
        }
        if cannot_be[nth] {
            let problem = format!("gives global layers {kv_heads} heads of keys, {dim} wide, which cannot be");
            return Err(f.wrong(if layers.is_some() { LAYERS } else { KEYS[nth] }, problem, REMEDY));
        }
    }
    Ok(heads)
}

/// The same of the object `layers`, which has one of sizes for each layer that differs from the usual.
fn read_layer_heads(
    f: &Fields<'_>,
    decoder: &DecoderConfig,
    windows: &[Option<usize>],
    layers: &Map<String, Json>,
) -> Result<[usize; 2]> {
    let one = |layer: usize| {
        let size = |key: &str, usual: usize| match layers.get(&layer.to_string()).and_then(|of| of.get(key)) {
            Some(size) => size.as_u64().and_then(|size| usize::try_from(size).ok()),
            None => Some(usual),
        };
        Some([size(SIZES[0], decoder.num_key_value_heads)?, size(SIZES[1], decoder.head_dim)?])
    };
    let global: Vec<_> = (0..windows.len()).filter(|layer| windows[*layer].is_none()).map(one).collect();
    let alike = global.iter().all(|heads| *heads == global[0]);
    let known = |of: &Json| of.as_object().is_some_and(|of| of.keys().all(|key| SIZES.contains(&key.as_str())));
    let in_place = layers
        .iter()
        .all(|(layer, of)| known(of) && layer.parse().is_ok_and(|layer: usize| windows.get(layer) == Some(&None)));
    match global.first().copied().flatten() {
        Some(heads) if alike && in_place => Ok(heads),
        _ => {
            let problem = "is not one head_dim and num_key_value_heads for all layers that see everything";
            Err(f.wrong(LAYERS, problem, "Ridge runs models whose global layers are alike"))
        }
    }
}

/// The object of layers whose sizes differ, and these sizes.
const LAYERS: &str = "per_layer_config";
const SIZES: [&str; 2] = ["num_key_value_heads", "head_dim"];
/// The widest that heads of global layers are.
const MAX_HEAD_DIM: usize = 1 << 12;

deref_to_decoder!(Gemma4Config);

/// The projections of experts.
const EXPERTS: &[TensorName] = &[
    TensorName::cut("experts.gate_proj", Cut::Columns, "ffn_gate_exps"),
    TensorName::cut("experts.up_proj", Cut::Columns, "ffn_up_exps"),
    TensorName::cut("experts.down_proj", Cut::Terms, "ffn_down_exps"),
    TensorName::whole("router.proj", "ffn_gate_inp"),
    TensorName::whole("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    TensorName::whole("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    TensorName::whole("post_feedforward_layernorm_2", "post_ffw_norm_2"),
];

/// How it is registered.
pub(super) static GEMMA4: FamilyDefinition = FamilyDefinition {
    name: "gemma4",
    model_type: "gemma4_text",
    class: Some("Gemma4ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Gemma4Config::read(f)?))),
    tensors: TensorTable {
        layer: &[ATTENTION, QK_NORMS, GATED_MLP, PER_LAYER, EXPERTS, OUTPUT_NORMS, GEMMA_INPUT_NORMS],
        others: PER_LAYER_MODEL,
        ..LLAMA_TENSORS
    },
    gguf: Some(gemma4_gguf::GEMMA4),
};

impl DecoderFamily for Gemma4Config {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn kind(&self, index: usize) -> &'static str {
        if self.shared_keys.has(index) { SHARING } else { "" }
    }

    fn states(&self, index: usize, _options: &BuildOptions) -> LayerStates {
        self.shared_keys.states(index)
    }

    fn cache_shape(&self, index: usize) -> [usize; 3] {
        let [heads, dim] = self.heads(self.window(index));
        [2, heads, dim]
    }

    fn owner(&self, index: usize, name: &str) -> usize {
        self.shared_keys.owner(&self.windows, index, name)
    }

    fn embed(&self, g: &mut Builder, x: Var, inputs: &mut LayerInputs) -> GraphResult<Var> {
        let x = scaled(g, x, (self.hidden_size as f64).sqrt())?;
        if let Some(per_layer) = self.per_layer {
            per_layer.embed(g, x, [self.num_hidden_layers, self.vocab_size], self.norm(), inputs)?;
        }
        Ok(x)
    }

    fn before_layer(&self, g: &mut Builder, index: usize, inputs: &mut LayerInputs) -> GraphResult<()> {
        self.per_layer.map_or(Ok(()), |per_layer| per_layer.before_layer(g, index, inputs))
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let (before, after) = (Some("input_layernorm"), Some("post_attention_layernorm"));
        let x = ResidualHalf { norm, before, after }.add(g, x, "self_attn", |g, x| self.attention(g, x, at))?;
        let wide = if self.double_mlp && at.kind == SHARING { 2 } else { 1 };
        let inner = wide * self.intermediate_size;
        let h = norm.apply(g, "pre_feedforward_layernorm", x)?;
        let mut h = g.scoped("mlp", |g| gated_mlp(g, h, inner, GATE, false))?;
        if let Some(experts) = &self.experts {
            h = norm.apply(g, "post_feedforward_layernorm_1", h)?;
            let y = self.mixture(g, x, experts)?;
            h = g.add(h, y)?;
        }
        let h = norm.apply(g, "post_feedforward_layernorm", h)?;
        let mut x = g.add(x, h)?;
        if let Some(per_layer) = self.per_layer {
            let own = per_layer.gate(g, x, at, norm)?;
            x = g.add(x, own)?;
        }
        let factor = weight(g, "layer_scalar", [1])?;
        let factor = g.cast(factor, g.ty(x)?.dtype)?;
        g.mul(x, factor)
    }

    fn logit_softcap(&self) -> Option<f64> {
        self.final_logit_softcapping
    }

    fn unused(&self, _drafts: bool) -> Vec<String> {
        self.shared_keys.unused(self.num_hidden_layers)
    }

    fn parts(&self) -> Vec<Part> {
        let part = |of: &str, name: &str, rows: Option<Rows>| Part {
            of: format!("model.layers.*.experts.{of}"),
            name: format!("model.layers.*.experts.{name}.weight"),
            transposed: false,
            rows,
        };
        let Some(ExpertsConfig { experts, intermediate_size: inner, .. }) = self.experts else { return Vec::new() };
        let half = |first: usize| Some(Rows { first, len: inner, stride: 2 * inner, blocks: experts });
        vec![
            part("gate_up_proj", "gate_proj", half(0)),
            part("gate_up_proj", "up_proj", half(inner)),
            part("down_proj", "down_proj", None),
        ]
    }
}
