//! Mistral: Llama's layers, in which a token sees a window of the tokens before it.

use super::decoder::{self, DecoderConfig, sliding_window};
use super::fields::Fields;
use super::rope;
use crate::error::Result;

/// Every size and switch of a Mistral model.
#[derive(Clone, Debug, PartialEq)]
pub struct MistralConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// How many tokens a token sees, itself included; all if `None`.
    pub sliding_window: Option<usize>,
}

impl MistralConfig {
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("MistralForCausalLM")?;
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
        decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
        Ok(Self { decoder, sliding_window: sliding_window(f, Some(4096))? })
    }
}
