//! A configuration of any family.

use std::ops::{Deref, DerefMut};

use super::decoder::DecoderConfig;
use super::fields::Fields;
use super::{
    FalconConfig, GemmaConfig, Gpt2Config, GptNeoxConfig, LlamaConfig, MistralConfig, Olmo2Config, Phi3Config,
    QwenConfig,
};
use crate::error::Result;
use ridge_files::json;

/// The configuration of a decoder of one of the families that Ridge knows. Derefs to what all of them have.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // each is the family that it names
pub enum ModelConfig {
    Llama(LlamaConfig),
    Mistral(MistralConfig),
    Qwen(QwenConfig),
    Gemma(GemmaConfig),
    Phi3(Phi3Config),
    Olmo2(Olmo2Config),
    Gpt2(Gpt2Config),
    GptNeox(GptNeoxConfig),
    Falcon(FalconConfig),
}

impl ModelConfig {
    /// Reads the text of a `config.json`, of the family that its `model_type` names. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// An error that names file, key, value and remedy if the text is not JSON, a needed key is missing, a value is
    /// impossible or contradicts another, the model is of a family or asks for something that Ridge does not do, or
    /// there is a key that Ridge does not know.
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let mut f = Fields::new(file, &map);
        let config = match f.required::<&str>("model_type")? {
            "llama" => Self::Llama(LlamaConfig::read(&mut f)?),
            "mistral" => Self::Mistral(MistralConfig::read(&mut f)?),
            "qwen2" => Self::Qwen(QwenConfig::read_2(&mut f)?),
            "qwen3" => Self::Qwen(QwenConfig::read_3(&mut f)?),
            "gemma2" => Self::Gemma(GemmaConfig::read_2(&mut f)?),
            "gemma3_text" => Self::Gemma(GemmaConfig::read_3(&mut f)?),
            "phi3" => Self::Phi3(Phi3Config::read(&mut f)?),
            "olmo2" => Self::Olmo2(Olmo2Config::read(&mut f)?),
            "gpt2" => Self::Gpt2(Gpt2Config::read(&mut f)?),
            "gpt_neox" => Self::GptNeox(GptNeoxConfig::read(&mut f)?),
            "falcon" => Self::Falcon(FalconConfig::read(&mut f)?),
            "bert" => {
                return Err(f.wrong(
                    "model_type",
                    "is an encoder, which writes no text",
                    "make vectors with `ridge embed`",
                ));
            }
            _ => {
                let remedy = format!(
                    "choose a checkpoint of falcon, gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, olmo2, phi3, \
                     qwen2 or qwen3; `ridge plan` takes {} too",
                    super::PlannedConfig::FAMILIES.join(", ")
                );
                return Err(f.wrong("model_type", "is not a family that Ridge reads", remedy));
            }
        };
        f.finish()?;
        Ok(config)
    }
}

impl Deref for ModelConfig {
    type Target = DecoderConfig;

    fn deref(&self) -> &DecoderConfig {
        match self {
            Self::Llama(c) => c,
            Self::Mistral(c) => c,
            Self::Qwen(c) => c,
            Self::Gemma(c) => c,
            Self::Phi3(c) => c,
            Self::Olmo2(c) => c,
            Self::Gpt2(c) => c,
            Self::GptNeox(c) => c,
            Self::Falcon(c) => c,
        }
    }
}

impl DerefMut for ModelConfig {
    fn deref_mut(&mut self) -> &mut DecoderConfig {
        match self {
            Self::Llama(c) => c,
            Self::Mistral(c) => c,
            Self::Qwen(c) => c,
            Self::Gemma(c) => c,
            Self::Phi3(c) => c,
            Self::Olmo2(c) => c,
            Self::Gpt2(c) => c,
            Self::GptNeox(c) => c,
            Self::Falcon(c) => c,
        }
    }
}

macro_rules! are_decoders {
    ($($config:ident),*) => {$(
        impl Deref for $config {
            type Target = DecoderConfig;

            fn deref(&self) -> &DecoderConfig {
                &self.decoder
            }
        }

        impl DerefMut for $config {
            fn deref_mut(&mut self) -> &mut DecoderConfig {
                &mut self.decoder
            }
        }
    )*};
}

are_decoders! {
    LlamaConfig, MistralConfig, QwenConfig, GemmaConfig, Phi3Config, Olmo2Config, Gpt2Config, GptNeoxConfig, FalconConfig
}
