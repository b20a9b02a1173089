//! Falcon, with rotary positions: attention and MLP in parallel, few key and value heads.

use ridge_graph::ops::Gelu;

use super::decoder::{self, DecoderConfig, Keys};
use super::fields::Fields;
use super::rope;
use crate::error::Result;

/// Every size and switch of a Falcon model.
#[derive(Clone, Debug, PartialEq)]
pub struct FalconConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// Do all projections have biases?
    pub bias: bool,
    /// Are the rows of the fused projection grouped by key and value head, each with its queries?
    pub grouped_rows: bool,
    /// Have attention and MLP a norm each, rather than one together?
    pub two_norms: bool,
}

const KEYS: Keys = Keys {
    intermediate_size: "ffn_hidden_size",
    intermediate_factor: Some(4),
    num_key_value_heads: "num_kv_heads",
    positions: Some(2048),
    norm_eps: "layer_norm_epsilon",
    tie_word_embeddings: true,
    ..decoder::USUAL
};

impl FalconConfig {
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("FalconForCausalLM")?;
        f.harmless(&["hidden_dropout"]);
        f.must_be("alibi", false)?;
        f.must_be("parallel_attn", true)?;
        f.must_be("apply_residual_connection_post_layernorm", false)?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
        let newer = f.optional("new_decoder_architecture")?.unwrap_or(false);
        let multi_query = f.optional("multi_query")?.unwrap_or(true);
        if !newer {
            decoder.num_key_value_heads = if multi_query { 1 } else { decoder.num_attention_heads };
        }
        let norms = f.count("num_ln_in_parallel_attn")?.unwrap_or(if newer { 2 } else { 1 });
        if !(1..=2).contains(&norms) {
            return Err(f.wrong("num_ln_in_parallel_attn", "is neither 1 nor 2", decoder::REMEDY));
        }
        Ok(Self {
            decoder,
            activation: f.gelu("activation", Gelu::Erf)?,
            bias: f.optional("bias")?.unwrap_or(false),
            // One key and value head for each query head has rows grouped by head in the older models too.
            grouped_rows: newer || !multi_query,
            two_norms: norms == 2,
        })
    }
}
