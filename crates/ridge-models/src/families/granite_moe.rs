//! Granite's mixtures of experts (IBM 2024, "Granite 3.0 Language Models", section 2): Granite's factors, and a few experts of
//! many for an MLP, beside which there may be one that all tokens take.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, scaled};
use super::decoder::{DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERT, check_experts, experts_and_shared,
    experts_metadata, read_experts,
};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_attention_bias};
use super::granite::GraniteFactors;
use super::llama;
use super::tensors::{ATTENTION, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, ROPE_KEYS, read_rope};
use crate::error::Result;

/// Every size and switch of a Granite model with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct GraniteMoeConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Its factors.
    pub factors: GraniteFactors,
    /// The experts of each layer.
    pub experts: ExpertsConfig,
}

impl GraniteMoeConfig {
    fn read(f: &mut Fields<'_>, shared: bool) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        let counts = [f.size("num_local_experts", MAX_SIZE)?, f.size("num_experts_per_tok", MAX_SIZE)?];
        let experts = ExpertsConfig {
            shared_size: if shared {
                f.count("shared_intermediate_size")?.unwrap_or(0).min(1 << 22) as usize
            } else {
                0
            },
            ..ExpertsConfig::softmax(counts[0], counts[1], decoder.intermediate_size)
        };
        check_experts(f, &experts)?;
        Ok(Self {
            decoder,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            factors: GraniteFactors::read(f)?,
            experts,
        })
    }
}

deref_to_decoder!(GraniteMoeConfig);

/// How it is registered without an expert for all tokens.
pub(super) static GRANITE_MOE: FamilyDefinition = FamilyDefinition {
    name: "granitemoe",
    model_type: "granitemoe",
    class: Some("GraniteMoeForCausalLM"),
    harmless: &[ROUTER_TRAINING],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GraniteMoeConfig::read(f, false)?))),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping {
        applies: |file| !file.has("blk.0.ffn_gate_shexp.weight"),
        interleaved: true,
        read: |file, to| {
            read_attention_bias(file, to)?;
            read_experts(file, to, "num_local_experts")?;
            GraniteFactors::read_gguf(file, to)
        },
        ..GgufMapping::new("granitemoe")
    }),
};

/// How it is registered with one.
pub(super) static GRANITE_MOE_SHARED: FamilyDefinition = FamilyDefinition {
    name: "granitemoeshared",
    model_type: "granitemoeshared",
    class: Some("GraniteMoeSharedForCausalLM"),
    harmless: &[ROUTER_TRAINING],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GraniteMoeConfig::read(f, true)?))),
    tensors: TensorTable { layer: &[ATTENTION, EXPERTS, SHARED_EXPERT, &[INPUT_NORM, MLP_NORM]], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping {
        applies: |file| file.has("blk.0.ffn_gate_shexp.weight"),
        interleaved: true,
        read: |file, to| {
            to.insert("shared_intermediate_size".into(), file.int(SHARED_WIDTH)?.into());
            read_attention_bias(file, to)?;
            read_experts(file, to, "num_local_experts")?;
            GraniteFactors::read_gguf(file, to)
        },
        ..GgufMapping::new("granitemoe")
    }),
};

/// What GGUF calls the width of the expert that all tokens take.
const SHARED_WIDTH: &str = "expert_shared_feed_forward_length";

impl DecoderFamily for GraniteMoeConfig {
    fn embed(&self, g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        scaled(g, x, self.factors.embedding)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let factors = &self.factors;
        let x = ResidualHalf::before(self.norm(), "input_layernorm").add(g, x, "self_attn", |g, x| {
            let a = llama::self_attention(self, g, x, at, [self.attention_bias; 2], &factors.scores(at))?;
            scaled(g, a, factors.residual)
        })?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| {
            let m = experts_and_shared(g, x, &self.experts, "shared_expert")?;
            scaled(g, m, factors.residual)
        })
    }

    fn logit_scale(&self) -> f64 {
        1.0 / self.factors.logits
    }

    fn parts(&self) -> Vec<Part> {
        parts(&self.experts)
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        let mut entries = [self.factors.metadata(), experts_metadata(&self.experts)].concat();
        if self.experts.shared_size > 0 {
            entries.push((SHARED_WIDTH, GgufEntry::U32(self.experts.shared_size as u32)));
        }
        Ok(entries)
    }
}

/// The experts of a layer as parts of published tensors.
pub(super) fn parts(e: &ExpertsConfig) -> Vec<Part> {
    let part = |of: &str, name: &str, rows| Part {
        of: format!("model.layers.*.{of}.weight"),
        name: format!("model.layers.*.mlp.{name}.weight"),
        transposed: false,
        rows,
    };
    // Of each matrix the first or the second half of its rows.
    let half = |nth: usize, width: usize, matrices: usize| {
        Some(Rows { first: nth * width, len: width, stride: 2 * width, blocks: matrices })
    };
    let mut parts = Vec::new();
    if e.experts > 0 {
        parts.extend([
            part("block_sparse_moe.router.layer", "gate", None),
            part("block_sparse_moe.input_linear", "experts.gate_proj", half(0, e.intermediate_size, e.experts)),
            part("block_sparse_moe.input_linear", "experts.up_proj", half(1, e.intermediate_size, e.experts)),
            part("block_sparse_moe.output_linear", "experts.down_proj", None),
        ]);
    }
    if e.shared_size > 0 {
        parts.extend([
            part("shared_mlp.input_linear", "shared_expert.gate_proj", half(0, e.shared_size, 1)),
            part("shared_mlp.input_linear", "shared_expert.up_proj", half(1, e.shared_size, 1)),
            part("shared_mlp.output_linear", "shared_expert.down_proj", None),
        ]);
    }
    parts
}
