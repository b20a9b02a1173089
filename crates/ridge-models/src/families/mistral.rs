//! Mistral: Llama's layers, in which a token sees a window of the tokens before it (Jiang et al. 2023, "Mistral 7B",
//! section 2).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::NormKind;
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, MixRules, window_metadata};
use super::llama;
use super::tensors::LLAMA_TENSORS;
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope, sliding_window};
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
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        Ok(Self { decoder, sliding_window: sliding_window(f, Some(4096))? })
    }
}

deref_to_decoder!(MistralConfig);

/// How it is registered.
pub(super) static MISTRAL: FamilyDefinition = FamilyDefinition {
    name: "mistral",
    model_type: "mistral",
    class: Some("MistralForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(MistralConfig::read(f)?))),
    tensors: LLAMA_TENSORS,
    // GGUF has it as a Llama with a window.
    gguf: Some(GgufMapping {
        applies: |file| file.window().is_some() && file.experts() == 0,
        interleaved: true,
        mix: MixRules::Llama,
        read: |file, to| {
            to.insert("sliding_window".into(), file.window().into());
            Ok(())
        },
        ..GgufMapping::new("llama")
    }),
};

impl DecoderFamily for MistralConfig {
    fn window(&self, _index: usize) -> Option<usize> {
        self.sliding_window
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        llama::layer(self, g, x, at, false, false)
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        Ok(window_metadata(self.sliding_window))
    }
}
