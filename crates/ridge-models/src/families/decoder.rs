//! What all decoders have in common: tokens are embedded, go through layers that each keep a paged cache, and become
//! logits.

use std::any::Any;
use std::fmt::Debug;
use std::ops::DerefMut;

use ridge_graph::ops::{LinearCrossEntropy, PagedAttention, RaggedAttention, Rope};
use ridge_graph::{Builder, DType, Dim, FormatRef, FuncId, GraphError, Result as GraphResult, Shape, Type, Var};

use super::blocks::{NormKind, deinterleaved, linear, rope, scaled, soft_cap, weight};
use super::gguf_mapping::GgufEntry;
use super::layer_states::{LayerStates, empty_group};
use super::tensors::{TensorName, TensorTable};
use crate::config::{DecoderConfig, RopeConfig};
use crate::error::Result;
use crate::loss::{mean_loss, targets};
use crate::model::{
    BuildOptions, Model, StepInputs, attend_cached, attention_symbols, block_table, finish_decoder, history_group,
    kv_bytes, kv_states, symbols,
};
use crate::module::{Module, StateGroup};
use ridge_files::checkpoint::{Part, Stack};

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

    /// What layer `index` keeps between steps; keys and values if the family does not say otherwise.
    fn states(&self, _index: usize, _options: &BuildOptions) -> LayerStates {
        LayerStates::paged()
    }

    /// The input of the first layer, from the embedded tokens `x`: `[tokens, hidden]`.
    fn embed(&self, _g: &mut Builder, x: Var, _positions: Var) -> GraphResult<Var> {
        Ok(x)
    }

    /// The norm in and after the layers.
    fn norm(&self) -> NormKind;

    /// One layer: `x`, `[tokens, hidden]`, to the next.
    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var>;

    /// The output projection's f32 logits are multiplied by this.
    fn logit_scale(&self) -> f64 {
        1.0
    }

    /// The output projection's f32 logits stay within this, by a hyperbolic tangent.
    fn logit_softcap(&self) -> Option<f64> {
        None
    }

    /// Sides of the layers' caches: keys and values, or one that is both.
    fn cache_sides(&self) -> usize {
        2
    }

    /// Patterns of published tensors that the model does not use, with `*` for any characters.
    fn unused(&self) -> Vec<String> {
        Vec::new()
    }

    /// The format that the configuration says the weight called `name` is published in, if it is in one.
    fn published_format(&self, _name: &str) -> Option<FormatRef> {
        None
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

/// Where and how a layer is built.
pub(crate) struct DecoderLayer<'a> {
    config: &'a DecoderConfig,
    options: &'a BuildOptions,
    /// How many tokens a token sees.
    pub(super) window: Option<usize>,
    /// [`DecoderFamily::kind`].
    pub(super) kind: &'static str,
    positions: Var,
    keys: KeySource,
}

/// Where a layer's tokens find the keys and values that they attend to.
#[derive(Clone, Copy, Debug)]
enum KeySource {
    /// In a paged cache, to which the step's are added at these slots, i32 `[tokens]`.
    Cache { slots: Var },
    /// Among those of the step's tokens, whose sequences are i32 `[tokens]`.
    Step { seq_ids: Var },
}

/// How a layer's attention scores pairs.
#[derive(Clone, Debug)]
pub(super) struct AttentionScores {
    /// Rotation of queries and keys.
    pub(super) rope: Option<Rope>,
    /// Factor of the scores.
    pub(super) scale: f64,
    /// They stay within this.
    pub(super) softcap: Option<f64>,
    /// Does a rotation turn neighbours, elements `2i` and `2i + 1`, rather than `i` and that half a rotation behind it?
    pub(super) interleaved: bool,
    /// Do windows begin at multiples of their length?
    pub(super) chunked: bool,
    /// What the score of a key is less by for each position that it is back, f32 `[heads]`.
    pub(super) slopes: Option<Var>,
    /// One more score of each head's softmax, f32 `[heads]`.
    pub(super) sinks: Option<Var>,
}

impl DecoderLayer<'_> {
    /// The usual scores: rotated as the configuration says, divided by the root of a head's width.
    pub(super) fn scores(&self) -> AttentionScores {
        let rope = self.config.rope.as_ref().map(|config| self.rope(config));
        AttentionScores {
            rope,
            scale: 1.0 / (self.config.head_dim as f64).sqrt(),
            softcap: None,
            interleaved: false,
            chunked: false,
            slopes: None,
            sinks: None,
        }
    }

    /// Does the graph keep states between steps?
    pub(super) fn keeps_states(&self) -> bool {
        matches!(self.keys, KeySource::Cache { .. })
    }

    /// The rotation that `config` says, for the contexts that the model is built for.
    pub(super) fn rope(&self, config: &RopeConfig) -> Rope {
        rope(config, self.options.context.unwrap_or_else(|| self.config.max_context()))
    }

    /// Positions of the tokens in their sequences, i32 `[tokens]`.
    pub(super) fn positions(&self) -> Var {
        self.positions
    }

    /// Queries, keys and values of `x`, each `[tokens, heads, dim]`, with weights of these names.
    pub(super) fn project(&self, g: &mut Builder, x: Var, names: [&str; 3], bias: bool) -> GraphResult<[Var; 3]> {
        let c = self.config;
        let heads = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads];
        let mut projected = [x; 3];
        for ((name, heads), y) in names.into_iter().zip(heads).zip(&mut projected) {
            let flat = linear(g, name, x, heads * c.head_dim, bias)?;
            *y = self.split_heads(g, flat)?;
        }
        Ok(projected)
    }

    /// `[tokens, heads * dim]` as `[tokens, heads, dim]`.
    fn split_heads(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let dim = self.config.head_dim;
        let heads = g.ty(x)?.shape.last().as_const().map_or(0, |n| n / dim);
        g.reshape(x, [Dim::sym(symbols::TOKENS), heads.into(), dim.into()])
    }

    /// `f` of `[tokens, heads, dim]` with its heads as one: `[tokens, heads * dim]`.
    pub(super) fn across_heads(
        &self,
        g: &mut Builder,
        x: Var,
        f: impl FnOnce(&mut Builder, Var) -> GraphResult<Var>,
    ) -> GraphResult<Var> {
        let joined = self.join_heads(g, x)?;
        let y = f(g, joined)?;
        self.split_heads(g, y)
    }

    /// `[tokens, heads, dim]` as `[tokens, heads * dim]`.
    fn join_heads(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let width = g.ty(x)?.shape.0[1].as_const().map_or(0, |heads| heads * self.config.head_dim);
        g.reshape(x, [Dim::sym(symbols::TOKENS), width.into()])
    }

    /// Causal attention over the layer's cache, to which `k` and `v` are added, or over those of the step if there is no
    /// cache: from `[tokens, heads, dim]` each to `[tokens, heads * dim]`.
    pub(super) fn attend(&self, g: &mut Builder, [q, k, v]: [Var; 3], scores: &AttentionScores) -> GraphResult<Var> {
        self.attend_sides(g, q, (k, Some(v)), scores)
    }

    /// As [`DecoderLayer::attend`], where keys are the values too: the cache has one side.
    pub(super) fn attend_rows(&self, g: &mut Builder, q: Var, k: Var, scores: &AttentionScores) -> GraphResult<Var> {
        self.attend_sides(g, q, (k, None), scores)
    }

    fn attend_sides(
        &self,
        g: &mut Builder,
        q: Var,
        (k, v): (Var, Option<Var>),
        scores: &AttentionScores,
    ) -> GraphResult<Var> {
        let turn = |g: &mut Builder, x: Var| match &scores.rope {
            Some(rope) => {
                let x = if scores.interleaved { deinterleaved(g, x, 2 * rope.inv_freq.len())? } else { x };
                g.rope(x, self.positions, rope)
            }
            None => Ok(x),
        };
        let (q, k) = (turn(g, q)?, turn(g, k)?);
        let (pairs, cached) = attention_symbols(self.window);
        let (scale, window, softcap) = (scores.scale, self.window, scores.softcap);
        let of_heads: Vec<Var> = [scores.slopes, scores.sinks].into_iter().flatten().collect();
        let a = match self.keys {
            KeySource::Cache { slots } => {
                let op = PagedAttention {
                    scale,
                    window,
                    chunked: scores.chunked,
                    softcap,
                    slopes: scores.slopes.is_some(),
                    sinks: scores.sinks.is_some(),
                    pairs,
                    cached,
                };
                attend_cached(g, (q, k, v), [self.positions, slots], &of_heads, op, self.options)?
            }
            KeySource::Step { .. } if scores.chunked || !of_heads.is_empty() => {
                let why = "attention with ALiBi slopes, sinks or chunked windows has no form without a cache, so models with \
                           it cannot be trained yet";
                return Err(GraphError::Use { at: g.scope().into(), why: why.into() });
            }
            KeySource::Step { seq_ids } => {
                let op = RaggedAttention { window, softcap, ..RaggedAttention::causal(scale, pairs) };
                g.ragged_attention([q, k, v.unwrap_or(k)], seq_ids, op)?
            }
        };
        self.join_heads(g, a)
    }
}

/// The functions of a decoder's layers, one for each window and kind.
#[derive(Default)]
struct LayerFunctions(Vec<(Option<usize>, &'static str, FuncId)>);

impl LayerFunctions {
    /// That of layer `index`: from `x`, `[tokens, hidden]`, and `positions`, i32 `[tokens]`, to the next `x`; with a cache
    /// it takes `slots`, i32 `[tokens]`, behind them.
    fn of(
        &mut self,
        g: &mut Builder,
        family: &dyn DecoderFamily,
        index: usize,
        options: &BuildOptions,
        cached: bool,
    ) -> GraphResult<FuncId> {
        let (window, kind) = (family.window(index), family.kind(index));
        if let Some((_, _, function)) = self.0.iter().find(|(w, k, _)| (*w, *k) == (window, kind)) {
            return Ok(*function);
        }
        let name = if window.is_some() { "local_decoder_layer" } else { "decoder_layer" };
        let name = if kind.is_empty() { name.to_owned() } else { format!("{kind}_{name}") };
        let function = g.function(&name, |g| {
            let (config, tokens) = (family.decoder(), Dim::sym(symbols::TOKENS));
            let x = g.arg("x", Type::tensor(options.activations, [tokens.clone(), config.hidden_size.into()]));
            let row = Type::tensor(DType::I32, Shape(vec![tokens]));
            let positions = g.arg("positions", row.clone());
            let keys = match cached {
                true => KeySource::Cache { slots: g.arg("slots", row) },
                false => KeySource::Step { seq_ids: g.step_input("seq_ids", row)? },
            };
            let at = DecoderLayer { config, options, window, kind, positions, keys };
            Ok(vec![family.layer(g, x, &at)?])
        })?;
        self.0.push((window, kind, function));
        Ok(function)
    }
}

/// The table of token embeddings.
fn embedding_table(g: &mut Builder, tensors: &TensorTable, config: &DecoderConfig) -> GraphResult<Var> {
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
fn head(g: &mut Builder, tensors: &TensorTable, family: &dyn DecoderFamily, x: Var) -> GraphResult<Var> {
    let w = head_weight(g, tensors, family.decoder())?;
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
    let mut x = family.embed(&mut g, x, positions)?;

    let mut groups: Vec<StateGroup> = Vec::new();
    // Of each group, the slots of the step's tokens in its blocks.
    let mut slots_of_groups = Vec::new();
    let mut functions = LayerFunctions::default();
    let mut fixed = empty_group();
    for index in 0..config.num_hidden_layers {
        let (window, states) = (family.window(index), family.states(index, options));
        let scope = format!("{}.{index}", tensors.layers);
        let function = functions.of(&mut g, family, index, options, true)?;
        let mut slots_of_layer = slots;
        if states.paged {
            let at = groups.iter().position(|group| group.window == window).unwrap_or(groups.len());
            if at == groups.len() {
                groups.push(StateGroup { window, heads: config.num_key_value_heads, ..empty_group() });
                slots_of_groups.push(match window {
                    None => slots,
                    Some(_) => {
                        let table = block_table(&mut g, window)?;
                        g.token_layout(step.seq_ids, step.query_start, step.lengths, table, options.block_size)?.1
                    }
                });
            }
            let of_layer = kv_states(options).iter().map(|state| format!("{scope}.{}.{state}", tensors.attention));
            groups[at].states.extend(of_layer);
            groups[at].bytes_per_token +=
                kv_bytes([family.cache_sides(), config.num_key_value_heads, config.head_dim], options);
            slots_of_layer = slots_of_groups[at];
        }
        states.add_to(&mut fixed, &scope);
        x = g.scoped(&scope, |g| g.call(function, &[x, positions, slots_of_layer]))?[0];
    }
    groups.extend((!fixed.states.is_empty()).then_some(fixed));

    let x = family.norm().apply(&mut g, tensors.norm.scope, x)?;
    let graph = finish_decoder(g, x, &step, [positions, slots], options, |g, x| head(g, tensors, family, x))?;
    Ok(Model {
        module: Module { family: name, graph, state_groups: groups, activations: options.activations, shares: None },
        answers: None,
        history: history_group(),
        cache: options.cache,
        block_size: options.block_size,
        max_context: config.max_context(),
        vocab_size: config.vocab_size,
        eos_token_ids: config.eos_token_ids.clone(),
    })
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
    let embedding = embedding_table(&mut g, tensors, config)?;
    let x = g.embedding(embedding, token_ids, options.activations)?;
    let mut x = family.embed(&mut g, x, positions)?;
    let mut functions = LayerFunctions::default();
    for index in 0..config.num_hidden_layers {
        let function = functions.of(&mut g, family, index, options, false)?;
        x = g.scoped(&format!("{}.{index}", tensors.layers), |g| g.call(function, &[x, positions]))?[0];
    }
    let x = family.norm().apply(&mut g, tensors.norm.scope, x)?;
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
