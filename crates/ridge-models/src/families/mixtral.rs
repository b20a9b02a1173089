//! Mixtral (Jiang et al. 2024, "Mixtral of Experts", section 2): Llama's layers with a few experts of many for an MLP.

use ridge_files::checkpoint::{Part, Stack};
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts, experts_metadata, read_experts, stacks,
};
use super::gguf_mapping::{GgufEntry, GgufMapping, MixRules, window_metadata};
use super::llama;
use super::tensors::{ATTENTION, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope, sliding_window};
use crate::error::Result;

/// Every size and switch of a Mixtral model.
#[derive(Clone, Debug, PartialEq)]
pub struct MixtralConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// How many tokens a token sees, itself included; all if `None`.
    pub sliding_window: Option<usize>,
    /// The experts of each layer.
    pub experts: ExpertsConfig,
}

impl MixtralConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        let counts = [f.size("num_local_experts", MAX_SIZE)?, f.size("num_experts_per_tok", MAX_SIZE)?];
        let experts = ExpertsConfig::softmax(counts[0], counts[1], decoder.intermediate_size);
        check_experts(f, &experts)?;
        Ok(Self { decoder, sliding_window: sliding_window(f, None)?, experts })
    }
}

deref_to_decoder!(MixtralConfig);

/// How it is registered.
pub(super) static MIXTRAL: FamilyDefinition = FamilyDefinition {
    name: "mixtral",
    model_type: "mixtral",
    class: Some("MixtralForCausalLM"),
    harmless: &[ROUTER_TRAINING, &["router_jitter_noise"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(MixtralConfig::read(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    // GGUF has it as a Llama with experts.
    gguf: Some(GgufMapping {
        applies: |file| file.experts() > 0,
        interleaved: true,
        mix: MixRules::Llama,
        read: |file, to| {
            to.insert("sliding_window".into(), file.window().into());
            read_experts(file, to, "num_local_experts")
        },
        ..GgufMapping::new("llama")
    }),
};

impl DecoderFamily for MixtralConfig {
    fn window(&self, _index: usize) -> Option<usize> {
        self.sliding_window
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = llama::attention(self, g, x, at, false)?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| experts(g, x, &self.experts))
    }

    fn parts(&self) -> Vec<Part> {
        vec![Part {
            of: "model.layers.*.block_sparse_moe.gate.weight".to_owned(),
            name: "model.layers.*.mlp.gate.weight".to_owned(),
            transposed: false,
            rows: None,
        }]
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("block_sparse_moe.experts", ["w1", "w3", "w2"], self.experts.experts)
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        Ok([window_metadata(self.sliding_window), experts_metadata(&self.experts)].concat())
    }
}
