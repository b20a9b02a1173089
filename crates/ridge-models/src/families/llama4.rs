//! The language models of Llama 4 (Meta AI 2025, "The Llama 4 herd", and the released code): three of four layers attend
//! within chunks of the context, the fourth to everything, without a rotation but with queries that grow with the position
//! (Nakanishi 2025, "Scalable-Softmax Is Superior for Attention"); a token goes to one expert of many, whose input is
//! multiplied by the sigmoid of its score, and to one that all tokens take.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Shape, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear, scaled, unit_rms};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERTS, check_experts, experts_and_shared,
};
use super::tensors::{ATTENTION, GATED_MLP, LLAMA_TENSORS, QKV, TensorTable};
use crate::config::{
    DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_POSITIONS, REMEDY, ROPE_KEYS, RopeKeys, read_rope,
};
use crate::error::Result;

/// Every size and switch of a Llama 4 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama4Config {
    /// What every decoder has. The width of the MLP is that of layers without experts.
    pub decoder: DecoderConfig,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// Which layers have experts.
    pub sparse: Vec<bool>,
    /// Which layers rotate queries and keys.
    pub rotated: Vec<bool>,
    /// Length of the chunks that a layer attends within; all if `None`.
    pub chunks: Vec<Option<usize>>,
    /// Are rotated queries and keys divided by their root mean square?
    pub qk_norm: bool,
    /// How queries grow with the position in layers that do not rotate, if they do.
    pub temperature: Option<Temperature>,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
}

/// The query at position `p` is multiplied by `1 + scale * ln(1 + floor((p + 1) / floor))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// How much it grows.
    pub scale: f64,
    /// Positions over which it is constant.
    pub floor: usize,
}

/// Every so manieth layer does not rotate where the configuration does not say.
const INTERVAL: usize = 4;

impl Llama4Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys { intermediate_size: "intermediate_size_mlp", ..DECODER_KEYS };
        const ROPE: RopeKeys = RopeKeys { default_theta: 500_000.0, ..ROPE_KEYS };
        f.needs(&["num_key_value_heads", "head_dim"])?;
        f.must_be("hidden_act", "silu")?;
        f.must_be("for_llm_compressor", false)?;
        f.must_be("num_experts_per_tok", 1)?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE)?);
        let layers = decoder.num_hidden_layers;
        let width = f.size("intermediate_size", MAX_SIZE)?;
        let experts = ExpertsConfig {
            shared_size: width,
            sigmoid: true,
            normalise: false,
            weighs_inputs: true,
            ..ExpertsConfig::softmax(f.size("num_local_experts", MAX_SIZE)?, 1, width)
        };
        check_experts(f, &experts)?;
        let step = f.optional_size("interleave_moe_layer_step", MAX_SIZE)?.unwrap_or(1);
        let sparse = match f.optional::<Vec<u64>>("moe_layers")? {
            Some(listed) => (0..layers).map(|layer| listed.contains(&(layer as u64))).collect(),
            None => (0..layers).map(|layer| (layer + 1).is_multiple_of(step)).collect(),
        };
        let interval = f.optional_size("no_rope_layer_interval", MAX_POSITIONS)?.unwrap_or(INTERVAL);
        let rotated: Vec<bool> = match f.optional::<Vec<u64>>("no_rope_layers")?.filter(|listed| !listed.is_empty()) {
            None => (0..layers).map(|i| !(i + 1).is_multiple_of(interval)).collect(),
            Some(listed) if listed.len() == layers => listed.iter().map(|one| *one != 0).collect(),
            Some(listed) => {
                return Err(f.wrong("no_rope_layers", format!("names {} layers of {layers}", listed.len()), REMEDY));
            }
        };
        let chunk = f.optional_size("attention_chunk_size", MAX_POSITIONS)?;
        let chunks = match f.optional::<Vec<&str>>("layer_types")? {
            None => rotated.iter().map(|rotated| chunk.filter(|_| *rotated)).collect(),
            Some(types) => read_chunks(f, &types, layers, chunk)?,
        };
        // Older files have a number, which is true unless it is 0.
        let tuned = match f.raw("attn_temperature_tuning").and_then(serde_json::Value::as_u64) {
            Some(number) => number > 0,
            None => f.optional("attn_temperature_tuning")?.unwrap_or(true),
        };
        let temperature = match tuned {
            true => Some(Temperature {
                scale: f.optional_positive("attn_scale")?.unwrap_or(0.1),
                floor: f.optional_size("floor_scale", MAX_POSITIONS)?.unwrap_or(8192),
            }),
            false => None,
        };
        f.harmless(&["attn_scale", "floor_scale"]);
        Ok(Self {
            decoder,
            experts,
            sparse,
            rotated,
            chunks,
            qk_norm: f.optional("use_qk_norm")?.unwrap_or(true),
            temperature,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
        })
    }

    fn rotates(&self, layer: usize) -> bool {
        self.rotated.get(layer).copied().unwrap_or(true)
    }

    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>, rotates: bool) -> GraphResult<Var> {
        let [mut q, mut k, v] = at.project(g, x, QKV, self.attention_bias)?;
        let mut scores = AttentionScores { interleaved: true, chunked: at.window.is_some(), ..at.scores() };
        if rotates {
            if self.qk_norm {
                // A rotation keeps the root mean square.
                (q, k) = (unit_rms(g, q, self.norm_eps)?, unit_rms(g, k, self.norm_eps)?);
            }
        } else {
            scores.rope = None;
            if let Some(temperature) = self.temperature {
                q = grown(g, q, at.positions(), temperature)?;
            }
        }
        let a = at.attend(g, [q, k, v], &scores)?;
        linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
    }
}

/// Which layers attend within chunks.
fn read_chunks(f: &Fields<'_>, types: &[&str], layers: usize, chunk: Option<usize>) -> Result<Vec<Option<usize>>> {
    if types.len() != layers {
        return Err(f.wrong("layer_types", format!("names {} layers of {layers}", types.len()), REMEDY));
    }
    let of = |kind: &&str| match *kind {
        "full_attention" => Ok(None),
        "chunked_attention" if chunk.is_some() => Ok(chunk),
        other => Err(f.wrong(
            "layer_types",
            format!("has {other:?} with attention_chunk_size = {chunk:?}, which is not supported"),
            "Ridge knows \"full_attention\" and, with a chunk size, \"chunked_attention\"",
        )),
    };
    types.iter().map(of).collect()
}

/// Queries `q`, `[tokens, heads, dim]`, as [`Temperature`] has them at `positions`, i32 `[tokens]`.
fn grown(g: &mut Builder, q: Var, positions: Var, by: Temperature) -> GraphResult<Var> {
    let dtype = g.ty(q)?.dtype;
    let tokens = g.ty(q)?.shape.0[0].clone();
    let one = g.constant(DType::I32, 1.0)?;
    let floor = g.constant(DType::I32, by.floor as f64)?;
    let next = g.add(positions, one)?;
    let steps = g.div(next, floor)?;
    let steps = g.cast(steps, DType::F32)?;
    let unit = g.constant(DType::F32, 1.0)?;
    let steps = g.add(steps, unit)?;
    let growth = g.log(steps)?;
    let growth = scaled(g, growth, by.scale)?;
    let growth = g.add(growth, unit)?;
    let growth = g.reshape(growth, Shape(vec![tokens, Dim::from(1), Dim::from(1)]))?;
    let q = g.cast(q, DType::F32)?;
    let q = g.mul(q, growth)?;
    g.cast(q, dtype)
}

deref_to_decoder!(Llama4Config);

/// How it is registered.
pub(super) static LLAMA4: FamilyDefinition = FamilyDefinition {
    name: "llama4",
    model_type: "llama4_text",
    class: Some("Llama4ForCausalLM"),
    harmless: &[ROUTER_TRAINING, &["router_jitter_noise"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Llama4Config::read(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS], ..LLAMA_TENSORS },
    gguf: None,
};

/// Kinds of layers: by whether they rotate, and have experts.
const KINDS: [[&str; 2]; 2] = [["unrotated", "unrotated_experts"], ["", "experts"]];

impl DecoderFamily for Llama4Config {
    fn window(&self, index: usize) -> Option<usize> {
        self.chunks.get(index).copied().flatten()
    }

    fn kind(&self, index: usize) -> &'static str {
        KINDS[usize::from(self.rotates(index))][usize::from(self.sparse.get(index).copied().unwrap_or(true))]
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let rotates = KINDS[1].contains(&at.kind);
        let sparse = KINDS.iter().any(|[_, sparse]| *sparse == at.kind);
        let x = ResidualHalf::before(self.norm(), "input_layernorm")
            .add(g, x, "self_attn", |g, x| self.attention(g, x, at, rotates))?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| match sparse {
            true => experts_and_shared(g, x, &self.experts, "shared_experts"),
            false => gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false),
        })
    }

    fn parts(&self) -> Vec<Part> {
        let (inner, hidden, count) = (self.experts.intermediate_size, self.hidden_size, self.experts.experts);
        let part = |of: &str, name: &str, rows: Option<Rows>| Part {
            of: format!("model.layers.*.feed_forward.{of}"),
            name: format!("model.layers.*.mlp.{name}.weight"),
            transposed: rows.is_some(),
            rows,
        };
        // Of each expert the gate's columns come first.
        let half = |first| Some(Rows { first, len: inner, stride: 2 * inner, blocks: count });
        let mut parts = vec![
            part("router.weight", "gate", None),
            part("experts.gate_up_proj", "experts.gate_proj", half(0)),
            part("experts.gate_up_proj", "experts.up_proj", half(inner)),
            part("experts.down_proj", "experts.down_proj", Some(Rows::range(0, count * hidden))),
        ];
        for name in ["gate_proj", "up_proj", "down_proj"] {
            parts.push(part(&format!("{name}.weight"), name, None));
            parts.push(part(&format!("shared_expert.{name}.weight"), &format!("shared_experts.{name}"), None));
        }
        parts
    }
}
