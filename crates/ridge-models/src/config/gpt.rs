//! GPT-2 and GPT-NeoX (Pythia): layer norms, biases, and an MLP without a gate.

use ridge_graph::ops::Gelu;

use super::decoder::{self, DecoderConfig, Keys};
use super::fields::Fields;
use super::rope::{self, RopeKeys};
use crate::error::Result;

/// Every size and switch of a GPT-2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// What every decoder has. Its positions are learned, so `max_position_embeddings` is a limit.
    pub decoder: DecoderConfig,
    /// Activation of the MLP.
    pub activation: Gelu,
}

/// Every size and switch of a GPT-NeoX model.
#[derive(Clone, Debug, PartialEq)]
pub struct GptNeoxConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// Do the projections of attention have biases?
    pub attention_bias: bool,
    /// Do attention and MLP read the same residual stream, rather than one after the other?
    pub use_parallel_residual: bool,
}

impl Gpt2Config {
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: Keys = Keys {
            hidden_size: "n_embd",
            intermediate_size: "n_inner",
            intermediate_factor: Some(4),
            num_hidden_layers: "n_layer",
            num_attention_heads: "n_head",
            max_position_embeddings: "n_positions",
            norm_eps: "layer_norm_epsilon",
            attention_dropout: "attn_pdrop",
            tie_word_embeddings: true,
            ..decoder::USUAL
        };
        // Dropout, heads for other tasks, and a way to compute the same in another precision.
        const HARMLESS: &[&str] = &[
            "embd_pdrop",
            "resid_pdrop",
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ];
        f.architecture("GPT2LMHeadModel")?;
        f.harmless(HARMLESS);
        f.must_be("scale_attn_weights", true)?;
        f.must_be("scale_attn_by_inverse_layer_idx", false)?;
        Ok(Self { decoder: DecoderConfig::read(f, &KEYS)?, activation: f.gelu("activation_function", Gelu::Tanh)? })
    }
}

impl GptNeoxConfig {
    pub(super) fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: Keys = Keys { norm_eps: "layer_norm_eps", ..decoder::USUAL };
        const ROPE: RopeKeys =
            RopeKeys { theta: "rotary_emb_base", partial: Some("rotary_pct"), default_partial: 0.25, ..rope::USUAL };
        f.architecture("GPTNeoXForCausalLM")?;
        f.harmless(&["classifier_dropout", "hidden_dropout"]);
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.rope = Some(rope::read(f, &decoder, &ROPE)?);
        Ok(Self {
            decoder,
            activation: f.gelu("hidden_act", Gelu::Erf)?,
            attention_bias: f.optional("attention_bias")?.unwrap_or(true),
            use_parallel_residual: f.optional("use_parallel_residual")?.unwrap_or(true),
        })
    }
}
