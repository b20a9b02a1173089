//! Llama: pre-norm decoder layers with grouped-query attention and a gated MLP (Touvron et al. 2023, "Llama 2"; "The
//! Llama 3 Herd of Models", 2024). Weights have their published names.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{Gate, Half, Norm, gated_mlp, linear};
use super::decoder::{Family, Layer};
use crate::config::{DecoderConfig, LlamaConfig};

/// The names of the projections to queries, keys and values.
pub(super) const QKV: [&str; 3] = ["q_proj", "k_proj", "v_proj"];

impl Family for LlamaConfig {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn config(&self) -> &DecoderConfig {
        self
    }

    fn norm(&self) -> Norm {
        Norm::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &Layer<'_>) -> GraphResult<Var> {
        layer(self, g, x, at, self.attention_bias, self.mlp_bias)
    }
}

/// The layer of a Llama.
pub(super) fn layer(
    config: &DecoderConfig,
    g: &mut Builder,
    x: Var,
    at: &Layer<'_>,
    attention_bias: bool,
    mlp_bias: bool,
) -> GraphResult<Var> {
    let norm = Norm::Rms(config.norm_eps);
    let x = Half::before(norm, "input_layernorm").add(g, x, "self_attn", |g, x| {
        let qkv = at.project(g, x, QKV, attention_bias)?;
        let a = at.attend(g, qkv, &at.scores())?;
        linear(g, "o_proj", a, config.hidden_size, attention_bias)
    })?;
    Half::before(norm, "post_attention_layernorm")
        .add(g, x, "mlp", |g, x| gated_mlp(g, x, config.intermediate_size, Gate::Silu, mlp_bias))
}
