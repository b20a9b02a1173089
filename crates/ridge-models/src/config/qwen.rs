//! Qwen 2, 2.5 and 3, the dense models.

use super::decoder::{self, DecoderConfig, layer_windows, sliding_window};
use super::fields::Fields;
use super::rope;
use crate::error::Result;

/// Every size and switch of a Qwen model.
#[derive(Clone, Debug, PartialEq)]
pub struct QwenConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the projections to queries, keys and values have biases?
    pub qkv_bias: bool,
    /// Has attention's output projection one?
    pub output_bias: bool,
    /// Are queries and keys normalised, head by head? In Qwen 3.
    pub qk_norm: bool,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
}

impl QwenConfig {
    pub(super) fn read_2(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("Qwen2ForCausalLM")?;
        f.needs(&["num_key_value_heads"])?;
        Self::read(f, |_| Ok((true, false)), false)
    }

    pub(super) fn read_3(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("Qwen3ForCausalLM")?;
        f.needs(&["num_key_value_heads", "head_dim"])?;
        let biases = |f: &mut Fields<'_>| {
            let biases = f.optional("attention_bias")?.unwrap_or(false);
            Ok((biases, biases))
        };
        Self::read(f, biases, true)
    }

    fn read(
        f: &mut Fields<'_>,
        biases: impl Fn(&mut Fields<'_>) -> Result<(bool, bool)>,
        qk_norm: bool,
    ) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        f.must_be("use_mrope", false)?;
        let mut decoder = DecoderConfig::read(f, &decoder::USUAL)?;
        decoder.rope = Some(rope::read(f, &decoder, &rope::USUAL)?);
        let (qkv_bias, output_bias) = biases(f)?;
        let (layers, first_local) = (decoder.num_hidden_layers, f.count("max_window_layers")?.unwrap_or(28));
        let in_use = f.optional("use_sliding_window")?.unwrap_or(false);
        let window = sliding_window(f, Some(4096))?.filter(|_| in_use);
        let windows = layer_windows(f, layers, window, |layer| layer as u64 >= first_local)?;
        Ok(Self { decoder, qkv_bias, output_bias, qk_norm, windows })
    }
}
