//! Qwen3-Next (Qwen 2025, "Qwen3-Next"): three of four layers have the gated delta rule (Yang et al. 2025, "Gated Delta
//! Networks: Improving Mamba2 with Delta Rule", section 3), the others attention whose output is gated; with experts. And the text
//! part of Qwen3.5 (Qwen 2026), with and without them.

use ridge_files::checkpoint::{Part, Rows, Stack};
use ridge_graph::{Builder, DType, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear, scaled, weight};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::{
    EXPERTS, ExpertsConfig, MAX_SIZE, ROUTER_TRAINING, SHARED_EXPERT, check_experts, experts_and_shared, stacks,
};
use super::layer_states::LayerStates;
use super::recurrent::{ConvActivation, columns, decay, flat, gated_recurrence, heads_of, short_conv};
use super::tensors::{
    ATTENTION, Cut, GATED_MLP, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QK_NORMS, TensorName, TensorTable,
};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;
use crate::model::BuildOptions;

/// The gated delta rule of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaMixer {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of the others.
    pub value_heads: usize,
    /// Width of a query or key.
    pub key: usize,
    /// Width of a value.
    pub value: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
}

impl DeltaMixer {
    /// Channels of queries, keys and values.
    fn widths(&self) -> [usize; 3] {
        let keys = self.key_heads * self.key;
        [keys, keys, self.value_heads * self.value]
    }

    fn states(&self, options: &BuildOptions) -> LayerStates {
        let states = LayerStates::none().with_conv("linear_attn", self.widths().iter().sum(), self.kernel, options);
        states.with_recurrence("linear_attn", [self.value_heads, self.key, self.value])
    }

    fn apply(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>, eps: f64) -> GraphResult<Var> {
        let ty = g.ty(x)?.clone();
        let (hidden, dtype) = (ty.shape.last().as_const().unwrap_or_default(), ty.dtype);
        let [_, _, inner] = self.widths();
        let names = ["q_proj", "k_proj", "v_proj"];
        let mut parts = [x; 3];
        for ((part, name), width) in parts.iter_mut().zip(names).zip(self.widths()) {
            *part = linear(g, name, x, width, false)?;
        }
        let gate = linear(g, "z_proj", x, inner, false)?;
        let beta = linear(g, "b_proj", x, self.value_heads, false)?;
        let step = linear(g, "a_proj", x, self.value_heads, false)?;

        let mixed = g.concat(&parts, 1)?;
        let mixed = short_conv(g, at, "conv1d", mixed, self.kernel, false, ConvActivation::Silu)?;
        // Rounded as the published kernels round the convolution's output, and queries and keys of norm 1.
        let mixed = g.cast(mixed, dtype)?;
        let [q, k, v] = columns(g, mixed, self.widths())?;
        let (q, k) = (heads_of(g, q, self.key_heads)?, heads_of(g, k, self.key_heads)?);
        let v = heads_of(g, v, self.value_heads)?;
        let (q, k) = (unit(g, q)?, unit(g, k)?);

        let beta = g.cast(beta, DType::F32)?;
        let beta = g.sigmoid(beta)?;
        let beta = heads_of(g, beta, self.value_heads)?;
        let step = g.cast(step, DType::F32)?;
        let bias = weight(g, "dt_bias", [self.value_heads])?;
        let bias = g.cast(bias, DType::F32)?;
        let step = g.add(step, bias)?;
        let step = g.softplus(step)?;
        let decay = decay(g, step, [self.value_heads])?;
        let decay = heads_of(g, decay, self.value_heads)?;

        let y = gated_recurrence(g, at, [q, k, v, beta, decay], true)?;
        let y = g.cast(y, DType::F32)?;
        // As if the queries were divided by it.
        let y = scaled(g, y, (self.key as f64).sqrt().recip())?;

        let y = NormKind::Rms(eps).apply(g, "norm", y)?;
        let gate = g.cast(gate, DType::F32)?;
        let y = flat(g, y)?;
        let y = g.swiglu(gate, y)?;
        let y = g.cast(y, dtype)?;
        linear(g, "out_proj", y, hidden, false)
    }
}

/// The heads of `x`, `[tokens, heads, width]`, each divided by its Euclidean norm.
fn unit(g: &mut Builder, x: Var) -> GraphResult<Var> {
    let dtype = g.ty(x)?.dtype;
    let x = g.cast(x, DType::F32)?;
    let squares = g.mul(x, x)?;
    let sum = g.reduce_sum(squares, 2)?;
    let eps = g.constant_like(sum, 1e-6)?;
    let sum = g.add(sum, eps)?;
    let inverse = g.rsqrt(sum)?;
    let y = g.mul(x, inverse)?;
    g.cast(y, dtype)
}

/// Every size and switch of a Qwen3-Next model.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3NextConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do attention's projections have biases?
    pub attention_bias: bool,
    /// The mixers of layers that do not attend.
    pub mixer: DeltaMixer,
    /// Which layers attend.
    pub attends: Vec<bool>,
    /// The experts of a layer that has some.
    pub experts: ExpertsConfig,
    /// Which layers have experts; the others have an MLP.
    pub sparse: Vec<bool>,
    /// Are published projections of a mixer fused key head by key head? Else queries, keys and values one behind another.
    pub fused_heads: bool,
}

impl Qwen3NextConfig {
    fn read_experts(f: &mut Fields<'_>) -> Result<ExpertsConfig> {
        let count = match f.optional_size("num_experts", MAX_SIZE)? {
            Some(count) => count,
            None => f.size("num_local_experts", MAX_SIZE)?,
        };
        let experts = ExpertsConfig {
            shared_size: f.size("shared_expert_intermediate_size", MAX_SIZE)?,
            shared_gate: true,
            normalise: f.optional("norm_topk_prob")?.unwrap_or(true),
            ..ExpertsConfig::softmax(
                count,
                f.size("num_experts_per_tok", MAX_SIZE)?,
                f.size("moe_intermediate_size", MAX_SIZE)?,
            )
        };
        check_experts(f, &experts)?;
        Ok(experts)
    }

    fn read_next(f: &mut Fields<'_>) -> Result<Self> {
        let experts = Self::read_experts(f)?;
        let config = Self { fused_heads: true, ..Self::read(f, experts, false)? };
        let sparse_step = f.optional_size("decoder_sparse_step", MAX_SIZE)?.unwrap_or(1);
        let dense: Vec<u64> = f.optional("mlp_only_layers")?.unwrap_or_default();
        let sparse = |i: usize| (i + 1).is_multiple_of(sparse_step) && !dense.contains(&(i as u64));
        Ok(Self { sparse: (0..config.num_hidden_layers).map(sparse).collect(), ..config })
    }

    /// A Qwen3.5, with experts in every layer or in none.
    fn read_35(f: &mut Fields<'_>, has_experts: bool) -> Result<Self> {
        f.must_be("attn_output_gate", true)?;
        f.harmless(&["mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"]);
        if !has_experts {
            f.harmless(&["mlp_only_layers"]);
            return Self::read(f, ExpertsConfig::softmax(0, 0, 0), true);
        }
        f.must_be("mlp_only_layers", Vec::<u64>::new())?;
        f.must_be("decoder_sparse_step", 1)?;
        f.must_be("norm_topk_prob", true)?;
        // No layer has an MLP of this width.
        f.harmless(&["intermediate_size"]);
        let experts = Self::read_experts(f)?;
        let config = Self::read(f, experts, true)?;
        Ok(Self { sparse: vec![true; config.num_hidden_layers], ..config })
    }

    /// What all have; `newer` is Qwen3.5, which positions of images may turn and whose experts leave no MLP.
    fn read(f: &mut Fields<'_>, experts: ExpertsConfig, newer: bool) -> Result<Self> {
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        f.must_be("use_sliding_window", false)?;
        const OF_EXPERTS: DecoderKeys = DecoderKeys { intermediate_size: "moe_intermediate_size", ..DECODER_KEYS };
        let keys = if newer && experts.experts > 0 { &OF_EXPERTS } else { &DECODER_KEYS };
        let mut decoder = DecoderConfig::read(f, keys)?;
        let keys = RopeKeys { partial: Some("partial_rotary_factor"), default_partial: 0.25, axes: newer, ..ROPE_KEYS };
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &keys)?);
        let layers = decoder.num_hidden_layers;
        let interval = f.optional_size("full_attention_interval", MAX_SIZE)?.unwrap_or(4);
        let attends = match f.optional::<Vec<&str>>("layer_types")? {
            Some(types) if types.len() != layers => {
                return Err(f.wrong("layer_types", format!("names {} layers of {layers}", types.len()), REMEDY));
            }
            Some(types) => match types.iter().find(|kind| !["linear_attention", "full_attention"].contains(*kind)) {
                Some(kind) => {
                    return Err(f.wrong("layer_types", format!("has {kind:?}, which is not supported"), REMEDY));
                }
                None => types.iter().map(|kind| *kind == "full_attention").collect(),
            },
            None => (0..layers).map(|i| (i + 1).is_multiple_of(interval)).collect(),
        };
        let mixer = DeltaMixer {
            key_heads: f.size("linear_num_key_heads", MAX_SIZE)?,
            value_heads: f.size("linear_num_value_heads", MAX_SIZE)?,
            key: f.size("linear_key_head_dim", MAX_SIZE)?,
            value: f.size("linear_value_head_dim", MAX_SIZE)?,
            kernel: f.size("linear_conv_kernel_dim", MAX_SIZE)?,
        };
        if !mixer.value_heads.is_multiple_of(mixer.key_heads) {
            let problem = format!("does not divide linear_num_value_heads = {}", mixer.value_heads);
            return Err(f.wrong("linear_num_key_heads", problem, REMEDY));
        }
        if mixer.kernel < 2 {
            return Err(f.wrong("linear_conv_kernel_dim", "is below 2", REMEDY));
        }
        Ok(Self {
            decoder,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mixer,
            attends,
            experts,
            sparse: vec![false; layers],
            fused_heads: false,
        })
    }
}

deref_to_decoder!(Qwen3NextConfig);

/// The gate of attention's output.
const GATE: &[TensorName] = &[TensorName::planned("self_attn.gate_proj", Cut::Heads)];

/// How it is registered.
pub(super) static QWEN3_NEXT: FamilyDefinition = FamilyDefinition {
    name: "qwen3_next",
    model_type: "qwen3_next",
    class: Some("Qwen3NextForCausalLM"),
    harmless: &[ROUTER_TRAINING],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Qwen3NextConfig::read_next(f)?))),
    tensors: TENSORS,
    gguf: None,
};

const TENSORS: TensorTable = TensorTable {
    layer: &[ATTENTION, GATE, GATED_MLP, EXPERTS, SHARED_EXPERT, QK_NORMS, &[INPUT_NORM, MLP_NORM]],
    // Multi-token prediction, which a decoder does without.
    computed: &["*.rotary_emb.inv_freq", "mtp.*"],
    ..LLAMA_TENSORS
};

/// How the text part of a Qwen3.5 without experts is registered: a Qwen3-Next whose projections are published apart.
pub(super) static QWEN35: FamilyDefinition = FamilyDefinition {
    name: "qwen3_5",
    model_type: "qwen3_5_text",
    class: Some("Qwen3_5ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Qwen3NextConfig::read_35(f, false)?))),
    tensors: TensorTable { layer: &[ATTENTION, GATE, GATED_MLP, QK_NORMS, &[INPUT_NORM, MLP_NORM]], ..TENSORS },
    gguf: None,
};

/// How the text part of a Qwen3.5 with experts is registered.
pub(super) static QWEN35_MOE: FamilyDefinition = FamilyDefinition {
    name: "qwen3_5_moe",
    model_type: "qwen3_5_moe_text",
    class: Some("Qwen3_5MoeForCausalLM"),
    harmless: &[ROUTER_TRAINING],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Qwen3NextConfig::read_35(f, true)?))),
    tensors: TensorTable {
        layer: &[ATTENTION, GATE, EXPERTS, SHARED_EXPERT, QK_NORMS, &[INPUT_NORM, MLP_NORM]],
        ..TENSORS
    },
    gguf: None,
};

impl Qwen3NextConfig {
    fn attends(&self, index: usize) -> bool {
        self.attends.get(index) == Some(&true)
    }

    /// Attention whose output is multiplied by the sigmoid of a gate.
    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let [q, k, v] = at.project(g, x, ["q_proj", "k_proj", "v_proj"], self.attention_bias)?;
        let gate = linear(g, "gate_proj", x, self.num_attention_heads * self.head_dim, self.attention_bias)?;
        let (q, k) = (self.norm().apply(g, "q_norm", q)?, self.norm().apply(g, "k_norm", k)?);
        let a = at.attend(g, [q, k, v], &at.scores())?;
        let open = g.sigmoid(gate)?;
        let a = g.mul(a, open)?;
        linear(g, "o_proj", a, self.hidden_size, self.attention_bias)
    }
}

impl DecoderFamily for Qwen3NextConfig {
    fn kind(&self, index: usize) -> &'static str {
        match (self.attends(index), self.sparse.get(index) == Some(&true)) {
            (true, true) => "attention_experts",
            (true, false) => "attention",
            (false, true) => "delta_experts",
            (false, false) => "delta",
        }
    }

    fn states(&self, index: usize, options: &BuildOptions) -> LayerStates {
        if self.attends(index) { LayerStates::paged() } else { self.mixer.states(options) }
    }

    fn norm(&self) -> NormKind {
        NormKind::RmsPlusOne(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let before = ResidualHalf::before(self.norm(), "input_layernorm");
        let x = match at.kind.starts_with("attention") {
            true => before.add(g, x, "self_attn", |g, x| self.attention(g, x, at))?,
            false => before.add(g, x, "linear_attn", |g, x| self.mixer.apply(g, x, at, self.norm_eps))?,
        };
        ResidualHalf::before(self.norm(), "post_attention_layernorm").add(g, x, "mlp", |g, x| {
            match at.kind.ends_with("experts") {
                true => experts_and_shared(g, x, &self.experts, "shared_expert"),
                false => gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false),
            }
        })
    }

    fn parts(&self) -> Vec<Part> {
        let part = |of: &str, name: &str, [first, len, stride, blocks]: [usize; 4]| Part {
            of: format!("model.layers.*.{of}"),
            name: format!("model.layers.*.{name}"),
            transposed: false,
            rows: Some(Rows { first, len, stride, blocks }),
        };
        // Queries and their gates, head by head.
        let (dim, heads) = (self.head_dim, self.num_attention_heads);
        let mut parts = Vec::new();
        for kind in if self.attention_bias { &["weight", "bias"][..] } else { &["weight"] } {
            let of = format!("self_attn.q_proj.{kind}");
            parts.push(part(&of, &of, [0, dim, 2 * dim, heads]));
            parts.push(part(&of, &format!("self_attn.gate_proj.{kind}"), [dim, dim, 2 * dim, heads]));
        }
        if !self.fused_heads {
            let [keys, _, values] = self.mixer.widths();
            let of_qkv = [("q_proj", 0, keys), ("k_proj", keys, keys), ("v_proj", 2 * keys, values)];
            for (name, first, len) in of_qkv {
                let name = format!("linear_attn.{name}.weight");
                parts.push(part("linear_attn.in_proj_qkv.weight", &name, [first, len, 2 * keys + values, 1]));
            }
            for name in ["z", "b", "a"] {
                parts.push(Part {
                    of: format!("model.layers.*.linear_attn.in_proj_{name}.weight"),
                    name: format!("model.layers.*.linear_attn.{name}_proj.weight"),
                    transposed: false,
                    rows: None,
                });
            }
            if self.experts.experts > 0 {
                // Published as one matrix of gates and ups for each expert, or else each for itself, which `stacks` says.
                let (width, count) = (self.experts.intermediate_size, self.experts.experts);
                for (name, first) in [("gate_proj", 0), ("up_proj", width)] {
                    let name = format!("mlp.experts.{name}.weight");
                    parts.push(part("mlp.experts.gate_up_proj", &name, [first, width, 2 * width, count]));
                }
                parts.push(Part {
                    of: "model.layers.*.mlp.experts.down_proj".into(),
                    name: "model.layers.*.mlp.experts.down_proj.weight".into(),
                    transposed: false,
                    rows: None,
                });
            }
            return parts;
        }
        // Queries, keys, values and gates of the values, key head by key head; so too both numbers of each value head.
        let m = &self.mixer;
        let each = m.value_heads / m.key_heads;
        let of_values = each * m.value;
        let widths = [("q_proj", m.key), ("k_proj", m.key), ("v_proj", of_values), ("z_proj", of_values)];
        for (of, widths) in [("in_proj_qkvz", &widths[..]), ("in_proj_ba", &[("b_proj", each), ("a_proj", each)])] {
            let stride = widths.iter().map(|(_, width)| width).sum();
            let mut first = 0;
            for (name, width) in widths {
                let [of, name] = [of, name].map(|of| format!("linear_attn.{of}.weight"));
                parts.push(part(&of, &name, [first, *width, stride, m.key_heads]));
                first += width;
            }
        }
        parts
    }

    fn stacks(&self) -> Vec<Stack> {
        match self.experts.experts {
            0 => Vec::new(),
            count => stacks("mlp.experts", ["gate_proj", "up_proj", "down_proj"], count),
        }
    }
}
