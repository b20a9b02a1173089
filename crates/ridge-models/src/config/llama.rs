//! The Llama family: Llama 2, Llama 3 and the many checkpoints that share their layers.

use super::decoder::{self, DecoderConfig};
use super::fields::Fields;
use super::rope;
use crate::error::Result;
use ridge_files::json;

/// Every size and switch of a Llama model, checked against each other.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Do the three projections of the MLP have biases?
    pub mlp_bias: bool,
}

/// Keys that some checkpoints of this family carry and that do not change the forward pass.
const HARMLESS: &[&str] = &["is_llama_config", "max_sequence_length"];

impl LlamaConfig {
    /// Reads the text of a `config.json`. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// An error that names file, key, value and remedy if the text is not JSON, a needed key is missing, a value is
    /// impossible or contradicts another, the model is of another family or asks for something that Ridge does not
    /// do, or there is a key that Ridge does not know.
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let mut f = Fields::new(file, &map);
        if f.required::<&str>("model_type")? != "llama" {
            let remedy = "choose a checkpoint of the family \"llama\"";
            return Err(f.wrong("model_type", "is not a family that Ridge reads here", remedy));
        }
        let config = Self::read(&mut f)?;
        f.finish()?;
        Ok(config)
    }

    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("LlamaForCausalLM")?;
        f.harmless(HARMLESS);
        f.must_be("hidden_act", "silu")?;
        f.must_be("pretraining_tp", 1)?;
        let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
        decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
        Ok(Self {
            decoder,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mlp_bias: f.optional("mlp_bias")?.unwrap_or(false),
        })
    }
}
