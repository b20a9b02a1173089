//! Qwen 3's mixtures of experts (2025, "Qwen3 Technical Report", section 2): Qwen 3's attention, and in most layers a few
//! experts of many for an MLP; and those of Qwen 2 (Yang et al. 2024, "Qwen2 Technical Report", section 2.2), with Qwen 2's
//! attention and an expert that all tokens take.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERT, check_experts, experts_and_shared,
    experts_metadata, read_experts, stacks,
};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_attention_bias};
use super::qwen;
use super::tensors::{ATTENTION, GATED_MLP, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QK_NORMS, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, REMEDY, ROPE_KEYS, read_rope, sliding_window};
use crate::error::Result;

/// Every size and switch of a Qwen model with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3MoeConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the projections to queries, keys and values have biases?
    pub qkv_bias: bool,
    /// Has attention's output projection one?
    pub output_bias: bool,
    /// Are queries and keys normalised, head by head? In Qwen 3.
    pub qk_norm: bool,
    /// How many tokens a token sees, itself included; all if `None`.
    pub sliding_window: Option<usize>,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// Which layers have experts; the others have an MLP.
    pub sparse: Vec<bool>,
}

impl Qwen3MoeConfig {
    fn read_2(f: &mut Fields<'_>) -> Result<Self> {
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        f.must_be("decoder_sparse_step", 1)?;
        f.must_be("mlp_only_layers", Vec::<u64>::new())?;
        f.must_be("use_sliding_window", false)?;
        f.must_be("use_mrope", false)?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        let layers = decoder.num_hidden_layers;
        let counts = [f.size("num_experts", MAX_SIZE)?, f.size("num_experts_per_tok", MAX_SIZE)?];
        let experts = ExpertsConfig {
            shared_size: f.size("shared_expert_intermediate_size", MAX_SIZE)?,
            shared_gate: true,
            normalise: f.optional("norm_topk_prob")?.unwrap_or(false),
            ..ExpertsConfig::softmax(counts[0], counts[1], f.size("moe_intermediate_size", MAX_SIZE)?)
        };
        check_experts(f, &experts)?;
        Ok(Self {
            decoder,
            qkv_bias: f.optional("qkv_bias")?.unwrap_or(true),
            output_bias: false,
            qk_norm: false,
            sliding_window: None,
            experts,
            sparse: vec![true; layers],
        })
    }

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
        let top_k = f.size("num_experts_per_tok", MAX_SIZE)?;
        let experts = ExpertsConfig {
            normalise: f.optional("norm_topk_prob")?.unwrap_or(false),
            ..ExpertsConfig::softmax(experts, top_k, f.size("moe_intermediate_size", MAX_SIZE)?)
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
        Ok(Self {
            decoder,
            qkv_bias: attention_bias,
            output_bias: attention_bias,
            qk_norm: true,
            sliding_window: window,
            experts,
            sparse,
        })
    }
}

deref_to_decoder!(Qwen3MoeConfig);

/// How Qwen 2 is registered.
pub(super) static QWEN2_MOE: FamilyDefinition = FamilyDefinition {
    name: "qwen2_moe",
    model_type: "qwen2_moe",
    class: Some("Qwen2MoeForCausalLM"),
    harmless: &[ROUTER_TRAINING, &["intermediate_size", "layer_types", "max_window_layers", "sliding_window"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Qwen3MoeConfig::read_2(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS, SHARED_EXPERT, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping {
        read: |file, to| {
            to.insert("norm_topk_prob".into(), false.into());
            to.insert("qkv_bias".into(), file.has("blk.0.attn_q.bias").into());
            for (theirs, ours) in WIDTHS {
                to.insert(ours.into(), file.int(theirs)?.into());
            }
            read_experts(file, to, "num_experts")
        },
        ..GgufMapping::new("qwen2moe")
    }),
};

/// Widths of experts in GGUF and in configurations.
const WIDTHS: [(&str, &str); 2] = [
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
];

/// How Qwen 3 is registered.
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
            to.insert(WIDTHS[0].1.into(), file.int(WIDTHS[0].0)?.into());
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
        let x = qwen::attention(self, g, x, at, [self.qkv_bias, self.output_bias], self.qk_norm)?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| match at.kind {
            SPARSE => experts_and_shared(g, x, &self.experts, "shared_expert"),
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
        if self.experts.normalise != self.qk_norm {
            return Err("whether the weights of its experts are divided by their sum is not as in its family");
        }
        if self.sliding_window.is_some() {
            return Err("its layers see a window only");
        }
        let widths = [self.experts.intermediate_size, self.experts.shared_size];
        let entries = WIDTHS.iter().zip(widths).filter(|(_, width)| *width > 0);
        let entries = entries.map(|((name, _), width)| (*name, GgufEntry::U32(width as u32)));
        Ok(experts_metadata(&self.experts).into_iter().chain(entries).collect())
    }
}
