//! Phi-3, 3.5 and 4: Llama's layers with fused projections.

use super::decoder::{self, DecoderConfig, MOST_POSITIONS, sliding_window};
use super::fields::Fields;
use super::rope::{self, RopeKeys};
use crate::error::Result;

/// Every size and switch of a Phi-3 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Phi3Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// How many tokens a token sees, itself included; all if `None`.
    pub sliding_window: Option<usize>,
}

/// Dropout, in training only.
const HARMLESS: &[&str] = &["embd_pdrop", "resid_pdrop"];

impl Phi3Config {
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("Phi3ForCausalLM")?;
        f.harmless(HARMLESS);
        f.must_be("hidden_act", "silu")?;
        for key in ["attention_bias", "mlp_bias", "lm_head_bias"] {
            f.must_be(key, false)?;
        }
        f.must_be("full_attn_mod", 1)?;
        f.must_be("interpolate_factor", 1)?;
        let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
        let original = f.optional_size("original_max_position_embeddings", MOST_POSITIONS)?;
        let keys = RopeKeys { partial: Some("partial_rotary_factor"), original, ..rope::USUAL };
        decoder.rope = Some(rope::read(f, &decoder, &keys)?);
        Ok(Self { decoder, sliding_window: sliding_window(f, None)? })
    }
}
