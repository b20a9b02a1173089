//! What all decoders have in common: tokens are embedded, go through layers that each keep a paged cache, and become
//! logits.

use std::any::Any;
use std::fmt::Debug;
use std::ops::DerefMut;

use ridge_graph::ops::LinearCrossEntropy;
use ridge_graph::{Builder, DType, Dim, FormatRef, FuncId, Result as GraphResult, Type, Var};

use super::blocks::{NormKind, scaled, soft_cap, weight};
use super::decoder_layer::{KeySource, PassedValues};
use super::gguf_mapping::GgufEntry;
use super::layer_states::{LayerGroups, LayerStates};
use super::prediction::PredictionScopes;
use super::tensors::{TensorName, TensorTable};
use crate::config::DecoderConfig;
use crate::error::Result;
use crate::loss::{mean_loss, targets};
use crate::model::{BuildOptions, FOLLOWERS, Model, StepInputs, history_group, symbols};
use crate::module::Module;
use crate::sampled::finish_decoder;
use ridge_files::checkpoint::{Part, Stack};

pub(super) use super::decoder_layer::AttentionScores;
pub(crate) use super::decoder_layer::{DecoderLayer, LayerInputs};

/// A decoder's configuration as a value: what the configuration of every family can do. Implemented for each of them below.
pub(crate) trait ConfigValue: Any + Debug + Send + Sync {
    /// What every decoder has.
    fn decoder(&self) -> &DecoderConfig;

    /// The same, to be changed.
    fn decoder_mut(&mut self) -> &mut DecoderConfig;

    /// The configuration as its own type.
    fn as_any(&self) -> &dyn Any;

    /// A copy.
    fn boxed(&self) -> Box<dyn DecoderFamily>;

    /// Is `other` of the same type and equal?
    fn equals(&self, other: &dyn DecoderFamily) -> bool;
}

impl<T> ConfigValue for T
where
    T: DecoderFamily + DerefMut<Target = DecoderConfig> + Any + Clone + Debug + PartialEq + Send + Sync,
{
    fn decoder(&self) -> &DecoderConfig {
        self
    }

    fn decoder_mut(&mut self) -> &mut DecoderConfig {
        self
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn boxed(&self) -> Box<dyn DecoderFamily> {
        Box::new(self.clone())
    }

    fn equals(&self, other: &dyn DecoderFamily) -> bool {
        other.as_any().downcast_ref::<Self>() == Some(self)
    }
}

/// Makes a family's configuration deref to its field `decoder`.
macro_rules! deref_to_decoder {
    ($config:ty) => {
        impl std::ops::Deref for $config {
            type Target = $crate::config::DecoderConfig;

            fn deref(&self) -> &$crate::config::DecoderConfig {
                &self.decoder
            }
        }

        impl std::ops::DerefMut for $config {
            fn deref_mut(&mut self) -> &mut $crate::config::DecoderConfig {
                &mut self.decoder
            }
        }
    };
}
pub(super) use deref_to_decoder;

/// The configuration of one family of decoders: what its graph has besides what all of them share.
pub(crate) trait DecoderFamily: ConfigValue {
    /// How many tokens a token sees in layer `index`, itself included; all if `None`. Layers with equal windows and of one
    /// kind are one function.
    fn window(&self, _index: usize) -> Option<usize> {
        None
    }

    /// The kind of layer `index`, where a family has several besides windows; the usual one has no name.
    fn kind(&self, _index: usize) -> &'static str {
        ""
    }

    /// Do tokens see those behind them too, within the window on both sides? Such a model writes no text, and is read as
    /// an encoder.
    fn sees_both_ways(&self) -> bool {
        false
    }

    /// What layer `index` keeps between steps; keys and values if the family does not say otherwise.
    fn states(&self, _index: usize, _options: &BuildOptions) -> LayerStates {
        LayerStates::paged()
    }

    /// The input of the first layer, from the embedded tokens `x`: `[tokens, hidden]`.
    fn embed(&self, _g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        Ok(x)
    }

    /// Sets the values that are of layer `index` alone.
    fn before_layer(&self, _g: &mut Builder, _index: usize, _inputs: &mut LayerInputs) -> GraphResult<()> {
        Ok(())
    }

    /// The layer whose weight or state `name` layer `index` has, both within a layer: its own if it is not shared.
    fn owner(&self, index: usize, _name: &str) -> usize {
        index
    }

    /// The norm in and after the layers.
    fn norm(&self) -> NormKind;

    /// One layer: `x`, `[tokens, hidden]` or what else `embed` gave, to the next.
    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var>;

    /// What the norm after the layers takes, `[tokens, hidden]`, of the last layer's `x`.
    fn finish(&self, _g: &mut Builder, x: Var) -> GraphResult<Var> {
        Ok(x)
    }

    /// The output projection's f32 logits are multiplied by this.
    fn logit_scale(&self) -> f64 {
        1.0
    }

    /// The output projection's f32 logits stay within this, by a hyperbolic tangent.
    fn logit_softcap(&self) -> Option<f64> {
        None
    }

    /// Sides, heads and their width of the cache of layer `index`: keys and values, or one side that is both.
    fn cache_shape(&self, _index: usize) -> [usize; 3] {
        [2, self.decoder().num_key_value_heads, self.decoder().head_dim]
    }

    /// The module that drafts further tokens, if there is one. Its layer is that behind the last one, of the same index.
    fn prediction(&self) -> Option<PredictionScopes> {
        None
    }

    /// Patterns of published tensors that the model does not use, with `*` for any characters; `drafts` says whether it uses
    /// those of [`DecoderFamily::prediction`].
    fn unused(&self, _drafts: bool) -> Vec<String> {
        Vec::new()
    }

    /// The format that the configuration says the weight called `name`, of `rank` axes, is published in, if it is in one.
    fn published_format(&self, name: &str, rank: usize) -> Option<FormatRef> {
        let codes = self.decoder().codes.as_ref()?;
        let of_part = self.parts().iter().find_map(|part| part.published(name));
        let published = of_part.or_else(|| self.stacks().iter().find_map(|stack| stack.published(name, 0)));
        codes.format_of(name, published.as_deref(), rank)
    }

    /// Weights that are parts of published tensors, or transposed ones.
    fn parts(&self) -> Vec<Part> {
        Vec::new()
    }

    /// Weights that are several published tensors.
    fn stacks(&self) -> Vec<Stack> {
        Vec::new()
    }

    /// The tensors of a layer, of the `usual` ones of the family.
    fn layer_tensors(&self, usual: Vec<TensorName>) -> Vec<TensorName> {
        usual
    }

    /// What GGUF's metadata has of this family alone, by key without the architecture's name.
    ///
    /// # Errors
    /// What of the configuration GGUF cannot express.
    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        Ok(Vec::new())
    }
}

/// The function of the layers of one window and kind.
struct LayerFunction {
    window: Option<usize>,
    kind: &'static str,
    /// Does it only add the step's tokens to the layer's caches?
    remembers: bool,
    function: FuncId,
    /// Names of the values that it takes behind the usual arguments.
    takes: Vec<&'static str>,
    /// Names of the values that it gives behind the residual stream.
    leaves: Vec<&'static str>,
}

/// The layers of a decoder, called one after another.
pub(super) struct Layers<'a> {
    tensors: &'a TensorTable,
    family: &'a dyn DecoderFamily,
    options: &'a BuildOptions,
    functions: Vec<LayerFunction>,
    pub(super) inputs: LayerInputs,
}

impl<'a> Layers<'a> {
    pub(super) fn new(
        tensors: &'a TensorTable,
        family: &'a dyn DecoderFamily,
        options: &'a BuildOptions,
        inputs: LayerInputs,
    ) -> Self {
        Self { tensors, family, options, functions: Vec::new(), inputs }
    }

    /// Layer `index` of `x`. With a cache, its keys and values go to `slots`, i32 `[tokens]`.
    fn call(&mut self, g: &mut Builder, index: usize, x: Var, slots: Option<Var>) -> GraphResult<Var> {
        let (family, layers) = (self.family, self.tensors.layers);
        family.before_layer(g, index, &mut self.inputs)?;
        let at = self.function(g, index, x, slots.is_some(), false)?;
        let named = |name: &str| format!("{layers}.{}.{name}", family.owner(index, name));
        let outputs = self.call_function(g, at, [x].into_iter().chain(slots), &format!("{layers}.{index}"), named)?;
        Ok(outputs[0])
    }

    /// The layer of a prediction module in `scope`, of `x` with a cache.
    pub(super) fn predict(&mut self, g: &mut Builder, scope: &str, x: Var, slots: Var) -> GraphResult<Var> {
        let at = self.function(g, self.family.decoder().num_hidden_layers, x, true, false)?;
        Ok(self.call_function(g, at, [x, slots].into_iter(), scope, |name| format!("{scope}.{name}"))?[0])
    }

    /// As [`Layers::predict`], of which only the caches are wanted.
    fn remember(&mut self, g: &mut Builder, scope: &str, x: Var, slots: Var) -> GraphResult<()> {
        let at = self.function(g, self.family.decoder().num_hidden_layers, x, true, true)?;
        self.call_function(g, at, [x, slots].into_iter(), scope, |name| format!("{scope}.{name}")).map(|_| ())
    }

    /// Calls function `at` in `scope`, of `x` and the slots if it has a cache. Weights and states have the names that `named` gives.
    fn call_function(
        &mut self,
        g: &mut Builder,
        at: usize,
        mut given: impl Iterator<Item = Var>,
        scope: &str,
        named: impl Fn(&str) -> String,
    ) -> GraphResult<Vec<Var>> {
        let of = &self.functions[at];
        let mut args: Vec<Var> = given.next().into_iter().chain([self.inputs.positions]).chain(given).collect();
        // Where one is missing, the call says which.
        args.extend(of.takes.iter().map_while(|name| self.inputs.get(name)));
        let outputs = g.scoped(scope, |g| g.call_named(of.function, &args, named))?;
        for (name, value) in of.leaves.iter().zip(outputs.iter().skip(1)) {
            self.inputs.set(name, *value);
        }
        Ok(outputs)
    }

    /// Which of the functions is that of layer `index`, whose `x` has the type of the one given: from `x` and `positions`,
    /// i32 `[tokens]`, with a cache `slots`, i32 `[tokens]`, and the values that it takes. One that `remembers` has no results.
    fn function(&mut self, g: &mut Builder, index: usize, x: Var, cached: bool, remembers: bool) -> GraphResult<usize> {
        let (family, options) = (self.family, self.options);
        let (window, kind) = (family.window(index), family.kind(index));
        let same = |of: &LayerFunction| (of.window, of.kind, of.remembers) == (window, kind, remembers);
        if let Some(known) = self.functions.iter().position(same) {
            return Ok(known);
        }
        let name = if window.is_some() { "local_decoder_layer" } else { "decoder_layer" };
        let name = if kind.is_empty() { name.to_owned() } else { format!("{kind}_{name}") };
        let name = if remembers { format!("{name}_caches") } else { name };
        let (of_x, passed) = (g.ty(x)?.clone(), PassedValues::new(self.inputs.types(g)?));
        let (mut takes, mut leaves) = (Vec::new(), Vec::new());
        let function = g.function(&name, |g| {
            let x = g.arg("x", of_x);
            let row = Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]);
            let positions = g.arg("positions", row.clone());
            let keys = match cached {
                true => KeySource::Cache { slots: g.arg("slots", row) },
                false => {
                    let seq_ids = g.step_input("seq_ids", row)?;
                    KeySource::Step { seq_ids, both_ways: family.sees_both_ways() }
                }
            };
            let (config, cache) = (family.decoder(), family.cache_shape(index));
            let at = DecoderLayer { config, options, window, kind, cache, positions, keys, passed };
            let mut outputs = vec![family.layer(g, x, &at)?];
            takes = at.passed.taken();
            if remembers {
                return Ok(Vec::new());
            }
            for (name, value) in at.passed.left() {
                leaves.push(name);
                outputs.push(value);
            }
            Ok(outputs)
        })?;
        self.functions.push(LayerFunction { window, kind, remembers, function, takes, leaves });
        Ok(self.functions.len() - 1)
    }
}

/// The table of token embeddings.
pub(super) fn embedding_table(g: &mut Builder, tensors: &TensorTable, config: &DecoderConfig) -> GraphResult<Var> {
    g.scoped(tensors.embedding.scope, |g| weight(g, "weight", [config.vocab_size, config.hidden_size]))
}

/// The weight of the output projection, `[vocab, hidden]`.
fn head_weight(g: &mut Builder, tensors: &TensorTable, config: &DecoderConfig) -> GraphResult<Var> {
    match config.tie_word_embeddings {
        true => embedding_table(g, tensors, config),
        false => g.scoped(tensors.head.scope, |g| weight(g, "weight", [config.vocab_size, config.hidden_size])),
    }
}

/// F32 logits of hidden states.
pub(super) fn head(g: &mut Builder, tensors: &TensorTable, family: &dyn DecoderFamily, x: Var) -> GraphResult<Var> {
    let w = head_weight(g, tensors, family.decoder())?;
    logits(g, tensors, family, x, w)
}

/// F32 logits of hidden states by the rows `w` of the output projection.
fn logits(g: &mut Builder, tensors: &TensorTable, family: &dyn DecoderFamily, x: Var, w: Var) -> GraphResult<Var> {
    g.scoped(tensors.head.scope, |g| {
        let logits = g.linear(x, w)?;
        let logits = g.cast(logits, DType::F32)?;
        let logits = scaled(g, logits, family.logit_scale())?;
        match family.logit_softcap() {
            Some(cap) => soft_cap(g, logits, cap),
            None => Ok(logits),
        }
    })
}

/// F32 logits, `[rows, words]`, of these words after the hidden states `x`, `[rows, hidden]`.
pub(super) fn word_logits(
    g: &mut Builder,
    tensors: &TensorTable,
    family: &dyn DecoderFamily,
    x: Var,
    words: &[u32],
) -> GraphResult<Var> {
    let w = head_weight(g, tensors, family.decoder())?;
    let words: Vec<f64> = words.iter().copied().map(f64::from).collect();
    let words = g.table(DType::I32, &words)?;
    let dtype = g.ty(x)?.dtype;
    let rows = g.embedding(w, words, dtype)?;
    logits(g, tensors, family, x, rows)
}

/// Builds the graph of the family called `name`, with weights of the names in `tensors`.
pub(super) fn build(
    name: &'static str,
    tensors: &TensorTable,
    family: &dyn DecoderFamily,
    options: &BuildOptions,
) -> GraphResult<Model> {
    let config = family.decoder();
    let mut g = Builder::new();
    let step = StepInputs::ask(&mut g)?;
    let (positions, slots) =
        g.token_layout(step.seq_ids, step.query_start, step.lengths, step.block_table, options.block_size)?;
    let embedding = embedding_table(&mut g, tensors, config)?;
    let x = g.embedding(embedding, step.token_ids, options.activations)?;
    let mut inputs = LayerInputs::new(step.token_ids, positions);
    let mut x = family.embed(&mut g, x, &mut inputs)?;
    let mut layers = Layers::new(tensors, family, options, inputs);
    let mut groups = LayerGroups::new(options, &step, slots);
    for index in 0..config.num_hidden_layers {
        let (window, states) = (family.window(index), family.states(index, options));
        let scope = format!("{}.{index}", tensors.layers);
        let slots = groups.add(&mut g, [&scope, tensors.attention], &states, window, family.cache_shape(index))?;
        x = layers.call(&mut g, index, x, Some(slots))?;
    }

    let x = family.finish(&mut g, x)?;
    let x = family.norm().apply(&mut g, tensors.norm.scope, x)?;
    if options.drafts > 0
        && let Some(scopes) = family.prediction()
    {
        let (index, hidden) = (config.num_hidden_layers, x);
        let at = [&scopes.layer, tensors.attention];
        let slots = groups.add(&mut g, at, &family.states(index, options), None, family.cache_shape(index))?;
        remember_followed(&mut g, &mut layers, &scopes, hidden, slots)?;
    }
    let state_groups = groups.into_groups();
    let graph = finish_decoder(g, x, &step, [positions, slots], options, |g, x| head(g, tensors, family, x))?;
    Ok(Model {
        module: Module { family: name, graph, state_groups, activations: options.activations, shares: None },
        answers: None,
        drafts: None,
        history: history_group(),
        cache: options.cache,
        block_size: options.block_size,
        max_context: config.max_context(),
        vocab_size: config.vocab_size,
        eos_token_ids: config.eos_token_ids.clone(),
    })
}

/// Adds the tokens whose followers are known to the caches of the prediction module, with the model's hidden states,
/// `[tokens, hidden]`; `slots` are those of the step's tokens, i32 `[tokens]`. Asks for all weights of the module, so that the graph
/// has those that drafting reads.
fn remember_followed(
    g: &mut Builder,
    layers: &mut Layers<'_>,
    scopes: &PredictionScopes,
    hidden: Var,
    slots: Var,
) -> GraphResult<()> {
    let norm = layers.family.norm();
    let followers = g.step_input(FOLLOWERS, Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]))?;
    let (zero, nowhere) = (g.constant(DType::I32, 0.0)?, g.constant(DType::I32, -1.0)?);
    let known = g.ge(followers, zero)?;
    let slots = g.select(known, slots, nowhere)?;
    let followers = g.max(followers, zero)?;
    let table = embedding_table(g, layers.tensors, layers.family.decoder())?;
    let embedded = g.embedding(table, followers, layers.options.activations)?;
    let x = scopes.join(g, norm, [embedded, hidden])?;
    norm.apply(g, &scopes.norm, x)?;
    layers.remember(g, &scopes.layer, x, slots)
}

/// The hidden states behind the last norm, `[tokens, hidden]`, of whole sequences without a cache: of the step's tokens and their
/// positions, i32 `[tokens]` each.
pub(super) fn hidden_states(
    g: &mut Builder,
    tensors: &TensorTable,
    family: &dyn DecoderFamily,
    options: &BuildOptions,
    [token_ids, positions]: [Var; 2],
) -> GraphResult<Var> {
    let config = family.decoder();
    let embedding = embedding_table(g, tensors, config)?;
    let x = g.embedding(embedding, token_ids, options.activations)?;
    let mut inputs = LayerInputs::new(token_ids, positions);
    let mut x = family.embed(g, x, &mut inputs)?;
    let mut layers = Layers::new(tensors, family, options, inputs);
    for index in 0..config.num_hidden_layers {
        x = layers.call(g, index, x, None)?;
    }
    let x = family.finish(g, x)?;
    family.norm().apply(g, tensors.norm.scope, x)
}

/// Builds the graph that the family called `name` is trained with; see [`ModelConfig::build_training`].
///
/// [`ModelConfig::build_training`]: super::ModelConfig::build_training
pub(super) fn build_training(
    name: &'static str,
    tensors: &TensorTable,
    family: &dyn DecoderFamily,
    options: &BuildOptions,
) -> GraphResult<Module> {
    let config = family.decoder();
    let mut g = Builder::new();
    let row = Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]);
    let token_ids = g.step_input("token_ids", row.clone())?;
    let positions = g.step_input("positions", row)?;
    let x = hidden_states(&mut g, tensors, family, options, [token_ids, positions])?;
    let all_logits = head(&mut g, tensors, family, x)?;
    let hidden = g.cast(x, DType::F32)?;
    let targets = targets(&mut g)?;
    let w = head_weight(&mut g, tensors, config)?;
    let x = scaled(&mut g, x, family.logit_scale())?;
    let op = LinearCrossEntropy { softcap: family.logit_softcap(), z_loss: options.z_loss };
    let loss = g.scoped("loss", |g| {
        let sum = g.linear_cross_entropy(x, w, targets, op)?;
        mean_loss(g, sum, targets)
    })?;
    let graph = g.finish(vec![
        ("hidden".into(), hidden),
        ("all_logits".into(), all_logits),
        ("loss".into(), loss.mean),
        ("loss_sum".into(), loss.sum),
        ("target_count".into(), loss.count),
    ])?;
    Ok(Module { family: name, graph, state_groups: Vec::new(), activations: options.activations, shares: None })
}
