//! What a decoder's layer sees of the model around it: positions, where keys and values are found, and the values that
//! layers pass to later ones.

use std::cell::RefCell;

use ridge_graph::ops::{PagedAttention, RaggedAttention, Rope, SelectedAttention};
use ridge_graph::{Builder, Dim, GraphError, Result as GraphResult, Type, Var};

use super::blocks::{deinterleaved, linear, rope};
use crate::config::{DecoderConfig, RopeConfig};
use crate::model::{BuildOptions, CacheRows, KV, StepInputs, attend_cached, attention_symbols, symbols, write_cache};

/// What the layers of a model are given besides the residual stream, in the function that calls them.
#[derive(Debug)]
pub(crate) struct LayerInputs {
    /// The step's tokens, i32 `[tokens]`.
    pub(super) token_ids: Var,
    /// Their positions in their sequences, i32 `[tokens]`.
    pub(super) positions: Var,
    /// The latest value of each name.
    values: Vec<(&'static str, Var)>,
}

impl LayerInputs {
    pub(super) fn new(token_ids: Var, positions: Var) -> Self {
        Self { token_ids, positions, values: Vec::new() }
    }

    /// Gives the layers that follow `value` by this name.
    pub(super) fn set(&mut self, name: &'static str, value: Var) {
        match self.values.iter_mut().find(|(known, _)| *known == name) {
            Some((_, latest)) => *latest = value,
            None => self.values.push((name, value)),
        }
    }

    /// The latest value of this name.
    pub(super) fn get(&self, name: &str) -> Option<Var> {
        self.values.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// The types of all values.
    pub(super) fn types(&self, g: &Builder) -> GraphResult<Vec<(&'static str, Type)>> {
        self.values.iter().map(|(name, value)| Ok((*name, g.ty(*value)?.clone()))).collect()
    }
}

/// Where and how a layer is built.
pub(crate) struct DecoderLayer<'a> {
    pub(super) config: &'a DecoderConfig,
    pub(super) options: &'a BuildOptions,
    /// How many tokens a token sees.
    pub(super) window: Option<usize>,
    /// [`DecoderFamily::kind`](super::decoder::DecoderFamily::kind).
    pub(super) kind: &'static str,
    /// [`DecoderFamily::cache_shape`](super::decoder::DecoderFamily::cache_shape).
    pub(super) cache: [usize; 3],
    pub(super) positions: Var,
    pub(super) keys: KeySource,
    pub(super) passed: PassedValues,
}

/// The values that a layer takes from earlier layers and leaves to later ones.
#[derive(Debug, Default)]
pub(crate) struct PassedValues {
    /// Those that there are.
    offered: Vec<(&'static str, Type)>,
    /// Those that the layer asked for, as arguments of its function.
    taken: RefCell<Vec<(&'static str, Var)>>,
    left: RefCell<Vec<(&'static str, Var)>>,
}

impl PassedValues {
    pub(super) fn new(offered: Vec<(&'static str, Type)>) -> Self {
        Self { offered, ..Self::default() }
    }

    /// Names of the arguments behind the usual ones, in order.
    pub(super) fn taken(&self) -> Vec<&'static str> {
        self.taken.borrow().iter().map(|(name, _)| *name).collect()
    }

    /// Outputs behind the residual stream, in order.
    pub(super) fn left(&self) -> Vec<(&'static str, Var)> {
        self.left.borrow().clone()
    }
}

/// Where a layer's tokens find the keys and values that they attend to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeySource {
    /// In a paged cache, to which the step's are added at these slots, i32 `[tokens]`.
    Cache { slots: Var },
    /// Among those of the step's tokens, whose sequences are i32 `[tokens]`; behind a token too if it sees `both_ways`.
    Step { seq_ids: Var, both_ways: bool },
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
            scale: 1.0 / (self.cache[2] as f64).sqrt(),
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

    /// The value that the model or an earlier layer gave this name, see [`LayerInputs::set`] and [`DecoderLayer::leave`].
    pub(super) fn value(&self, g: &mut Builder, name: &'static str) -> GraphResult<Var> {
        let mut taken = self.passed.taken.borrow_mut();
        if let Some((_, value)) = taken.iter().find(|(known, _)| *known == name) {
            return Ok(*value);
        }
        let Some((_, ty)) = self.passed.offered.iter().find(|(known, _)| *known == name) else {
            let why = format!("no layer before this one leaves a value called {name}");
            return Err(GraphError::Use { at: g.scope().into(), why });
        };
        let value = g.arg(name, ty.clone());
        taken.push((name, value));
        Ok(value)
    }

    /// Gives `value` this name for the layers that follow.
    pub(super) fn leave(&self, name: &'static str, value: Var) {
        self.passed.left.borrow_mut().push((name, value));
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
        let [_, kv_heads, dim] = self.cache;
        let heads = [self.config.num_attention_heads, kv_heads, kv_heads];
        let mut projected = [x; 3];
        for ((name, heads), y) in names.into_iter().zip(heads).zip(&mut projected) {
            let flat = linear(g, name, x, heads * dim, bias)?;
            *y = self.split_heads(g, flat)?;
        }
        Ok(projected)
    }

    /// `[tokens, heads * dim]` as `[tokens, heads, dim]`.
    pub(super) fn split_heads(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let [_, _, dim] = self.cache;
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

    /// Elements of all heads of `x`, `[tokens, heads, dim]`.
    pub(super) fn heads_width(&self, g: &Builder, x: Var) -> GraphResult<usize> {
        Ok(g.ty(x)?.shape.0[1].as_const().map_or(0, |heads| heads * self.cache[2]))
    }

    /// `[tokens, heads, dim]` as `[tokens, heads * dim]`.
    fn join_heads(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let width = self.heads_width(g, x)?;
        g.reshape(x, [Dim::sym(symbols::TOKENS), width.into()])
    }

    /// Causal attention over the layer's cache, to which `k` and `v` are added, or over those of the step if there is no
    /// cache: from `[tokens, heads, dim]` each to `[tokens, heads * dim]`.
    pub(super) fn attend(&self, g: &mut Builder, [q, k, v]: [Var; 3], scores: &AttentionScores) -> GraphResult<Var> {
        self.attend_sides(g, q, &[k, v], scores)
    }

    /// As [`DecoderLayer::attend`], where keys are the values too: the cache has one side.
    pub(super) fn attend_rows(&self, g: &mut Builder, q: Var, k: Var, scores: &AttentionScores) -> GraphResult<Var> {
        self.attend_sides(g, q, &[k], scores)
    }

    /// Lets later layers with this window attend to `k` and `v` by [`DecoderLayer::attend_lent`]. With a cache they read
    /// this layer's, which is theirs by [`DecoderFamily::owner`](super::decoder::DecoderFamily::owner).
    pub(super) fn lend(&self, [k, v]: [Var; 2]) {
        if !self.keeps_states() {
            let [keys, values] = self.lent();
            self.leave(keys, k);
            self.leave(values, v);
        }
    }

    /// As [`DecoderLayer::attend`], to the keys and values of the last layer with this window that lent its own.
    pub(super) fn attend_lent(&self, g: &mut Builder, q: Var, scores: &AttentionScores) -> GraphResult<Var> {
        match self.keys {
            KeySource::Cache { .. } => self.attend_sides(g, q, &[], scores),
            KeySource::Step { .. } => {
                let [keys, values] = self.lent();
                let rows = [self.value(g, keys)?, self.value(g, values)?];
                self.attend_sides(g, q, &rows, scores)
            }
        }
    }

    /// Names of lent keys and values.
    fn lent(&self) -> [&'static str; 2] {
        if self.window.is_some() { ["local_keys", "local_values"] } else { ["keys", "values"] }
    }

    /// `x`, `[tokens, heads, dim]`, rotated as `scores` says.
    pub(super) fn rotate(&self, g: &mut Builder, x: Var, scores: &AttentionScores) -> GraphResult<Var> {
        match &scores.rope {
            Some(rope) => {
                let x = if scores.interleaved { deinterleaved(g, x, 2 * rope.inv_freq.len())? } else { x };
                g.rope(x, self.positions, rope)
            }
            None => Ok(x),
        }
    }

    /// `q` and the first of `rows`, which are keys, rotated.
    fn rotate_with_first(
        &self,
        g: &mut Builder,
        q: Var,
        rows: &[Var],
        scores: &AttentionScores,
    ) -> GraphResult<(Var, Vec<Var>)> {
        let (q, mut rows) = (self.rotate(g, q, scores)?, rows.to_vec());
        if let Some(k) = rows.first_mut() {
            *k = self.rotate(g, *k, scores)?;
        }
        Ok((q, rows))
    }

    /// The slots of the step's tokens in the cache; an error where there is none, which `what` cannot do without.
    pub(super) fn slots(&self, g: &Builder, what: &str) -> GraphResult<Var> {
        match self.keys {
            KeySource::Cache { slots } => Ok(slots),
            KeySource::Step { .. } => Err(no_form_without_cache(g, what)),
        }
    }

    /// As [`DecoderLayer::attend_rows`], to the `top_k` positions of `selected`, i32 `[tokens, top_k]`, alone.
    pub(super) fn attend_selected(
        &self,
        g: &mut Builder,
        [q, k, selected]: [Var; 3],
        top_k: usize,
        scores: &AttentionScores,
    ) -> GraphResult<Var> {
        let slots = self.slots(g, "attention to selected tokens")?;
        let (q, rows) = self.rotate_with_first(g, q, &[k], scores)?;
        let new = CacheRows { rows: &rows, slots, shape: self.cache };
        let cache = write_cache(g, KV, &new, None, self.options)?;
        let step = StepInputs::ask(g)?;
        let (pairs, cached) = attention_symbols(Some(top_k));
        let op = SelectedAttention { scale: scores.scale, top_k, pairs, cached };
        let a = g.selected_attention(q, &cache, [step.block_table, step.seq_ids, selected], op)?;
        self.join_heads(g, a)
    }

    /// Attention to `rows`: keys and values, keys that are values too, or none but those that the cache has.
    fn attend_sides(&self, g: &mut Builder, q: Var, rows: &[Var], scores: &AttentionScores) -> GraphResult<Var> {
        let (q, rows) = self.rotate_with_first(g, q, rows, scores)?;
        let (pairs, cached) = attention_symbols(self.window);
        let (scale, window, softcap) = (scores.scale, self.window, scores.softcap);
        let of_heads: Vec<Var> = [scores.slopes, scores.sinks].into_iter().flatten().collect();
        let a = match self.keys {
            KeySource::Cache { slots } => {
                let op = PagedAttention {
                    window,
                    chunked: scores.chunked,
                    softcap,
                    slopes: scores.slopes.is_some(),
                    sinks: scores.sinks.is_some(),
                    ..PagedAttention::new(scale, pairs, cached)
                };
                let cache = CacheRows { rows: &rows, slots, shape: self.cache };
                attend_cached(g, q, &cache, self.positions, &of_heads, op, self.options)?
            }
            KeySource::Step { .. } if scores.chunked || !of_heads.is_empty() => {
                return Err(no_form_without_cache(g, "attention with ALiBi slopes, sinks or chunked windows"));
            }
            KeySource::Step { seq_ids, both_ways } => {
                let op = if both_ways { RaggedAttention::new } else { RaggedAttention::causal };
                let op = RaggedAttention { window, softcap, ..op(scale, pairs) };
                let (k, v) = (rows[0], rows[rows.len() - 1]);
                g.ragged_attention([q, k, v], seq_ids, op)?
            }
        };
        self.join_heads(g, a)
    }
}

fn no_form_without_cache(g: &Builder, what: &str) -> GraphError {
    let why =
        format!("{what} has no form without a cache, so models with it cannot be trained yet, nor read as encoders");
    GraphError::Use { at: g.scope().into(), why }
}
