//! StableLM (Bellagente et al. 2024, "Stable LM 2 1.6B Technical Report", section 2.1): Llama's layers with layer norms, heads
//! that are rotated in part, and in larger models norms of each head and both halves side by side.

use ridge_files::checkpoint::Stack;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear, norm_per_head};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, LAYER_NORM_EPSILON, read_rotary_share};
use super::tensors::{ATTENTION, Cut, GATED_MLP, INPUT_NORM, LLAMA_TENSORS, MLP_NORM, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;

/// Every size and switch of a StableLM model.
#[derive(Clone, Debug, PartialEq)]
pub struct StableLmConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the projections to queries, keys and values have biases?
    pub qkv_bias: bool,
    /// Are queries and keys normalised, with weights for each head?
    pub qk_norm: bool,
    /// Do attention and MLP read the same input, and are added together?
    pub parallel: bool,
}

/// The share of a head that is rotated.
const ROTATED: &str = "partial_rotary_factor";

impl StableLmConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys { norm_eps: "layer_norm_eps", ..DECODER_KEYS };
        const ROPE: RopeKeys = RopeKeys { partial: Some(ROTATED), default_partial: 0.25, ..ROPE_KEYS };
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE)?);
        Ok(Self {
            decoder,
            qkv_bias: f.optional("use_qkv_bias")?.unwrap_or(false),
            qk_norm: f.optional("qk_layernorm")?.unwrap_or(false),
            parallel: f.optional("use_parallel_residual")?.unwrap_or(false),
        })
    }
}

deref_to_decoder!(StableLmConfig);

/// Norms of queries and keys, head by head.
const HEAD_NORMS: [(&str, &str); 2] = [("q_layernorm", "attn_q_norm"), ("k_layernorm", "attn_k_norm")];

/// How it is registered.
pub(super) static STABLELM: FamilyDefinition = FamilyDefinition {
    name: "stablelm",
    model_type: "stablelm",
    class: Some("StableLmForCausalLM"),
    harmless: &[&["hidden_dropout", "rotary_scaling_factor", "norm_eps"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(StableLmConfig::read(f)?))),
    tensors: TensorTable {
        layer: &[
            ATTENTION,
            GATED_MLP,
            &[
                TensorName::cut("self_attn.q_layernorm", Cut::Columns, HEAD_NORMS[0].1),
                TensorName::cut("self_attn.k_layernorm", Cut::Columns, HEAD_NORMS[1].1),
                INPUT_NORM,
                MLP_NORM,
            ],
        ],
        ..LLAMA_TENSORS
    },
    gguf: Some(GgufMapping {
        keys: &[(LAYER_NORM_EPSILON, Some("layer_norm_eps"))],
        read: |file, to| {
            let parallel = file.flag("use_parallel_residual")?;
            to.insert("use_parallel_residual".into(), parallel.unwrap_or(true).into());
            to.insert("use_qkv_bias".into(), file.has("blk.0.attn_q.bias").into());
            to.insert("qk_layernorm".into(), file.has("blk.0.attn_q_norm.weight").into());
            read_rotary_share(file, to, ROTATED)
        },
        ..GgufMapping::new("stablelm")
    }),
};

impl StableLmConfig {
    fn attention(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let [mut q, mut k, v] = at.project(g, x, QKV, self.qkv_bias)?;
        if self.qk_norm {
            q = norm_per_head(g, HEAD_NORMS[0].0, q, self.norm_eps)?;
            k = norm_per_head(g, HEAD_NORMS[1].0, k, self.norm_eps)?;
        }
        let a = at.attend(g, [q, k, v], &at.scores())?;
        linear(g, "o_proj", a, self.hidden_size, false)
    }

    fn mlp(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false)
    }
}

impl DecoderFamily for StableLmConfig {
    fn norm(&self) -> NormKind {
        NormKind::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        if !self.parallel {
            let x = ResidualHalf::before(norm, "input_layernorm")
                .add(g, x, "self_attn", |g, x| self.attention(g, x, at))?;
            return ResidualHalf::before(norm, "post_attention_layernorm").add(g, x, "mlp", |g, x| self.mlp(g, x));
        }
        let h = norm.apply(g, "input_layernorm", x)?;
        let a = g.scoped("self_attn", |g| self.attention(g, h, at))?;
        let m = g.scoped("mlp", |g| self.mlp(g, h))?;
        let x = g.add(x, a)?;
        g.add(x, m)
    }

    fn stacks(&self) -> Vec<Stack> {
        let heads = [self.num_attention_heads, self.num_key_value_heads];
        let stack = |((name, _), count): (&(&str, &str), usize)| Stack {
            of: format!("model.layers.*.self_attn.{name}.norms.*.weight"),
            name: format!("model.layers.*.self_attn.{name}.weight"),
            count,
        };
        if self.qk_norm { HEAD_NORMS.iter().zip(heads).map(stack).collect() } else { Vec::new() }
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        Ok(vec![("use_parallel_residual", GgufEntry::Bool(self.parallel))])
    }
}
