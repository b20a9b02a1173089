//! Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): keys and values of all heads from one latent
//! per token, which is all that the cache holds.
//!
//! Weights are absorbed (section 2.1.2): queries are taken to the space of latents, and results out of it, so that all
//! heads attend to the rows of the cache. A row is the rotated part of the keys, then the latent; it is key and value, in
//! a cache with one side.

use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Var};

use super::blocks::{NormKind, linear, weight};
use super::decoder::{AttentionScores, DecoderLayer};
use super::experts::MAX_SIZE;
use super::indexer::IndexerConfig;
use super::tensors::{ATTENTION_OUTPUT, Cut, TensorName};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;
use crate::model::symbols;

/// Sizes of a layer's latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentAttentionConfig {
    /// Width of the queries' latent, if they have one.
    pub q_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Elements of a head that are not rotated.
    pub nope: usize,
    /// Elements that are.
    pub rope: usize,
    /// Elements of a value.
    pub value: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Does the rotation turn neighbours, elements `2i` and `2i + 1`?
    pub interleaved: bool,
    /// What selects the tokens that are attended to; all are where there is none.
    pub indexer: Option<IndexerConfig>,
}

/// Projections out of the latents of queries, keys and values.
pub(super) const LATENT_ATTENTION: &[TensorName] = &[
    TensorName::planned("self_attn.q_b_proj", Cut::Heads),
    TensorName::planned("self_attn.kv_b_proj", Cut::Heads),
    ATTENTION_OUTPUT,
];

/// The epsilon of the norms of latents, which configurations do not have.
const LATENT_EPS: f64 = 1e-6;

impl LatentAttentionConfig {
    /// Reads them, and the decoder that they are of: its head of keys and its width are those of the cache.
    pub(super) fn read(f: &mut Fields<'_>) -> Result<(Self, DecoderConfig)> {
        f.must_be("attention_bias", false)?;
        let q_rank = f.optional_size("q_lora_rank", MAX_SIZE)?;
        let kv_rank = f.size("kv_lora_rank", MAX_SIZE)?;
        let nope = f.size("qk_nope_head_dim", MAX_SIZE)?;
        let rope = f.size("qk_rope_head_dim", MAX_SIZE)?;
        let value = f.size("v_head_dim", MAX_SIZE)?;
        let interleaved = f.optional("rope_interleave")?.unwrap_or(true);
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.head_dim = rope;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        decoder.head_dim = rope + kv_rank;
        decoder.num_key_value_heads = 1;
        decoder.latent_attention = true;
        let temper = read_temper(f)?;
        let scale = temper * temper / ((nope + rope) as f64).sqrt();
        Ok((Self { q_rank, kv_rank, nope, rope, value, scale, interleaved, indexer: None }, decoder))
    }

    /// Attention of `x`, `[tokens, hidden]`, in scope `self_attn`, with `heads` query heads. A layer that is `sharing` takes
    /// the selection of an earlier one.
    pub(super) fn build(
        &self,
        g: &mut Builder,
        x: Var,
        heads: usize,
        at: &DecoderLayer<'_>,
        sharing: bool,
    ) -> GraphResult<Var> {
        let (rank, tokens) = (self.kv_rank, Dim::sym(symbols::TOKENS));
        let norm = NormKind::Rms(LATENT_EPS);
        let (dtype, hidden) = (g.ty(x)?.dtype, g.ty(x)?.shape.last().as_const().unwrap_or_default());
        let width = heads * (self.nope + self.rope);
        let (of_q, projection) = match self.q_rank {
            None => (x, "q_proj"),
            Some(q_rank) => {
                let latent = linear(g, "q_a_proj", x, q_rank, false)?;
                (norm.apply(g, "q_a_layernorm", latent)?, "q_b_proj")
            }
        };
        let q = linear(g, projection, of_q, width, false)?;
        let q = g.reshape(q, [tokens.clone(), heads.into(), (self.nope + self.rope).into()])?;
        let (plain, turned) = (g.slice(q, 2, 0, self.nope)?, g.slice(q, 2, self.nope, self.rope)?);

        let row = linear(g, "kv_a_proj_with_mqa", x, rank + self.rope, false)?;
        let (latent, key) = (g.slice(row, 1, 0, rank)?, g.slice(row, 1, rank, self.rope)?);
        let latent = norm.apply(g, "kv_a_layernorm", latent)?;
        let row = g.concat(&[key, latent], 1)?;
        let row = g.reshape(row, [tokens.clone(), 1.into(), (rank + self.rope).into()])?;

        // Of each head, from a latent to the part of keys that is not rotated, and to values.
        let both = self.nope + self.value;
        let w = g.scoped("kv_b_proj", |g| weight(g, "weight", [heads * both, rank]))?;
        let w = g.cast(w, DType::F32)?;
        let w = g.reshape(w, [heads.into(), both.into(), Dim::from(rank)])?;
        let (to_keys, to_values) = (g.slice(w, 1, 0, self.nope)?, g.slice(w, 1, self.nope, self.value)?);
        let plain = g.cast(plain, DType::F32)?;
        let plain = g.transpose(plain, &[1, 0, 2])?;
        let absorbed = g.matmul(plain, to_keys, false, false, DType::F32)?;
        let absorbed = g.transpose(absorbed, &[1, 0, 2])?;
        let absorbed = g.cast(absorbed, dtype)?;
        let q = g.concat(&[turned, absorbed], 2)?;

        let scores = AttentionScores { scale: self.scale, interleaved: self.interleaved, ..at.scores() };
        let a = match &self.indexer {
            None => at.attend_rows(g, q, row, &scores)?,
            Some(indexer) => {
                let selected = indexer.select(g, [x, of_q], at, sharing)?;
                at.attend_selected(g, [q, row, selected], indexer.top_k, &scores)?
            }
        };
        let a = g.reshape(a, [tokens.clone(), heads.into(), (rank + self.rope).into()])?;
        let a = g.slice(a, 2, self.rope, rank)?;
        let a = g.cast(a, DType::F32)?;
        let a = g.transpose(a, &[1, 0, 2])?;
        let y = g.matmul(a, to_values, false, true, DType::F32)?;
        let y = g.transpose(y, &[1, 0, 2])?;
        let y = g.reshape(y, [tokens, (heads * self.value).into()])?;
        let y = g.cast(y, dtype)?;
        linear(g, "o_proj", y, hidden, false)
    }
}

/// By what queries and keys are multiplied besides, where the context is stretched (the released code).
fn read_temper(f: &mut Fields<'_>) -> Result<f64> {
    for key in ["rope_scaling", "rope_parameters"] {
        if let Some(mut block) = f.object(key)?
            && let (Some(factor), Some(mscale)) =
                (block.optional_positive("factor")?, block.optional_positive("mscale_all_dim")?)
            && factor > 1.0
        {
            return Ok(0.1 * mscale * factor.ln() + 1.0);
        }
    }
    Ok(1.0)
}
