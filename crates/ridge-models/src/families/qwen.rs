//! The dense models of Qwen 2 and 2.5, with biases on queries, keys and values (Yang et al. 2024, "Qwen2 Technical
//! Report", section 2.2), and of Qwen 3, with norms of queries and keys instead (2025, "Qwen3 Technical Report",
//! section 2).

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, MixRules, read_attention_bias};
use super::tensors::{ATTENTION, GATED_MLP, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QK_NORMS, QKV, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, layer_windows, read_rope, sliding_window};
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
    fn read_2(f: &mut Fields<'_>) -> Result<Self> {
        f.needs(&["num_key_value_heads"])?;
        Self::read(f, |_| Ok((true, false)), false)
    }

    fn read_3(f: &mut Fields<'_>) -> Result<Self> {
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
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        let (qkv_bias, output_bias) = biases(f)?;
        let (layers, first_local) = (decoder.num_hidden_layers, f.count("max_window_layers")?.unwrap_or(28));
        let in_use = f.optional("use_sliding_window")?.unwrap_or(false);
        let window = sliding_window(f, Some(4096))?.filter(|_| in_use);
        let windows = layer_windows(f, layers, window, |layer| layer as u64 >= first_local)?;
        Ok(Self { decoder, qkv_bias, output_bias, qk_norm, windows })
    }
}

deref_to_decoder!(QwenConfig);

/// How Qwen 2 is registered.
pub(super) static QWEN2: FamilyDefinition = FamilyDefinition {
    name: "qwen2",
    model_type: "qwen2",
    class: Some("Qwen2ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(QwenConfig::read_2(f)?))),
    tensors: LLAMA_TENSORS,
    gguf: Some(GgufMapping { mix: MixRules::Llama, ..GgufMapping::new("qwen2") }),
};

/// How Qwen 3 is registered.
pub(super) static QWEN3: FamilyDefinition = FamilyDefinition {
    name: "qwen3",
    model_type: "qwen3",
    class: Some("Qwen3ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(QwenConfig::read_3(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, GATED_MLP, QK_NORMS, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping { read: read_attention_bias, ..GgufMapping::new("qwen3") }),
};

impl DecoderFamily for QwenConfig {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = attention(self, g, x, at, [self.qkv_bias, self.output_bias], self.qk_norm)?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        match self.windows.iter().any(Option::is_some) {
            true => Err("some of its layers see a window only"),
            false => Ok(Vec::new()),
        }
    }
}

/// The first half of the layer of a Qwen: are there biases, of queries, keys and values and of the output projection, and
/// norms of queries and keys?
pub(super) fn attention(
    config: &DecoderConfig,
    g: &mut Builder,
    x: Var,
    at: &DecoderLayer<'_>,
    [qkv_bias, output_bias]: [bool; 2],
    qk_norm: bool,
) -> GraphResult<Var> {
    let norm = NormKind::Rms(config.norm_eps);
    ResidualHalf::before(norm, "input_layernorm").add(g, x, "self_attn", |g, x| {
        let [mut q, mut k, v] = at.project(g, x, QKV, qkv_bias)?;
        if qk_norm {
            (q, k) = (norm.apply(g, "q_norm", q)?, norm.apply(g, "k_norm", k)?);
        }
        let a = at.attend(g, [q, k, v], &at.scores())?;
        linear(g, "o_proj", a, config.hidden_size, output_bias)
    })
}
