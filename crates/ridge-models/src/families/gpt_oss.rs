//! gpt-oss (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2): windows in every other layer, a sink in each
//! head's softmax, biases everywhere, and a few experts of many with clamped gates.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::format::Mxfp4;
use ridge_graph::ops::ClampedSwiglu;
use ridge_graph::{Builder, DType, FormatRef, Op, Prim, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, weight};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, check_experts, experts, experts_metadata, read_experts,
};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_attention_bias, window_metadata};
use super::llama;
use super::tensors::{ATTENTION, Cut, INPUT_NORM, LLAMA_TENSORS, TensorName, TensorTable};
use crate::config::{
    DECODER_KEYS, DecoderConfig, Fields, NotConverted, ROPE_KEYS, RopeKeys, layer_windows, read_rope, sliding_window,
};
use crate::error::Result;

/// Every size and switch of a gpt-oss model.
#[derive(Clone, Debug, PartialEq)]
pub struct GptOssConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// The experts of each layer.
    pub experts: ExpertsConfig,
    /// The modules that are published plainly, if the experts of others are in MXFP4.
    pub(crate) not_converted: Option<NotConverted>,
}

impl GptOssConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const ROPE: RopeKeys = RopeKeys { default_theta: 150_000.0, ..ROPE_KEYS };
        f.needs(&["num_key_value_heads", "head_dim"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE)?);
        let count = match f.optional_size("num_local_experts", MAX_SIZE)? {
            Some(count) => count,
            None => f.size("num_experts", MAX_SIZE)?,
        };
        // Older files have the number twice.
        let top_k = f.size("num_experts_per_tok", MAX_SIZE)?;
        f.must_be("experts_per_token", top_k)?;
        let gate = ClampedSwiglu {
            alpha: f.optional_positive("swiglu_alpha")?.unwrap_or(1.702),
            limit: f.optional_positive("swiglu_limit")?.unwrap_or(7.0),
        };
        let experts =
            ExpertsConfig { clamped: Some(gate), ..ExpertsConfig::softmax(count, top_k, decoder.intermediate_size) };
        check_experts(f, &experts)?;
        let window = sliding_window(f, Some(128))?;
        let windows = layer_windows(f, decoder.num_hidden_layers, window, |i| i.is_multiple_of(2))?;
        let attention_bias = f.optional("attention_bias")?.unwrap_or(true);
        let not_converted = NotConverted::of_model(f)?;
        Ok(Self { decoder, attention_bias, windows, experts, not_converted })
    }
}

deref_to_decoder!(GptOssConfig);

/// How it is registered.
pub(super) static GPT_OSS: FamilyDefinition = FamilyDefinition {
    name: "gpt_oss",
    model_type: "gpt_oss",
    class: Some("GptOssForCausalLM"),
    harmless: &[ROUTER_TRAINING, &["initial_context_length"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(GptOssConfig::read(f)?))),
    tensors: TensorTable {
        layer: &[
            ATTENTION,
            &[
                TensorName::cut("self_attn.sinks", Cut::Columns, "attn_sinks"),
                TensorName::whole("mlp.gate", "ffn_gate_inp"),
                TensorName::cut("mlp.experts.gate_proj", Cut::Columns, "ffn_gate_exps"),
                TensorName::cut("mlp.experts.up_proj", Cut::Columns, "ffn_up_exps"),
                TensorName::cut("mlp.experts.down_proj", Cut::Terms, "ffn_down_exps"),
                INPUT_NORM,
                TensorName::whole("post_attention_layernorm", "post_attention_norm"),
            ],
        ],
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping {
        read: |file, to| {
            if let Some(width) = file.int(EXPERT_WIDTH)? {
                to.insert("intermediate_size".into(), width.into());
            }
            to.insert("sliding_window".into(), file.window().into());
            read_attention_bias(file, to)?;
            read_experts(file, to, "num_local_experts")
        },
        ..GgufMapping::new("gpt-oss")
    }),
};

/// What GGUF calls the width of an expert, which it may have beside that of an MLP.
const EXPERT_WIDTH: &str = "expert_feed_forward_length";

impl DecoderFamily for GptOssConfig {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let x = ResidualHalf::before(self.norm(), "input_layernorm").add(g, x, "self_attn", |g, x| {
            let sinks = g.scoped("sinks", |g| weight(g, "weight", [self.num_attention_heads]))?;
            // Not `cast`, which leaves out the node where the weight is f32 as it is built: checkpoints have bf16.
            let sinks = g.emit(Op::Prim(Prim::Cast(DType::F32)), &[sinks])?[0];
            let scores = AttentionScores { sinks: Some(sinks), ..at.scores() };
            llama::self_attention(self, g, x, at, [self.attention_bias; 2], &scores)
        })?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| experts(g, x, &self.experts))
    }

    fn published_format(&self, name: &str, _rank: usize) -> Option<FormatRef> {
        let (module, projection) = name.split_once(".mlp.experts.")?;
        let module = format!("{module}.mlp.experts");
        let in_blocks = projection.ends_with("_proj.weight") && !self.not_converted.as_ref()?.has(&module);
        in_blocks.then(|| FormatRef::new(Mxfp4))
    }

    fn parts(&self) -> Vec<Part> {
        let (inner, hidden, count) = (self.intermediate_size, self.hidden_size, self.experts.experts);
        let part = |of: &str, name: &str, transposed, rows| Part {
            of: format!("model.layers.*.{of}"),
            name: format!("model.layers.*.{name}"),
            transposed,
            rows,
        };
        // Rows of gates and of what they open take turns.
        let turns = |first| Some(Rows { first, len: 1, stride: 2, blocks: count * inner });
        let whole = Some(Rows::range(0, count * hidden));
        vec![
            part("self_attn.sinks", "self_attn.sinks.weight", false, None),
            part("mlp.router.weight", "mlp.gate.weight", false, None),
            part("mlp.router.bias", "mlp.gate.bias", false, None),
            part("mlp.experts.gate_up_proj", "mlp.experts.gate_proj.weight", true, turns(0)),
            part("mlp.experts.gate_up_proj", "mlp.experts.up_proj.weight", true, turns(1)),
            part("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_proj.bias", false, turns(0)),
            part("mlp.experts.gate_up_proj_bias", "mlp.experts.up_proj.bias", false, turns(1)),
            part("mlp.experts.down_proj", "mlp.experts.down_proj.weight", true, whole),
            part("mlp.experts.down_proj_bias", "mlp.experts.down_proj.bias", false, None),
        ]
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        let window = self.windows.iter().copied().flatten().next();
        let usual = |(i, window): (usize, &Option<usize>)| window.is_some() == i.is_multiple_of(2);
        if window.is_none() || !self.windows.iter().enumerate().all(usual) {
            return Err("its layers with windows are not every other one");
        }
        let width = (EXPERT_WIDTH, GgufEntry::U32(self.intermediate_size as u32));
        Ok([window_metadata(window), experts_metadata(&self.experts), vec![width]].concat())
    }
}
