//! OLMo 2: norms after attention and MLP, and of queries and keys as wholes.

use serde_json::Value;

use super::decoder::{self, DecoderConfig};
use super::fields::Fields;
use super::rope;
use crate::error::Result;

/// Every size and switch of an OLMo 2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Olmo2Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
}

impl Olmo2Config {
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("Olmo2ForCausalLM")?;
        f.must_be("hidden_act", "silu")?;
        f.must_be("clip_qkv", Value::Null)?;
        let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
        decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
        Ok(Self { decoder, attention_bias: f.optional("attention_bias")?.unwrap_or(false) })
    }
}
