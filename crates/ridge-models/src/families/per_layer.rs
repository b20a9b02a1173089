//! What the layers of Gemma 3n and Gemma 4 have of the model around them: an embedding of each token for every layer, and
//! keys and values that earlier layers computed.

use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Var};
use serde_json::{Map, Value as Json};

use super::blocks::{NormKind, linear, scaled, weight};
use super::decoder::{DecoderLayer, LayerInputs};
use super::experts::MAX_SIZE;
use super::gguf_mapping::{GgufMetadata, LAYERS_KEY};
use super::layer_states::LayerStates;
use super::tensors::{Cut, TensorName};
use crate::config::{Fields, REMEDY};
use crate::error::Result;
use crate::model::symbols;

/// The kind of layers that have keys and values of earlier ones.
pub(super) const SHARING: &str = "sharing";

/// The projections of a layer's own embedding.
pub(super) const PER_LAYER: &[TensorName] = &[
    TensorName::cut("per_layer_input_gate", Cut::Columns, "inp_gate"),
    TensorName::cut("per_layer_projection", Cut::Terms, "proj"),
    TensorName::whole("post_per_layer_input_norm", "post_norm"),
];

/// What all layers' embeddings are made of.
pub(super) const PER_LAYER_MODEL: &[TensorName] = &[
    TensorName::whole("model.embed_tokens_per_layer", "per_layer_token_embd"),
    TensorName::whole("model.per_layer_model_projection", "per_layer_model_proj"),
    TensorName::whole("model.per_layer_projection_norm", "per_layer_proj_norm"),
];

/// Adds to a configuration what a GGUF file says of windows, embeddings for layers and shared keys, of which there are
/// `shared` if it does not say. Returns which layers have windows.
///
/// # Errors
/// [`ModelError::Files`](crate::ModelError::Files) if a key is not what it is in these families.
pub(super) fn read_gguf(file: &dyn GgufMetadata, to: &mut Map<String, Json>, shared: u64) -> Result<Vec<bool>> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let layers = file.int(LAYERS_KEY)?.unwrap_or_default();
    let windows: Vec<bool> = file.list(PATTERN)?.unwrap_or_default().iter().map(|window| *window != 0.0).collect();
    if windows.len() as u64 != layers {
        return Err(file.wrong(PATTERN, &format!("has {} values for {layers} layers", windows.len())));
    }
    let kind = |window: &bool| if *window { "sliding_attention" } else { "full_attention" };
    to.insert("layer_types".into(), windows.iter().map(kind).collect());
    to.insert("sliding_window".into(), file.window().into());
    to.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
    to.insert("final_logit_softcapping".into(), file.float("final_logit_softcapping")?.into());
    let width = file.int("embedding_length_per_layer_input")?;
    to.insert("hidden_size_per_layer_input".into(), width.unwrap_or_default().into());
    if let Some(rows) = file.rows("per_layer_token_embd.weight") {
        to.insert("vocab_size_per_layer_input".into(), rows.into());
    }
    let shared = file.int("attention.shared_kv_layers")?.unwrap_or(shared);
    to.insert("num_kv_shared_layers".into(), shared.into());
    Ok(windows)
}

/// Embeddings of tokens for every layer: a row of a table for all layers, and a projection of the model's embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerInputs {
    /// Rows of the table; tokens above them have the first row.
    pub vocab_size: usize,
    /// Width of a layer's part.
    pub width: usize,
}

/// The names of all layers' parts, `[tokens, layers * width]`, and of one's.
const ALL: &str = "per_layer_inputs";
const ONE: &str = "per_layer_input";

impl PerLayerInputs {
    /// Reads the sizes of both keys; `None` where the width is 0.
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Option<Self>> {
        const WIDTH: &str = "hidden_size_per_layer_input";
        let vocab = f.optional_size("vocab_size_per_layer_input", 1 << 26)?.unwrap_or(262_144);
        let width = match f.count(WIDTH)? {
            None => 256,
            Some(width) if width <= MAX_SIZE as u64 => width as usize,
            Some(_) => return Err(f.wrong(WIDTH, format!("is above {MAX_SIZE}"), REMEDY)),
        };
        Ok((width > 0).then_some(Self { vocab_size: vocab, width }))
    }

    /// Sets the parts of all `layers`, of the model's scaled embedding `x`, `[tokens, hidden]`.
    pub(super) fn embed(
        &self,
        g: &mut Builder,
        x: Var,
        [layers, vocab]: [usize; 2],
        norm: NormKind,
        inputs: &mut LayerInputs,
    ) -> GraphResult<()> {
        let ty = g.ty(x)?.clone();
        let (all, hidden) = (layers * self.width, ty.shape.last().as_const().unwrap_or_default());
        let by_layer = Shape(vec![ty.shape.0[0].clone(), layers.into(), self.width.into()]);
        let projected = g.scoped("model", |g| {
            let y = linear(g, "per_layer_model_projection", x, all, false)?;
            let y = scaled(g, y, 1.0 / (hidden as f64).sqrt())?;
            let y = g.reshape(y, by_layer)?;
            let y = norm.apply(g, "per_layer_projection_norm", y)?;
            g.reshape(y, Shape(vec![ty.shape.0[0].clone(), all.into()]))
        })?;
        let mut ids = inputs.token_ids;
        if vocab > self.vocab_size {
            let (end, first) = (g.constant(DType::I32, self.vocab_size as f64)?, g.constant(DType::I32, 0.0)?);
            let within = g.lt(ids, end)?;
            ids = g.select(within, ids, first)?;
        }
        let looked_up = g.scoped("model.embed_tokens_per_layer", |g| {
            let table = weight(g, "weight", [self.vocab_size, all])?;
            g.embedding(table, ids, ty.dtype)
        })?;
        let looked_up = scaled(g, looked_up, (self.width as f64).sqrt())?;
        let sum = g.add(projected, looked_up)?;
        let sum = scaled(g, sum, std::f64::consts::FRAC_1_SQRT_2)?;
        inputs.set(ALL, sum);
        Ok(())
    }

    /// Sets the part of layer `index`.
    pub(super) fn before_layer(&self, g: &mut Builder, index: usize, inputs: &mut LayerInputs) -> GraphResult<()> {
        if let Some(all) = inputs.get(ALL) {
            let one = g.slice(all, 1, index * self.width, self.width)?;
            inputs.set(ONE, one);
        }
        Ok(())
    }

    /// What a layer adds to its output: the layer's part opened by `x`, `[tokens, hidden]`.
    pub(super) fn gate(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>, norm: NormKind) -> GraphResult<Var> {
        let hidden = g.ty(x)?.shape.last().as_const().unwrap_or_default();
        let gate = linear(g, "per_layer_input_gate", x, self.width, false)?;
        let gate = g.gelu(gate, Gelu::Tanh)?;
        let part = at.value(g, ONE)?;
        let open = g.mul(gate, part)?;
        let y = linear(g, "per_layer_projection", open, hidden, false)?;
        norm.apply(g, "post_per_layer_input_norm", y)
    }
}

/// The layers at the end that have no keys and values of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedKeys {
    /// The first of them.
    pub first: usize,
}

impl SharedKeys {
    /// Reads how many they are, `default` if the file does not say; each of them needs a layer before them that is like it.
    pub(super) fn read(f: &mut Fields<'_>, windows: &[Option<usize>], default: usize) -> Result<Self> {
        const KEY: &str = "num_kv_shared_layers";
        let shared = f.count(KEY)?.map_or(default, |n| usize::try_from(n).unwrap_or(usize::MAX));
        let Some(first) = windows.len().checked_sub(shared).filter(|first| *first > 0) else {
            return Err(f.wrong(KEY, format!("leaves none of {} layers with keys of its own", windows.len()), REMEDY));
        };
        let (own, sharing) = windows.split_at(first);
        if let Some(lone) = sharing.iter().position(|window| !own.contains(window)) {
            let problem = format!("leaves layer {} without an earlier layer whose keys it can have", first + lone);
            return Err(f.wrong(KEY, problem, REMEDY));
        }
        Ok(Self { first })
    }

    /// Is layer `index` one of them?
    pub(super) fn has(self, index: usize) -> bool {
        index >= self.first
    }

    /// What layer `index` keeps: a cache, if its keys are its own.
    pub(super) fn states(self, index: usize) -> LayerStates {
        if self.has(index) { LayerStates::none() } else { LayerStates::paged() }
    }

    /// The layer whose argument `name` layer `index` reads: where it is a cache that the layer does not have, the last layer with
    /// its window that has keys of its own.
    pub(super) fn owner(self, windows: &[Option<usize>], index: usize, name: &str) -> usize {
        if !self.has(index) || !name.starts_with("self_attn.kv") {
            return index;
        }
        let own = windows.iter().take(self.first).rposition(|window| Some(window) == windows.get(index));
        own.unwrap_or(index)
    }

    /// Patterns of tensors that checkpoints have of layers which do not use them.
    pub(super) fn unused(self, layers: usize) -> Vec<String> {
        let of = |layer| ["k_proj", "v_proj", "k_norm"].map(|name| format!("model.layers.{layer}.self_attn.{name}.*"));
        (self.first..layers).flat_map(of).collect()
    }
}

/// Queries of `x`, normalised head by head: `[tokens, heads, dim]`.
pub(super) fn queries(g: &mut Builder, x: Var, at: &DecoderLayer<'_>, norm: NormKind, bias: bool) -> GraphResult<Var> {
    let [_, _, dim] = at.cache;
    let q = linear(g, "q_proj", x, at.config.num_attention_heads * dim, bias)?;
    let q = at.split_heads(g, q)?;
    norm.apply(g, "q_norm", q)
}

/// `x`, `[tokens, streams, width]`: stream `nth` of them, `[tokens, width]`.
pub(super) fn stream(g: &mut Builder, x: Var, nth: usize) -> GraphResult<Var> {
    let width = g.ty(x)?.shape.last();
    let one = g.slice(x, 1, nth, 1)?;
    g.reshape(one, Shape(vec![Dim::sym(symbols::TOKENS), width]))
}
