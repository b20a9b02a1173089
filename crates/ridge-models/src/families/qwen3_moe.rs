//! Qwen 3's mixtures of experts (2025, "Qwen3 Technical Report", section 2): Qwen 3's attention, and in most layers a few
//! experts of many for an MLP.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts, experts_metadata, read_experts, stacks,
};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_attention_bias};
use super::qwen;
use super::tensors::{ATTENTION, GATED_MLP, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QK_NORMS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, REMEDY, ROPE_KEYS, read_rope, sliding_window};
use crate::error::Result;

/// Every size and switch of a Qwen 3 model with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3MoeConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the projections of attention have biases?
    pub attention_bias: bool,
    /// How many tokens a token sees, itself included; all if `None`.
    pub sliding_window: Option<usize>,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// Which layers have experts; the others have an MLP.
    pub sparse: Vec<bool>,
}

impl Qwen3MoeConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        let in_use = f.optional("use_sliding_window")?.unwrap_or(false);
        let window = sliding_window(f, Some(4096))?.filter(|_| in_use);
        // The newer spelling is that of other families.
        let experts = match f.optional_size("num_experts", MAX_SIZE)? {
            Some(experts) => experts,
            None => f.size("num_local_experts", MAX_SIZE)?,
        };
        let experts = ExpertsConfig {
            experts,
            top_k: f.size("num_experts_per_tok", MAX_SIZE)?,
            intermediate_size: f.size("moe_intermediate_size", MAX_SIZE)?,
            shared_size: 0,
            gated: true,
            sigmoid: false,
            normalise: f.optional("norm_topk_prob")?.unwrap_or(false),
            scale: 1.0,
            groups: None,
        };
        check_experts(f, &experts)?;
        let layers = decoder.num_hidden_layers;
        let step = f.optional_size("decoder_sparse_step", MAX_SIZE)?.unwrap_or(1);
        let dense: Vec<u64> = f.optional("mlp_only_layers")?.unwrap_or_default();
        if let Some(layer) = dense.iter().find(|layer| **layer >= layers as u64) {
            return Err(f.wrong("mlp_only_layers", format!("names layer {layer} of {layers}"), REMEDY));
        }
        let sparse = (0..layers).map(|i| (i + 1).is_multiple_of(step) && !dense.contains(&(i as u64))).collect();
        let attention_bias = f.optional("attention_bias")?.unwrap_or(false);
        Ok(Self { decoder, attention_bias, sliding_window: window, experts, sparse })
    }
}

deref_to_decoder!(Qwen3MoeConfig);

/// How it is registered.
pub(super) static QWEN3_MOE: FamilyDefinition = FamilyDefinition {
    name: "qwen3_moe",
    model_type: "qwen3_moe",
    class: Some("Qwen3MoeForCausalLM"),
    harmless: &[ROUTER_TRAINING, &["max_window_layers"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Qwen3MoeConfig::read(f)?))),
    tensors: TensorTable {
        layer: &[ATTENTION, GATED_MLP, EXPERTS, QK_NORMS, &[INPUT_NORM, MLP_NORM]],
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping {
        read: |file, to| {
            // Files of this architecture have experts in every layer, whose weights are divided by their sum.
            to.insert("norm_topk_prob".into(), true.into());
            let width = file.int("expert_feed_forward_length")?;
            to.insert("moe_intermediate_size".into(), width.into());
            read_attention_bias(file, to)?;
            read_experts(file, to, "num_experts")
        },
        ..GgufMapping::new("qwen3moe")
    }),
};

/// The layers with experts.
const SPARSE: &str = "experts";

impl DecoderFamily for Qwen3MoeConfig {
    fn window(&self, _index: usize) -> Option<usize> {
        self.sliding_window
    }

    fn kind(&self, index: usize) -> &'static str {
        if self.sparse.get(index) == Some(&true) { SPARSE } else { "" }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = qwen::attention(self, g, x, at, [self.attention_bias; 2], true)?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| match at.kind {
            SPARSE => experts(g, x, &self.experts),
            _ => gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false),
        })
    }

    fn stacks(&self) -> Vec<Stack> {
        stacks("mlp.experts", ["gate_proj", "up_proj", "down_proj"], self.experts.experts)
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        if self.sparse.contains(&false) {
            return Err("some of its layers have no experts");
        }
        if !self.experts.normalise {
            return Err("the weights of its experts are not divided by their sum");
        }
        if self.sliding_window.is_some() {
            return Err("its layers see a window only");
        }
        let width = GgufEntry::U32(self.experts.intermediate_size as u32);
        Ok([experts_metadata(&self.experts), vec![("expert_feed_forward_length", width)]].concat())
    }
}
