//! Phi-3, 3.5 and 4: Llama's layers, published with fused projections (Abdin et al. 2024, "Phi-3 Technical Report",
//! section 2).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::NormKind;
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_rotary_share, window_metadata};
use super::llama;
use super::tensors::{ATTENTION_OUTPUT, Cut, INPUT_NORM, LLAMA_TENSORS, MLP_DOWN, MLP_NORM, TensorName, TensorTable};
use crate::config::{
    DECODER_KEYS, DecoderConfig, Fields, MAX_POSITIONS, ROPE_KEYS, RopeKeys, read_rope, sliding_window,
};
use crate::error::Result;
use ridge_files::checkpoint::{Part, Rows};

/// Every size and switch of a Phi-3 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Phi3Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// How many tokens a token sees, itself included; all if `None`.
    pub sliding_window: Option<usize>,
}

/// The context of pretraining, outside the rotation's own object, whose key of that name it overrides.
const ORIGINAL_POSITIONS: &str = "original_max_position_embeddings";
/// The same where the file does not say.
const DEFAULT_ORIGINAL_POSITIONS: usize = 4096;

impl Phi3Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        for key in ["attention_bias", "mlp_bias", "lm_head_bias"] {
            f.must_be(key, false)?;
        }
        f.must_be("full_attn_mod", 1)?;
        f.must_be("interpolate_factor", 1)?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        let original = f.optional_size(ORIGINAL_POSITIONS, MAX_POSITIONS)?.unwrap_or(DEFAULT_ORIGINAL_POSITIONS);
        let keys = RopeKeys { partial: Some("partial_rotary_factor"), original: Some(original), ..ROPE_KEYS };
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &keys)?);
        Ok(Self { decoder, sliding_window: sliding_window(f, None)? })
    }
}

deref_to_decoder!(Phi3Config);

/// How it is registered.
pub(super) static PHI3: FamilyDefinition = FamilyDefinition {
    name: "phi3",
    model_type: "phi3",
    class: Some("Phi3ForCausalLM"),
    // Dropout, in training only.
    harmless: &[&["embd_pdrop", "resid_pdrop"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Phi3Config::read(f)?))),
    tensors: TensorTable {
        layer: &[&[
            INPUT_NORM,
            TensorName::cut("self_attn.q_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("self_attn.k_proj", Cut::Heads, "attn_qkv"),
            TensorName::cut("self_attn.v_proj", Cut::Heads, "attn_qkv"),
            ATTENTION_OUTPUT,
            MLP_NORM,
            TensorName::cut("mlp.gate_proj", Cut::Columns, "ffn_up"),
            TensorName::cut("mlp.up_proj", Cut::Columns, "ffn_up"),
            MLP_DOWN,
        ]],
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping {
        read: |file, to| {
            to.insert("sliding_window".into(), file.window().into());
            let original = file.int("rope.scaling.original_context_length")?.or(file.int("context_length")?);
            to.insert(ORIGINAL_POSITIONS.into(), original.into());
            read_rotary_share(file, to, "partial_rotary_factor")
        },
        ..GgufMapping::new("phi3")
    }),
};

impl DecoderFamily for Phi3Config {
    fn window(&self, _index: usize) -> Option<usize> {
        self.sliding_window
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        llama::layer(self, g, x, at, false, false)
    }

    fn parts(&self) -> Vec<Part> {
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let inner = self.intermediate_size;
        let part = |of: &str, name: &str, first, len| Part {
            of: format!("model.layers.*.{of}.weight"),
            name: format!("model.layers.*.{name}.weight"),
            transposed: false,
            rows: Some(Rows::range(first, len)),
        };
        vec![
            part("self_attn.qkv_proj", "self_attn.q_proj", 0, q),
            part("self_attn.qkv_proj", "self_attn.k_proj", q, kv),
            part("self_attn.qkv_proj", "self_attn.v_proj", q + kv, kv),
            part("mlp.gate_up_proj", "mlp.gate_proj", 0, inner),
            part("mlp.gate_up_proj", "mlp.up_proj", inner, inner),
        ]
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        Ok(window_metadata(self.sliding_window))
    }
}
