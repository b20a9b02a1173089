//! The indexer of sparse attention (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1): small heads with a key for each token, in
//! a cache of their own, whose scores select the tokens that a layer attends to.
//!
//! The released code of DeepSeek-V3.2 rotates queries and keys by a Hadamard matrix and rounds them to f8, which here they
//! are not: the rotation changes no product, and it is there for the rounding. transformers leaves both out too.

use ridge_graph::ops::IndexTopK;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Var};

use super::blocks::{NormKind, linear};
use super::decoder::{AttentionScores, DecoderLayer};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use crate::config::Fields;
use crate::error::Result;
use crate::model::{CacheRows, StepInputs, attention_symbols, symbols, write_cache};

/// Sizes of an indexer.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexerConfig {
    /// Its heads.
    pub heads: usize,
    /// Elements of a head, of which the first are rotated as those of attention are.
    pub dim: usize,
    /// Tokens that a token attends to.
    pub top_k: usize,
    /// Does the rotation turn neighbours, elements `2i` and `2i + 1`?
    pub interleaved: bool,
    /// Of each layer, does it take the selection of the last layer before it that has an indexer? None does if empty.
    pub sharing: Vec<bool>,
}

/// The epsilon of the norm of keys, which configurations do not have.
const KEY_EPS: f64 = 1e-6;

/// The cache of its keys, in a layer and in the scope of attention.
const KEYS_OF_LAYER: &str = "self_attn.index_keys";
const KEYS: &str = "index_keys";

/// The selection that a layer leaves to those that share it.
const SELECTED: &str = "selected";

impl IndexerConfig {
    /// Reads one that every layer has, whose rotation turns neighbours as said if the file does not say.
    pub(super) fn read(f: &mut Fields<'_>, interleaved: bool) -> Result<Self> {
        f.needs(&["q_lora_rank"])?;
        let config = Self {
            heads: f.size("index_n_heads", MAX_SIZE)?,
            dim: f.size("index_head_dim", MAX_SIZE)?,
            top_k: f.size("index_topk", MAX_SIZE)?,
            interleaved: f.optional("indexer_rope_interleave")?.unwrap_or(interleaved),
            sharing: Vec::new(),
        };
        let rotated = f.size("qk_rope_head_dim", MAX_SIZE)?;
        match rotated <= config.dim {
            true => Ok(config),
            false => Err(f.wrong(
                "index_head_dim",
                format!("is below qk_rope_head_dim = {rotated}, the elements that are rotated"),
                crate::config::REMEDY,
            )),
        }
    }

    /// Does layer `index` take the selection of one before it?
    pub(super) fn shares(&self, index: usize) -> bool {
        self.sharing.get(index) == Some(&true)
    }

    /// `states`, those of a layer without an indexer, with the keys of one.
    pub(super) fn with_keys(&self, states: LayerStates) -> LayerStates {
        states.with_cache(KEYS_OF_LAYER, self.key_shape())
    }

    fn key_shape(&self) -> [usize; 3] {
        [1, 1, self.dim]
    }

    /// The positions that each token attends to, i32 `[tokens, top_k]`: by this layer's indexer, of `x`, `[tokens, hidden]`,
    /// and the latent of queries; or those of an earlier layer if it is `sharing`.
    pub(super) fn select(
        &self,
        g: &mut Builder,
        [x, latent]: [Var; 2],
        at: &DecoderLayer<'_>,
        sharing: bool,
    ) -> GraphResult<Var> {
        if sharing {
            return at.value(g, SELECTED);
        }
        let slots = at.slots(g, "an indexer, which selects tokens of a cache,")?;
        let tokens = Dim::sym(symbols::TOKENS);
        let scores = AttentionScores { interleaved: self.interleaved, ..at.scores() };
        let (q, k, w) = g.scoped("indexer", |g| -> GraphResult<(Var, Var, Var)> {
            let q = linear(g, "wq_b", latent, self.heads * self.dim, false)?;
            let q = g.reshape(q, [tokens.clone(), self.heads.into(), self.dim.into()])?;
            let k = linear(g, "wk", x, self.dim, false)?;
            let k = NormKind::Layer(KEY_EPS).apply(g, "k_norm", k)?;
            let k = g.reshape(k, [tokens, 1.into(), self.dim.into()])?;
            // In f32, as the router of experts.
            let wide = g.cast(x, DType::F32)?;
            let w = linear(g, "weights_proj", wide, self.heads, false)?;
            Ok((at.rotate(g, q, &scores)?, at.rotate(g, k, &scores)?, w))
        })?;
        let new = CacheRows { rows: &[k], slots, shape: self.key_shape() };
        let keys = write_cache(g, KEYS, &new, None, at.options)?;
        let step = StepInputs::ask(g)?;
        let (pairs, cached) = attention_symbols(None);
        let op = IndexTopK { top_k: self.top_k, pairs, cached };
        let selected = g.index_topk([q, w], &keys, [step.block_table, step.seq_ids, at.positions()], op)?;
        if !self.sharing.is_empty() {
            at.leave(SELECTED, selected);
        }
        Ok(selected)
    }
}
