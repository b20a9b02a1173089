//! Gemma 3n (text; Google 2025, the released model card and code). Its residual is several streams, which each layer predicts
//! and corrects from what it computes of one (AltUp: Baykal et al. 2023, "Alternating Updates for Efficient Transformers",
//! section 3); a low-rank projection runs beside attention (LAuReL: Menghani et al. 2024, "Learned Augmented Residual
//! Layer", section 2); each layer has an embedding of the token of its own; and the last layers attend to keys and values of
//! earlier ones.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Var};
use serde_json::{Map, Value as Json};

use super::blocks::{MlpGate, NormKind, ResidualHalf, linear, open, scaled, unit_rms, weight};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::gguf_mapping::{GgufLayout, GgufMapping, GgufMetadata, GgufTensorName, LAYERS_KEY};
use super::layer_states::LayerStates;
use super::per_layer::{self, PER_LAYER, PER_LAYER_MODEL, PerLayerInputs, SHARING, SharedKeys, queries, stream};
use super::tensors::{
    ATTENTION, Cut, GATED_MLP, GEMMA_INPUT_NORMS, LLAMA_TENSORS, OUTPUT_NORMS, QK_NORMS, QKV, TensorName, TensorTable,
};
use crate::config::{
    DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_INTERMEDIATE, MAX_POSITIONS, REMEDY, ROPE_KEYS, RopeConfig,
    RopeKeys, layer_windows, read_two_ropes,
};
use crate::error::Result;
use crate::model::{BuildOptions, symbols};

/// Every size and switch of a Gemma 3n model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma3nConfig {
    /// What every decoder has; its rotation is that of the layers that see everything.
    pub decoder: DecoderConfig,
    /// The rotation in layers with a window.
    pub local_rope: RopeConfig,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// Embeddings of tokens for each layer.
    pub per_layer: PerLayerInputs,
    /// Layers that attend to keys and values of earlier ones.
    pub shared_keys: SharedKeys,
    /// Streams of the residual.
    pub streams: usize,
    /// The stream that layers compute on.
    pub active: usize,
    /// Is the corrected active stream multiplied by a weight before it opens the layer's embedding?
    pub corrected_scale: bool,
    /// Rank of the projection beside attention.
    pub laurel_rank: usize,
    /// Share of the gate's elements that each layer's MLP closes, in `0.0..1.0`, if they are distributed normally.
    pub sparsity: Vec<f64>,
    /// Logits stay within this, by a hyperbolic tangent, if there is a limit.
    pub final_logit_softcapping: Option<f64>,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
}

/// Every so manieth layer sees everything, where the file does not say.
const PATTERN: usize = 5;
/// So many layers at the beginning close this share of their gates, where the file does not say.
const SPARSE: (usize, f64) = (10, 0.95);
/// Below this a stream's mean square does not count as its magnitude.
const LEAST_SQUARE: f64 = 1e-5;
/// The value by which a layer knows what its gates are compared with, in standard deviations.
const CUTOFF: &str = "cutoff";

impl Gemma3nConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            intermediate_size: "",
            intermediate_factor: Some(1),
            tie_word_embeddings: true,
            ..DECODER_KEYS
        };
        const GLOBAL: RopeKeys = RopeKeys { default_theta: 1_000_000.0, ..ROPE_KEYS };
        const LOCAL: RopeKeys = RopeKeys { theta: "rope_local_base_freq", ..ROPE_KEYS };
        f.needs(&["num_key_value_heads", "head_dim", "sliding_window"])?;
        f.must_be("hidden_activation", "gelu_pytorch_tanh")?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.intermediate_size = intermediate_size(f, decoder.num_hidden_layers)?;
        let (global, local_rope) = read_two_ropes(f, decoder.rope_sizes(), &GLOBAL, &LOCAL)?;
        decoder.rope = Some(global);
        let layers = decoder.num_hidden_layers;
        let window = f.optional_size("sliding_window", MAX_POSITIONS)?;
        let windows = layer_windows(f, layers, window, |i| !(i + 1).is_multiple_of(PATTERN))?;
        let Some(per_layer) = PerLayerInputs::read(f)? else {
            return Err(f.wrong("hidden_size_per_layer_input", "is 0", REMEDY));
        };
        let streams = f.optional_size("altup_num_inputs", 64)?.unwrap_or(4);
        let active = f.count("altup_active_idx")?.unwrap_or(0) as usize;
        if streams < 2 {
            return Err(f.wrong(
                "altup_num_inputs",
                "is below 2",
                "Ridge runs models whose residual is several streams",
            ));
        }
        if active >= streams {
            return Err(f.wrong("altup_active_idx", format!("is not below altup_num_inputs = {streams}"), REMEDY));
        }
        Ok(Self {
            local_rope,
            shared_keys: SharedKeys::read(f, &windows, 15)?,
            windows,
            per_layer,
            streams,
            active,
            corrected_scale: f.optional("altup_correct_scale")?.unwrap_or(true),
            laurel_rank: f.optional_size("laurel_rank", MAX_SIZE)?.unwrap_or(64),
            sparsity: sparsity(f, layers)?,
            final_logit_softcapping: soft_cap(f)?,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            decoder,
        })
    }

    /// What a router says of `x`, `[tokens, hidden]`, for each stream: `[tokens, streams]`.
    fn modalities(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let y = self.norm().apply(g, "router_norm", x)?;
        let y = scaled(g, y, 1.0 / self.hidden_size as f64)?;
        let routed = linear(g, "modality_router", y, self.streams, false)?;
        g.tanh(routed)
    }

    /// The streams `x`, `[tokens, streams, hidden]`, each with a sum of all that the active one weighs.
    fn predict(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let (n, dtype) = (self.streams, g.ty(x)?.dtype);
        let active = stream(g, x, self.active)?;
        let routed = self.modalities(g, active)?;
        let weights = linear(g, "prediction_coefs", routed, n * n, false)?;
        let weights = g.reshape(weights, Shape(vec![Dim::sym(symbols::TOKENS), n.into(), n.into()]))?;
        let sums = g.matmul(weights, x, false, false, dtype)?;
        g.add(sums, x)
    }

    /// The predicted streams, each with a share of what the layer's output `y`, `[tokens, hidden]`, has beyond the active one.
    fn correct(&self, g: &mut Builder, predicted: Var, y: Var) -> GraphResult<Var> {
        let tokens = Dim::sym(symbols::TOKENS);
        let routed = self.modalities(g, y)?;
        let shares = linear(g, "correction_coefs", routed, self.streams, false)?;
        let one = g.constant_like(shares, 1.0)?;
        let shares = g.add(shares, one)?;
        let shares = g.reshape(shares, Shape(vec![tokens.clone(), self.streams.into(), 1.into()]))?;
        let active = stream(g, predicted, self.active)?;
        let beyond = g.sub(y, active)?;
        let beyond = g.reshape(beyond, Shape(vec![tokens, 1.into(), self.hidden_size.into()]))?;
        let beyond = g.mul(beyond, shares)?;
        g.add(predicted, beyond)
    }

    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let rope = if at.window.is_some() { Some(at.rope(&self.local_rope)) } else { at.scores().rope };
        let scores = AttentionScores { scale: 1.0, rope, ..at.scores() };
        let a = if at.kind.ends_with(SHARING) {
            let q = queries(g, x, at, norm, self.attention_bias)?;
            at.attend_lent(g, q, &scores)?
        } else {
            let [q, k, v] = at.project(g, x, QKV, self.attention_bias)?;
            let (q, k) = (norm.apply(g, "q_norm", q)?, norm.apply(g, "k_norm", k)?);
            let v = unit_rms(g, v, self.norm_eps)?;
            at.lend([k, v]);
            at.attend(g, [q, k, v], &scores)?
        };
        linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
    }

    fn mlp(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let mut gate = linear(g, "gate_proj", x, self.intermediate_size, false)?;
        if at.kind.starts_with(SPARSE_KIND) {
            let cutoff = at.value(g, CUTOFF)?;
            gate = above(g, gate, cutoff)?;
        }
        let up = linear(g, "up_proj", x, self.intermediate_size, false)?;
        let h = open(g, gate, up, MlpGate::Gelu(Gelu::Tanh))?;
        linear(g, "down_proj", h, self.hidden_size, false)
    }
}

/// What is of `x`, `[tokens, width]`, above its mean by more than `cutoff` standard deviations; 0 elsewhere.
fn above(g: &mut Builder, x: Var, cutoff: Var) -> GraphResult<Var> {
    let ty = g.ty(x)?.clone();
    let mean_of = |g: &mut Builder, x: Var| {
        let sum = g.reduce_sum(x, 1)?;
        g.div_by_dim(sum, &ty.shape.last())
    };
    let wide = g.cast(x, DType::F32)?;
    let mean = mean_of(g, wide)?;
    let off = g.sub(wide, mean)?;
    let square = g.mul(off, off)?;
    let variance = mean_of(g, square)?;
    let deviation = g.sqrt(variance)?;
    let bound = g.mul(deviation, cutoff)?;
    let beyond = g.sub(off, bound)?;
    let zero = g.constant(DType::F32, 0.0)?;
    let beyond = g.max(beyond, zero)?;
    g.cast(beyond, ty.dtype)
}

/// The f32 root of the mean square of `x`, `[tokens, width]`: `[tokens, 1]`. The mean square is `least` at least.
fn magnitude(g: &mut Builder, x: Var, least: f64) -> GraphResult<Var> {
    let width = g.ty(x)?.shape.last();
    let x = g.cast(x, DType::F32)?;
    let square = g.mul(x, x)?;
    let sum = g.reduce_sum(square, 1)?;
    let mean = g.div_by_dim(sum, &width)?;
    let least = g.constant(DType::F32, least)?;
    let mean = g.max(mean, least)?;
    g.sqrt(mean)
}

/// `x` with the magnitude `target`, f32 `[tokens, 1]`.
fn with_magnitude(g: &mut Builder, x: Var, target: Var) -> GraphResult<Var> {
    let dtype = g.ty(x)?.dtype;
    let own = magnitude(g, x, LEAST_SQUARE)?;
    let factor = g.div(target, own)?;
    let x = g.cast(x, DType::F32)?;
    let y = g.mul(x, factor)?;
    g.cast(y, dtype)
}

/// The width of every layer's MLP: a number, or a list with one for each layer.
fn intermediate_size(f: &mut Fields<'_>, layers: usize) -> Result<usize> {
    const KEY: &str = "intermediate_size";
    if !f.is_list(KEY) {
        return f.size(KEY, MAX_INTERMEDIATE);
    }
    let sizes: Vec<u64> = f.required(KEY)?;
    match sizes.first() {
        Some(first) if (1..=MAX_INTERMEDIATE as u64).contains(first) && sizes == vec![*first; layers] => {
            Ok(*first as usize)
        }
        _ => Err(f.wrong(
            KEY,
            format!("is not one width, {layers} times"),
            "Ridge runs models whose layers have MLPs of one width",
        )),
    }
}

/// The limit of logits: null is none, and an absent key the family's.
fn soft_cap(f: &mut Fields<'_>) -> Result<Option<f64>> {
    const KEY: &str = "final_logit_softcapping";
    let cap = f.optional_positive(KEY)?;
    Ok(if f.has(KEY) { cap } else { Some(30.0) })
}

/// The share of its gate's elements that each layer closes.
fn sparsity(f: &mut Fields<'_>, layers: usize) -> Result<Vec<f64>> {
    const KEY: &str = "activation_sparsity_pattern";
    let Some(shares) = f.optional::<Vec<f64>>(KEY)? else {
        let (sparse, share) = SPARSE;
        return Ok((0..layers).map(|layer| if layers > sparse && layer < sparse { share } else { 0.0 }).collect());
    };
    if shares.len() != layers {
        return Err(f.wrong(KEY, format!("has {} shares for {layers} layers", shares.len()), REMEDY));
    }
    match shares.iter().find(|share| !(0.0..1.0).contains(*share)) {
        Some(share) => Err(f.wrong(KEY, format!("has {share}, which is outside 0.0..1.0"), REMEDY)),
        None => Ok(shares),
    }
}

/// The number that a normal variable is below with probability `share`, in `0.0..1.0`, by Newton's method.
fn normal_quantile(share: f64) -> f64 {
    use std::f64::consts::{FRAC_1_SQRT_2, TAU};
    let (mut low, mut high) = (-40.0, 40.0);
    let mut x = 0.0_f64;
    for _ in 0..200 {
        let off = 0.5 * libm::erfc(-x * FRAC_1_SQRT_2) - share;
        if off > 0.0 {
            high = x;
        } else {
            low = x;
        }
        let next = x - off * TAU.sqrt() * (0.5 * x * x).exp();
        // Far out a step of Newton's leaves what is known to hold the root.
        let next = if next > low && next < high { next } else { 0.5 * (low + high) };
        if next == x {
            break;
        }
        x = next;
    }
    x
}

deref_to_decoder!(Gemma3nConfig);

/// Layers whose gates are closed are of a kind that begins with this.
const SPARSE_KIND: &str = "sparse";

/// The projection beside attention.
const LAUREL: &[TensorName] = &[
    TensorName::cut("laurel.linear_left", Cut::Columns, "laurel_l"),
    TensorName::cut("laurel.linear_right", Cut::Terms, "laurel_r"),
    TensorName::whole("laurel.post_laurel_norm", "laurel_post_norm"),
];

/// The weights of streams.
const ALTUP: &[TensorName] = &[
    TensorName::whole("altup.modality_router", "altup_router"),
    TensorName::whole("altup.router_norm", "altup_router_norm"),
    TensorName::whole("altup.prediction_coefs", "altup_predict_coef"),
    TensorName::whole("altup.correction_coefs", "altup_correct_coef"),
];

/// What GGUF stacks, of four streams, and the factor of the corrected stream.
const GGUF_TENSORS: &[GgufTensorName] = &[
    GgufTensorName::new(
        "altup_proj.weight",
        &["model.altup_projections.0.weight", "model.altup_projections.1.weight", "model.altup_projections.2.weight"],
        GgufLayout::Stacked,
    ),
    GgufTensorName::new(
        "altup_unembd_proj.weight",
        &[
            "model.altup_unembed_projections.0.weight",
            "model.altup_unembed_projections.1.weight",
            "model.altup_unembed_projections.2.weight",
        ],
        GgufLayout::Stacked,
    ),
    GgufTensorName::new(
        "blk.*.altup_correct_scale.weight",
        &["model.layers.*.altup.correct_output_scale"],
        GgufLayout::Same,
    ),
];

/// Layers with keys of their own, where a GGUF file does not say.
const GGUF_OWN_KEYS: u64 = 20;

/// Adds what only this family has of a GGUF file, which has the gates' cutoffs and not the shares of what they close.
fn read_gguf(file: &dyn GgufMetadata, to: &mut Map<String, Json>) -> Result<()> {
    let layers = file.int(LAYERS_KEY)?.unwrap_or_default();
    per_layer::read_gguf(file, to, layers.saturating_sub(GGUF_OWN_KEYS))?;
    let local = file.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
    to.insert("rope_local_base_freq".into(), local.into());
    for (theirs, ours) in [("altup.num_inputs", "altup_num_inputs"), ("altup.active_idx", "altup_active_idx")] {
        if let Some(value) = file.int(theirs)? {
            to.insert(ours.into(), value.into());
        }
    }
    to.insert("altup_correct_scale".into(), file.has("blk.0.altup_correct_scale.weight").into());
    if let Some(rank) = file.rows("blk.0.laurel_l.weight") {
        to.insert("laurel_rank".into(), rank.into());
    }
    if let Some(cutoffs) = file.list("activation_sparsity_scale")? {
        let share = |cutoff: f64| 0.5 * libm::erfc(-cutoff * std::f64::consts::FRAC_1_SQRT_2);
        to.insert("activation_sparsity_pattern".into(), cutoffs.into_iter().map(share).collect());
    }
    Ok(())
}

/// How it is registered.
pub(super) static GEMMA3N: FamilyDefinition = FamilyDefinition {
    name: "gemma3n",
    model_type: "gemma3n_text",
    class: Some("Gemma3nForCausalLM"),
    // Bounds of AltUp's weights in training.
    harmless: &[&["altup_coef_clip"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Gemma3nConfig::read(f)?))),
    tensors: TensorTable {
        layer: &[ATTENTION, QK_NORMS, GATED_MLP, LAUREL, ALTUP, PER_LAYER, OUTPUT_NORMS, GEMMA_INPUT_NORMS],
        others: PER_LAYER_MODEL,
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping { tensors: GGUF_TENSORS, read: read_gguf, ..GgufMapping::new("gemma3n") }),
};

impl DecoderFamily for Gemma3nConfig {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn kind(&self, index: usize) -> &'static str {
        match (self.sparsity[index] > 0.0, self.shared_keys.has(index)) {
            (false, false) => "",
            (true, false) => SPARSE_KIND,
            (false, true) => SHARING,
            (true, true) => "sparse_sharing",
        }
    }

    fn states(&self, index: usize, _options: &BuildOptions) -> LayerStates {
        self.shared_keys.states(index)
    }

    fn owner(&self, index: usize, name: &str) -> usize {
        self.shared_keys.owner(&self.windows, index, name)
    }

    fn embed(&self, g: &mut Builder, x: Var, inputs: &mut LayerInputs) -> GraphResult<Var> {
        let x = scaled(g, x, (self.hidden_size as f64).sqrt())?;
        self.per_layer.embed(g, x, [self.num_hidden_layers, self.vocab_size], self.norm(), inputs)?;
        let target = magnitude(g, x, 0.0)?;
        let mut streams = vec![x];
        for nth in 1..self.streams {
            let y = linear(g, &format!("model.altup_projections.{}", nth - 1), x, self.hidden_size, false)?;
            streams.push(with_magnitude(g, y, target)?);
        }
        for x in &mut streams {
            *x = g.reshape(*x, Shape(vec![Dim::sym(symbols::TOKENS), 1.into(), self.hidden_size.into()]))?;
        }
        g.concat(&streams, 1)
    }

    fn before_layer(&self, g: &mut Builder, index: usize, inputs: &mut LayerInputs) -> GraphResult<()> {
        if self.sparsity[index] > 0.0 {
            let cutoff = g.constant(DType::F32, normal_quantile(self.sparsity[index]))?;
            inputs.set(CUTOFF, cutoff);
        }
        self.per_layer.before_layer(g, index, inputs)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let predicted = g.scoped("altup", |g| self.predict(g, x))?;
        let active = stream(g, predicted, self.active)?;
        let h = norm.apply(g, "input_layernorm", active)?;
        let beside = g.scoped("laurel", |g| {
            let low = linear(g, "linear_left", h, self.laurel_rank, false)?;
            let y = linear(g, "linear_right", low, self.hidden_size, false)?;
            let y = norm.apply(g, "post_laurel_norm", y)?;
            g.add(h, y)
        })?;
        let a = g.scoped("self_attn", |g| self.attention(g, h, at))?;
        let a = norm.apply(g, "post_attention_layernorm", a)?;
        let y = g.add(active, a)?;
        let y = g.add(y, beside)?;
        let y = scaled(g, y, std::f64::consts::FRAC_1_SQRT_2)?;
        let (before, after) = (Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm"));
        let y = ResidualHalf { norm, before, after }.add(g, y, "mlp", |g, x| self.mlp(g, x, at))?;
        let corrected = g.scoped("altup", |g| self.correct(g, predicted, y))?;
        let mut open = stream(g, corrected, self.active)?;
        if self.corrected_scale {
            let factor = g.scoped("altup", |g| weight(g, "correct_output_scale", [self.hidden_size]))?;
            let factor = g.cast(factor, g.ty(open)?.dtype)?;
            open = g.mul(open, factor)?;
        }
        // All streams but the first have the layer's embedding, whichever is active.
        let own = self.per_layer.gate(g, open, at, norm)?;
        let own = g.reshape(own, Shape(vec![Dim::sym(symbols::TOKENS), 1.into(), self.hidden_size.into()]))?;
        let first = g.slice(corrected, 1, 0, 1)?;
        let others = g.slice(corrected, 1, 1, self.streams - 1)?;
        let others = g.add(others, own)?;
        g.concat(&[first, others], 1)
    }

    fn finish(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let first = stream(g, x, 0)?;
        let target = magnitude(g, first, 0.0)?;
        let mut sum = first;
        for nth in 1..self.streams {
            let y = stream(g, x, nth)?;
            let y = linear(g, &format!("model.altup_unembed_projections.{}", nth - 1), y, self.hidden_size, false)?;
            let y = with_magnitude(g, y, target)?;
            sum = g.add(sum, y)?;
        }
        scaled(g, sum, 1.0 / self.streams as f64)
    }

    fn logit_softcap(&self) -> Option<f64> {
        self.final_logit_softcapping
    }

    fn unused(&self, _drafts: bool) -> Vec<String> {
        let scale = (!self.corrected_scale).then(|| "model.layers.*.altup.correct_output_scale".to_owned());
        self.shared_keys.unused(self.num_hidden_layers).into_iter().chain(scale).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::normal_quantile;

    #[test]
    fn quantiles_are_those_of_tables() {
        // By Python's statistics.NormalDist and torch.special.ndtri; one rounding of 0.999 moves its quantile by 3e-14.
        for (share, quantile) in [
            (0.5, 0.0),
            (0.7, 0.524_400_512_708_041),
            (0.95, 1.644_853_626_951_472_2),
            (0.999, 3.090_232_306_167_813_5),
            (1e-9, -5.997_807_015_007_686_5),
        ] {
            assert!((normal_quantile(share) - quantile).abs() < 1e-13, "{share}: {}", normal_quantile(share));
        }
    }
}
