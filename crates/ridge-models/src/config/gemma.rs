//! Gemma 2 and 3, the text models.

use super::decoder::{self, DecoderConfig, Keys, MOST_POSITIONS, layer_windows};
use super::fields::Fields;
use super::rope::{self, RopeConfig, RopeKeys};
use crate::error::Result;

/// Every size and switch of a Gemma model.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmaConfig {
    /// What every decoder has; its rotation is that of the layers that see everything.
    pub decoder: DecoderConfig,
    /// The rotation in layers with a window.
    pub local_rope: RopeConfig,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// Scores are divided by its root; above 0.
    pub query_pre_attn_scalar: f64,
    /// Scores stay within this, by a hyperbolic tangent. In Gemma 2.
    pub attn_logit_softcapping: Option<f64>,
    /// So do logits.
    pub final_logit_softcapping: Option<f64>,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Are queries and keys normalised, head by head? In Gemma 3.
    pub qk_norm: bool,
}

const KEYS: Keys = Keys { tie_word_embeddings: true, ..decoder::USUAL };

impl GemmaConfig {
    pub(super) fn read_2(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("Gemma2ForCausalLM")?;
        // Every other layer is local, the first one too.
        Self::read(f, false, 2, |f, decoder| {
            let rope = rope::read(f, decoder, &rope::USUAL)?;
            Ok((rope.clone(), rope))
        })
    }

    pub(super) fn read_3(f: &mut Fields<'_>) -> Result<Self> {
        f.architecture("Gemma3ForCausalLM")?;
        let newer = f.optional_size("_sliding_window_pattern", MOST_POSITIONS)?;
        let pattern = f.optional_size("sliding_window_pattern", MOST_POSITIONS)?.or(newer).unwrap_or(6);
        Self::read(f, true, pattern, read_two_ropes)
    }

    /// `pattern`: every so manieth layer sees everything.
    fn read(
        f: &mut Fields<'_>,
        qk_norm: bool,
        pattern: usize,
        ropes: impl Fn(&mut Fields<'_>, &DecoderConfig) -> Result<(RopeConfig, RopeConfig)>,
    ) -> Result<Self> {
        f.needs(&["num_key_value_heads", "head_dim", "sliding_window"])?;
        f.must_be("hidden_act", "gelu_pytorch_tanh")?;
        f.must_be("hidden_activation", "gelu_pytorch_tanh")?;
        f.must_be("use_bidirectional_attention", false)?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let (global, local_rope) = ropes(f, &decoder)?;
        decoder.rope = Some(global);
        let window = f.optional_size("sliding_window", MOST_POSITIONS)?;
        Ok(Self {
            local_rope,
            windows: layer_windows(f, decoder.num_hidden_layers, window, |i| !(i + 1).is_multiple_of(pattern))?,
            query_pre_attn_scalar: f.positive("query_pre_attn_scalar")?,
            attn_logit_softcapping: f.optional_positive("attn_logit_softcapping")?,
            final_logit_softcapping: f.optional_positive("final_logit_softcapping")?,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            qk_norm,
            decoder,
        })
    }
}

/// The rotations of global and local layers: in the newer spelling two objects, in the older two bases, of which the
/// global one alone is scaled.
fn read_two_ropes(f: &mut Fields<'_>, decoder: &DecoderConfig) -> Result<(RopeConfig, RopeConfig)> {
    const GLOBAL: RopeKeys = RopeKeys { default_theta: 1_000_000.0, ..rope::USUAL };
    const LOCAL: RopeKeys = RopeKeys { theta: "rope_local_base_freq", ..rope::USUAL };
    if let Some(mut both) = f.object("rope_parameters")?
        && both.has("full_attention")
    {
        let global = rope::read_block(both.required_object("full_attention")?, decoder, &GLOBAL)?;
        let local = rope::read_block(both.required_object("sliding_attention")?, decoder, &LOCAL)?;
        both.finish()?;
        return Ok((global, local));
    }
    let theta = f.optional_positive(LOCAL.theta)?.unwrap_or(LOCAL.default_theta);
    let global = rope::read(f, decoder, &GLOBAL)?;
    let local = RopeConfig { theta, scaling: None, ..global };
    Ok((global, local))
}
